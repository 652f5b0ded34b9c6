"""Kernels: grouped GEMM and MLP, router, permutation, exchange, attention, ..; tensors, not models.

One folder an operation, one public function each, `reference.py` in it the definition. `impl=None`
picks the best implementation that serves; a name runs that one, or raises and says why not.
"""

from pallas_kernels.attention import attention
from pallas_kernels.cross_entropy import logit_stats
from pallas_kernels.dispatch import Tables, return_rows, send_rows
from pallas_kernels.grouped_gemm import grouped_gemm, overflow_rows
from pallas_kernels.grouped_mlp import grouped_mlp
from pallas_kernels.linear import linear
from pallas_kernels.permute import permute, sort_slots, unpermute
from pallas_kernels.router import RouterOptions, log_scores, route, weigh
from pallas_kernels.swiglu import swiglu

__all__ = [
    "RouterOptions",
    "Tables",
    "attention",
    "grouped_gemm",
    "grouped_mlp",
    "linear",
    "log_scores",
    "logit_stats",
    "overflow_rows",
    "permute",
    "return_rows",
    "route",
    "send_rows",
    "sort_slots",
    "swiglu",
    "unpermute",
    "weigh",
]
