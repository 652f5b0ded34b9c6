"""Fused attention for Hopper GPUs (sm_90a), backward: two kernels that make p again from lse.

    p = exp2(c q k^T - log2(e) lse),  dp = do v^T,  ds = p * (dp - correction)
    dq = scale * ds k                           attention_query_gradient, by blocks of queries
    dk = scale * ds^T q,  dv = p^T do           attention_key_value_gradient, by blocks of keys
    c = scale * log2 e; correction = sum(do * out) - dlse, by XLA

Both are built as the forward (hopper.py): two warpgroups of 64 rows, operands of their own waiting
in shared memory, what they sweep coming through a ring, blocks that nothing sees never loaded.

attention_query_gradient. Grid and sweep are the forward's. s and dp are two accumulators; ds goes
from registers into the third product.

attention_key_value_gradient. Grid: (row of the batch, key head, block of 128 keys), the first
blocks, which most queries see, first. It sweeps the queries that see any of its keys, for one after
the other of the heads that share them, so dk and dv are summed over a group in float32, in a fixed
order, and written once. Scores are kept transposed, a key to a row: p^T and ds^T go from registers
into their products, and nothing is turned. lse and correction, one a column, come with q and do; a
block at a border also reads first and last keys from device memory. At 192 columns it takes 32
queries at a time, for the accumulators of dk and dv alone are 160 registers a thread.

FLOPs for each query, key of a visited block, and head: 2*(2*H + V) and 4*(H + V), 3.5 times the
forward where H = V; s and dp are made twice, for which nothing is added by atomics, and the bits
never change. Bytes: operands and results once, what is swept once more for each block, mostly from
the L2: with 4096 tokens a row, 128 columns and bfloat16 that is 4 MB a head both ways.

Not yet run or timed on a GPU. Assembled for an H100, no spills, no local memory; registers a thread
(255 fit) and bytes of shared memory (232,448 fit), barriers aside:

    H, V        query gradient    key and value gradient
    64, 64      150,  98,304      162, 100,352
    128, 128    183, 180,224      226, 182,272
    192, 128    213, 221,184      222, 161,792
"""

from functools import partial

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.attention.hopper_forward import (
    BY_COL,
    BY_ROW,
    LOG2E,
    ROWS,
    TILE,
    WARPGROUPS,
    WGMMA,
    Ring,
    by_blocks,
    filled,
    launch,
    number,
    product,
    ring_types,
    seen_scores,
    spread,
    store_tile,
)
from pallas_kernels.attention.reference import NOTHING
from pallas_kernels.attention.visible import key_blocks, query_blocks
from pallas_kernels.grouped_gemm.hopper import like, swizzled


def _two_products(first, second):
    """a @ b of both pairs, awaited."""

    def scope(one, other):
        plgpu.wgmma(one, *first)
        plgpu.wgmma(other, *second)
        return one[...], other[...]

    shapes = [(a.shape[0], b.shape[1]) for a, b in (first, second)]
    return pl.run_scoped(scope, *map(plgpu.ACC, shapes))


def _turned(smem):
    return smem.transpose((1, 0))


def _tiled(shape, dtype, width):
    """As `swizzled`, in tiles of `width` columns: where it is the right operand of a product with
    one in registers, as many rows as a tile has columns are multiplied at once."""
    transforms = plgpu.TilingTransform((8, width)), plgpu.SwizzleTransform(2 * width)
    return plgpu.SMEM(shape, dtype, transforms=transforms)


