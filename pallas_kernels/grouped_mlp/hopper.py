"""Grouped MLP for Hopper GPUs (sm_90a): the grouped GEMM with the activation in two epilogues.

    forward    h = x @ w_in[g],  a = silu(gate) * up * weight       one kernel
               y = a @ w_out[g]                                     grouped_gemm
    backward   da = dy @ w_out[g]^T,  dh, a and dweight of it       one kernel
               dw_out = a^T dy,  dx = dh @ w_in[g]^T,  dw_in = x^T dh    grouped_gemm

Saved for the backward are x, h, the weights and the matrices: a is made again, and da is never in
memory. h is rounded to bfloat16 first, and a computed in float32 from that, forward and backward
alike: both are `swiglu` of h to the bit, but for how a compiler does exp and division.

Grid, tiles of rows, ring of stages and borders are those of grouped_gemm/hopper.py; what differs:

grouped_mlp_forward. A tile has `cols` / 2 columns of gate and the same columns of up, from two
loads of w_in and in two accumulators. h is stored as [M, 2, F], where a copy ends at F: a tile of
gates that overhangs leaves up alone. 4*M*D*F FLOPs; writes h and a, 6*M*F bytes; beside swiglu in
a kernel of its own, h is not read again, 4*M*F bytes less.

grouped_mlp_gradient. da stays in the accumulator, in float32. h comes through the ring: after a
tile's products the loading warpgroup fills cols / depth more stages with gate (where x was) and up
(where w was), so h is asked for as soon as stages are free, while the products still run. Writes
dh and a, 6*M*F bytes, for 4*M*F read; 2*M*D*F FLOPs. The routing weight's gradient is a sum over
F: each tile stores its rows' part of it, [tiles, column tiles, rows] float32, and XLA adds the
parts in order, so the bits never change. Columns past F are cleared by select.

Rows past the sum of the sizes: h, a and dh are left as they were found there, and nothing that is
kept reads them (a product stores no row of another group, the weight gradient clears them by
select); y, dx and dweight are zeros. At a border the last tile reads rows of the next group, which
stay in rows that are not stored.

Not yet run or timed on a GPU. Assembled for an H100 at M=8192, D=2048, F=768, G=16 and at D=F=2880,
G=8: no spills, 168 registers; 229,376 bytes of shared memory (forward), 198,656 (gradient).
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.deviceless import Gpu
from pallas_kernels.grouped_gemm import hopper as gemm
from pallas_kernels.grouped_gemm.hopper import CHUNK, H100, Ring
from pallas_kernels.grouped_gemm.tiles import Tiles, choose
from pallas_kernels.grouped_gemm.work import bounds, row_tiles
from pallas_kernels.swiglu.reference import activate, slopes

OLDEST_JAX = gemm.OLDEST_JAX
_ROWS = plgpu.Layout.WGMMA.reduce(1)  # a value for each row of an accumulator


def _each_column(value_M, shape):
    """One value a row, repeated over the columns of an accumulator's chunk."""
    return plgpu.layout_cast(lax.broadcast_in_dim(value_M, shape, (0,)), plgpu.Layout.WGMMA)


