"""Fused attention for Blackwell's tensor cores (sm_100a, sm_103a), forward: bfloat16 or float16 in,
sums in float32 in tensor memory, scores never in device memory. The backward: `blackwell_backward`.

    s[i, j] = scale * q[i] . k[j]   for first_i <= j <= i           2 H FLOPs each
    out[i] = sum_j exp(s[i, j] - lse[i]) v[j],  lse[i] = log sum_j exp(s[i, j])     2 V

Grid: pairs of tiles of 128 queries, last ones first (causal rows are longer), batch, query heads.
A block of the grid visits the blocks of 64 keys that its 256 queries see: their range, and that of
those which need no mask, come from XLA (`key_bounds`), so short documents and windows cost what
they are long. Of a row of 4096, 52 % of all scores are computed where it is one document (97 % of
them are seen, 6 % of the blocks masked), and 8 % where it is eight (80 %, 40 %). Bytes: q, out and
lse once; k and v once for 256 queries and head, mostly from L2: 512 FLOP a byte (H = V = 128).

Who does what:
- Warpgroup 2 (`_feed`) has TMA bring q, and k and v into rings of `stages` slots, and issues the
  MMAs: s = q k^T of block n + 1 before out += p v of block n, for both tiles. So that a slot is
  refilled when its MMAs are over, and no wait is long, that happens a step later.
- Warpgroups 0 and 1 (`_softmax`) have a tile each: they read s, a row a thread, which makes the
  row's maximum and sum a matter of one thread, and write p for the tensor core to read. While one
  tile is in the exponentials, the tensor core is at the other.
- Out in tensor memory is scaled anew only where a row's maximum has grown by more than 2^8 over the
  one in use (as in FlashAttention-4); p is at most 2^8 till then, in float16 too.
- A block at the diagonal, or at a document's first key, has its scores masked in tensor memory
  before they are read: a branch that gave them back in registers would have them spilled.

    barrier              arrives                                   waits
    q_landed, k_, v_     TMA                                       2
    k_used, v_used       the tensor core has read a slot           2
    s_ready              the tensor core has written a tile's s    0 or 1
    s_read               it is in registers                        2
    p_ready              p is written, and out scaled              2
    o_ready              the tensor core has added to out          0 or 1

Tensor memory: s 2 x 64, p 2 x 32, out 2 x V columns, 448 of 512. Per block of keys and tile the
tensor core needs 64 * (H + V) * 256 / 8192 clocks (512 for H = V = 128) if shared memory keeps up,
which for s it does not (64 columns: 6 KiB a step of 32 clocks), and the exponentials 512, at 16 a
clock: 70 to 80 % of the peak is the most to hope for.

What the assembler says (b200, gb300): 136 to 140 registers of 168, nothing spilled, 99 to 219 KiB
of shared memory. Tested in Mosaic's interpreter, not yet run on a GPU: no time has been measured.
"""

import math
from functools import partial, reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.attention import fused
from pallas_kernels.attention.blackwell_backward import backward
from pallas_kernels.attention.blackwell_parts import (
    BY_LANE,
    BY_QUAD,
    LINE,
    PART,
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
    seen_by_rows,
    slot_of,
    span_of,
    stages_for,
    sum_over_lines,
    swizzled,
)
from pallas_kernels.attention.reference import NOTHING
from pallas_kernels.varying import varying_as

OLDEST_JAX = (0, 12)
FLOOR = NOTHING / 2  # a maximum that no score is below
SLACK = 8.0  # by how many powers of two a score may exceed the maximum in use
PAIR = 2  # tiles of a block of the grid


class Scratch(NamedTuple):
    """What a block holds in shared and tensor memory; barriers: see the top."""

    q: Any  # [2, lines, ROWS, LINE], and on the way out, out
    k: Any  # rings [stages, STEP, H or V]
    v: Any
    inverse: Any  # 1 / the sums of a tile's rows
    s: Any  # tensor memory, two tiles beside each other
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


def _kernel(bounds, first, q, k, v, out, lse, *scratch, call: Call):
    s = Scratch(*scratch)
    batch, head, wg = (lax.axis_index(name) for name in ("batch", "head", "wg"))
    pair = bounds.shape[1] // PAIR - 1 - lax.axis_index("tile")

    def span(t):
        return span_of(bounds, batch, PAIR * pair + t)

    @pl.when(wg == PAIR)
    def _():
        _feed([span(t)[:2] for t in range(PAIR)], q, k, v, (batch, pair, head), s, call)

    @pl.when(wg < PAIR)
    def _():
        _softmax(span(wg), first, out, lse, (batch, PAIR * pair + wg, head), wg, s, call)


