"""What an analytic plan is made from: a model, a fold, a batch, and how the software works."""

import dataclasses
from math import ceil

import jax
import jax.numpy as jnp

from moejax.config import Config
from moejax.model.config import ModelConfig
from moejax.plan.estimate import refuse_unknown
from moejax.plan.hardware import Cluster
from moejax.plan.operations import Group
from pallas_kernels.attention import fused

PRECISIONS = ("bfloat16", "fp8", "mxfp8")
DISPATCHERS = ("all_gather", "all_to_all", "ragged", "hierarchical", "fused")
RECOMPUTE = ("full", "selective", "norm", "mlp", "shared", "mla_up", "moe_act", "moe", "attend")
GRAPHS = ("none", "partial", "full")
SOFTWARE = ("moejax", "megatron")


@dataclasses.dataclass(frozen=True)
class Setup:
    """One way to train a model: degrees of both readings, batch, precision, schedule."""

    model: ModelConfig
    """Shape of the model; its `remat` is not read."""
    num_gpus: int
    """GPUs in all."""
    batch_size: int
    """Rows of the global batch."""
    rows: int = 1
    """Rows of one microbatch on one data-parallel rank."""
    sequence_length: int = 4096
    """Tokens of a row."""
    tp: int = 1
    """Tensor-parallel degree of attention, dense MLPs, embedding and head."""
    cp: int = 1
    """Context-parallel degree: pieces of a row."""
    pp: int = 1
    """Pipeline stages."""
    vpp: int = 1
    """Chunks of layers that each stage holds (interleaved schedule)."""
    ep: int = 1
    """Expert-parallel degree."""
    etp: int = 1
    """Tensor-parallel degree inside each expert."""
    zero: int = 1
    """0 or 1: weights are gathered and gradients reduced once a step; 3 (moejax): where each layer
    runs."""
    precision: str = "bfloat16"
    """Of the layers' products: one of `PRECISIONS` ("fp8": Hopper's blocks)."""
    recompute: tuple[str, ...] = ()
    """What the backward computes again, of `RECOMPUTE`."""
    dispatcher: str = "all_to_all"
    """One of `DISPATCHERS`; "fused": DeepEP or HybridEP."""
    overlap: bool = False
    """Expert communication of one microbatch runs beside the other's compute (merged 1F1B)."""
    graphs: str = "full"
    """CUDA graphs: "none", "partial" (all but dispatch, experts and combine) or "full"."""
    attention: str = "fused"
    """"fused": one kernel (cuDNN's, or ours); "xla": blocks with an online softmax."""
    software: str = "megatron"
    """Whose program: it decides what is fused, and how weights are cast, gathered and summed."""

    def __post_init__(self):
        for name, known in (
            ("precision", PRECISIONS),
            ("dispatcher", DISPATCHERS),
            ("graphs", GRAPHS),
            ("software", SOFTWARE),
            ("attention", ("fused", "xla")),
        ):
            if getattr(self, name) not in known:
                raise ValueError(f"{name}={getattr(self, name)!r}: choose from {', '.join(known)}")
        unknown = set(self.recompute) - set(RECOMPUTE)
        if unknown:
            raise ValueError(f"recompute={sorted(unknown)}: choose from {', '.join(RECOMPUTE)}")
        if self.zero == 3 and self.software != "moejax":
            raise ValueError("zero=3 is described for software='moejax' alone")
        if self.num_gpus % (self.tp * self.cp * self.pp):
            raise ValueError(
                f"tp={self.tp} x cp={self.cp} x pp={self.pp} do not divide {self.num_gpus} GPUs"
            )
        if self.num_gpus % (self.ep * self.etp * self.pp):
            raise ValueError(
                f"ep={self.ep} x etp={self.etp} x pp={self.pp} do not divide {self.num_gpus} GPUs"
            )
        if self.batch_size % (self.rows * self.dp):
            raise ValueError(
                f"batch_size={self.batch_size} is no multiple of rows={self.rows} x dp={self.dp}"
            )

    @classmethod
    def of(cls, config: Config, num_gpus: int) -> "Setup":
        """Returns the setup of moejax's own train step on so many GPUs.

        Raises ValueError as `config.fold_over` and `refuse_unknown` do.
        """
        refuse_unknown(config)
        fold, train, model = config.fold_over(num_gpus), config.train, config.model
        dp = fold.degree("dp")
        rows = train.batch_size // (train.microbatches * dp)
        return cls(
            model,
            num_gpus,
            train.batch_size,
            rows,
            train.sequence_length,
            tp=fold.degree("tp"),
            ep=fold.degree("ep"),
            etp=fold.degree("etp"),
            zero=config.parallel.zero,
            recompute=_latents(model) if model.remat == "none" else (model.remat,),
            dispatcher=_traffic(model.moe.dispatch),
            attention=_attention(config, rows, fold.degree("tp")),
            software="moejax",
        )

    @property
    def dp(self) -> int:
        """Data-parallel degree of attention."""
        return self.num_gpus // (self.tp * self.cp * self.pp)

    @property
    def edp(self) -> int:
        """Data-parallel degree of the experts."""
        return self.num_gpus // (self.ep * self.etp * self.pp)

    @property
    def microbatches(self) -> int:
        """Microbatches of a step on each rank."""
        return self.batch_size // (self.rows * self.dp)

    @property
    def tokens(self) -> int:
        """Tokens T of a microbatch in a tensor-parallel group: what projections work on."""
        return self.rows * self.sequence_length // self.cp

    @property
    def here(self) -> float:
        """Tokens t of a microbatch on one GPU: what norms and router work on."""
        return self.tokens / self.tp

    @property
    def dtype(self) -> str:
        """What the layers' products multiply, as `cost` names it."""
        return {"bfloat16": "bfloat16", "fp8": "fp8", "mxfp8": "fp8"}[self.precision]

    def stride(self, role: str) -> int:
        """Returns the distance of a role's neighbours, in devices."""
        return {
            "tp": 1,
            "cp": self.tp,
            "dp": self.tp * self.cp,
            "etp": 1,
            "ep": self.etp,
            "edp": self.etp * self.ep,
            "pp": self.num_gpus // self.pp,
        }[role]

    def group(self, role: str, cluster: Cluster) -> Group:
        """Returns the GPUs of a role; pp: two neighbours. "dp" has cp in it: both share weights."""
        size = 2 if role == "pp" else self.dp * self.cp if role == "dp" else getattr(self, role)
        stride = self.tp if role == "dp" else self.stride(role)
        return Group(size, min(size, ceil(cluster.domain / stride)))