def _forward_kernel(*refs, tiles):
    counts_gmem, tiles_gmem, x_gmem, w_gmem, weights_gmem, h_gmem, a_gmem, *scratch = refs
    x_smem, w_smem, out_smem, border_smem, full, empty = scratch
    wg, wg_rows, ring = lax.axis_index("wg"), tiles.rows // 2, Ring(tiles.stages, full, empty)
    F, width = a_gmem.shape[1], tiles.cols // 2
    steps = pl.cdiv(x_gmem.shape[1], tiles.depth)

    def copies(place, step, slot):
        deep, col = pl.ds(step * tiles.depth, tiles.depth), place.col * width
        gate, up = (w_gmem.at[place.group, deep, pl.ds(col + at, width)] for at in (0, F))
        x = x_gmem.at[pl.ds(place.row, tiles.rows), deep]
        return (x, x_smem.at[slot]), (gate, w_smem.at[slot, 0]), (up, w_smem.at[slot, 1])

    def pieces(gate, up, weights, col):
        for c in range(0, width, CHUNK):
            cols = pl.ds(col + c, CHUNK)
            halves = [half[:, c : c + CHUNK] for half in (gate, up)]
            yield halves[0], h_gmem.at[:, 0], cols
            yield halves[1], h_gmem.at[:, 1], cols
            a = activate(*(half.astype(jnp.float32) for half in halves))
            yield (a * _each_column(weights, a.shape)).astype(a_gmem.dtype), a_gmem, cols

    def compute(place, done):
        row = place.row + wg * wg_rows
        weights = plgpu.load(weights_gmem.at[pl.ds(row, wg_rows)], layout=_ROWS, optimized=False)

        def scope(gate_acc, up_acc):
            def multiply(slot):
                x = x_smem.at[slot, pl.ds(wg * wg_rows, wg_rows)]
                plgpu.wgmma(gate_acc, x, w_smem.at[slot, 0])
                plgpu.wgmma(up_acc, x, w_smem.at[slot, 1])

            gemm.accumulate(steps, done, ring, multiply, each=2)
            return gate_acc[...].astype(h_gmem.dtype), up_acc[...].astype(h_gmem.dtype)

        gate, up = pl.run_scoped(scope, *[plgpu.ACC((wg_rows, width))] * 2)
        stored = pieces(gate, up, weights, place.col * width)
        gemm.store_rows(stored, out_smem.at[wg], border_smem.at[wg], row, place.end - row)

    num_cols = pl.cdiv(F, width)
    gemm.by_rows(counts_gmem, tiles_gmem, num_cols, tiles, ring, [(steps, copies)], compute)


def _padded(weights_M, tiles):
    """In float32, with rows that a last tile may read beyond."""
    return jnp.pad(weights_M.astype(jnp.float32), (0, tiles.rows))