def _feed(spans, q, k, v, at, s: Scratch, call: Call):
    (batch, pair, head), ((lo, hi), (lo1, hi1)) = at, spans
    lo, count = jnp.minimum(lo, lo1), jnp.maximum(hi, hi1) - jnp.minimum(lo, lo1)
    g, stages = lax.div(head, jnp.int32(call.group)), call.stages
    for t in range(PAIR):
        rows = q.at[batch, pl.ds((PAIR * pair + t) * ROWS, ROWS), head]
        bring_lines(rows, s.q.at[t], s.q_landed.at[t])

    def fetch(n, source, ring, landed):
        keys, slot = pl.ds((lo + n) * STEP, STEP), slot_of(n, stages)
        plgpu.copy_gmem_to_smem(source.at[batch, keys, g], ring.at[slot], landed.at[slot])

    fetch_k = partial(fetch, source=k, ring=s.k, landed=s.k_landed)
    fetch_v = partial(fetch, source=v, ring=s.v, landed=s.v_landed)

    def refill(n, fetch, used):
        @pl.when((n >= stages) & (n < count))
        def _():
            plgpu.barrier_wait(used.at[slot_of(n, stages)])
            fetch(n)

    def for_tiles(n, visit):
        """visit(t, whether it is its first) for each tile that sees any of block n."""
        for t, (from_, to) in enumerate(spans):
            j = lo + n
            pl.when((j >= from_) & (j < to))(partial(visit, t, j == from_))

    def begin(n, _):
        fetch_k(n)
        fetch_v(n)

    def step(n, _):
        pl.when(n + 1 < count)(lambda: _scores(n + 1, for_tiles, s, stages))
        _values(n, for_tiles, s, stages)
        refill(n + stages, fetch_k, s.k_used)
        refill(n + stages - 1, fetch_v, s.v_used)

    lax.fori_loop(0, jnp.minimum(count, stages), begin, None)
    pl.when(count > 0)(lambda: _scores(jnp.int32(0), for_tiles, s, stages))
    lax.fori_loop(0, count, step, None)


def _scores(n, for_tiles, s: Scratch, stages: int):
    """Issues s = q k^T of block n of keys."""
    slot = slot_of(n, stages)
    plgpu.barrier_wait(s.k_landed.at[slot])

    def tile(t, is_first):
        pl.when(is_first)(lambda: plgpu.barrier_wait(s.q_landed.at[t]))
        pl.when(jnp.logical_not(is_first))(lambda: plgpu.barrier_wait(s.s_read.at[t]))
        sum_over_lines(s.s.at[:, pl.ds(t * STEP, STEP)], s.q.at[t], s.k.at[slot])
        plgpu.tcgen05_commit_arrive(s.s_ready.at[t])

    for_tiles(n, tile)
    plgpu.tcgen05_commit_arrive(s.k_used.at[slot])


def _values(n, for_tiles, s: Scratch, stages: int):
    """Issues out += p v of block n of keys."""
    slot, width = slot_of(n, stages), s.o.shape[1] // PAIR
    plgpu.barrier_wait(s.v_landed.at[slot])

    def tile(t, is_first):
        plgpu.barrier_wait(s.p_ready.at[t])
        acc, p = s.o.at[:, pl.ds(t * width, width)], s.p.at[:, pl.ds(t * STEP, STEP)]
        more = jnp.logical_not(is_first)
        plgpu.tcgen05_mma(acc, p, s.v.at[slot], s.o_ready.at[t], accumulate=more)

    for_tiles(n, tile)
    plgpu.tcgen05_commit_arrive(s.v_used.at[slot])


