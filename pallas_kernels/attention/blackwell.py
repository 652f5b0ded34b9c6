"""Draft."""

import math
from functools import partial, reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.attention.blackwell_parts import (
    BY_LANE,
    BY_QUAD,
    LINE,
    PER_ROW,
    ROWS,
    across,
    key_bounds,
    launch,
    mask,
    pad_last,
    put_lines,
    seen_by_rows,
    slot_of,
    swizzled,
)
from pallas_kernels.attention.reference import NOTHING
from pallas_kernels.varying import varying_as

OLDEST_JAX = (0, 12)
FLOOR = NOTHING / 2  # a peak that no score is below
SLACK = 8.0  # how far, in powers of two, a score may exceed the peak in use


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


def _kernel(bounds, first, q, k, v, out, lse, *scratch, plan: Plan):
    s = Scratch(*scratch)
    batch, head = lax.axis_index("batch"), lax.axis_index("head")
    num_pairs = bounds.shape[1] // 2
    pair = num_pairs - 1 - lax.axis_index("tile")
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
        at, slot = pl.ds((lo + n) * keys, keys), slot_of(n, plan.stages)
        plgpu.copy_gmem_to_smem(source.at[batch, at, g], ring.at[slot], landed.at[slot])

    fetch_k = partial(fetch, source=k, ring=s.k, landed=s.k_landed)
    fetch_v = partial(fetch, source=v, ring=s.v, landed=s.v_landed)

    def refill(n, fetch, used):
        """Asks for block n, in the slot of the one that is `stages` before."""

        @pl.when((n >= plan.stages) & (n < count))
        def _():
            plgpu.barrier_wait(used.at[slot_of(n, plan.stages)])
            fetch(n)

    def scores(n):
        j, slot = lo + n, slot_of(n, plan.stages)
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
        j, slot = lo + n, slot_of(n, plan.stages)
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


def _softmax(bounds, first, out, lse, at, t, s: Scratch, plan: Plan):
    batch, tile, head = at
    lo, hi, plain_from, plain_to = bounds
    row0, keys, width = tile * ROWS, plan.keys, s.o.shape[1] // 2
    to_log2 = plan.scale * math.log2(math.e)
    rows = pl.ds(row0, ROWS)
    part = (ROWS, 32)

    def hide(j):
        first_R = plgpu.load(first.at[batch, rows], layout=PER_ROW, optimized=False)
        mask(s.s, t * keys, keys, seen_by_rows(first_R, row0 + plan.offset, j * keys))

    def rescale(alpha):
        def part_of(c, _):
            part = s.o.at[:, pl.ds(t * width + c * 32, 32)]
            scaled = plgpu.async_load_tmem(part, layout=BY_LANE) * across(alpha, (ROWS, 32))
            plgpu.wait_load_tmem()
            plgpu.async_store_tmem(part, scaled)

        lax.fori_loop(0, width // 32, part_of, None)

    def step(j, carry):
        peak, total = carry
        plgpu.barrier_wait(s.s_ready.at[t])
        pl.when((j < plain_from) | (j >= plain_to))(lambda: hide(j))
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
            p = jnp.exp2(x * to_log2 - across(new, part))
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
    inverse = plgpu.load(s.inverse.at[t], layout=BY_QUAD.reduce(1), optimized=False)

    @pl.when(hi > lo)
    def _():
        plgpu.barrier_wait(s.o_ready.at[t])

    pl.when(hi <= lo)(lambda: plgpu.barrier_wait(s.q_landed.at[t]))
    own = s.o.at[:, pl.ds(t * width, width)]
    to = lambda columns: out.at[batch, rows, head, columns]  # noqa: E731
    put_lines(own, s.q.at[t], to, inverse, hi > lo)


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
    bounds, first = key_bounds(first_BL, S, plan.keys, 2), pad_last(first_BL, 2 * ROWS)
    kernel = plgpu.kernel(
        partial(_kernel, plan=plan),
        out_type=(
            jax.ShapeDtypeStruct((B, L, N, V), q_BLNH.dtype),
            jax.ShapeDtypeStruct((B, N, first.shape[1]), jnp.float32),
        ),
        scratch_types=_scratch(H, V, q_BLNH.dtype, plan),
        kernel_name="attention_forward",
        **launch(bounds.shape[1] // 2, B, N),
    )
    operands = bounds, first, q_BLNH, k_BSGH, v_BSGV
    out, lse = (varying_as(x, *operands) for x in kernel(*operands))
    return out, lse[..., :L].transpose(0, 2, 1)
