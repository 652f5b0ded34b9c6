"""The definition of causal attention: the whole score matrix, in obvious jnp."""

import jax
import jax.numpy as jnp

NOTHING = -1e30  # the score of a key that is not seen


def visible(row_BL, key_BS, segment_ids, window: int | None, offset: int):
    """Returns [B or 1, L, S]: whether query row sees key. Rows and keys are given by position, [L]
    and [S] where it is the same in the whole batch."""
    row_BL, key_BS = (a[None] if a.ndim == 1 else a for a in (row_BL, key_BS))
    ahead_BLS = row_BL[:, :, None] + offset - key_BS[:, None]
    seen_BLS = (ahead_BLS >= 0) if window is None else (ahead_BLS >= 0) & (ahead_BLS < window)
    if segment_ids is None:
        return seen_BLS
    ids_BL, ids_BS = segment_ids
    same_BLS = (ids_BL[:, :, None] == ids_BS[:, None]) & (ids_BL != 0)[:, :, None]
    return seen_BLS & same_BLS


def attention(q_BLNH, k_BSGH, v_BSGV, segment_ids, window, sinks, scale, positions=None):
    """See the package."""
    (B, L, N, H), (S, G) = q_BLNH.shape, k_BSGH.shape[1:3]
    wide = jnp.float64 if q_BLNH.dtype == jnp.float64 else jnp.float32
    q = q_BLNH.reshape(B, L, G, N // G, H).astype(wide)
    k, v = k_BSGH.astype(wide), v_BSGV.astype(wide)
    scores = jnp.einsum("BLGRH,BSGH->BGRLS", q, k, precision="highest") * scale
    rows, keys = jnp.arange(L, dtype=jnp.int32), jnp.arange(S, dtype=jnp.int32)
    offset = S - L
    if positions is not None:
        (rows, keys), offset = positions, 0
    seen = visible(rows, keys, segment_ids, window, offset)[:, None, None]
    scores = jnp.where(seen, scores, NOTHING)
    peak = scores.max(axis=-1, keepdims=True)
    sink = None if sinks is None else sinks.astype(wide).reshape(1, G, N // G, 1, 1)
    peak = peak if sink is None else jnp.maximum(peak, sink)
    peak = jax.lax.stop_gradient(peak)
    weights = jnp.where(seen, jnp.exp(scores - peak), 0)
    total = weights.sum(axis=-1, keepdims=True)
    total = total if sink is None else total + jnp.exp(sink - peak)
    empty = total == 0
    total = jnp.where(empty, 1, total)
    out = jnp.einsum("BGRLS,BSGV->BLGRV", weights / total, v, precision="highest")
    lse = jnp.where(empty, NOTHING, peak + jnp.log(total))[..., 0]
    return (
        out.reshape(B, L, N, -1).astype(q_BLNH.dtype),
        lse.transpose(0, 3, 1, 2).reshape(B, L, N),
    )
