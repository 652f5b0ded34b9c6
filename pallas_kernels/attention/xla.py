"""Causal attention by blocks with an online softmax (Milakov and Gimelshein, 2018), and a backward
that recomputes the scores from the log-sum-exp (Dao et al., 2022): memory linear in the length.

    loops     chunks of the batch, then query blocks, then the keys that a query block sees: what
              lies above the diagonal or left of the window is never visited
    forward   (peak, total, out) of each range of keys, joined as they come
    backward  p = exp(s - lse); ds = p * (dp - sum(do * out) + dlse); dq, dk, dv from ds and p

A row of few query blocks is unrolled, each block with one static range of keys; a longer one loops
over query blocks and, inside, over key blocks. Where queries and keys have positions, the range is
looked up in these and in the documents (when unrolled: all keys). Products are batched over
[c*G, R*rows, width] (c rows of the batch, R query heads to a key head) in the forms that XLA:CPU
runs fast in bfloat16: no product sums over rows, so dk and dv are kept transposed and q and do are
turned instead. The barriers keep XLA from fusing across a product, which recomputes the mask for
every head, or turns a fast product into a slow one.

FLOPs: 4*B*N*L*S*H forward, half of it skipped when causal; backward 2.5 times that.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from pallas_kernels.attention.reference import NOTHING, visible

# What a remat policy has to save, to not attend again; other implementations name nothing.
SAVED = ("attention_out", "attention_lse")
ROWS = 128  # queries of a block
KEYS = 512  # keys of a block, where the keys are looped over
FEW = 8  # query blocks that are unrolled
# Scores held at once decide the chunk of the batch: 2 MiB, a core's cache, or 256 MiB elsewhere.
SCORES_CPU, SCORES = 2**19, 2**26
FLOOR = NOTHING / 2  # exp(NOTHING - FLOOR) is 0, where exp(NOTHING - NOTHING) would be 1


class _Plan(NamedTuple):
    """Static facts of one call."""

    batch_cpu: int
    """Rows of the batch worked on at once on a CPU; divides B."""
    batch: int
    """The same elsewhere."""
    rows: int
    """Queries of a block; divides the padded L."""
    keys: int
    """Keys of a block; divides the padded S. All of them if the key blocks are not looped over."""
    looped: bool
    offset: int
    """Query i sees keys up to i + offset."""
    window: int | None
    scale: float


def _plan(B: int, L: int, S: int, N: int, window: int | None, scale: float) -> _Plan:
    count = -(-L // ROWS)
    rows = L if count == 1 else -(-L // count // 16) * 16
    looped = count > FEW or rows * S > 2 * FEW * ROWS**2
    keys = min(KEYS, S) if looped else S

    def batch(scores: int) -> int:
        room = max(scores // (N * rows * keys), 1)
        return max(size for size in range(1, B + 1) if B % size == 0 and size <= room)

    return _Plan(batch(SCORES_CPU), batch(SCORES), rows, keys, looped, S - L, window, scale)


class _Marks(NamedTuple):
    """What decides who sees whom, each a pair (of queries, of keys) [c, .], or None."""

    ids: Any
    """Document ids."""
    positions: Any
    """Places in the row, rising along it; None: the index is the place."""


def _wide(dtype):
    return jnp.float64 if dtype == jnp.float64 else jnp.float32


def _dot(a, b, contract: tuple[int, int]):
    """Batched product over dim 0, summed in float32 or wider."""
    dims = (((contract[0],), (contract[1],)), ((0,), (0,)))
    product = lax.dot_general(a, b, dims, preferred_element_type=_wide(a.dtype))
    return lax.optimization_barrier(product)


def _turned(x):
    """The last two dims swapped, in memory too (the barrier keeps the product from undoing it)."""
    return lax.optimization_barrier(x[:, None].swapaxes(2, 3))[:, 0]


def _cut(x, start, size: int, axis: int = 1):
    return lax.dynamic_slice_in_dim(x, start, size, axis)


def _heads_first(x, G: int):
    """[c, l, N, W] -> [c*G, R*l, W]."""
    c, length, N, W = x.shape
    x = x.reshape(c, length, G, N // G, W).transpose(0, 2, 3, 1, 4)
    return x.reshape(c * G, N // G * length, W)


def _heads_last(x, c: int, length: int):
    """The inverse of `_heads_first`."""
    G, R, W = x.shape[0] // c, x.shape[1] // length, x.shape[2]
    return x.reshape(c, G, R, length, W).transpose(0, 3, 1, 2, 4).reshape(c, length, G * R, W)


def _bias(marks: _Marks, row0, key0, size: int, plan: _Plan, wide):
    """[c or 1, 1, rows, size]: 0 where the query sees the key, else NOTHING."""

    def cut(pair):
        return _cut(pair[0], row0, plan.rows), _cut(pair[1], key0, size)

    ids = None if marks.ids is None else cut(marks.ids)
    if marks.positions is None:
        rows = row0 + jnp.arange(plan.rows, dtype=jnp.int32)
        keys = key0 + jnp.arange(size, dtype=jnp.int32)
        seen = visible(rows, keys, ids, plan.window, plan.offset)
    else:
        seen = visible(*cut(marks.positions), ids, plan.window, 0)
    return lax.optimization_barrier(jnp.where(seen, 0, NOTHING).astype(wide))[:, None]


def _scores(q, k, bias, c: int, plan: _Plan):
    """[c, N, rows, size] of q [c*G, R*rows, H] and k [c*G, size, H]."""
    return _dot(q, k, (2, 2)).reshape(c, -1, *bias.shape[2:]) * plan.scale + bias


def _range_of(i, marks: _Marks, plan: _Plan):
    """The keys, as (first, end), of which query block i sees any in some row of the batch: none
    before those of its first query's document, where these are here at all."""
    rows_cl, keys_cS = _cut(marks.positions[0], i * plan.rows, plan.rows), marks.positions[1]
    end = (keys_cS <= rows_cl.max(axis=1, keepdims=True)).sum(axis=1, dtype=jnp.int32).max()
    first = jnp.int32(0)
    if marks.ids is not None:
        ids_cl, ids_cS = _cut(marks.ids[0], i * plan.rows, plan.rows), marks.ids[1]
        true_c = lax.argmax(ids_cl != 0, 1, jnp.int32)
        document_c1 = jnp.take_along_axis(ids_cl, true_c[:, None], axis=1)
        first = lax.argmax(ids_cS == document_c1, 1, jnp.int32).min()
    if plan.window is not None:
        before_c = (keys_cS <= rows_cl[:, :1] - plan.window).sum(axis=1, dtype=jnp.int32)
        first = jnp.maximum(first, before_c.min())
    return first, end