def _softmax(span, first, out, lse, at, t, s: Scratch, call: Call):
    (batch, tile, _), (lo, hi, plain_from, plain_to) = at, span
    row0, width, to_log2 = tile * ROWS, s.o.shape[1] // PAIR, call.scale * math.log2(math.e)
    rows, part = pl.ds(row0, ROWS), (ROWS, PART)

    def hide(j):
        first_R = plgpu.load(first.at[batch, rows], layout=PER_ROW, optimized=False)
        mask(s.s, t * STEP, STEP, seen_by_rows(first_R, row0 + call.offset, j * STEP))

    def rescale(alpha):
        def columns(c, _):
            ref = s.o.at[:, pl.ds(t * width + c * PART, PART)]
            scaled = plgpu.async_load_tmem(ref, layout=BY_LANE) * across(alpha, part)
            plgpu.wait_load_tmem()
            plgpu.async_store_tmem(ref, scaled)

        lax.fori_loop(0, width // PART, columns, None)

    def step(j, carry):
        peak, total = carry
        plgpu.barrier_wait(s.s_ready.at[t])
        pl.when((j < plain_from) | (j >= plain_to))(lambda: hide(j))
        parts = [pl.ds(t * STEP + c, PART) for c in range(0, STEP, PART)]
        xs = [plgpu.async_load_tmem(s.s.at[:, columns], layout=BY_LANE) for columns in parts]
        plgpu.wait_load_tmem()
        plgpu.barrier_arrive(s.s_read.at[t])
        new = jnp.maximum(peak, reduce(jnp.maximum, [x.max(axis=1) for x in xs]) * to_log2)
        moves = (new - peak).max() > SLACK
        new = jnp.maximum(peak, new - jnp.where(moves, 0.0, jnp.finfo(jnp.float32).max))
        alpha = jnp.exp2(peak - new)
        total, ps = total * alpha, []
        for x in xs:
            p = jnp.exp2(x * to_log2 - across(new, part))
            total += p.sum(axis=1)
            ps.append(p.astype(s.q.dtype))

        @pl.when(j > lo)
        def _():
            plgpu.barrier_wait(s.o_ready.at[t])
            pl.when(moves)(lambda: rescale(alpha))

        for columns, p in zip(parts, ps, strict=True):
            plgpu.async_store_tmem(s.p.at[:, columns], p)
        plgpu.commit_tmem()
        plgpu.barrier_arrive(s.p_ready.at[t])
        return new, total

    start = [plgpu.layout_cast(jnp.full((ROWS,), x, jnp.float32), PER_ROW) for x in (FLOOR, 0.0)]
    peak, total = lax.fori_loop(lo, hi, step, tuple(start))
    _leave(peak, total, hi > lo, out, lse, at, t, s)


def _leave(peak, total, any_keys, out, lse, at, t, s: Scratch):
    """Stores a tile's out and lse."""
    (batch, tile, head), width = at, s.o.shape[1] // PAIR
    rows, some = pl.ds(tile * ROWS, ROWS), total > 0
    total = jnp.where(some, total, 1.0)
    result = jnp.where(some, peak * math.log(2) + jnp.log(total), NOTHING)
    plgpu.store(lse.at[batch, head, rows], result, optimized=False)
    # From a row a thread to the layout that `put_lines` reads in.
    plgpu.store(s.inverse.at[t], jnp.where(some, 1.0 / total, 0.0), optimized=False)
    plgpu.commit_smem()
    inverse = plgpu.load(s.inverse.at[t], layout=BY_QUAD.reduce(1), optimized=False)
    # In either case q is no longer read, and out may leave through it.
    pl.when(any_keys)(lambda: plgpu.barrier_wait(s.o_ready.at[t]))
    pl.when(jnp.logical_not(any_keys))(lambda: plgpu.barrier_wait(s.q_landed.at[t]))
    to = lambda columns: out.at[batch, rows, head, columns]  # noqa: E731
    put_lines(s.o.at[:, pl.ds(t * width, width)], s.q.at[t], to, inverse, any_keys)


def _scratch(H: int, V: int, dtype, stages: int):
    landed = plgpu.Barrier(num_barriers=stages)
    used = plgpu.Barrier(num_barriers=stages, orders_tensor_core=True)
    by_tile = plgpu.Barrier(num_barriers=PAIR, orders_tensor_core=True)
    return Scratch(
        q=swizzled(PAIR, H // LINE, ROWS, LINE, dtype=dtype),
        k=swizzled(stages, STEP, H, dtype=dtype),
        v=swizzled(stages, STEP, V, dtype=dtype),
        inverse=plgpu.SMEM((PAIR, ROWS), jnp.float32),
        s=plgpu.TMEM((ROWS, PAIR * STEP), jnp.float32),
        p=plgpu.TMEM((ROWS, PAIR * STEP), dtype, packed=True),
        o=plgpu.TMEM((ROWS, PAIR * V), jnp.float32),
        q_landed=plgpu.Barrier(num_barriers=PAIR, num_arrivals=H // LINE),
        k_landed=landed,
        v_landed=landed,
        k_used=used,
        v_used=used,
        s_ready=by_tile,
        s_read=by_tile,
        p_ready=by_tile,
        o_ready=by_tile,
    )


def forward(q_BLNH, k_BSGH, v_BSGV, first_BL, scale):
    """Returns (out_BLNV, lse_BLN): see `fused.Kernels`."""
    (B, L, N, H), (S, G, V), dtype = q_BLNH.shape, v_BSGV.shape[1:], q_BLNH.dtype
    call = Call(scale, S - L, N // G, stages_for(H))
    bounds, first = key_bounds(first_BL, S, STEP, PAIR), pad_last(first_BL, PAIR * ROWS)
    kernel = plgpu.kernel(
        partial(_kernel, call=call),
        out_type=(
            jax.ShapeDtypeStruct((B, L, N, V), dtype),
            jax.ShapeDtypeStruct((B, N, first.shape[1]), jnp.float32),
        ),
        scratch_types=_scratch(H, V, dtype, call.stages),
        kernel_name="attention_forward",
        **launch(bounds.shape[1] // PAIR, B, N),
    )
    operands = bounds, first, q_BLNH, k_BSGH, v_BSGV
    out, lse = (varying_as(x, *operands) for x in kernel(*operands))
    return out, lse[..., :L].transpose(0, 2, 1)


_KERNELS = fused.Kernels(forward, backward)


def refusal(q_BLNH, k_BSGH, v_BSGV, scale) -> str | None:
    """Returns why these kernels cannot serve this call; None if they can."""
    return fused.refusal(q_BLNH, k_BSGH, v_BSGV, scale, "blackwell", OLDEST_JAX)


def attention(q_BLNH, k_BSGH, v_BSGV, segment_ids, window, sinks, scale):
    """See the package; called only where `refusal` is None."""
    return fused.attend(_KERNELS, q_BLNH, k_BSGH, v_BSGV, segment_ids, window, sinks, scale)
