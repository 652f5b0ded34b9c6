"""The section of attention in the configuration, one for all kinds."""

import dataclasses

from moejax.model.rope import RopeConfig

KINDS = ("gqa", "mla")
QK_NORMS = ("", "head", "full")


@dataclasses.dataclass(frozen=True)
class MLAConfig:
    """What multi-head latent attention has beside heads."""

    q_rank: int = 0
    """Width of the latent that queries are made of; 0: they are made of x (DeepSeek-V2-Lite)."""
    kv_rank: int = 512
    """Width of the latent that keys and values are made of, and that a cache holds."""
    value_dim: int = 128
    """Width V of a value head."""
    recompute_up: bool = False
    """Queries, keys and values are made from the latents again in the backward pass, not saved."""

    def __post_init__(self):
        if self.q_rank < 0 or self.kv_rank < 1 or self.value_dim < 1:
            raise ValueError(
                f"mla.q_rank={self.q_rank}, kv_rank={self.kv_rank}, value_dim={self.value_dim}: "
                "widths are positive (q_rank may be 0: none)"
            )


@dataclasses.dataclass(frozen=True)
class AttentionConfig:
    """Shape and options of every layer's attention."""

    kind: str = "gqa"
    """Kind: "gqa" (grouped-query) or "mla" (multi-head latent, DeepSeek)."""
    num_heads: int = 8
    """Query heads N."""
    num_kv_heads: int = 4
    """Key/value heads G; each serves N/G query heads. MLA has none."""
    head_dim: int = 64
    """Width H of a head; with MLA of the part of it that has no positions."""
    qk_norm: str = ""
    """RMSNorm on queries and keys before the rotation: "head": on each head (Qwen3), "full": on
    whole projections (OLMoE); empty: none."""
    bias: bool = False
    """Biases on the query, key and value projections (Qwen2, GLM-4.5, gpt-oss)."""
    out_bias: bool = False
    """Bias on the output projection (gpt-oss)."""
    clip_qkv: float = 0.0
    """Queries, keys and values are clipped to -clip_qkv..clip_qkv before the rotation (OLMoE);
    0: not."""
    window: int = 0
    """Tokens that the layers written in lower case in `model.pattern` see, the query included."""
    sinks: bool = False
    """A learned logit per query head that takes probability and no value (gpt-oss)."""
    impl: str = ""
    """Attention kernel by name; empty: the best that serves."""
    mla: MLAConfig = MLAConfig()
    """What MLA has beside these."""
    rope: RopeConfig = RopeConfig()
    """Rotary positions."""

    def __post_init__(self):
        for name, known in (("kind", KINDS), ("qk_norm", QK_NORMS)):
            if getattr(self, name) not in known:
                shown = ", ".join(repr(choice) for choice in known)
                raise ValueError(f"attention.{name}={getattr(self, name)!r}: choose from {shown}")
        if self.window < 0 or self.clip_qkv < 0:
            raise ValueError(
                f"attention.window={self.window}, clip_qkv={self.clip_qkv}: neither is below 0"
            )
        if self.kind == "mla":
            names = ("qk_norm", "bias", "out_bias", "clip_qkv")
            wrong = [f"{name}={getattr(self, name)!r}" for name in names if getattr(self, name)]
            if wrong:
                raise ValueError(f"attention.kind='mla' takes no {', '.join(wrong)}")
            return
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"attention.num_heads={self.num_heads} is no multiple of "
                f"num_kv_heads={self.num_kv_heads}"
            )
        if self.rope_dim % 2 or self.rope_dim > self.head_dim:
            raise ValueError(
                f"attention.head_dim={self.head_dim}, rope.dim={self.rope.dim}: the dims that turn "
                "are even, and of a head"
            )

    @property
    def rope_dim(self) -> int:
        """Dims of a head that turn."""
        return self.rope.dim or (64 if self.kind == "mla" else self.head_dim)

    @property
    def qk_dim(self) -> int:
        """Width of a query or key head, as the scores see it."""
        return self.head_dim + (self.rope_dim if self.kind == "mla" else 0)

    @property
    def value_dim(self) -> int:
        """Width of a value head."""
        return self.mla.value_dim if self.kind == "mla" else self.head_dim

    @property
    def scale(self) -> float:
        """What scores are multiplied by before the softmax."""
        return self.qk_dim**-0.5 * self.rope.softmax_factor
