"""The analytic plan against published throughput.

    python -m benchmarks.published        # writes benchmarks/results/published.md; seconds, on a CPU

Every row is priced from its published configuration by the same model: no constant belongs to a
row, a model or a source. Where a source does not print a setting, `RULES` says what is taken, for
all rows alike; which rows count was settled before any was priced.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

from configs import deepseek_v3, gpt_oss, mixtral, qwen3_moe
from moejax.model.config import ModelConfig
from moejax.model.flops import attention_flops, linear_flops_per_token
from moejax.plan.analytic import events
from moejax.plan.cost import simulate
from moejax.plan.hardware import CLUSTERS
from moejax.plan.setup import Setup

RESULTS = Path(__file__).parent / "results" / "published.md"
LENGTH = 4096

RULES = """
- **Rows**: Table 11 of the paper "Scalable Training of Mixture-of-Experts Models with Megatron
  Core"; of Megatron-Bridge's performance pages the newest release of each model, GPU, precision and
  layout; Megatron-LM's `examples/moe_recipes`; ModelZoo's Qwen3 page; the README of Megatron Core
  MoE for Mixtral. Forced balance, 4,096 tokens a sequence.
- **Expert communication** is fused (DeepEP on Hopper, HybridEP on Blackwell), and hidden under the
  other microbatch's compute only where the source says so.
- **CUDA graphs**: none on Hopper; partial on Blackwell; full with Megatron-Bridge 26.06 and later,
  which brought them; or as printed.
- **Recomputation** as printed (DeepSeek-V3: the paper's Table 17, also for the other rows of its
  GPU generation), otherwise none. Interleaving (VP) as printed, otherwise none; a GB300 row of the
  paper has the layout of its GB200 row.