def _latents(model: ModelConfig) -> tuple[str, ...]:
    attention = model.attention
    return ("mla_up",) if attention.kind == "mla" and attention.mla.recompute_up else ()


def _traffic(dispatch: str) -> str:
    """Returns which of `DISPATCHERS` sends what a dispatcher of the model sends."""
    alike = {"nvlink": "ragged"}.get(dispatch, dispatch)
    return alike if alike in DISPATCHERS else "all_gather"


def _attention(config: Config, rows: int, tp: int) -> str:
    """Returns which attention the step has on a GPU: "fused" where our kernels take its arrays."""
    cfg, auto = config.model.attention, config.precision.compute_dtype == "auto"
    dtype = jnp.bfloat16 if auto else config.precision.dtype("compute")
    heads = max(cfg.num_heads // tp, 1)
    kv_heads = heads if cfg.kind == "mla" else max(cfg.num_kv_heads // tp, 1)
    q, k, v = (
        jax.ShapeDtypeStruct((rows, config.train.sequence_length, n, width), dtype)
        for n, width in (
            (heads, cfg.qk_dim), (kv_heads, cfg.qk_dim), (kv_heads, cfg.value_dim),
        )
    )  # fmt: skip
    if cfg.impl in ("xla", "reference") or fused.refusal_of(q, k, v, 1.0):
        return "xla"
    return "fused"