def first_product(x_MD, w_in_GDF2, weights_M, group_sizes_G, tiles: Tiles):
    """Returns h = x[m] @ w_in[g] [M, 2F], and silu(gate) * up * weight of it [M, F].

    Rows past the sum of the sizes are left as they were found. The activation is that of the
    rounded h.
    """
    M, F = x_MD.shape[0], w_in_GDF2.shape[2] // 2
    dtype = x_MD.dtype
    scratch = [
        gemm.swizzled((tiles.stages, tiles.rows, tiles.depth), dtype),
        gemm.swizzled((tiles.stages, 2, tiles.depth, tiles.cols // 2), dtype),
        *gemm.outbox(tiles, dtype),
        *gemm.ring_of(tiles.stages, copies=3),
    ]
    out_type = gemm.like(x_MD, (M, 2, F), dtype), gemm.like(x_MD, (M, F), dtype)
    kernel = partial(_forward_kernel, tiles=tiles)
    run = gemm.launch("grouped_mlp_forward", kernel, out_type, tiles, scratch)
    lists = row_tiles(group_sizes_G, M, tiles.rows)
    h_M2F, a_MF = run(*lists, x_MD, w_in_GDF2, _padded(weights_M, tiles))
    return h_M2F.reshape(M, 2 * F), a_MF


def _h_chunks(smems, mine, ring, numbers):
    """Gate and up in float32, chunk after chunk, from the stages of these numbers, handed back."""
    for number in numbers:
        slot = lax.rem(number, ring.stages)
        plgpu.barrier_wait(ring.full.at[slot])
        halves = [plgpu.load(smem.at[slot, mine], layout=plgpu.Layout.WGMMA) for smem in smems]
        plgpu.commit_smem()  # these were ordinary reads, and copies will write here
        plgpu.barrier_arrive(ring.empty.at[slot])
        for c in range(0, halves[0].shape[1], CHUNK):
            yield [half[:, c : c + CHUNK].astype(jnp.float32) for half in halves]


def _gradient_kernel(*refs, tiles):
    counts_gmem, tiles_gmem, dy_gmem, w_gmem, h_gmem, weights_gmem, *refs = refs
    dh_gmem, a_gmem, sums_gmem, x_smem, w_smem, out_smem, border_smem, full, empty = refs
    wg, wg_rows, ring = lax.axis_index("wg"), tiles.rows // 2, Ring(tiles.stages, full, empty)
    F, dtype = a_gmem.shape[1], a_gmem.dtype
    steps, h_steps = pl.cdiv(dy_gmem.shape[1], tiles.depth), tiles.cols // tiles.depth
    mine = pl.ds(wg * wg_rows, wg_rows)

    def operands(place, step, slot):
        deep, cols = (pl.ds(at * n, n) for at, n in ((step, tiles.depth), (place.col, tiles.cols)))
        dy, w = dy_gmem.at[pl.ds(place.row, tiles.rows), deep], w_gmem.at[place.group, cols, deep]
        return (dy, x_smem.at[slot]), (w, w_smem.at[slot])

    def activations(place, step, slot):
        rows = pl.ds(place.row, tiles.rows)
        cols = pl.ds(place.col * tiles.cols + step * tiles.depth, tiles.depth)
        gate, up = h_gmem.at[rows, 0, cols], h_gmem.at[rows, 1, cols]
        return (gate, x_smem.at[slot]), (up, w_smem.at[slot, pl.ds(0, tiles.rows)])

    def pieces(da, weights, place, done, by_row):
        numbers = [done + steps + i for i in range(h_steps)]
        h_chunks = _h_chunks((x_smem, w_smem), mine, ring, numbers)
        for n, (gate, up) in enumerate(h_chunks):
            d_a = da[:, n * CHUNK : (n + 1) * CHUNK]
            col = place.col * tiles.cols + n * CHUNK
            weight = _each_column(weights, d_a.shape)
            by_gate, by_up, value = slopes(gate, up)
            by_row[0] += _sum_columns(d_a * value, col, F)
            scaled = d_a * weight
            # All three are rounded before the first is stored, for they are smaller then.
            made = scaled * by_gate, scaled * by_up, value * weight
            d_gate, d_up, a = (v.astype(dtype) for v in made)
            stored = (d_gate, dh_gmem.at[:, 0]), (d_up, dh_gmem.at[:, 1]), (a, a_gmem)
            yield from ((chunk, gmem, pl.ds(col, CHUNK)) for chunk, gmem in stored)

    def compute(place, done):
        row = place.row + wg * wg_rows
        by_row = [plgpu.layout_cast(jnp.zeros(wg_rows, jnp.float32), _ROWS)]
        weights = plgpu.load(weights_gmem.at[pl.ds(row, wg_rows)], layout=_ROWS, optimized=False)

        def scope(acc):
            def multiply(slot):
                plgpu.wgmma(acc, x_smem.at[slot, mine], w_smem.at[slot].transpose((1, 0)))

            gemm.accumulate(steps, done, ring, multiply)
            return acc[...]

        da = pl.run_scoped(scope, plgpu.ACC((wg_rows, tiles.cols)))
        stored = pieces(da, weights, place, done, by_row)
        gemm.store_rows(stored, out_smem.at[wg], border_smem.at[wg], row, place.end - row)
        gemm.store(sums_gmem.at[place.tile, place.col, mine], by_row[0])

    phases, num_cols = [(steps, operands), (h_steps, activations)], pl.cdiv(F, tiles.cols)
    gemm.by_rows(counts_gmem, tiles_gmem, num_cols, tiles, ring, phases, compute)


def _sum_columns(value, col, end):
    """Each row's sum over those columns, from `col` on, that lie before `end`."""
    if end % value.shape[1]:
        at = plgpu.broadcasted_iota(jnp.int32, value.shape, 1, layout=plgpu.Layout.WGMMA)
        value = jnp.where(at < end - col, value, jnp.zeros_like(value))
    return value.sum(axis=1)


def first_gradient(dy_MD, w_out_GFD, h_MF2, weights_M, group_sizes_G, tiles: Tiles):
    """Returns dh [M, 2F], the activation times weight [M, F], and dweights [M] in float32.

    Rows past the sum of the sizes are zeros in dweights, and as they were found in the others.
    Raises ValueError for tiles whose stages do not hold two tiles of rows.
    """
    if tiles.cols < tiles.rows or tiles.cols % tiles.depth:
        raise ValueError(f"as many columns as rows at least, in whole depths; got {tiles}")
    M, F, dtype = dy_MD.shape[0], w_out_GFD.shape[1], dy_MD.dtype
    scratch = [
        gemm.swizzled((tiles.stages, tiles.rows, tiles.depth), dtype),
        gemm.swizzled((tiles.stages, tiles.cols, tiles.depth), dtype),
        *gemm.outbox(tiles, dtype),
        *gemm.ring_of(tiles.stages),
    ]
    counts_2, tiles_3T = row_tiles(group_sizes_G, M, tiles.rows)
    sums_TCR = (tiles_3T.shape[1], pl.cdiv(F, tiles.cols), tiles.rows)
    shapes = ((M, 2, F), dtype), ((M, F), dtype), (sums_TCR, jnp.float32)
    out_type = tuple(gemm.like(dy_MD, *shape) for shape in shapes)
    kernel = partial(_gradient_kernel, tiles=tiles)
    run = gemm.launch("grouped_mlp_gradient", kernel, out_type, tiles, scratch)
    h_M2F, weights = h_MF2.reshape(M, 2, F), _padded(weights_M, tiles)
    dh_M2F, a_MF, sums_TCR = run(counts_2, tiles_3T, dy_MD, w_out_GFD, h_M2F, weights)
    ends_G = bounds(group_sizes_G, M)[1]
    return dh_M2F.reshape(M, 2 * F), a_MF, _by_row(sums_TCR, tiles_3T[1], M, ends_G[-1])


def _by_row(sums_TCR, first_T, num_rows, end):
    """What the tiles found for their rows, summed over columns in order; 0 from row `end` on."""
    row_M = jnp.arange(num_rows, dtype=jnp.int32)
    tile_M = (row_M[:, None] >= first_T[None, :]).sum(axis=1, dtype=jnp.int32) - 1
    sum_M = sums_TCR.sum(axis=1)[tile_M, row_M - first_T[tile_M]]
    return jnp.where(row_M < end, sum_M, 0)


def refusal(x_MD, w_in_GDF2, w_out_GFD) -> str | None:
    """Returns why these kernels cannot serve, on any Hopper GPU; None if they can."""
    if w_out_GFD.shape[1] % 8:
        return f"its copies need F in multiples of 8 (16 bytes); got {w_out_GFD.shape[1]}"
    if w_out_GFD.dtype != w_in_GDF2.dtype:
        return f"it takes one dtype, not {w_in_GDF2.dtype} and {w_out_GFD.dtype}"
    return gemm.refusal(x_MD, w_in_GDF2)


@partial(jax.custom_vjp, nondiff_argnums=(5, 6))
def grouped_mlp(
    x_MD,
    w_in_GDF2,
    w_out_GFD,
    weights_M,
    group_sizes_G,
    gpu: Gpu = H100,
    tiles: Tiles | None = None,
):
    """See the package; called only where `refusal` is None. Sizes beyond M are clipped.

    `gpu` chooses tiles and cores; `tiles` replaces that choice.
    """
    return _forward(x_MD, w_in_GDF2, w_out_GFD, weights_M, group_sizes_G, gpu, tiles)[0]


def _forward(x_MD, w_in_GDF2, w_out_GFD, weights_M, group_sizes_G, gpu, tiles):
    (M, D), F2 = x_MD.shape, w_in_GDF2.shape[2]
    own = tiles or choose("mlp_forward", gpu, M, F2)
    h_MF2, a_MF = first_product(x_MD, w_in_GDF2, weights_M, group_sizes_G, own)
    own = tiles or choose("forward", gpu, M, D)
    y_MD = gemm.product(a_MF, w_out_GFD, group_sizes_G, own, transposed=False)
    return y_MD, (x_MD, w_in_GDF2, w_out_GFD, weights_M, group_sizes_G, h_MF2)


def _backward(gpu, tiles, residuals, dy_MD):
    x_MD, w_in_GDF2, w_out_GFD, weights_M, sizes_G, h_MF2 = residuals
    (M, D), F = x_MD.shape, w_out_GFD.shape[1]

    def own(op, rows, cols):
        return tiles or choose(op, gpu, rows, cols)

    dh_MF2, a_MF, d_weights_M = first_gradient(
        dy_MD, w_out_GFD, h_MF2, weights_M, sizes_G, own("mlp_gradient", M, F)
    )
    dw_out_GFD = gemm.weight_gradient(a_MF, dy_MD, sizes_G, own("weight", F, D))
    dx_MD = gemm.product(dh_MF2, w_in_GDF2, sizes_G, own("input", M, D), transposed=True)
    dw_in_GDF2 = gemm.weight_gradient(x_MD, dh_MF2, sizes_G, own("weight", D, 2 * F))
    return dx_MD, dw_in_GDF2, dw_out_GFD, d_weights_M.astype(weights_M.dtype), None


grouped_mlp.defvjp(_forward, _backward)