"""


class Row(NamedTuple):
    """One published number."""

    source: str
    model: str
    gpu: str
    gpus: int
    precision: str
    gbs: int
    mbs: int
    tp: int
    pp: int
    vpp: int
    ep: int
    tflops: float = 0.0
    """TFLOP/s a GPU; 0: tokens are compared."""
    tokens: float = 0.0
    """Tokens/s a GPU."""
    graphs: str = ""
    """As printed; empty: by the rule."""
    overlap: bool = False
    recompute: tuple[str, ...] = ()
    marked: bool = False
    """Whether it chose a constant of the model."""


V3_HOPPER = ("mlp", "mla_up", "moe_act", "norm")
BF16, FP8, MXFP8 = "bfloat16", "fp8", "mxfp8"
PAPER, BRIDGE, RECIPES, ZOO, CORE = "paper", "Bridge", "recipes", "ModelZoo", "Core README"
ROWS = (
    Row(PAPER, "DeepSeek-V3", "gb300", 256, MXFP8, 8192, 1, 1, 4, 4, 64, 1233, recompute=("mlp",)),
    Row(PAPER, "DeepSeek-V3", "gb200", 256, MXFP8, 8192, 1, 1, 4, 4, 64, 1048, recompute=("mlp",)),
    Row(PAPER, "DeepSeek-V3", "gb200", 256, BF16, 8192, 1, 1, 4, 4, 64, 857, recompute=("mlp",)),
    Row(PAPER, "DeepSeek-V3", "h100", 1024, FP8, 8192, 1, 2, 8, 4, 64, 368, overlap=True,
        recompute=V3_HOPPER),
    Row(PAPER, "Qwen3-235B", "gb300", 256, MXFP8, 3072, 3, 1, 4, 6, 64, 974),
    Row(PAPER, "Qwen3-235B", "gb200", 256, MXFP8, 3072, 3, 1, 4, 6, 64, 919),
    Row(PAPER, "Qwen3-235B", "gb200", 256, BF16, 8192, 1, 1, 8, 1, 8, 750),
    Row(PAPER, "Qwen3-235B", "h100", 256, BF16, 2048, 1, 2, 8, 4, 32, 320, overlap=True),
    Row("Bridge 26.08", "DeepSeek-V3", "gb300", 256, MXFP8, 4096, 1, 1, 2, 8, 32, 1635,
        recompute=("mlp",)),
    Row("Bridge 26.06", "DeepSeek-V3", "gb300", 256, MXFP8, 15360, 1, 1, 2, 8, 32, 1670,
        recompute=("mlp",)),
    Row("Bridge 26.08", "DeepSeek-V3", "gb200", 256, MXFP8, 4096, 1, 1, 4, 4, 64, 1276,
        recompute=("mlp",)),
    Row("Bridge 26.04.01", "DeepSeek-V3", "b200", 256, MXFP8, 4096, 1, 1, 8, 2, 32, 864,
        recompute=("mlp",)),
    Row("Bridge 25.11", "DeepSeek-V3 without MTP", "gb300", 256, BF16, 4096, 1, 1, 2, 4, 32, 961,
        recompute=("mlp",)),
    Row("Bridge 25.11", "DeepSeek-V3 without MTP", "gb200", 256, BF16, 4096, 1, 1, 4, 4, 64, 782,
        recompute=("mlp",)),
    Row("Bridge 25.09", "DeepSeek-V3", "h100", 1024, FP8, 8192, 1, 2, 8, 4, 64, 338,
        recompute=V3_HOPPER),
    Row("Bridge 26.08", "Qwen3-235B", "gb300", 256, MXFP8, 8192, 2, 1, 4, 12, 32, 1306),
    Row("Bridge 26.08", "Qwen3-235B", "gb200", 256, MXFP8, 8192, 1, 1, 8, 3, 32, 1077),
    Row("Bridge 26.04.01", "Qwen3-235B", "b200", 256, MXFP8, 8192, 1, 1, 8, 1, 8, 560),
    Row("Bridge 26.04.01", "Qwen3-235B", "h100", 256, FP8, 8192, 1, 2, 8, 4, 32, 253),
    Row("Bridge 25.11", "Qwen3-235B", "gb300", 256, BF16, 8192, 2, 1, 4, 12, 16, 907),
    Row("Bridge 25.11", "Qwen3-235B", "gb200", 256, BF16, 8192, 1, 1, 8, 3, 32, 728),
    Row("Bridge 26.08", "Qwen3-30B", "gb300", 8, MXFP8, 512, 8, 1, 1, 1, 8, 1029),
    Row("Bridge 26.08", "Qwen3-30B", "gb200", 8, MXFP8, 512, 4, 1, 1, 1, 8, 923),
    Row("Bridge 26.04.01", "Qwen3-30B", "b200", 8, MXFP8, 512, 4, 1, 1, 1, 8, 619),
    Row("Bridge 26.06", "Qwen3-30B", "h100", 16, FP8, 1024, 1, 1, 1, 1, 16, 203),
    Row("Bridge 26.08", "gpt-oss-120B", "gb300", 64, MXFP8, 1280, 4, 1, 1, 1, 16, tokens=33024),
    Row("Bridge 26.08", "gpt-oss-120B", "gb200", 64, MXFP8, 1280, 4, 1, 1, 1, 64, tokens=28672),
    Row("Bridge 26.04.01", "gpt-oss-120B", "gb300", 64, BF16, 1280, 4, 1, 1, 1, 64, tokens=19200),
    Row("Bridge 26.04.01", "gpt-oss-120B", "gb200", 64, BF16, 1280, 4, 1, 1, 1, 64, tokens=16640),
    Row("Bridge 26.04.01", "gpt-oss-120B", "b200", 64, BF16, 1280, 4, 1, 1, 1, 8, tokens=13568),
    Row("Bridge 26.04.01", "gpt-oss-120B", "h100", 64, BF16, 1280, 1, 1, 4, 1, 8, tokens=5824),
    Row(RECIPES, "DeepSeek-V3", "b200", 256, MXFP8, 2048, 1, 1, 8, 1, 32, 776.7,
        recompute=("mlp",)),
    Row(RECIPES, "DeepSeek-V3", "gb200", 256, MXFP8, 8192, 1, 1, 4, 4, 64, 1127.6,
        graphs="partial", overlap=True, recompute=("mlp",)),
    Row(RECIPES, "DeepSeek-V3", "gb300", 256, MXFP8, 8192, 1, 1, 4, 4, 64, 1357.7,
        graphs="partial", overlap=True, recompute=("mlp",)),
    Row(RECIPES, "Qwen3-235B", "h100", 256, BF16, 2048, 1, 2, 8, 1, 32, 214.3),
    Row(RECIPES, "Qwen3-235B", "b200", 128, MXFP8, 3072, 3, 2, 4, 12, 16, 633.9),
    Row(RECIPES, "Qwen3-235B", "gb200", 128, MXFP8, 8192, 1, 1, 1, 1, 64, 1018, graphs="partial"),
    Row(RECIPES, "Qwen3-235B", "gb200", 128, MXFP8, 8192, 1, 1, 1, 1, 64, 1159.5, graphs="full"),
    Row(RECIPES, "Qwen3-235B", "gb300", 128, MXFP8, 8192, 1, 1, 1, 1, 64, 1323.1, graphs="full"),
    Row(RECIPES, "Qwen3-30B", "h100", 32, BF16, 256, 1, 1, 1, 1, 8, 234.1, marked=True),
    Row(RECIPES, "Qwen3-30B", "h100", 32, FP8, 256, 1, 1, 1, 1, 8, 232.4),
    Row(RECIPES, "Qwen3-30B", "gb200", 16, BF16, 512, 4, 1, 1, 1, 16, 528, marked=True),
    Row(RECIPES, "Qwen3-30B", "gb200", 16, MXFP8, 512, 4, 1, 1, 1, 16, 514, graphs="partial",
        marked=True),
    Row(RECIPES, "Qwen3-30B", "gb200", 16, MXFP8, 512, 4, 1, 1, 1, 16, 646.8, graphs="full"),
    Row(ZOO, "Qwen3-235B", "h100", 256, BF16, 2048, 1, 2, 8, 4, 32, 245),
    Row(ZOO, "Qwen3-235B", "h100", 256, BF16, 2048, 1, 2, 8, 4, 32, 276, overlap=True),
    Row(ZOO, "Qwen3-235B", "gb300", 64, MXFP8, 8192, 1, 1, 1, 1, 64, 1055),
    Row(ZOO, "Qwen3-30B", "h100", 16, BF16, 1024, 1, 1, 1, 1, 16, 299.35, graphs="partial",
        overlap=True),
    Row(CORE, "Mixtral-8x7B", "h100", 64, BF16, 256, 1, 1, 4, 8, 8, 468),
)  # fmt: skip

LEFT_OUT = (
    ("Bridge DeepSeek-V3 GB300 1088, 1199, 1219, 1290, 1298", "older releases of the same layout"),
    ("Bridge gpt-oss-120B GB300, GB200 26.06.01, 661 and 597", "a regression, mended in 26.08"),
    ("Bridge Qwen3-235B 26.06, 1335 and 1092", "the release before, same layout"),
    ("ModelZoo Qwen3-30B 132.9, alltoall", "a smoke test"),
    ("ModelZoo Qwen3-235B H100 276 with FSDP, 200 with A2A and 32 stages", "software of another "
     "kind; chunks of less than a layer pair"),
    ("Core README Mixtral-8x7B 438", "an older release of the same row"),
    ("Mixtral-8x22B 49.3 %, Qwen2-57B 39.0 % MFU", "no configuration"),
    ("Moonlight 77.5, Qwen3-Next 89", "batch of 4, and an architecture that moejax has not"),
    ("DeepSeek-V4, Nemotron-3", "architectures that moejax has not"),
)


def model_of(name: str) -> ModelConfig:
    """Returns the shape of a model of the table."""
    models = {
        "DeepSeek-V3": deepseek_v3.v3,
        "DeepSeek-V3 without MTP": deepseek_v3.v3_gb200x256,
        "Qwen3-235B": qwen3_moe.qwen3_235b_a22b,
        "Qwen3-30B": qwen3_moe.qwen3_30b_a3b,
        "gpt-oss-120B": gpt_oss.gpt_oss_120b,
        "Mixtral-8x7B": mixtral.mixtral_8x7b,
    }
    return models[name]().model


def graphs_of(row: Row) -> str:
    """Returns how much of a step is in CUDA graphs, by the rule where it is not printed."""
    if row.graphs:
        return row.graphs
    if row.gpu in ("h100", "h200"):
        return "none"
    release = row.source.removeprefix("Bridge ")
    return "full" if release in ("26.06", "26.08") else "partial"


def setup_of(row: Row) -> Setup:
    """Returns what the analytic plan is made from."""
    return Setup(
        model_of(row.model), row.gpus, row.gbs, row.mbs, LENGTH, tp=row.tp, pp=row.pp, vpp=row.vpp,
        ep=row.ep, precision=row.precision, recompute=row.recompute, dispatcher="fused",
        overlap=row.overlap, graphs=graphs_of(row),
    )  # fmt: skip


class Priced(NamedTuple):
    """A row with its price."""

    row: Row
    published: float
    """Tokens/s a GPU (gpt-oss), or TFLOP/s a GPU."""
    predicted: float
    """The same."""
    peak_share: float
    """FLOP/s at peak in the unit of the two."""

    @property
    def error(self) -> float:
        """Relative error, signed."""
        return self.predicted / self.published - 1


def flops_per_token(model: ModelConfig) -> float:
    """Returns FLOPs a token by the project's formula."""
    return linear_flops_per_token(model) + attention_flops(model, LENGTH) / LENGTH


def price(row: Row) -> Priced:
    """Returns the row with its price."""
    setup, cluster = setup_of(row), CLUSTERS[row.gpu]
    length = simulate(events(setup, cluster), cluster).seconds
    tokens = row.gbs * LENGTH / row.gpus / length
    flops = flops_per_token(setup.model)
    peak = cluster.peak(setup.dtype)
    if not row.tflops:
        return Priced(row, row.tokens, tokens, peak / flops)
    return Priced(row, row.tflops, tokens * flops / 1e12, peak / 1e12)


if __name__ == "__main__":
    for r in ROWS:
        p = price(r)
        print(f"{r.source:16} {r.model:24} {r.gpu:6} {r.gpus:5} {r.precision:9} {p.published:8.0f} {p.predicted:8.0f} {100*p.error:6.1f}%  {'*' if r.marked else ''} {graphs_of(r)} {'ov' if r.overlap else ''}")
    e=[abs(price(r).error) for r in ROWS if not r.marked]
    print(median(e), max(e), len(e))
