"""Grouped GEMM for Blackwell's tensor cores (sm_100a, sm_103a): bfloat16 in, float32 sums in tensor
memory, three persistent kernels.

    forward   y[m]   = x[m] @ w[g]          for rows m of group g       2 M K N FLOPs each,
    input     dx[m]  = dy[m] @ w[g]^T                                   every operand read through
    weight    dw[g]  = sum over rows m of g   x[m]^T dy[m]              L2, each result written once

Who does what in a block, and how rows are cut into tiles: see `blackwell_loop.py`. In the weight
gradient, rows of other groups are zeroed by select in shared memory, in both operands: a NaN times
a zero is a NaN. A group's border blocks come first in its sum, so that this happens while the
tensor core is still at the tile before. Groups are taken longest first.

With the default tiles a kernel uses 224 KiB of shared memory, all 512 columns of tensor memory and
up to 106 registers; nothing is spilled, on either GPU. Tested in Mosaic's interpreter and put
through the compiler, but not yet run on a GPU: no time has been measured.

Left for a GPU to judge: pairs of blocks that share an MMA (`Tiles.pair`, for the products), a split
of long groups' sums, which would help a weight gradient of few tiles, and the tile sizes.
"""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.deviceless import GPUS
from pallas_kernels.grouped_gemm.blackwell_loop import (
    ALIGN,
    LINE,
    Scratch,
    block_in_pair,
    blocks_of,
    by_warpgroup,
    drain,
    feed,
    feed_rows,
    for_items,
    launch,
    longest_first,
    multiply,
    padded,
    place,
    put_rows,
    row_tiles,
    scratch_types,
    store_rows,
    tile_rows,
)
from pallas_kernels.grouped_gemm.tiles import ByOp, Tiles, of
from pallas_kernels.varying import varies_nowhere, varying_as

OLDEST_JAX = (0, 12)
# Rows are lanes of tensor memory, two sums of these columns fill its 512, and the depth is one
# swizzled line of 128 bytes.
DEFAULT = Tiles(rows=128, cols=256, depth=64, stages=4, snake=8, cores=GPUS["b200"].cores)


def refusal(x_MK, w_GKN) -> str | None:
    """Returns why these kernels cannot serve x and w (arrays or their types), or None."""
    if x_MK.dtype != jnp.bfloat16 or w_GKN.dtype != jnp.bfloat16:
        return f"takes bfloat16, got {x_MK.dtype} and {w_GKN.dtype}"
    K, N = w_GKN.shape[1:]
    if K % 8 or N % 8 or not K or not N:
        return f"K and N must be multiples of 8 (TMA strides of 16 bytes), got {K} and {N}"
    return None


# The products: forward and input gradient.


