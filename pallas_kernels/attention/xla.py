"""Causal attention by blocks with an online softmax (Milakov and Gimelshein, 2018), and a backward
that recomputes the scores from the log-sum-exp (Dao et al., 2022): memory linear in the length.

    grid      query blocks x key blocks; those above the diagonal or left of the window are skipped
    forward   running maximum m and sum l of each row, out rescaled as m grows
    backward  p = exp(s - lse); ds = p * (dp - sum(do * out) + dlse); dq, dk, dv from ds and p

Arrays are held as [B*G, blocks, R*block, width] (R query heads share a key head), so that each
block is one batched product. FLOPs: 4*B*N*L*S*H forward, half of it skipped when causal; backward
2.5 times that. On two Zen 5 cores a block of 256 is the best of 128, 256, 512.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.attention.reference import NOTHING, visible

BLOCK = 256


class _Plan(NamedTuple):
    """Static facts of one call."""

    G: int
    R: int
    L: int
    S: int
    rows: int
    """Query rows of a block."""
    keys: int
    """Keys of a block."""
    window: int | None
    scale: float
    packed: bool


def _wide(dtype):
    return jnp.float64 if dtype == jnp.float64 else jnp.float32


def _dot(a, b, contract: tuple[int, int]):
    """Batched product over dim 0, summed in float32 or wider."""
    dims = (((contract[0],), (contract[1],)), ((0,), (0,)))
    return lax.dot_general(a, b, dims, preferred_element_type=_wide(a.dtype))


def _pad(x, length: int):
    return jnp.pad(x, ((0, 0), (0, length - x.shape[1]), *((0, 0),) * (x.ndim - 2)))


def _blocks_of_queries(x_BLNW, plan: _Plan):
    """[B, L, N, W] -> [blocks, B*G, R*rows, W]."""
    B, _, N, W = x_BLNW.shape
    count = -(-plan.L // plan.rows)
    x = _pad(x_BLNW, count * plan.rows).reshape(B, count, plan.rows, plan.G, plan.R, W)
    return x.transpose(1, 0, 3, 4, 2, 5).reshape(count, B * plan.G, plan.R * plan.rows, W)


def _queries_of_blocks(x, B: int, plan: _Plan):
    """The inverse of `_blocks_of_queries`."""
    count, W = x.shape[0], x.shape[-1]
    x = x.reshape(count, B, plan.G, plan.R, plan.rows, W).transpose(1, 0, 4, 2, 3, 5)
    return x.reshape(B, count * plan.rows, plan.G * plan.R, W)[:, : plan.L]


def _blocks_of_keys(x_BSGW, plan: _Plan):
    """[B, S, G, W] -> [blocks, B*G, keys, W]."""
    B, _, G, W = x_BSGW.shape
    count = -(-plan.S // plan.keys)
    x = _pad(x_BSGW, count * plan.keys).reshape(B, count, plan.keys, G, W)
    return x.transpose(1, 0, 3, 2, 4).reshape(count, B * G, plan.keys, W)


def _keys_of_blocks(x, B: int, plan: _Plan):
    """The inverse of `_blocks_of_keys`."""
    count, W = x.shape[0], x.shape[-1]
    x = x.reshape(count, B, plan.G, plan.keys, W).transpose(1, 0, 3, 2, 4)
    return x.reshape(B, count * plan.keys, plan.G, W)[:, : plan.S]


def _blocks_of_ids(segment_ids, plan: _Plan):
    """([blocks, B, rows], [blocks, B, keys]): the padded segment ids."""

    def cut(ids, size):
        count = -(-ids.shape[1] // size)
        return _pad(ids, count * size).reshape(ids.shape[0], count, size).swapaxes(0, 1)

    return cut(segment_ids[0], plan.rows), cut(segment_ids[1], plan.keys)


def _mask(i, j, ids_rows, ids_keys, plan: _Plan):
    """[B*G, R*rows, keys]: what query block i sees of key block j."""
    rows = i * plan.rows + jnp.arange(plan.rows, dtype=jnp.int32)
    keys = j * plan.keys + jnp.arange(plan.keys, dtype=jnp.int32)
    ids = (ids_rows, ids_keys) if plan.packed else None
    seen = visible(rows, keys, ids, plan.window, plan.S - plan.L) & (keys < plan.S)[None, None]
    B = ids_rows.shape[0]
    shape = (B, plan.G, plan.R, plan.rows, plan.keys)
    return jnp.broadcast_to(seen[:, None, None], shape).reshape(
        B * plan.G, plan.R * plan.rows, plan.keys
    )


def _key_blocks(i, plan: _Plan):
    """(first, end) key block that query block i sees anything of."""
    last_row = jnp.minimum((i + 1) * plan.rows, plan.L) - 1 + plan.S - plan.L
    end = last_row // plan.keys + 1
    if plan.window is None:
        return jnp.zeros_like(end), end
    first_key = i * plan.rows + plan.S - plan.L - plan.window + 1
    return jnp.maximum(first_key, 0) // plan.keys, end


def _scores(q, k, seen, plan: _Plan):
    return jnp.where(seen, _dot(q, k, (2, 2)) * plan.scale, NOTHING)


def _forward_blocks(q, k, v, ids_rows, ids_keys, sink, plan: _Plan):
    """Returns (out, lse) by query block: [blocks, B*G, R*rows, V] and [..., 1], wide."""

    def query_block(_, at):
        i, q_i, ids_i = at
        first, end = _key_blocks(i, plan)
        zero = q_i[..., :1].astype(_wide(q_i.dtype)) * 0  # a carry starts as varying as it ends
        peak = zero + (NOTHING if sink is None else sink)
        total = zero + (0.0 if sink is None else 1.0)
        out = zero + jnp.zeros((1, 1, v.shape[-1]), zero.dtype)

        def key_block(j, carry):
            peak, total, out = carry
            k_j, v_j, ids_j = (lax.dynamic_index_in_dim(a, j, 0, False) for a in (k, v, ids_keys))
            seen = _mask(i, j, ids_i, ids_j, plan)
            s = _scores(q_i, k_j, seen, plan)
            new_peak = jnp.maximum(peak, s.max(axis=-1, keepdims=True))
            p = jnp.where(seen, jnp.exp(s - new_peak), 0)
            shrink = jnp.exp(peak - new_peak)
            total = total * shrink + p.sum(axis=-1, keepdims=True)
            out = out * shrink + _dot(p.astype(v_j.dtype), v_j, (2, 1))
            return new_peak, total, out

        peak, total, out = lax.fori_loop(first, end, key_block, (peak, total, out))
        empty = total == 0
        total = jnp.where(empty, 1, total)
        return None, (out / total, jnp.where(empty, NOTHING, peak + jnp.log(total)))

    count = jnp.arange(q.shape[0], dtype=jnp.int32)
    return lax.scan(query_block, None, (count, q, ids_rows))[1]


def _backward_blocks(q, k, v, ids_rows, ids_keys, lse, do, correction, plan: _Plan):
    """Returns (dq, dk, dv) by blocks, wide. `correction` is sum(do * out) - dlse, [..., 1]."""
    keys = jnp.arange(k.shape[0], dtype=jnp.int32)
    zero_k = (k[0] * 0).astype(_wide(k.dtype))
    zero_v = (v[0] * 0).astype(_wide(v.dtype))

    def key_block(dq, at):
        j, k_j, v_j, ids_j = at

        def query_block(i, carry):
            dq, dk, dv = carry
            q_i, ids_i, lse_i, do_i, correction_i, dq_i = (
                lax.dynamic_index_in_dim(a, i, 0, False)
                for a in (q, ids_rows, lse, do, correction, dq)
            )
            first, end = _key_blocks(i, plan)

            def work(dq_i, dk, dv):
                seen = _mask(i, j, ids_i, ids_j, plan)
                p = jnp.where(seen, jnp.exp(_scores(q_i, k_j, seen, plan) - lse_i), 0)
                ds = p * (_dot(do_i, v_j, (2, 2)) - correction_i) * plan.scale
                p, ds = p.astype(q_i.dtype), ds.astype(q_i.dtype)
                dk = dk + _dot(ds, q_i, (1, 1))
                dv = dv + _dot(p, do_i, (1, 1))
                return dq_i + _dot(ds, k_j, (2, 1)), dk, dv

            skip = lambda *same: same  # noqa: E731
            dq_i, dk, dv = lax.cond((first <= j) & (j < end), work, skip, dq_i, dk, dv)
            return lax.dynamic_update_index_in_dim(dq, dq_i, i, 0), dk, dv

        dq, dk, dv = lax.fori_loop(0, q.shape[0], query_block, (dq, zero_k, zero_v))
        return dq, (dk, dv)

    dq = (q * 0).astype(_wide(q.dtype))
    dq, (dk, dv) = lax.scan(key_block, dq, (keys, k, v, ids_keys))
    return dq, dk, dv


def _prepared(q_BLNH, k_BSGH, v_BSGV, segment_ids, sinks, plan: _Plan):
    sink = None
    if sinks is not None:  # [1 * G, R * rows, 1], repeated over B
        per_head = sinks.astype(_wide(q_BLNH.dtype)).reshape(1, plan.G, plan.R, 1, 1)
        shape = (q_BLNH.shape[0], plan.G, plan.R, plan.rows, 1)
        sink = jnp.broadcast_to(per_head, shape).reshape(-1, plan.R * plan.rows, 1)
    ids_rows, ids_keys = _blocks_of_ids(segment_ids, plan)
    return (
        _blocks_of_queries(q_BLNH, plan),
        _blocks_of_keys(k_BSGH, plan),
        _blocks_of_keys(v_BSGV, plan),
        ids_rows,
        ids_keys,
        sink,
    )


@partial(jax.custom_vjp, nondiff_argnums=(5,))
def _attend(q, k, v, segment_ids, sinks, plan):
    return _attend_forward(q, k, v, segment_ids, sinks, plan)[0]


def _attend_forward(q, k, v, segment_ids, sinks, plan):
    out, lse = _forward_blocks(*_prepared(q, k, v, segment_ids, sinks, plan), plan)
    B = q.shape[0]
    out = _queries_of_blocks(out.astype(q.dtype), B, plan)
    lse = _queries_of_blocks(lse, B, plan)[..., 0]
    return (out, lse), (q, k, v, segment_ids, sinks, out, lse)


def _attend_backward(plan, saved, cotangents):
    q, k, v, segment_ids, sinks, out, lse = saved
    do, dlse = cotangents
    wide, B = _wide(q.dtype), q.shape[0]
    correction = (do.astype(wide) * out.astype(wide)).sum(axis=-1) - dlse
    qb, kb, vb, ids_rows, ids_keys, _ = _prepared(q, k, v, segment_ids, None, plan)
    columns = (_blocks_of_queries(a[..., None], plan) for a in (lse, correction))
    lse_b, correction_b = columns
    do_b = _blocks_of_queries(do, plan)
    dq, dk, dv = _backward_blocks(qb, kb, vb, ids_rows, ids_keys, lse_b, do_b, correction_b, plan)
    dsinks = None
    if sinks is not None:
        share = jnp.exp(sinks.astype(wide)[None, None] - lse)
        dsinks = -(share * correction).sum(axis=(0, 1)).astype(sinks.dtype)
    return (
        _queries_of_blocks(dq, B, plan).astype(q.dtype),
        _keys_of_blocks(dk, B, plan).astype(k.dtype),
        _keys_of_blocks(dv, B, plan).astype(v.dtype),
        None,
        dsinks,
    )


_attend.defvjp(_attend_forward, _attend_backward)


def attention(q_BLNH, k_BSGH, v_BSGV, segment_ids, window, sinks, scale):
    """See the package."""
    (B, L, N, _), (S, G) = q_BLNH.shape, k_BSGH.shape[1:3]
    plan = _Plan(
        G, N // G, L, S, min(BLOCK, L), min(BLOCK, S), window, scale, segment_ids is not None
    )
    if segment_ids is None:
        segment_ids = (jnp.ones((B, L), jnp.int32), jnp.ones((B, S), jnp.int32))
    return _attend(q_BLNH, k_BSGH, v_BSGV, segment_ids, sinks, plan)
