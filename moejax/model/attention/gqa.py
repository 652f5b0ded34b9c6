"""Grouped-query attention (Ainslie et al., 2023) with rotary positions, heads split over tp.

Tokens enter split over tp (sequence parallelism), are gathered for the projections, and leave
through a reduce-scatter: x_tD -> x_TD -> q_blnH, k_blgH, v_blgH -> out -> x_tD.
"""

import dataclasses

import jax
from flax import nnx
from jaxtyping import Array, Float

from moejax.core import collectives, params
from moejax.core.mesh import Fold
from moejax.core.precision import PrecisionConfig
from moejax.model.norm import RMSNorm
from moejax.model.rope import apply_rope
from moejax.model.stream import Stream
from pallas_kernels import attention, linear


@dataclasses.dataclass(frozen=True)
class AttentionConfig:
    """Shape and options of grouped-query attention."""

    num_heads: int = 8
    """Query heads N."""
    num_kv_heads: int = 4
    """Key/value heads G; each serves N/G query heads."""
    head_dim: int = 64
    """Width H of a head."""
    rope_theta: float = 10000.0
    """Base of the rotary angles."""
    qk_norm: bool = False
    """RMSNorm on each query and key head before the rotation (Qwen3)."""
    bias: bool = False
    """Biases on the query, key and value projections (Qwen2)."""
    window: int = 0
    """Sliding window in tokens, the query included; 0: none."""
    sinks: bool = False
    """A learned logit per query head that takes probability and no value (gpt-oss)."""
    impl: str = ""
    """Attention kernel by name; empty: the best that serves."""

    def __post_init__(self):
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"attention.num_heads={self.num_heads} is no multiple of "
                f"num_kv_heads={self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"attention.head_dim={self.head_dim} must be even for rotary pairs")


class Attention(nnx.Module):
    """Causal self-attention within documents."""

    def __init__(
        self,
        cfg: AttentionConfig,
        dim: int,
        *,
        out_std: float,
        std: float,
        eps: float,
        fold: Fold,
        precision: PrecisionConfig,
        rngs: nnx.Rngs,
    ):
        self.cfg, self.fold = cfg, fold
        q_dim, kv_dim = cfg.num_heads * cfg.head_dim, cfg.num_kv_heads * cfg.head_dim
        for role, heads in (("num_heads", cfg.num_heads), ("num_kv_heads", cfg.num_kv_heads)):
            if heads % fold.degree("tp"):
                raise ValueError(
                    f"attention.{role}={heads} does not divide over tp={fold.degree('tp')}"
                )
        self.w_q = params.normal(rngs, (dim, q_dim), ("embed", "heads"), std, precision)
        self.w_k = params.normal(rngs, (dim, kv_dim), ("embed", "kv_heads"), std, precision)
        self.w_v = params.normal(rngs, (dim, kv_dim), ("embed", "kv_heads"), std, precision)
        self.w_o = params.normal(rngs, (q_dim, dim), ("heads", "embed"), out_std, precision)
        if cfg.bias:
            self.b_q = params.constant((q_dim,), ("heads",), 0.0, precision)
            self.b_k = params.constant((kv_dim,), ("kv_heads",), 0.0, precision)
            self.b_v = params.constant((kv_dim,), ("kv_heads",), 0.0, precision)
        if cfg.qk_norm:
            self.q_norm = RMSNorm(cfg.head_dim, eps, precision)
            self.k_norm = RMSNorm(cfg.head_dim, eps, precision)
        if cfg.sinks:
            self.sinks = params.constant((cfg.num_heads,), ("heads",), 0.0, precision)

    def _project(self, x_TD, shape, w, bias):
        y = linear(x_TD, w[...])
        y = y + bias[...].astype(y.dtype)[None] if self.cfg.bias else y
        return y.reshape(*shape, -1, self.cfg.head_dim)

    @jax.named_scope("attend")
    def __call__(self, x_tD: Float[Array, "t D"], stream: Stream) -> Float[Array, "t D"]:
        """Returns the attention output, split like the input; t covers rows b of length L."""
        cfg, segment_ids_bL = self.cfg, stream.segment_ids_bL
        bias = (self.b_q, self.b_k, self.b_v) if cfg.bias else (None,) * 3
        x_TD = collectives.all_gather(x_tD, self.fold["tp"])
        q_blnH = self._project(x_TD, segment_ids_bL.shape, self.w_q, bias[0])
        k_blgH = self._project(x_TD, segment_ids_bL.shape, self.w_k, bias[1])
        v_blgH = self._project(x_TD, segment_ids_bL.shape, self.w_v, bias[2])
        if cfg.qk_norm:
            q_blnH, k_blgH = self.q_norm(q_blnH), self.k_norm(k_blgH)
        out_blnH, _ = attention(
            apply_rope(q_blnH, stream.rope),
            apply_rope(k_blgH, stream.rope),
            v_blgH,
            segment_ids=(segment_ids_bL, segment_ids_bL),
            window=cfg.window or None,
            sinks=self.sinks[...] if cfg.sinks else None,
            scale=None,
            impl=cfg.impl or None,
        )
        out_Td = out_blnH.reshape(x_TD.shape[0], -1)
        return collectives.psum_scatter(linear(out_Td, self.w_o[...]), self.fold["tp"])
