"""Draft."""

import math
from functools import partial, reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.attention.reference import NOTHING
from pallas_kernels.varying import varying_as

OLDEST_JAX = (0, 12)
ROWS = 128  # queries of a tile, the lanes of tensor memory
LINE = 64  # elements of a swizzled line of 128 bytes
FLOOR = NOTHING / 2  # a peak that no score is below
SLACK = 8.0  # how far, in powers of two, a score may exceed the peak in use
BY_LANE = plgpu.Layout.TCGEN05_TMEM_NATIVE  # a thread holds a row
PER_ROW = BY_LANE.reduce(1)
PER_COL = BY_LANE.reduce(0)


class Plan(NamedTuple):
    """Static facts of one call."""

    keys: int
    stages: int
    scale: float
    offset: int
    group: int


class Scratch(NamedTuple):
    q: Any
    k: Any
    v: Any
    inverse: Any
    s: Any
    p: Any
    o: Any
    q_landed: Any
    k_landed: Any
    v_landed: Any
    k_used: Any
    v_used: Any
    s_ready: Any
    s_read: Any
    p_ready: Any
    o_ready: Any


def key_bounds(first_BL, S: int, keys: int):
    B, L = first_BL.shape
    tiles = -(-L // (2 * ROWS)) * 2
    i_L = jnp.arange(tiles * ROWS, dtype=jnp.int32)
    last_L = i_L + (S - L)
    first = jnp.pad(first_BL, ((0, 0), (0, tiles * ROWS - L)), constant_values=S)
    sees = first <= last_L
    first = first.reshape(B, tiles, ROWS)
    sees_T, last_T = sees.reshape(first.shape), last_L.reshape(tiles, ROWS)
    lo = jnp.where(sees_T, first, S).min(-1) // keys
    hi = jnp.where(sees_T, last_T // keys + 1, 0).max(-1)
    lo = jnp.minimum(lo, hi)
    plain_from = jnp.clip((first.max(-1) + (keys - 1)) // keys, lo, hi)
    plain_to = jnp.clip((last_T[:, 0] + 1) // keys, plain_from, hi)
    return jnp.stack([lo, hi, plain_from, plain_to], -1).astype(jnp.int32)


def _ring(n, stages: int):
    return lax.rem(n, jnp.int32(stages))


def _kernel(bounds, first, q, k, v, out, lse, *scratch, plan: Plan):
    s = Scratch(*scratch)
    batch, head = lax.axis_index("batch"), lax.axis_index("head")
    num_pairs = bounds.shape[1] // 2
    pair = num_pairs - 1 - lax.axis_index("pair")
    wg = lax.axis_index("wg")

    def span(t):
        return [bounds[batch, 2 * pair + t, i] for i in range(4)]

    @pl.when(wg == 2)
    def _():
        _feed(span, q, k, v, (batch, pair, head), s, plan)

    @pl.when(wg < 2)
    def _():
        _softmax(span(wg), first, out, lse, (batch, 2 * pair + wg, head), wg, s, plan)


def _feed(span, q, k, v, at, s: Scratch, plan: Plan):
    batch, pair, head = at
    (lo0, hi0, *_), (lo1, hi1, *_) = span(0), span(1)
    for t in range(2):
        rows = pl.ds((2 * pair + t) * ROWS, ROWS)
        for c in range(s.q.shape[1]):
            line = q.at[batch, rows, head, pl.ds(c * LINE, LINE)]
            plgpu.copy_gmem_to_smem(line, s.q.at[t, c], s.q_landed.at[t])
    lo, hi = jnp.minimum(lo0, lo1), jnp.maximum(hi0, hi1)
    spans, count = ((lo0, hi0), (lo1, hi1)), hi - lo
    keys, width = plan.keys, s.o.shape[1] // 2
    g = lax.div(head, jnp.int32(plan.group))

    def fetch(n, source, ring, landed):
        at, slot = pl.ds((lo + n) * keys, keys), _ring(n, plan.stages)
        plgpu.copy_gmem_to_smem(source.at[batch, at, g], ring.at[slot], landed.at[slot])

    fetch_k = partial(fetch, source=k, ring=s.k, landed=s.k_landed)
    fetch_v = partial(fetch, source=v, ring=s.v, landed=s.v_landed)

    def refill(n, fetch, used):
        """Asks for block n, in the slot of the one that is `stages` before."""

        @pl.when((n >= plan.stages) & (n < count))
        def _():
            plgpu.barrier_wait(used.at[_ring(n, plan.stages)])
            fetch(n)

    def scores(n):
        j, slot = lo + n, _ring(n, plan.stages)
        plgpu.barrier_wait(s.k_landed.at[slot])
        for t, (own_lo, own_hi) in enumerate(spans):

            @pl.when((j >= own_lo) & (j < own_hi))
            def _(t=t, own_lo=own_lo):
                pl.when(j == own_lo)(lambda: plgpu.barrier_wait(s.q_landed.at[t]))
                pl.when(j > own_lo)(lambda: plgpu.barrier_wait(s.s_read.at[t]))
                acc = s.s.at[:, pl.ds(t * keys, keys)]
                for c in range(s.q.shape[1]):
                    k = s.k.at[slot, :, pl.ds(c * LINE, LINE)].transpose((1, 0))
                    plgpu.tcgen05_mma(acc, s.q.at[t, c], k, accumulate=c > 0)
                plgpu.tcgen05_commit_arrive(s.s_ready.at[t])

        plgpu.tcgen05_commit_arrive(s.k_used.at[slot])

    def values(n):
        j, slot = lo + n, _ring(n, plan.stages)
        plgpu.barrier_wait(s.v_landed.at[slot])
        for t, (own_lo, own_hi) in enumerate(spans):

            @pl.when((j >= own_lo) & (j < own_hi))
            def _(t=t, own_lo=own_lo):
                plgpu.barrier_wait(s.p_ready.at[t])
                acc = s.o.at[:, pl.ds(t * width, width)]
                p = s.p.at[:, pl.ds(t * keys, keys)]
                plgpu.tcgen05_mma(acc, p, s.v.at[slot], s.o_ready.at[t], accumulate=j > own_lo)

        plgpu.tcgen05_commit_arrive(s.v_used.at[slot])

    def step(n, _):
        pl.when(n + 1 < count)(lambda: scores(n + 1))
        values(n)
        refill(n + plan.stages, fetch_k, s.k_used)
        refill(n - 1 + plan.stages, fetch_v, s.v_used)

    def begin(n, _):
        fetch_k(n)
        fetch_v(n)

    lax.fori_loop(0, jnp.minimum(count, plan.stages), begin, None)
    pl.when(count > 0)(lambda: scores(jnp.int32(0)))
    lax.fori_loop(0, count, step, None)


def _across(x, shape, dim=0):
    return lax.broadcast_in_dim(x, shape, (dim,))


def _softmax(bounds, first, out, lse, at, t, s: Scratch, plan: Plan):
    batch, tile, head = at
    lo, hi, plain_from, plain_to = bounds
    row0, keys, width = tile * ROWS, plan.keys, s.o.shape[1] // 2
    to_log2 = plan.scale * math.log2(math.e)
    rows = pl.ds(row0, ROWS)
    part = (ROWS, 32)

    def mask(j):
        """Masks the scores where they are, which few blocks need."""
        first_R = plgpu.load(first.at[batch, rows], layout=PER_ROW, optimized=False)
        last_R = plgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=PER_ROW)
        key = plgpu.broadcasted_iota(jnp.int32, part, 1, layout=BY_LANE)

        def columns(c, _):
            key0, x_ref = j * keys + c * 32, s.s.at[:, pl.ds(t * keys + c * 32, 32)]
            x = plgpu.async_load_tmem(x_ref, layout=BY_LANE)
            plgpu.wait_load_tmem()
            seen = key >= _across(first_R - key0, part)
            seen &= key <= _across(last_R + (row0 + plan.offset - key0), part)
            plgpu.async_store_tmem(x_ref, jnp.where(seen, x, -jnp.inf))

        lax.fori_loop(0, keys // 32, columns, None)
        plgpu.commit_tmem()

    def rescale(alpha):
        def part_of(c, _):
            part = s.o.at[:, pl.ds(t * width + c * 32, 32)]
            scaled = plgpu.async_load_tmem(part, layout=BY_LANE) * _across(alpha, (ROWS, 32))
            plgpu.wait_load_tmem()
            plgpu.async_store_tmem(part, scaled)

        lax.fori_loop(0, width // 32, part_of, None)

    def step(j, carry):
        peak, total = carry
        plgpu.barrier_wait(s.s_ready.at[t])
        pl.when((j < plain_from) | (j >= plain_to))(lambda: mask(j))
        at = [t * keys + c for c in range(0, keys, part[1])]
        xs = [plgpu.async_load_tmem(s.s.at[:, pl.ds(c, part[1])], layout=BY_LANE) for c in at]
        plgpu.wait_load_tmem()
        plgpu.barrier_arrive(s.s_read.at[t])
        new = jnp.maximum(peak, reduce(jnp.maximum, [x.max(axis=1) for x in xs]) * to_log2)
        moves = (new - peak).max() > SLACK
        new = jnp.maximum(peak, new - jnp.where(moves, 0.0, 1e38))
        alpha = jnp.exp2(peak - new)
        total, ps = total * alpha, []
        for x in xs:
            p = jnp.exp2(x * to_log2 - _across(new, part))
            total += p.sum(axis=1)
            ps.append(p.astype(q_dtype))

        @pl.when(j > lo)
        def _():
            plgpu.barrier_wait(s.o_ready.at[t])
            pl.when(moves)(lambda: rescale(alpha))

        for c, p in zip(at, ps, strict=True):
            plgpu.async_store_tmem(s.p.at[:, pl.ds(c, part[1])], p)
        plgpu.commit_tmem()
        plgpu.barrier_arrive(s.p_ready.at[t])
        return new, total

    q_dtype = s.q.dtype
    start = [plgpu.layout_cast(jnp.full((ROWS,), x, jnp.float32), PER_ROW) for x in (FLOOR, 0.0)]
    peak, total = lax.fori_loop(lo, hi, step, tuple(start))
    some = total > 0
    total = jnp.where(some, total, 1.0)
    result = jnp.where(some, peak * math.log(2) + jnp.log(total), NOTHING)
    plgpu.store(lse.at[batch, head, rows], result, optimized=False)
    plgpu.store(s.inverse.at[t], jnp.where(some, 1.0 / total, 0.0), optimized=False)
    plgpu.commit_smem()
    by_quad = plgpu.Layout.TCGEN05
    inverse = plgpu.load(s.inverse.at[t], layout=by_quad.reduce(1), optimized=False)

    @pl.when(hi > lo)
    def _():
        plgpu.barrier_wait(s.o_ready.at[t])

    pl.when(hi <= lo)(lambda: plgpu.barrier_wait(s.q_landed.at[t]))
    def put(c, _):
        x = plgpu.async_load_tmem(s.o.at[:, pl.ds(t * width + c * LINE, LINE)], layout=by_quad)
        inv = _across(inverse, x.shape)
        s.q[t, c] = jnp.where(inv > 0, x * inv, 0.0).astype(q_dtype)
        plgpu.commit_smem()
        to = out.at[batch, rows, head, pl.ds(c * LINE, LINE)]
        plgpu.copy_smem_to_gmem(s.q.at[t, c], to)

    lax.fori_loop(0, width // LINE, put, None)
    plgpu.wait_smem_to_gmem(0)


def swizzled(*shape, dtype):
    return plgpu.SMEM(
        shape, dtype, transforms=(plgpu.TilingTransform((8, LINE)), plgpu.SwizzleTransform(128))
    )


def _scratch(H: int, V: int, dtype, plan: Plan):
    landed = lambda n: plgpu.Barrier(num_barriers=n)  # noqa: E731
    tensor = lambda n: plgpu.Barrier(num_barriers=n, orders_tensor_core=True)  # noqa: E731
    keys, stages = plan.keys, plan.stages
    return Scratch(
        q=swizzled(2, H // LINE, ROWS, LINE, dtype=dtype),
        k=swizzled(stages, keys, H, dtype=dtype),
        v=swizzled(stages, keys, V, dtype=dtype),
        inverse=plgpu.SMEM((2, ROWS), jnp.float32),
        s=plgpu.TMEM((ROWS, 2 * keys), jnp.float32),
        p=plgpu.TMEM((ROWS, 2 * keys), dtype, packed=True),
        o=plgpu.TMEM((ROWS, 2 * V), jnp.float32),
        q_landed=plgpu.Barrier(num_barriers=2, num_arrivals=H // LINE),
        k_landed=landed(stages),
        v_landed=landed(stages),
        k_used=tensor(stages),
        v_used=tensor(stages),
        s_ready=tensor(2),
        s_read=tensor(2),
        p_ready=tensor(2),
        o_ready=tensor(2),
    )


def forward(q_BLNH, k_BSGH, v_BSGV, first_BL, plan: Plan):
    (B, L, N, H), (S, G, V) = q_BLNH.shape, v_BSGV.shape[1:]
    bounds = key_bounds(first_BL, S, plan.keys)
    padded = bounds.shape[1] * ROWS
    first = jnp.pad(first_BL, ((0, 0), (0, padded - L)))
    kernel = plgpu.kernel(
        partial(_kernel, plan=plan),
        out_type=(
            jax.ShapeDtypeStruct((B, L, N, V), q_BLNH.dtype),
            jax.ShapeDtypeStruct((B, N, padded), jnp.float32),
        ),
        scratch_types=_scratch(H, V, q_BLNH.dtype, plan),
        grid=(bounds.shape[1] // 2, B, N),
        grid_names=("pair", "batch", "head"),
        num_threads=3,
        thread_name="wg",
        kernel_name="attention_forward",
        compiler_params=plgpu.CompilerParams(
            approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Warpgroup
        ),
    )
    operands = bounds, first, q_BLNH, k_BSGH, v_BSGV
    out, lse = (varying_as(x, *operands) for x in kernel(*operands))
    return out, lse[..., :L].transpose(0, 2, 1)