def _over_keys(i, S: int, marks: _Marks, plan: _Plan, step, carry):
    """Folds carry = step(carry, first key, size) over the keys that query block i sees any of.

    Unrolled, i is an int, there is one step, and it gets None for the carry.
    """
    if marks.positions is not None:
        first_key, end_key = _range_of(i, marks, plan) if plan.looped else (0, S)
    else:
        first_key = 0 if plan.window is None else i * plan.rows + plan.offset - plan.window + 1
        end_key = (i + 1) * plan.rows + plan.offset
    if not plan.looped:
        first_key = max(first_key, 0)
        return step(None, first_key, min(end_key, S) - first_key)
    first = jnp.maximum(jnp.asarray(first_key, jnp.int32), 0) // plan.keys
    end = jnp.minimum((end_key - 1) // plan.keys + 1, S // plan.keys)
    return lax.fori_loop(first, end, lambda j, c: step(c, j * plan.keys, plan.keys), carry)


def _join(a, b):
    """The (peak, total, out) of two sets of keys together."""
    peak = jnp.maximum(a[0], b[0])
    of_a, of_b = jnp.exp(a[0] - peak), jnp.exp(b[0] - peak)
    return peak, a[1] * of_a + b[1] * of_b, a[2] * of_a + b[2] * of_b


def _forward_chunk(q, k, v, marks: _Marks, sinks, plan: _Plan):
    """Returns (out [c, L, N, V], lse [c, L, N])."""
    (c, L, N, _), (S, G) = q.shape, k.shape[1:3]
    wide = _wide(q.dtype)
    k, v = _heads_first(k, G), _heads_first(v, G)

    def part(q_i, row0, key0, size):
        bias = _bias(marks, row0, key0, size, plan, wide)
        s = _scores(q_i, _cut(k, key0, size), bias, c, plan)
        peak = jnp.maximum(s.max(axis=-1, keepdims=True), FLOOR)
        p = jnp.exp(s - peak)
        total = p.sum(axis=-1, keepdims=True)
        p = p.astype(v.dtype).reshape(c * G, -1, size)
        out = _dot(p, _cut(v, key0, size), (2, 1))
        return peak.reshape(c * G, -1, 1), total.reshape(c * G, -1, 1), out

    def query_block(carry, i):
        row0 = i * plan.rows
        q_i = _heads_first(_cut(q, row0, plan.rows), G)
        zero = q_i[..., :1].astype(wide) * 0  # a carry starts as varying as it ends
        start = zero + FLOOR, zero, zero + jnp.zeros((1, 1, v.shape[-1]), wide)

        def step(so_far, key0, size):
            new = part(q_i, row0, key0, size)
            return new if so_far is None else _join(so_far, new)

        peak, total, out = _over_keys(i, S, marks, plan, step, start)
        if sinks is not None:
            sink = jnp.broadcast_to(sinks.astype(wide)[None, None, :, None], (c, plan.rows, N, 1))
            sink = _heads_first(sink, G)
            peak, total, out = _join((peak, total, out), (sink, zero + 1, zero))
        empty = total == 0
        total = jnp.where(empty, 1, total)
        out = (out / total).astype(q.dtype)
        lse = jnp.where(empty, NOTHING, peak + jnp.log(total))
        return carry, tuple(_heads_last(a, c, plan.rows) for a in (out, lse))

    _, (out, lse) = _over_queries(query_block, None, L, plan)
    return out, lse[..., 0]


def _over_queries(f, carry, L: int, plan: _Plan):
    """(carry, results joined along axis 1) of carry, result = f(carry, i) over the query blocks."""
    count = L // plan.rows
    if plan.looped:
        carry, results = lax.scan(f, carry, jnp.arange(count, dtype=jnp.int32))
        join = lambda x: x.swapaxes(0, 1).reshape(x.shape[1], L, *x.shape[3:])  # noqa: E731
        return carry, jax.tree.map(join, results)
    parts = []
    for i in range(count):
        carry, result = f(carry, i)
        parts.append(result)
    return carry, jax.tree.map(lambda *part: jnp.concatenate(part, axis=1), *parts)


def _backward_chunk(q, k, v, marks: _Marks, lse, do, correction, plan: _Plan):
    """Returns (dq, dk, dv). `correction` is sum(do * out) - dlse, [c, L, N]."""
    (c, L, N, _), (S, G) = q.shape, k.shape[1:3]
    wide, narrow = _wide(q.dtype), k.dtype
    k, v = _heads_first(k, G), _heads_first(v, G)

    def query_block(carry, i):
        row0 = i * plan.rows
        q_i, do_i, lse_i, correction_i = (
            _heads_first(_cut(x, row0, plan.rows), G)
            for x in (q, do, lse[..., None], correction[..., None])
        )
        q_turned, do_turned = _turned(q_i), _turned(do_i)
        lse_i, correction_i = (x.reshape(c, N, plan.rows, 1) for x in (lse_i, correction_i))

        def step(so_far, key0, size):
            dq, dk, dv = (None, *carry) if so_far is None else so_far

            def add(whole, new):
                return lax.dynamic_update_slice_in_dim(
                    whole, _cut(whole, key0, size, 2) + new, key0, 2
                )

            k_j, v_j = _cut(k, key0, size), _cut(v, key0, size)
            bias = _bias(marks, row0, key0, size, plan, wide)
            p = jnp.exp(_scores(q_i, k_j, bias, c, plan) - lse_i)
            dp = _dot(do_i, v_j, (2, 2)).reshape(p.shape)
            ds = p * ((dp - correction_i) * plan.scale)
            ds, p = (x.astype(narrow).reshape(c * G, -1, size) for x in (ds, p))
            dq_j = _dot(ds, k_j, (2, 1))
            dq = dq_j if dq is None else dq + dq_j
            return dq, add(dk, _dot(q_turned, ds, (2, 1))), add(dv, _dot(do_turned, p, (2, 1)))

        dq, dk, dv = _over_keys(i, S, marks, plan, step, (q_i.astype(wide) * 0, *carry))
        return (dk, dv), _heads_last(dq.astype(narrow), c, plan.rows)

    zero = k[:, :1, :1].astype(wide) * 0  # a carry starts as varying as it ends
    start = tuple(zero + jnp.zeros((1, x.shape[-1], S), wide) for x in (k, v))
    turned, dq = _over_queries(query_block, start, L, plan)
    narrowed = (lax.optimization_barrier(x.astype(narrow)).swapaxes(1, 2) for x in turned)
    return dq, *(_heads_last(x, c, S) for x in narrowed)


def _over_batch(f, arguments, plan: _Plan):
    """f over chunks of the batch, as large as suits the platform that the program is for."""
    B = arguments[0].shape[0]

    def chunked(arguments, size: int):
        if size == B:
            return f(arguments)
        split = jax.tree.map(lambda x: x.reshape(B // size, size, *x.shape[1:]), arguments)
        return jax.tree.map(lambda x: x.reshape(B, *x.shape[2:]), lax.map(f, split))

    if plan.batch_cpu == plan.batch:
        return chunked(arguments, plan.batch)
    on_cpu, elsewhere = (partial(chunked, size=size) for size in (plan.batch_cpu, plan.batch))
    return lax.platform_dependent(arguments, cpu=on_cpu, default=elsewhere)


@partial(jax.custom_vjp, nondiff_argnums=(5,))
def _attend(q, k, v, marks, sinks, plan):
    return _attend_forward(q, k, v, marks, sinks, plan)[0]


def _attend_forward(q, k, v, marks, sinks, plan):
    def chunk(arrays):
        q, k, v, marks = arrays
        return _forward_chunk(q, k, v, marks, sinks, plan)

    out, lse = _over_batch(chunk, (q, k, v, marks), plan)
    out, lse = map(checkpoint_name, (out, lse), SAVED)
    return (out, lse), (q, k, v, marks, sinks, out, lse)


def _attend_backward(plan, saved, cotangents):
    q, k, v, marks, sinks, out, lse = saved
    do, dlse = cotangents
    wide = _wide(q.dtype)
    correction = (do.astype(wide) * out.astype(wide)).sum(axis=-1) - dlse

    def chunk(arrays):
        q, k, v, marks, lse, do, correction = arrays
        return _backward_chunk(q, k, v, marks, lse, do, correction, plan)

    arrays = (q, k, v, marks, jnp.maximum(lse, FLOOR), do, correction)
    dq, dk, dv = _over_batch(chunk, arrays, plan)
    dsinks = None
    if sinks is not None:
        share = jnp.exp(sinks.astype(wide)[None, None] - lse)
        dsinks = -(share * correction).sum(axis=(0, 1)).astype(sinks.dtype)
    return dq, dk, dv, None, dsinks


_attend.defvjp(_attend_forward, _attend_backward)


def _pad(x, size: int, value=0):
    """Dim 1 padded to a multiple of `size`."""
    missing = -x.shape[1] % size
    widths = ((0, 0), (0, missing), *((0, 0),) * (x.ndim - 2))
    return jnp.pad(x, widths, constant_values=value) if missing else x


def _padded(segment_ids, positions, plan: _Plan) -> _Marks:
    """The marks of padded rows. Padding needs no mask of its own: a true query never sees a key
    from S on, whose positions are beyond all others; a padded query has no cotangent."""
    if segment_ids is not None:
        segment_ids = _pad(segment_ids[0], plan.rows), _pad(segment_ids[1], plan.keys)
    if positions is not None:
        positions = _pad(positions[0], plan.rows, -1), _pad(positions[1], plan.keys, 2**30)
    return _Marks(segment_ids, positions)


def attention(q_BLNH, k_BSGH, v_BSGV, segment_ids, window, sinks, scale, positions=None):
    """See the package."""
    (B, L, N, _), S = q_BLNH.shape, k_BSGH.shape[1]
    plan = _plan(B, L, S, N, window, scale)
    marks = _padded(segment_ids, positions, plan)
    q, k, v = _pad(q_BLNH, plan.rows), _pad(k_BSGH, plan.keys), _pad(v_BSGV, plan.keys)
    with jax.named_scope(_scope(plan)):
        out, lse = _attend(q, k, v, marks, sinks, plan)
    return out[:, :L], lse[:, :L]


def _scope(plan: _Plan) -> str:
    """From which a reader of the compiled program knows that keys are skipped for a window, not for
    documents alone."""
    return "causal" if plan.window is None else "window"


def gradients(arrays, results, cotangents, segment_ids, window, scale, positions):
    """See `attention_gradients` of the package."""
    (B, L, N, _), S = arrays[0].shape, arrays[1].shape[1]
    plan = _plan(B, L, S, N, window, scale)
    q, out, lse, *cotangents = (_pad(a, plan.rows) for a in (arrays[0], *results, *cotangents))
    k, v = (_pad(a, plan.keys) for a in arrays[1:])
    saved = (q, k, v, _padded(segment_ids, positions, plan), None, out, lse)
    with jax.named_scope(_scope(plan)):
        dq, dk, dv, *_ = _attend_backward(plan, saved, cotangents)
    return dq[:, :L], dk[:, :S], dv[:, :S]