def _query_kernel(*refs, scale, keys, stages, group):
    blocks_gmem, first_gmem, q_gmem, k_gmem, v_gmem, do_gmem, lse_gmem, *refs = refs
    correction_gmem, dq_gmem, q_smem, do_smem, k_smem, v_smem, out_smem, *barriers = refs
    own_full, full, empty = barriers
    batch, own_head, wg = (lax.axis_index(name) for name in ("row", "group", "wg"))
    head = own_head * group + lax.axis_index("member")
    block = blocks_gmem.shape[2] - 1 - lax.axis_index("block")
    begin, whole, whole_end, end = (blocks_gmem[i, batch, block] for i in range(4))
    ring, H = Ring(stages, end - begin, full, empty), q_gmem.shape[3]
    row = block * ROWS + wg * TILE
    own = pl.ds(row, TILE)

    def copies(n, slot):
        at = pl.ds((begin + n) * keys, keys)
        yield k_gmem.at[batch, at, own_head], k_smem.at[slot]
        yield v_gmem.at[batch, at, own_head], v_smem.at[slot]

    plgpu.copy_gmem_to_smem(q_gmem.at[batch, own, head], q_smem.at[wg], own_full.at[wg])
    plgpu.copy_gmem_to_smem(do_gmem.at[batch, own, head], do_smem.at[wg], own_full.at[wg])
    ring.prefetch(copies)
    first = plgpu.load(first_gmem.at[batch, own], layout=BY_ROW, optimized=False)
    lse, correction = (
        plgpu.load(gmem.at[batch, head, own], layout=BY_ROW, optimized=False)
        for gmem in (lse_gmem, correction_gmem)
    )
    plgpu.barrier_wait(own_full.at[wg])

    def scope(dq_acc):
        def step(n, _):
            slot, at = ring.slot(n), begin + n
            plgpu.barrier_wait(ring.full.at[slot])
            mine = wg + jnp.minimum(at, 0)  # wg: see the other kernel
            of_k = q_smem.at[mine], _turned(k_smem.at[slot])
            s, dp = _two_products(of_k, (do_smem.at[mine], _turned(v_smem.at[slot])))
            partly = (at < whole) | (at >= whole_end)
            s = lax.cond(partly, lambda s: seen_scores(s, first, row, at * keys), lambda s: s, s)
            p = jnp.exp2(s * (scale * LOG2E) - spread(lse, s.shape, 0))
            ds = p * (dp - spread(correction, s.shape, 0))
            ring.load(ring.ahead(n), copies)
            plgpu.wgmma(dq_acc, ds.astype(k_smem.dtype), k_smem.at[slot])
            plgpu.wgmma_wait(0)
            plgpu.barrier_arrive(ring.empty.at[slot])

        lax.fori_loop(0, ring.count, step, None)
        return dq_acc[...]

    dq = pl.run_scoped(scope, plgpu.ACC((TILE, H)))
    store_tile(dq * scale, dq_gmem.at[batch, own, head], out_smem.at[wg])
    plgpu.wait_smem_to_gmem(0)


