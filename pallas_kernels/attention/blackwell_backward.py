"""Fused attention for Blackwell, backward: the scores are computed again, once in each of two
kernels, and nothing of size L x S is in device memory. Forward, and what is common: `blackwell`.

    p[i, j] = exp(scale * q[i] . k[j] - lse[i]);  ds[i, j] = p * (do[i] . v[j] - correction[i])
    dq[i] = scale * sum_j ds[i, j] k[j]                          6 H + 2 V FLOPs a score
    dk[j] = scale * sum_i ds[i, j] q[i],  dv[j] = sum_i p[i, j] do[i]    4 H + 4 V

(2 H of each are the scores, which a single kernel would compute once, and then add up dq in device
memory in no fixed order.) In both, warpgroup 2 has TMA load and issues the MMAs, those of the next
step's s and dp before those of this step's sums; warpgroups 0 and 1 turn s and dp into p and ds.

attention_query_gradient: a block of the grid has 128 queries of a head and visits the blocks of 64
keys that they see, which the two warpgroups take in turns. Tensor memory: s and dp 2 x 64 columns
each, ds 2 x 32, dq H, 512 for H = 192. Bytes: q, do and dq once, k and v once for 128 queries and
head, mostly from L2: 192 FLOP a byte (H = V = 128).

attention_key_value_gradient: a block has 128 keys of a key head and visits the blocks of 64 queries
that see any of them, head after head of the query heads that read it: the sums over the group stay
in tensor memory. The scores are [keys, queries], each warpgroup takes 32 queries of every step, and
a thread has a key; what is one number a query (lse, correction, first key) comes by TMA into the
ring too. Tensor memory: s, dp 64 columns, p, ds 32, dk H, dv V, 512 for H = 192. Bytes: k, v, dk
and dv once, q and do once for 128 keys: 256 FLOP a byte. Where key heads and rows are too few to
keep all cores busy (`BUSY`), a key head's query heads are split over blocks and added by XLA.

    barrier                   arrives                                  waits
    landed, k_, v_, kv_       TMA                                      2; of dk, dv's ring, all
    used, k_used, v_used      the tensor core has read a slot          2
    ready                     s and dp are written                     0 or 1
    read                      they are in registers                    2
    ds_ready                  ds (and p) are written                   2
    ds_used                   the tensor core has read them            0 or 1
    done                      the sums are complete                    0 and 1

What the assembler says (b200, gb300): 144 to 168 registers of 168, nothing spilled, 96 to 203 KiB
of shared memory. Tested in Mosaic's interpreter, not yet run on a GPU: no time has been measured.
"""

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.attention.blackwell_parts import (
    BY_LANE,
    LINE,
    PART,
    PER_COL,
    PER_ROW,
    ROWS,
    STEP,
    Call,
    across,
    bring_lines,
    key_bounds,
    launch,
    mask,
    pad_last,
    put_lines,
    query_bounds,
    seen_by_rows,
    slot_of,
    span_of,
    stages_for,
    sum_over_lines,
    swizzled,
)
from pallas_kernels.deviceless import GPUS
from pallas_kernels.varying import varying_as

LOG2E = math.log2(math.e)
BUSY = 4 * GPUS["b200"].cores  # blocks of a grid that leave no core idle for long


# dq: a tile of queries.


class DqScratch(NamedTuple):
    q: Any
    do: Any
    k: Any
    v: Any
    s: Any
    dp: Any
    ds: Any
    dq: Any
    landed: Any
    k_landed: Any
    v_landed: Any
    k_used: Any
    v_used: Any
    ready: Any
    read: Any
    ds_ready: Any
    ds_used: Any
    done: Any


def _dq_kernel(bounds, first, lse, correction, q, k, v, do, dq, *scratch, call: Call):
    s = DqScratch(*scratch)
    batch, head, wg = (lax.axis_index(name) for name in ("batch", "head", "wg"))
    tile = bounds.shape[1] - 1 - lax.axis_index("tile")
    at = batch, tile, head
    span = span_of(bounds, batch, tile)
    pl.when(wg == 2)(lambda: _dq_feed(span, q, k, v, do, at, s, call))
    pl.when(wg < 2)(lambda: _dq_slopes(span, first, lse, correction, dq, at, wg, s, call))


