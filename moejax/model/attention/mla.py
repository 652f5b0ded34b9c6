"""Multi-head latent attention (DeepSeek-V2, 2024): keys and values are made of a small latent.

    c_q = norm(x w_q_down)                     q = c_q w_q_up      (or q = x w_q, without c_q)
    c, k_rope = split(x w_kv_down)             k, v = norm(c) w_kv_up
    scores = q k + rope(q_rope) rope(k_rope)   the rope key is one for all heads

The down-projections are the same on all tp ranks and work on each one's own tokens, so what is
gathered over tp is the latents, not x; the up-projections and heads are split over tp.

A cache holds the normed latent and the turned rope key. With held tokens the up-projection of the
keys is applied to the queries instead, and that of the values to what attention gives: attention
then runs over latents, as one shared key/value head, and no key or value is ever made of them.

`recompute_up` saves the latents and what attention gave, and makes q, k and v again for its
backward: the largest activations of the layer are then never kept.
"""

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from moejax.core import collectives, params
from moejax.core.mesh import Fold
from moejax.core.precision import PrecisionConfig
from moejax.model.attention.config import AttentionConfig
from moejax.model.attention.context import (
    Asked,
    Axes,
    attend,
    attend_whole,
    gather_rows,
    gathers,
    in_groups,
    saving_results,
)
from moejax.model.attention.gqa import check_heads
from moejax.model.attention.memory import Memory, recall
from moejax.model.norm import RMSNorm
from moejax.model.rope import apply_rope
from moejax.model.stream import Stream
from pallas_kernels import linear

LATENT_EPS = 1e-6  # of the latents' norms, whatever the model's (DeepSeek's own code and files)