def _product_kernel(work, counts, x, w, y, *scratch, tiles: Tiles, flip: bool):
    s, (num_rows, num_cols), blocks = Scratch(*scratch), y.shape, blocks_of(tiles)
    col_tiles, steps = pl.cdiv(num_cols, tiles.cols), pl.cdiv(x.shape[1], tiles.depth)
    num_items = counts[0] * col_tiles
    where = partial(place, num_rows=counts[0], num_cols=col_tiles, band=tiles.snake)

    def w_tile(g, n, k):
        ks, cols = pl.ds(k * tiles.depth, tiles.depth), pl.ds(n * tiles.cols, tiles.cols)
        return w.at[g, cols, ks] if flip else w.at[g, ks, cols]

    w_dim = 0 if flip else 1

    def operands(slot):
        b = s.b.at[slot]
        return s.a.at[slot], b.transpose((1, 0)) if flip else b

    def write(item, read, _):
        t, n = where(item)
        for i, c in enumerate(range(0, tiles.cols, LINE)):
            cols = pl.ds(n * tiles.cols + c, LINE)
            to = lambda rows, cols=cols: y.at[rows, cols]  # noqa: E731
            line = read(c, LINE).astype(y.dtype)
            # An item may have an odd number of lines.
            put_rows(s, [(line, to)], tile_rows(work, t, tiles), slot=i % 2, others=1 if i else 0)

    def zero(item, _turn, _):
        lines = pl.cdiv(num_cols, LINE)
        tile = lax.div(item, jnp.int32(lines)) * blocks + block_in_pair(tiles)
        row = counts[1] + tile * tiles.rows
        cols = pl.ds(lax.rem(item, jnp.int32(lines)) * LINE, LINE)
        rows_left = jnp.clip(num_rows - row, 0, tiles.rows)
        store_rows([(s.out.at[0], lambda rows: y.at[rows, cols])], 0, row, rows_left)

    def store():
        drain(num_items, tiles, s, write)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        s.out[0] = jnp.zeros(s.out.shape[1:], y.dtype)
        plgpu.commit_smem()
        rows = tiles.rows * blocks
        past = lax.div(num_rows - counts[1] + (rows - 1), jnp.int32(rows))
        for_items(past * pl.cdiv(num_cols, LINE), tiles, zero, None)
        plgpu.wait_smem_to_gmem(0)

    by_warpgroup(
        lambda: feed(num_items, tiles, s, feed_rows(work, where, x, tiles, s, w_tile, w_dim)),
        lambda: multiply(num_items, tiles, s, lambda _: steps, operands),
        store,
    )


def product(x_MK, w_GKN, group_sizes_G, flip: bool, tiles: Tiles):
    """y[m] = x[m] @ w[g], or x[m] @ w[g]^T if flipped; zeros past the groups' sum."""
    shape = (x_MK.shape[0], w_GKN.shape[1 if flip else 2])
    if 0 in (*x_MK.shape, *w_GKN.shape):
        return lax.full_like(x_MK, 0, shape=shape)
    x_MK, w_GKN = padded(x_MK, (ALIGN, LINE)), padded(w_GKN, (1, LINE, LINE))
    work, counts = row_tiles(group_sizes_G, x_MK.shape[0], tiles.rows * blocks_of(tiles))
    cols, b_cols = w_GKN.shape[1 if flip else 2], tiles.cols // blocks_of(tiles)
    b_tile = (b_cols, tiles.depth) if flip else (tiles.depth, b_cols)
    y_MN = plgpu.kernel(
        partial(_product_kernel, tiles=tiles, flip=flip),
        out_type=jax.ShapeDtypeStruct((x_MK.shape[0], cols), x_MK.dtype),
        scratch_types=scratch_types(
            tiles, (tiles.rows, tiles.depth), b_tile, x_MK.dtype, (2, LINE)
        ),
        kernel_name="grouped_gemm_input_gradient" if flip else "grouped_gemm_forward",
        num_threads=3,
        **launch(tiles),
    )(work, counts, x_MK, w_GKN)
    y_MN = varying_as(y_MN, x_MK, w_GKN, group_sizes_G)
    return y_MN if y_MN.shape == shape else y_MN[: shape[0], : shape[1]]


# The weight gradient.