def _dq_feed(span, q, k, v, do, at, s: DqScratch, call: Call):
    (batch, tile, head), (lo, hi, *_) = at, span
    count, g, rows = hi - lo, lax.div(head, jnp.int32(call.group)), pl.ds(tile * ROWS, ROWS)
    bring_lines(q.at[batch, rows, head], s.q, s.landed)
    bring_lines(do.at[batch, rows, head], s.do, s.landed)

    def fetch(n, source, ring, landed):
        keys, slot = pl.ds((lo + n) * STEP, STEP), slot_of(n, call.stages)
        plgpu.copy_gmem_to_smem(source.at[batch, keys, g], ring.at[slot], landed.at[slot])

    def fetch_both(n):
        fetch(n, k, s.k, s.k_landed)
        fetch(n, v, s.v, s.v_landed)

    def scores(n):
        slot, half = slot_of(n, call.stages), lax.rem(n, jnp.int32(2))
        columns = pl.ds(half * STEP, STEP)
        pl.when(n >= 2)(lambda: plgpu.barrier_wait(s.read.at[half]))
        plgpu.barrier_wait(s.k_landed.at[slot])
        sum_over_lines(s.s.at[:, columns], s.q, s.k.at[slot])
        plgpu.barrier_wait(s.v_landed.at[slot])
        sum_over_lines(s.dp.at[:, columns], s.do, s.v.at[slot])
        plgpu.tcgen05_commit_arrive(s.ready.at[half])
        plgpu.tcgen05_commit_arrive(s.v_used.at[slot])

    def gradient(n):
        slot, half = slot_of(n, call.stages), lax.rem(n, jnp.int32(2))
        plgpu.barrier_wait(s.ds_ready.at[half])
        ds = s.ds.at[:, pl.ds(half * STEP, STEP)]
        plgpu.tcgen05_mma(s.dq, ds, s.k.at[slot], s.ds_used.at[half], accumulate=n > 0)
        plgpu.tcgen05_commit_arrive(s.k_used.at[slot])

    def step(n, _):
        pl.when(n + 1 < count)(lambda: scores(n + 1))
        gradient(n)
        after = n - 1 + call.stages  # its slot was last used a step ago

        @pl.when((n >= 1) & (after < count))
        def _():
            slot = slot_of(after, call.stages)
            plgpu.barrier_wait(s.v_used.at[slot])
            plgpu.barrier_wait(s.k_used.at[slot])
            fetch_both(after)

    lax.fori_loop(0, jnp.minimum(count, call.stages), lambda n, _: fetch_both(n), None)
    plgpu.barrier_wait(s.landed)
    pl.when(count > 0)(lambda: scores(jnp.int32(0)))
    lax.fori_loop(0, count, step, None)
    plgpu.tcgen05_commit_arrive(s.done)


def _dq_slopes(span, first, lse, correction, dq, at, half, s: DqScratch, call: Call):
    (batch, tile, head), (lo, hi, plain_from, plain_to) = at, span
    row0, count = tile * ROWS, hi - lo
    rows = pl.ds(row0, ROWS)
    lse_R, correction_R = (
        plgpu.load(x.at[batch, head, rows], layout=PER_ROW, optimized=False)
        for x in (lse, correction)
    )

    def step(turn, _):
        n = turn * 2 + half
        j = lo + n
        plgpu.barrier_wait(s.ready.at[half])

        @pl.when((j < plain_from) | (j >= plain_to))
        def _():
            first_R = plgpu.load(first.at[batch, rows], layout=PER_ROW, optimized=False)
            seen = seen_by_rows(first_R, row0 + call.offset, j * STEP)
            mask(s.s, half * STEP, STEP, seen)

        found = []
        for c in range(0, STEP, PART):
            columns = pl.ds(half * STEP + c, PART)
            x = plgpu.async_load_tmem(s.s.at[:, columns], layout=BY_LANE)
            dp = plgpu.async_load_tmem(s.dp.at[:, columns], layout=BY_LANE)
            p = jnp.exp2(x * (call.scale * LOG2E) - across(lse_R, x.shape))
            found.append((columns, (p * (dp - across(correction_R, x.shape))).astype(s.k.dtype)))
        plgpu.wait_load_tmem()
        plgpu.barrier_arrive(s.read.at[half])
        pl.when(turn > 0)(lambda: plgpu.barrier_wait(s.ds_used.at[half]))
        for columns, ds in found:
            plgpu.async_store_tmem(s.ds.at[:, columns], ds)
        plgpu.commit_tmem()
        plgpu.barrier_arrive(s.ds_ready.at[half])

    lax.fori_loop(0, lax.div(count + 1 - half, jnp.int32(2)), step, None)
    plgpu.barrier_wait(s.done)
    to = lambda columns: dq.at[batch, rows, head, columns]  # noqa: E731
    put_lines(s.dq, s.q, to, call.scale, count > 0, range_=(half, 2))