def _query_gradient(q, k, v, first_BL, first, lse, do, correction, scale):
    (B, _, N, H), (G, V), dtype = q.shape, v.shape[2:], q.dtype
    keys, stages = 64, 3
    scratch = [
        swizzled((WARPGROUPS, TILE, H), dtype),
        swizzled((WARPGROUPS, TILE, V), dtype),
        swizzled((stages, keys, H), dtype),
        swizzled((stages, keys, V), dtype),
        swizzled((WARPGROUPS, TILE, 64), dtype),
        plgpu.Barrier(num_arrivals=2, num_barriers=WARPGROUPS),
        *ring_types(stages, 2),
    ]
    kernel = partial(_query_kernel, scale=scale, keys=keys, stages=stages, group=N // G)
    grid = (B, G, first.shape[1] // ROWS, N // G)
    run = launch("attention_query_gradient", kernel, like(q, q.shape, dtype), grid, scratch)
    return run(key_blocks(first_BL, ROWS, keys), first, q, k, v, do, lse, correction)


def _seen_turned(s, key, first_gmem, last_gmem):
    """s, of the keys from `key` on, by the first and last key of each query; -inf where it is not
    seen. The last is the query's own number: read, as registers for 16 of those are short."""
    first, last = (
        spread(plgpu.load(gmem, layout=BY_COL, optimized=False), s.shape, 1)
        for gmem in (first_gmem, last_gmem)
    )
    at = number(key, s.shape, 0)
    return jnp.where((at >= first) & (at <= last), s, filled(-jnp.inf, s.shape, WGMMA))


def _after(blocks, place):
    """The place that follows (head of the group, block of `blocks`)."""
    last = place[1] + 1 == blocks
    return place[0] + last.astype(jnp.int32), jnp.where(last, 0, place[1] + 1)


def _key_kernel(*refs, scale, rows, stages, group):
    blocks_gmem, first_gmem, last_gmem, q_gmem, k_gmem, v_gmem, do_gmem, *refs = refs
    lse_gmem, correction_gmem, dk_gmem, dv_gmem, k_smem, v_smem, *refs = refs
    q_smem, do_smem, lse_smem, correction_smem, out_smem, own_full, full, empty = refs
    batch, own_head, block, wg = (lax.axis_index(x) for x in ("row", "group", "block", "wg"))
    begin, end = (blocks_gmem[i, batch, block] for i in (0, 3))
    ring, key = Ring(stages, (end - begin) * group, full, empty), block * ROWS + wg * TILE
    own = pl.ds(key, TILE)

    def copies(place, n, slot):
        head, at = own_head * group + place[0], pl.ds((begin + place[1]) * rows, rows)
        yield q_gmem.at[batch, at, head], q_smem.at[slot]
        yield do_gmem.at[batch, at, head], do_smem.at[slot]
        yield lse_gmem.at[batch, head, at], lse_smem.at[slot]
        yield correction_gmem.at[batch, head, at], correction_smem.at[slot]

    after = partial(_after, end - begin)
    plgpu.copy_gmem_to_smem(k_gmem.at[batch, own, own_head], k_smem.at[wg], own_full.at[wg])
    plgpu.copy_gmem_to_smem(v_gmem.at[batch, own, own_head], v_smem.at[wg], own_full.at[wg])
    place = ahead = jnp.int32(0), jnp.int32(0)  # head of the group, block of queries from begin on
    for n in range(stages - 1):
        ring.load(jnp.int32(n), partial(copies, ahead))
        ahead = after(ahead)
    plgpu.barrier_wait(own_full.at[wg])

    def scope(dk_acc, dv_acc):
        def step(n, places):
            place, ahead = places
            slot, at = ring.slot(n), begin + place[1]
            plgpu.barrier_wait(ring.full.at[slot])
            # wg, as the compiler does not know it before the loop: it would keep 16 addresses of
            # the parts of k and v in registers, and has none to spare.
            mine = wg + jnp.minimum(at, 0)
            s = product(k_smem.at[mine], _turned(q_smem.at[slot]))
            whole, whole_end = (blocks_gmem[i, batch, block] for i in (1, 2))
            partly = (at < whole) | (at >= whole_end)
            queries = pl.ds(at * rows, rows)
            bounds = first_gmem.at[batch, queries], last_gmem.at[queries]
            s = lax.cond(partly, lambda s: _seen_turned(s, key, *bounds), lambda s: s, s)
            lse = plgpu.load(lse_smem.at[slot], layout=BY_COL, optimized=False)
            p = jnp.exp2(s * (scale * LOG2E) - spread(lse, s.shape, 1))
            plgpu.wgmma(dv_acc, p.astype(do_smem.dtype), do_smem.at[slot])
            dp = product(v_smem.at[mine], _turned(do_smem.at[slot]))
            correction = plgpu.load(correction_smem.at[slot], layout=BY_COL, optimized=False)
            ds = p * (dp - spread(correction, s.shape, 1))
            ring.load(ring.ahead(n), partial(copies, ahead))
            plgpu.wgmma(dk_acc, ds.astype(q_smem.dtype), q_smem.at[slot])
            plgpu.wgmma_wait(0)
            plgpu.commit_smem()  # there were ordinary reads, and copies will write here
            plgpu.barrier_arrive(ring.empty.at[slot])
            return after(place), after(ahead)

        lax.fori_loop(0, ring.count, step, (place, ahead))
        return dk_acc[...], dv_acc[...]

    shapes = [(TILE, gmem.shape[3]) for gmem in (k_gmem, v_gmem)]
    dk, dv = pl.run_scoped(scope, *map(plgpu.ACC, shapes))
    store_tile(dk * scale, dk_gmem.at[batch, own, own_head], out_smem.at[wg])
    store_tile(dv, dv_gmem.at[batch, own, own_head], out_smem.at[wg])
    plgpu.wait_smem_to_gmem(0)


def _key_gradients(q, k, v, first_BL, first, lse, do, correction, scale):
    (B, _, N, H), (G, V), dtype = q.shape, v.shape[2:], q.dtype
    rows, stages = (32 if H > 128 else 64), 3
    scratch = [
        _tiled((WARPGROUPS, TILE, H), dtype, rows),
        _tiled((WARPGROUPS, TILE, V), dtype, rows),
        _tiled((stages, rows, H), dtype, rows),
        _tiled((stages, rows, V), dtype, rows),
        *[plgpu.SMEM((stages, rows), jnp.float32)] * 2,
        swizzled((WARPGROUPS, TILE, 64), dtype),
        plgpu.Barrier(num_arrivals=2, num_barriers=WARPGROUPS),
        *ring_types(stages, 4),
    ]
    kernel = partial(_key_kernel, scale=scale, rows=rows, stages=stages, group=N // G)
    out_type = like(q, k.shape, dtype), like(q, v.shape, dtype)
    grid = (B, G, first.shape[1] // ROWS, 1)
    run = launch("attention_key_value_gradient", kernel, out_type, grid, scratch)
    last = jnp.arange(first.shape[1], dtype=jnp.int32)
    return run(query_blocks(first_BL, rows, ROWS), first, last, q, k, v, do, lse, correction)


def backward(q, k, v, first_BL, lse_BLN, do_BLNV, correction_BLN, scale):
    """See `fused.Kernels`."""
    first = by_blocks(first_BL, first_BL.shape[1] + ROWS)
    lse = by_blocks(lse_BLN.transpose(0, 2, 1) * LOG2E, -NOTHING)  # p is 0 past the last query
    correction = by_blocks(correction_BLN.transpose(0, 2, 1), 0.0)
    arrays = (q, k, v, first_BL, first, lse, do_BLNV, correction, scale)
    return _query_gradient(*arrays), *_key_gradients(*arrays)