class LatentAttention(nnx.Module):
    """Causal self-attention within documents, through latents."""

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
        del eps  # that of other norms
        check_heads(cfg, fold)
        self.cfg, self.fold, self.window = cfg, fold, window
        N, R, rank = cfg.num_heads, cfg.mla.kv_rank, cfg.mla.q_rank
        q_dim, kv_dim, v_dim = N * cfg.qk_dim, N * (cfg.head_dim + cfg.value_dim), N * cfg.value_dim
        make = lambda shape, dims, std=std: params.normal(rngs, shape, dims, std, precision)  # noqa: E731
        if rank:
            self.w_q_down = make((dim, rank), ("embed", "latent"))
            self.q_norm = RMSNorm(rank, LATENT_EPS, precision)
            self.w_q_up = make((rank, q_dim), ("rank", "heads"))
        else:
            self.w_q = make((dim, q_dim), ("embed", "heads"))
        self.w_kv_down = make((dim, R + cfg.rope_dim), ("embed", "latent"))
        self.kv_norm = RMSNorm(R, LATENT_EPS, precision)
        self.w_kv_up = make((R, kv_dim), ("rank", "heads"))
        self.w_o = make((v_dim, dim), ("heads", "embed"), out_std)
        if cfg.sinks:
            self.sinks = params.constant((N,), ("heads",), 0.0, precision)

    @jax.named_scope("attend")
    def __call__(
        self, x_tD: Float[Array, "t D"], stream: Stream, held: Memory | None = None
    ) -> tuple[Float[Array, "t D"], Memory | None]:
        """Returns (the attention output, split like the input, and what is to be held); t covers
        rows b of length L, `held` the latents and rope keys of tokens before them."""
        from_TC, c_blR, rope_blP = self._latents(x_tD, stream)
        w_q = self.w_q_up[...] if self.cfg.mla.q_rank else self.w_q[...]
        w_kv, sinks = self.w_kv_up[...], self.sinks[...] if self.cfg.sinks else None
        known = held
        (c_bSR, rope_bSP), ids_bS, held = recall((c_blR, rope_blP), held, stream, self.window)

        def run(spread, axes):
            how = partial(self._attend_expanded, axes) if known is None else self._attend_absorbed
            if gathers(self.fold) or self.cfg.mla.recompute_up:
                how = saving_results(how)
            here = stream._replace(spread=spread)
            return how(from_TC, c_bSR, rope_bSP, w_q, w_kv, sinks, here, ids_bS)

        out_blnV = in_groups(run, stream.spread, self.fold)
        out_Td = out_blnV.reshape(-1, self.w_o.shape[0])
        return collectives.psum_scatter(linear(out_Td, self.w_o[...]), self.fold["tp"]), held

    def _latents(self, x_tD, stream: Stream):
        """Returns (what queries are made of, the normed latent, the turned rope key) of all tokens
        of this device's rows."""
        cfg, tp, shape = self.cfg, self.fold["tp"], stream.segment_ids_bL.shape
        R, P = cfg.mla.kv_rank, cfg.rope_dim
        down_tC = linear(x_tD, self.w_kv_down[...])
        parts = [self.kv_norm(down_tC[:, :R]), down_tC[:, R:]]
        if cfg.mla.q_rank:
            parts.append(self.q_norm(linear(x_tD, self.w_q_down[...])))
        gathered_TC = collectives.all_gather(jnp.concatenate(parts, axis=1), tp)
        c_TR, rope_TP, q_TC = jnp.split(gathered_TC, (R, R + P), axis=1)
        rope_bl1P = apply_rope(rope_TP.reshape(*shape, 1, P), stream.rope, cfg.rope.layout)
        from_TC = q_TC if cfg.mla.q_rank else collectives.all_gather(x_tD, tp)
        return from_TC, c_TR.reshape(*shape, R), rope_bl1P[:, :, 0]

    def _queries(self, from_TC, w_q, stream: Stream):
        """Returns (q_blnH without positions, the turned q_blnP)."""
        cfg = self.cfg
        q = linear(from_TC, w_q).reshape(*stream.segment_ids_bL.shape, -1, cfg.qk_dim)
        q_blnH, q_blnP = q[..., : cfg.head_dim], q[..., cfg.head_dim :]
        return q_blnH, apply_rope(q_blnP, stream.rope, cfg.rope.layout)

    def _asked(self) -> Asked:
        return Asked(self.window or None, self.cfg.scale, self.cfg.impl or None)

    def _attend_expanded(
        self, gathered: Axes, from_TC, c_blR, rope_blP, w_q, w_kv, sinks, stream: Stream, ids_bL
    ):
        """Returns out_blnV: keys and values are made of the latents, which are gathered over these
        axes. For many queries a key."""
        cfg, spread = self.cfg, stream.spread if gathered else None
        q_blnH, q_blnP = self._queries(from_TC, w_q, stream)
        if spread is not None:
            c_blR, rope_blP = (gather_rows(x, spread, gathered) for x in (c_blR, rope_blP))
        kv = linear(c_blR.reshape(-1, c_blR.shape[-1]), w_kv)
        kv = kv.reshape(*c_blR.shape[:2], -1, cfg.head_dim + cfg.value_dim)
        k_blnH, v_blnV = kv[..., : cfg.head_dim], kv[..., cfg.head_dim :]
        rope_blnP = jnp.broadcast_to(rope_blP[:, :, None], (*k_blnH.shape[:3], cfg.rope_dim))
        q = jnp.concatenate([q_blnH, q_blnP], axis=-1)
        k = jnp.concatenate([k_blnH, rope_blnP], axis=-1)
        if spread is not None:
            return attend_whole((q, k, v_blnV), sinks, spread, self._asked())
        return attend((q, k, v_blnV), sinks, stream, ids_bL, self._asked(), self.fold)

    def _attend_absorbed(self, from_TC, c_bSR, rope_bSP, w_q, w_kv, sinks, stream, ids_bS):
        """Returns out_blnV: attention over latents. For few queries and many held tokens."""
        cfg = self.cfg
        q_blnH, q_blnP = self._queries(from_TC, w_q, stream)
        w_Rnd = w_kv.reshape(w_kv.shape[0], -1, cfg.head_dim + cfg.value_dim)
        q_blnR = jnp.einsum("blnH,RnH->blnR", q_blnH, w_Rnd[..., : cfg.head_dim])
        q = jnp.concatenate([q_blnR, q_blnP], axis=-1)
        k = jnp.concatenate([c_bSR, rope_bSP], axis=-1)
        arrays = (q, k[:, :, None], c_bSR[:, :, None])
        out_blnR = attend(arrays, sinks, stream, ids_bS, self._asked(), self.fold)
        return jnp.einsum("blnR,RnV->blnV", out_blnR, w_Rnd[..., cfg.head_dim :])