# dk, dv: a tile of keys.


class DkvScratch(NamedTuple):
    k: Any
    v: Any
    q: Any
    do: Any
    lse: Any
    correction: Any
    first: Any
    s: Any
    dp: Any
    p: Any
    ds: Any
    dk: Any
    dv: Any
    kv_landed: Any
    landed: Any
    used: Any
    ready: Any
    read: Any
    ds_ready: Any
    ds_used: Any
    done: Any


def _dkv_kernel(bounds, first, lse, correction, q, k, v, do, dk, dv, *scratch, call: Call):
    s = DkvScratch(*scratch)
    batch, some, wg = (lax.axis_index(name) for name in ("batch", "head", "wg"))
    tile = lax.axis_index("tile")
    at, span = (batch, tile, some), span_of(bounds, batch, tile)
    operands = first, lse, correction, q, do
    pl.when(wg == 2)(lambda: _dkv_feed(span, operands, k, v, at, s, call))
    pl.when(wg < 2)(lambda: _dkv_slopes(span, dk, dv, at, wg, s, call))


def _following(where, lo, hi):
    """Where the next block of queries is: (block, head)."""
    i, r = where
    turn = i + 1 == hi
    return jnp.where(turn, lo, i + 1), jnp.where(turn, r + 1, r)


def _dkv_feed(span, operands, k, v, at, s: DkvScratch, call: Call):
    (batch, tile, some), (lo, hi, *_) = at, span
    first, lse, correction, q, do = operands
    count, rows = (hi - lo) * call.group, pl.ds(tile * ROWS, ROWS)
    g = lax.div(some * call.group, jnp.int32(q.shape[2] // k.shape[2]))
    bring_lines(k.at[batch, rows, g], s.k, s.kv_landed)
    bring_lines(v.at[batch, rows, g], s.v, s.kv_landed)

    def fetch(n, where):
        """Asks for block n, queries i of head r of ours, and returns where the next one is."""
        i, r = where
        head, slot = some * call.group + r, slot_of(n, call.stages)
        queries = pl.ds(i * STEP, STEP)
        for source, ring in (
            (q.at[batch, queries, head], s.q),
            (do.at[batch, queries, head], s.do),
            (lse.at[batch, head, queries], s.lse),
            (correction.at[batch, head, queries], s.correction),
            (first.at[batch, queries], s.first),
        ):
            plgpu.copy_gmem_to_smem(source, ring.at[slot], s.landed.at[slot])
        return _following(where, lo, hi)

    def scores(n):
        slot = slot_of(n, call.stages)
        plgpu.barrier_wait(s.landed.at[slot])
        pl.when(n >= 1)(lambda: plgpu.barrier_wait(s.read))
        sum_over_lines(s.s, s.k, s.q.at[slot])
        sum_over_lines(s.dp, s.v, s.do.at[slot])
        plgpu.tcgen05_commit_arrive(s.ready)

    def gradients(n):
        slot = slot_of(n, call.stages)
        plgpu.barrier_wait(s.ds_ready)
        plgpu.tcgen05_mma(s.dv, s.p, s.do.at[slot], accumulate=n > 0)
        plgpu.tcgen05_mma(s.dk, s.ds, s.q.at[slot], accumulate=n > 0)
        plgpu.tcgen05_commit_arrive(s.ds_used)
        plgpu.tcgen05_commit_arrive(s.used.at[slot])

    def step(n, where):
        pl.when(n + 1 < count)(lambda: scores(n + 1))
        gradients(n)
        after = n - 1 + call.stages  # its slot was last used a step ago
        more = (n >= 1) & (after < count)

        @pl.when(more)
        def _():
            plgpu.barrier_wait(s.used.at[slot_of(after, call.stages)])
            fetch(after, where)

        after_that = _following(where, lo, hi)
        return tuple(jnp.where(more, a, b) for a, b in zip(after_that, where, strict=True))

    where = lo, jnp.int32(0)
    where = lax.fori_loop(0, jnp.minimum(count, call.stages), fetch, where)
    plgpu.barrier_wait(s.kv_landed)
    pl.when(count > 0)(lambda: scores(jnp.int32(0)))
    lax.fori_loop(0, count, step, where)
    plgpu.tcgen05_commit_arrive(s.done)


def _dkv_slopes(span, dk, dv, at, half, s: DkvScratch, call: Call):
    (batch, tile, some), (lo, hi, plain_from, plain_to) = at, span
    count, rows = (hi - lo) * call.group, pl.ds(tile * ROWS, ROWS)
    columns, part = pl.ds(half * PART, PART), (ROWS, PART)

    def of_queries(ring, slot):
        x = plgpu.load(ring.at[slot, columns], layout=PER_COL, optimized=False)
        return across(x, part, 1)

    def step(n, i):
        slot = slot_of(n, call.stages)
        plgpu.barrier_wait(s.landed.at[slot])
        plgpu.barrier_wait(s.ready)

        @pl.when((i < plain_from) | (i >= plain_to))
        def _():
            def seen(_, shape):
                key = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=BY_LANE) + tile * ROWS
                query = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=BY_LANE)
                last = query + (i * STEP + half * PART + call.offset)
                return (key >= of_queries(s.first, slot)) & (key <= last)

            mask(s.s, half * PART, PART, seen)

        x = plgpu.async_load_tmem(s.s.at[:, columns], layout=BY_LANE)
        dp = plgpu.async_load_tmem(s.dp.at[:, columns], layout=BY_LANE)
        plgpu.wait_load_tmem()
        plgpu.barrier_arrive(s.read)
        p = jnp.exp2(x * (call.scale * LOG2E) - of_queries(s.lse, slot))
        ds = p * (dp - of_queries(s.correction, slot))
        pl.when(n > 0)(lambda: plgpu.barrier_wait(s.ds_used))
        plgpu.async_store_tmem(s.p.at[:, columns], p.astype(s.q.dtype))
        plgpu.async_store_tmem(s.ds.at[:, columns], ds.astype(s.q.dtype))
        plgpu.commit_tmem()
        plgpu.commit_smem()  # what was read there is over, and TMA may write it
        plgpu.barrier_arrive(s.ds_ready)
        return jnp.where(i + 1 == hi, lo, i + 1)

    lax.fori_loop(0, count, step, lo)
    plgpu.barrier_wait(s.done)
    for own, acc, through, to, factor in (
        (0, s.dv, s.v, dv, 1.0),
        (1, s.dk, s.k, dk, call.scale),
    ):

        @pl.when(half == own)
        def _(acc=acc, through=through, to=to, factor=factor):
            put_lines(acc, through, lambda c: to.at[batch, rows, some, c], factor, count > 0)