def _blocks(work, t, tiles: Tiles):
    """(how many blocks of rows, the first row of block k, whether block k holds rows of others) of
    the group in row t of `work`. Block 0 is its last one: borders come first."""
    base8, first, end = work[t, 1], work[t, 2], work[t, 3]
    blocks = lax.div(end - base8 * ALIGN + (tiles.depth - 1), jnp.int32(tiles.depth))

    def row(k):
        return (base8 + jnp.where(k == 0, blocks - 1, k - 1) * (tiles.depth // ALIGN)) * ALIGN

    return blocks, row, lambda k: (row(k) < first) | (row(k) + tiles.depth > end)


def _weight_kernel(work, counts, x, dy, *refs, tiles: Tiles, add: bool):
    out, s = refs[0], Scratch(*refs[1:])
    k_tiles, n_tiles = pl.cdiv(x.shape[1], tiles.rows), pl.cdiv(dy.shape[1], tiles.cols)
    per_group = jnp.int32(k_tiles * n_tiles)
    num_items = counts[0] * per_group

    def where(item):
        """(row of `work`, first row in dw, first column in dw)."""
        k, n = place(lax.rem(item, per_group), k_tiles, n_tiles, tiles.snake)
        return lax.div(item, per_group), k * tiles.rows, n * tiles.cols

    def blocks(item):
        return _blocks(work, lax.div(item, per_group), tiles)

    def plan(item):
        (_, k0, n0), (num_blocks, row, border) = where(item), blocks(item)

        def copy(k, slot):
            rows = pl.ds(row(k), tiles.depth)
            landed = s.landed.at[slot + jnp.where(border(k), tiles.stages, 0)]
            plgpu.copy_gmem_to_smem(x.at[rows, pl.ds(k0, tiles.rows)], s.a.at[slot], landed)
            plgpu.copy_gmem_to_smem(dy.at[rows, pl.ds(n0, tiles.cols)], s.b.at[slot], landed)

        return num_blocks, copy

    def operands(slot):
        return s.a.at[slot].transpose((1, 0)), s.b.at[slot]

    def write(item, read, _=None):
        t, k0, n0 = where(item)
        _write_weights(out, s, tiles, (work[t, 0], k0, n0), read, add)

    def store():
        drain(num_items, tiles, s, write)
        if not add:  # to an empty group's gradient nothing is to be added
            zeros = lambda c, width: jnp.zeros((tiles.rows, width), jnp.float32)  # noqa: E731
            empty = (out.shape[0] - counts[0]) * per_group
            for_items(empty, tiles, lambda item, *_: write(num_items + item, zeros), None)
        plgpu.wait_smem_to_gmem(0)

    clear = partial(_clear_borders, work, s, tiles, lambda item: lax.div(item, per_group))
    by_warpgroup(
        lambda: feed(num_items, tiles, s, plan),
        lambda: multiply(num_items, tiles, s, lambda item: blocks(item)[0], operands),
        store,
        lambda: for_items(num_items, tiles, clear, jnp.int32(0)),
    )


def _clear_borders(work, s: Scratch, tiles: Tiles, row_of, item, _turn, count):
    """Zeroes the rows of other groups in an item's border blocks: blocks 0 and 1, if at all."""
    t = row_of(item)
    num_blocks, row, border = _blocks(work, t, tiles)
    first, end = work[t, 2], work[t, 3]

    def step(k, _):
        @pl.when(border(k))
        def _():
            slot = lax.rem(count + k, jnp.int32(tiles.stages))
            plgpu.barrier_wait(s.landed.at[slot + tiles.stages])
            for ref in (s.a, s.b):
                for c in range(0, ref.shape[2], LINE):
                    tile = ref.at[slot, :, pl.ds(c, LINE)]
                    at = row(k) + lax.broadcasted_iota(jnp.int32, (tiles.depth, LINE), 0)
                    tile[...] = jnp.where((at >= first) & (at < end), tile[...], 0)
            plgpu.commit_smem()
            for _ in range(2):  # in place of the two copies
                plgpu.barrier_arrive(s.landed.at[slot])

    lax.fori_loop(0, jnp.minimum(num_blocks, 2), step, None)
    return count + num_blocks


def _write_weights(out, s: Scratch, tiles: Tiles, corner, read, add: bool):
    """Stores a tile of dw, or adds it to what is there; read(c, width) is some of its columns."""
    (g, k0, n0), line = corner, s.out.shape[2]

    def at(c):
        return out.at[g, pl.ds(k0, tiles.rows), pl.ds(n0 + c, line)]

    def fetch(c):
        half = c // line % 2
        plgpu.copy_gmem_to_smem(at(c), s.out.at[half], s.fetched.at[half])

    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    if add:
        fetch(0)
    for c in range(0, tiles.cols, line):
        half = c // line % 2
        piece = s.out.at[half]
        if add:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # of the half to be fetched into
            if c + line < tiles.cols:
                fetch(c + line)
            plgpu.barrier_wait(s.fetched.at[half])
            piece[...] = piece[...] + read(c, line)
        else:
            plgpu.wait_smem_to_gmem(1 if c else 0, wait_read_only=True)
            piece[...] = read(c, line).astype(out.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(piece, at(c))


def weight_gradient(x_MK, dy_MN, group_sizes_G, *, dtype=None, into_GKN=None, tiles=DEFAULT):
    """Returns dw[g] = x[rows of g]^T dy[rows of g]: [G, K, N], summed in float32; 0 where empty.

    In `dtype` (bfloat16, the default, or float32); or float32 and added to `into_GKN`, in place if
    the caller gives that buffer away. Rows past the groups' sum count for nothing. The sum is one
    of XLA's, after the kernel, where K or N is no multiple of 64, and inside
    shard_map(check_vma=True), where a kernel takes no reference of a varying type.
    """
    (M, K), N, G = x_MK.shape, dy_MN.shape[1], group_sizes_G.shape[0]
    tiles = replace(tiles, pair=False)
    dtype = jnp.dtype(dtype or x_MK.dtype) if into_GKN is None else jnp.dtype(jnp.float32)
    if 0 in (M, K, N, G):
        return (
            lax.full_like(x_MK, 0, shape=(G, K, N), dtype=dtype) if into_GKN is None else into_GKN
        )
    x_MK, dy_MN = padded(x_MK, (ALIGN, LINE)), padded(dy_MN, (ALIGN, LINE))
    shape = (G, x_MK.shape[1], dy_MN.shape[1])
    # A padded copy could not be added to in place, and a kernel takes no reference that varies.
    add = into_GKN is not None and shape == (G, K, N) and varies_nowhere(into_GKN)
    work, counts = longest_first(group_sizes_G, x_MK.shape[0])
    out = (2, 128 // dtype.itemsize)
    kernel = plgpu.kernel(
        partial(_weight_kernel, tiles=tiles, add=add),
        out_type=() if add else jax.ShapeDtypeStruct(shape, dtype),
        scratch_types=scratch_types(
            tiles, (tiles.depth, tiles.rows), (tiles.depth, tiles.cols), x_MK.dtype, out, dtype
        ),
        kernel_name="grouped_gemm_weight_gradient",
        num_threads=4,
        **launch(tiles),
    )
    if add:
        into = jax.new_ref(into_GKN)
        kernel(work, counts, x_MK, dy_MN, into)
        return jax.freeze(into)
    dw_GKN = varying_as(kernel(work, counts, x_MK, dy_MN), x_MK, dy_MN, group_sizes_G)
    dw_GKN = dw_GKN if shape == (G, K, N) else dw_GKN[:, :K, :N]
    return dw_GKN if into_GKN is None else into_GKN + dw_GKN


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def grouped_gemm(x_MK, w_GKN, group_sizes_G, tiles: Tiles | ByOp = DEFAULT):
    """See the package. For arguments that `refusal` has nothing against."""
    return product(x_MK, w_GKN, group_sizes_G, False, of(tiles, "forward"))


def _forward(x_MK, w_GKN, group_sizes_G, tiles):
    return grouped_gemm(x_MK, w_GKN, group_sizes_G, tiles), (x_MK, w_GKN, group_sizes_G)


def _backward(tiles, residuals, dy_MN):
    x_MK, w_GKN, group_sizes_G = residuals
    dx_MK = product(dy_MN, w_GKN, group_sizes_G, True, of(tiles, "input"))
    return dx_MK, weight_gradient(x_MK, dy_MN, group_sizes_G, tiles=of(tiles, "weight")), None


grouped_gemm.defvjp(_forward, _backward)
