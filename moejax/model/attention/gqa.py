"""Grouped-query attention (Ainslie et al., 2023) with rotary positions, heads split over tp.

Tokens enter split over tp (sequence parallelism), are gathered for the projections, and leave
through a reduce-scatter: x_tD -> x_TD -> q_blnH, k_blgH, v_blgH -> out -> x_tD. Where tp is a
multiple of the key/value heads, each device projects to its piece of one, the pieces are gathered,
and it keeps the head that its queries read.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from moejax.core import collectives, params
from moejax.core.mesh import Fold
from moejax.core.precision import PrecisionConfig
from moejax.model.attention.config import AttentionConfig
from moejax.model.attention.context import Asked, attend
from moejax.model.attention.memory import Memory, recall
from moejax.model.norm import RMSNorm, rms_norm_split
from moejax.model.rope import apply_rope
from moejax.model.stream import Stream
from pallas_kernels import linear


def check_heads(cfg: AttentionConfig, fold: Fold) -> None:
    """Raises ValueError where heads do not divide over tp, or then over cp."""
    tp, cp = fold.degree("tp"), fold.degree("cp")
    if cfg.num_heads % tp:
        raise ValueError(f"attention.num_heads={cfg.num_heads} does not divide over tp={tp}")
    heads = cfg.num_kv_heads
    if cfg.kind == "gqa" and heads % tp and (tp % heads or heads * cfg.head_dim % tp):
        raise ValueError(
            f"attention.num_kv_heads={heads} does not divide over tp={tp}, nor tp over them"
        )
    if fold.context == "ulysses" and cfg.num_heads // tp % cp:
        raise ValueError(
            f"attention.num_heads={cfg.num_heads} over tp={tp} do not divide over cp={cp}: set "
            "parallel.cp_kind to 'ulysses_ring', 'ring' or 'all_gather', or change cp"
        )


class Attention(nnx.Module):
    """Causal self-attention within documents."""

    def __init__(
        self,
        cfg: AttentionConfig,
        dim: int,
        *,
        window: int = 0,
        out_std: float,
        std: float,
        eps: float,
        fold: Fold,
        precision: PrecisionConfig,
        rngs: nnx.Rngs,
    ):
        check_heads(cfg, fold)
        self.cfg, self.fold, self.window, self.eps = cfg, fold, window, eps
        q_dim, kv_dim = cfg.num_heads * cfg.head_dim, cfg.num_kv_heads * cfg.head_dim
        self.w_q = params.normal(rngs, (dim, q_dim), ("embed", "heads"), std, precision)
        self.w_k = params.normal(rngs, (dim, kv_dim), ("embed", "kv_heads"), std, precision)
        self.w_v = params.normal(rngs, (dim, kv_dim), ("embed", "kv_heads"), std, precision)
        self.w_o = params.normal(rngs, (q_dim, dim), ("heads", "embed"), out_std, precision)
        if cfg.bias:
            self.b_q = params.constant((q_dim,), ("heads",), 0.0, precision)
            self.b_k = params.constant((kv_dim,), ("kv_heads",), 0.0, precision)
            self.b_v = params.constant((kv_dim,), ("kv_heads",), 0.0, precision)
        if cfg.out_bias:
            self.b_o = params.constant((dim,), ("embed",), 0.0, precision)
        if cfg.qk_norm == "head":
            self.q_norm = RMSNorm(cfg.head_dim, eps, precision)
            self.k_norm = RMSNorm(cfg.head_dim, eps, precision)
        if cfg.qk_norm == "full":
            self.q_scale = params.constant((q_dim,), ("heads",), 1.0, precision)
            self.k_scale = params.constant((kv_dim,), ("kv_heads",), 1.0, precision)
        if cfg.sinks:
            self.sinks = params.constant((cfg.num_heads,), ("heads",), 0.0, precision)

    @jax.named_scope("attend")
    def __call__(
        self, x_tD: Float[Array, "t D"], stream: Stream, held: Memory | None = None
    ) -> tuple[Float[Array, "t D"], Memory | None]:
        """Returns (the attention output, split like the input, and what is to be held); t covers
        rows b of length L, `held` the keys and values of tokens before them."""
        cfg = self.cfg
        q_blnH, k_blgH, v_blgH = self._heads(collectives.all_gather(x_tD, self.fold["tp"]), stream)
        q_blnH = apply_rope(q_blnH, stream.rope, cfg.rope.layout)
        k_blgH = apply_rope(k_blgH, stream.rope, cfg.rope.layout)
        (k_bSgH, v_bSgH), ids_bS, held = recall((k_blgH, v_blgH), held, stream, self.window)
        sinks = self.sinks[...] if cfg.sinks else None
        asked = Asked(self.window or None, cfg.scale, cfg.impl or None)
        arrays = (q_blnH, k_bSgH, v_bSgH)
        out_blnH = attend(arrays, sinks, stream, ids_bS, asked, self.fold)
        out_Td = out_blnH.reshape(-1, self.w_o.shape[0])
        y_tD = collectives.psum_scatter(linear(out_Td, self.w_o[...]), self.fold["tp"])
        return (y_tD + self.b_o[...].astype(y_tD.dtype)[None] if cfg.out_bias else y_tD), held

    def _heads(self, x_TD, stream: Stream):
        """Returns (q_blnH, k_blgH, v_blgH), before the rotation."""
        cfg = self.cfg
        weights = [self.w_q, self.w_k, self.w_v]
        made = [linear(x_TD, w[...]) for w in weights]
        if cfg.bias:
            biases = (self.b_q, self.b_k, self.b_v)
            made = [y + b[...].astype(y.dtype)[None] for y, b in zip(made, biases, strict=True)]
        if cfg.qk_norm == "full":
            tp, scales = self.fold["tp"], (self.q_scale, self.k_scale)
            normed = [
                rms_norm_split(y, scale[...], self.eps, tp, self.fold.degree("tp"))
                for y, scale in zip(made[:2], scales, strict=True)
            ]
            made = [*normed, made[2]]
        if cfg.clip_qkv:
            made = [jnp.clip(y, -cfg.clip_qkv, cfg.clip_qkv) for y in made]
        made = [made[0], *(self._my_kv_heads(y) for y in made[1:])]
        q, k, v = (y.reshape(*stream.segment_ids_bL.shape, -1, cfg.head_dim) for y in made)
        return (self.q_norm(q), self.k_norm(k), v) if cfg.qk_norm == "head" else (q, k, v)

    def _my_kv_heads(self, y_Th: Float[Array, "T h"]) -> Float[Array, "T h"]:
        """The key or value heads that this device's queries read, of the piece it projected to."""
        tp, heads = self.fold.degree("tp"), self.cfg.num_kv_heads
        if heads % tp == 0:
            return y_Th
        y_TGH = collectives.all_gather(y_Th, self.fold["tp"], dim=1)
        y_TGH = y_TGH.reshape(-1, heads, self.cfg.head_dim)
        mine = collectives.axis_index(self.fold["tp"]) * heads // tp
        return jax.lax.dynamic_index_in_dim(y_TGH, mine, axis=1, keepdims=False)