def _dq_scratch(H: int, V: int, dtype, call: Call):
    lines = plgpu.Barrier(num_arrivals=(H + V) // LINE)
    landed = plgpu.Barrier(num_barriers=call.stages)
    tensor = partial(plgpu.Barrier, orders_tensor_core=True)
    used, pair = tensor(num_barriers=call.stages), tensor(num_barriers=2)
    return DqScratch(
        q=swizzled(H // LINE, ROWS, LINE, dtype=dtype),
        do=swizzled(V // LINE, ROWS, LINE, dtype=dtype),
        k=swizzled(call.stages, STEP, H, dtype=dtype),
        v=swizzled(call.stages, STEP, V, dtype=dtype),
        s=plgpu.TMEM((ROWS, 2 * STEP), jnp.float32),
        dp=plgpu.TMEM((ROWS, 2 * STEP), jnp.float32),
        ds=plgpu.TMEM((ROWS, 2 * STEP), dtype, packed=True),
        dq=plgpu.TMEM((ROWS, H), jnp.float32),
        landed=lines,
        k_landed=landed,
        v_landed=landed,
        k_used=used,
        v_used=used,
        ready=pair,
        read=pair,
        ds_ready=pair,
        ds_used=pair,
        done=tensor(),
    )


def _dkv_scratch(H: int, V: int, dtype, call: Call):
    tensor = partial(plgpu.Barrier, orders_tensor_core=True)
    row = (call.stages, STEP)
    return DkvScratch(
        k=swizzled(H // LINE, ROWS, LINE, dtype=dtype),
        v=swizzled(V // LINE, ROWS, LINE, dtype=dtype),
        q=swizzled(call.stages, STEP, H, dtype=dtype),
        do=swizzled(call.stages, STEP, V, dtype=dtype),
        lse=plgpu.SMEM(row, jnp.float32),
        correction=plgpu.SMEM(row, jnp.float32),
        first=plgpu.SMEM(row, jnp.int32),
        s=plgpu.TMEM((ROWS, STEP), jnp.float32),
        dp=plgpu.TMEM((ROWS, STEP), jnp.float32),
        p=plgpu.TMEM((ROWS, STEP), dtype, packed=True),
        ds=plgpu.TMEM((ROWS, STEP), dtype, packed=True),
        dk=plgpu.TMEM((ROWS, H), jnp.float32),
        dv=plgpu.TMEM((ROWS, V), jnp.float32),
        kv_landed=plgpu.Barrier(num_arrivals=(H + V) // LINE),
        landed=plgpu.Barrier(num_arrivals=5, num_barriers=call.stages),
        used=tensor(num_barriers=call.stages),
        ready=tensor(),
        read=tensor(num_arrivals=2),
        ds_ready=tensor(num_arrivals=2),
        ds_used=tensor(),
        done=tensor(),
    )


def splits_of(group: int, blocks: int) -> int:
    """Into how many parts the query heads of a key head are split, to have work for all cores."""
    enough = (n for n in range(1, group) if group % n == 0 and blocks * n >= BUSY)
    return next(enough, group)


def _dq(by_keys, operands, call: Call):
    q_BLNH, _, v_BSGV = operands[3:6]
    (B, _, N, H), V, dtype = q_BLNH.shape, v_BSGV.shape[-1], q_BLNH.dtype
    kernel = plgpu.kernel(
        partial(_dq_kernel, call=call),
        out_type=jax.ShapeDtypeStruct(q_BLNH.shape, dtype),
        scratch_types=_dq_scratch(H, V, dtype, call),
        kernel_name="attention_query_gradient",
        **launch(by_keys.shape[1], B, N),
    )
    return varying_as(kernel(by_keys, *operands), *operands)


def _dkv(by_queries, operands, call: Call, splits: int):
    k_BSGH, v_BSGV = operands[4:6]
    (B, S, G, H), V, dtype = k_BSGH.shape, v_BSGV.shape[-1], k_BSGH.dtype
    kernel = plgpu.kernel(
        partial(_dkv_kernel, call=call._replace(group=call.group // splits)),
        out_type=tuple(jax.ShapeDtypeStruct((B, S, G * splits, w), dtype) for w in (H, V)),
        scratch_types=_dkv_scratch(H, V, dtype, call),
        kernel_name="attention_key_value_gradient",
        **launch(by_queries.shape[1], B, G * splits),
    )
    found = [varying_as(x, *operands) for x in kernel(by_queries, *operands)]
    if splits == 1:
        return found
    parts = (x.reshape(B, S, G, splits, -1).astype(jnp.float32) for x in found)
    return [x.sum(3).astype(dtype) for x in parts]


def backward(q_BLNH, k_BSGH, v_BSGV, first_BL, lse_BLN, do_BLNV, correction_BLN, scale):
    """Returns (dq, dk, dv): see `fused.Kernels`."""
    (B, L, N, H), (S, G) = q_BLNH.shape, k_BSGH.shape[1:3]
    call = Call(scale, S - L, N // G, stages_for(H))
    by_keys, by_queries = key_bounds(first_BL, S, STEP, 1), query_bounds(first_BL, S, STEP)
    first = pad_last(first_BL, ROWS)
    lse, correction = (
        pad_last(x.transpose(0, 2, 1), ROWS) for x in (lse_BLN * LOG2E, correction_BLN)
    )
    operands = first, lse, correction, q_BLNH, k_BSGH, v_BSGV, do_BLNV
    splits = splits_of(call.group, B * by_queries.shape[1] * G)
    return _dq(by_keys, operands, call), *_dkv(by_queries, operands, call, splits)
