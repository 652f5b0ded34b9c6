"""Grouped GEMM for Blackwell's tensor cores (sm_100a, sm_103a): bfloat16 in, float32 sums in tensor
memory, three persistent kernels.

    forward   y[m]   = x[m] @ w[g]          for rows m of group g       2 M K N FLOPs each,
    input     dx[m]  = dy[m] @ w[g]^T                                   every operand read through
    weight    dw[g]  = sum over rows m of g   x[m]^T dy[m]              L2, each result written once

Who does what, in each of `cores` blocks, which take the tiles of the result in turns:
- Warpgroup 0 has TMA bring operand tiles into a ring of `stages` slots, on and on across tiles of
  the result. Neither w nor x is transposed in memory: TMA reads them as they lie, and the MMA takes
  an operand transposed.
- Warpgroup 1 issues the MMAs, into one of two accumulators in tensor memory.
- Warpgroup 2 empties the other one: tensor memory, registers, shared memory, TMA.
- Warpgroup 3 (weight gradient only) zeroes rows of other groups at the ends of a group.
One warp each would do for the first two, but a kernel with `warp_map` cannot be traced inside
`shard_map(check_vma=True)`: it takes no references of a varying type.

    barrier    arrives                                    waits
    landed     both TMA copies of a slot, or warpgroup 3  1, or 3 for a slot at a border
    used       the tensor core has read a slot            0
    ready      the tensor core has finished a sum         2
    drained    warpgroup 2 has read a sum                 1
    fetched    a piece of what dw is added to             2

The sizes of the groups stay on the device: a little XLA arithmetic turns them into a list of work,
of static length, which the warpgroups read. TMA moves whole swizzled tiles of 8 rows, so a tile of
rows begins at its group's first row rounded down to 8: of groups of 5 and 9 rows, the second one's
tile begins at row 0, and holds rows 5 to 13 of it. The other rows of a product's tile are computed
and not stored: a border leaves in runs of 64, 32, .. 1 rows, each by TMA, and no element has a
mask. (A run may start at any row of shared memory, for swizzling goes by address.) In the weight
gradient, rows of other groups are zeroed by select in shared memory, in both operands: a NaN times
a zero is a NaN. A group's border blocks come first in its sum, so that this happens while the
tensor core is still at the tile before. Groups are taken longest first.

With the default tiles a kernel uses 224 KiB of shared memory, all 512 columns of tensor memory and
up to 106 registers; nothing is spilled, on either GPU. Tested in Mosaic's interpreter and put
through the compiler, but not yet run on a GPU: no time has been measured.

Left for a GPU to judge: pairs of blocks that share an MMA (which the interpreter cannot run), a
split of long groups' sums, which would help a weight gradient of few tiles, and the tile sizes.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.deviceless import GPUS
from pallas_kernels.grouped_gemm.tiles import ByOp, Tiles, bounds, of

# Rows are lanes of tensor memory, two sums of these columns fill its 512, and the depth is one
# swizzled line of 128 bytes.
DEFAULT = Tiles(rows=128, cols=256, depth=64, stages=4, snake=8, cores=GPUS["b200"].cores)
_ALIGN = 8  # rows: a swizzled tile in shared memory has 8, and TMA moves whole tiles
_LINE = 64  # elements of bfloat16 in a swizzled line; K and N are padded to whole lines


class _Scratch(NamedTuple):
    """What a block holds in shared and tensor memory."""

    a: Any  # the ring's left operands [stages, ..]
    b: Any  # and right operands
    out: Any  # what is on its way out [2, rows, one line]
    acc: Any  # tensor memory [rows, 2 cols]
    landed: Any  # barriers: see the top; entries from `stages` on are for slots at a border
    used: Any
    ready: Any
    drained: Any
    fetched: Any  # a piece of the buffer that the weight gradient is added to


def refusal(x_MK, w_GKN) -> str | None:
    """Returns why these kernels cannot serve x and w (arrays or their types), or None."""
    if x_MK.dtype != jnp.bfloat16 or w_GKN.dtype != jnp.bfloat16:
        return f"takes bfloat16, got {x_MK.dtype} and {w_GKN.dtype}"
    K, N = w_GKN.shape[1:]
    if K % 8 or N % 8 or not K or not N:
        return f"K and N must be multiples of 8 (TMA strides of 16 bytes), got {K} and {N}"
    return None


# The list of work, in XLA.


def _row_tiles(group_sizes_G, num_rows, rows):
    """(work, counts): for each tile of rows (group, first row / 8, first and end row of the group
    in it), and [number of tiles, rows in all groups]."""
    starts_G, ends_G = bounds(group_sizes_G, num_rows)
    bases_G = starts_G // _ALIGN
    tiles_G = jnp.where(ends_G > starts_G, (ends_G - bases_G * _ALIGN + rows - 1) // rows, 0)
    last_G, num_groups = jnp.cumsum(tiles_G, dtype=jnp.int32), group_sizes_G.shape[0]
    # Rounding down adds up to 7 rows to a group, and its last tile may hold a single row.
    most = (num_rows + (_ALIGN - 1) * num_groups) // rows + num_groups
    t_T = jnp.arange(most, dtype=jnp.int32)
    g_T = (t_T[:, None] >= last_G[None, :]).sum(1, dtype=jnp.int32)
    g_T = jnp.minimum(g_T, num_groups - 1)  # entries past the last tile are not read
    base_T = bases_G[g_T] + (t_T - last_G[g_T] + tiles_G[g_T]) * (rows // _ALIGN)
    first_T = jnp.maximum(base_T * _ALIGN, starts_G[g_T])
    end_T = jnp.minimum(base_T * _ALIGN + rows, ends_G[g_T])
    return jnp.stack([g_T, base_T, first_T, end_T], 1), jnp.stack([last_G[-1], ends_G[-1]])


def _longest_first(group_sizes_G, num_rows):
    """(work, counts): for each group, the longest first (group, first row / 8, first and end row),
    and [number of groups with rows]. Ranks by comparison: G is small, and a sort is a kernel."""
    starts_G, ends_G = bounds(group_sizes_G, num_rows)
    bases_G = starts_G // _ALIGN
    size_G, g_G = ends_G - starts_G, jnp.arange(group_sizes_G.shape[0], dtype=jnp.int32)
    longer_GG = (size_G[None] > size_G[:, None]) | (
        (size_G[None] == size_G[:, None]) & (g_G[None] < g_G[:, None])
    )
    work_G4 = jnp.stack([g_G, bases_G, starts_G, ends_G], 1)
    work_G4 = jnp.zeros_like(work_G4).at[longer_GG.sum(1, dtype=jnp.int32)].set(work_G4)
    return work_G4, (size_G > 0).sum(dtype=jnp.int32)[None]


# What the warps do, in any of the kernels.


def _for_items(num_items, tiles: Tiles, visit, carry):
    """Returns carry after carry = visit(item, turn, carry) for each item of this block."""
    first = lax.axis_index("sm")
    turns = lax.div(jnp.maximum(num_items - first, 0) + (tiles.cores - 1), jnp.int32(tiles.cores))
    body = lambda turn, carry: visit(first + turn * tiles.cores, turn, carry)  # noqa: E731
    return lax.fori_loop(0, turns, body, carry)


def _place(item, num_rows, num_cols: int, band: int):
    """(row, column) of an item: by bands of rows, in each column after column."""
    per_band = jnp.int32(band * num_cols)
    first, within = lax.div(item, per_band) * band, lax.rem(item, per_band)
    height = jnp.minimum(num_rows - first, band)
    return first + lax.rem(within, height), lax.div(within, height)


def _feed(num_items, tiles: Tiles, s: _Scratch, plan: Callable) -> None:
    """Has TMA fill the ring. plan(item) is (steps, copy), copy(k, slot) starts both copies."""

    def visit(item, _, count):
        steps, copy = plan(item)

        def step(k, _):
            slot = lax.rem(count + k, jnp.int32(tiles.stages))

            @pl.when(count + k >= tiles.stages)
            def _():
                plgpu.barrier_wait(s.used.at[slot])

            copy(k, slot)

        lax.fori_loop(0, steps, step, None)
        return count + steps

    _for_items(num_items, tiles, visit, jnp.int32(0))


def _multiply(num_items, tiles: Tiles, s: _Scratch, steps_of, flip_a: bool, flip_b: bool) -> None:
    """Issues the MMAs of every item: steps_of(item) slots each, operands as they lie or flipped."""

    def visit(item, turn, count):
        steps, half = steps_of(item), lax.rem(turn, jnp.int32(2))

        @pl.when(turn >= 2)
        def _():
            plgpu.barrier_wait(s.drained.at[half])

        def step(k, _):
            slot = lax.rem(count + k, jnp.int32(tiles.stages))
            plgpu.barrier_wait(s.landed.at[slot])
            a, b = s.a.at[slot], s.b.at[slot]
            plgpu.tcgen05_mma(
                s.acc.at[:, pl.ds(half * tiles.cols, tiles.cols)],
                a.transpose((1, 0)) if flip_a else a,
                b.transpose((1, 0)) if flip_b else b,
                s.used.at[slot],
                accumulate=k > 0,
            )

        lax.fori_loop(0, steps, step, None)
        plgpu.tcgen05_commit_arrive(s.ready.at[half])
        return count + steps

    _for_items(num_items, tiles, visit, jnp.int32(0))


def _drain(num_items, tiles: Tiles, s: _Scratch, write: Callable) -> None:
    """Empties accumulators: write(item, read) stores one, read(c, width) is some of its columns."""

    def visit(item, turn, _):
        half = lax.rem(turn, jnp.int32(2))
        plgpu.barrier_wait(s.ready.at[half])
        write(
            item,
            lambda c, width: plgpu.async_load_tmem(
                s.acc.at[:, pl.ds(half * tiles.cols + c, width)]
            ),
        )
        plgpu.wait_load_tmem()
        plgpu.barrier_arrive(s.drained.at[half])

    _for_items(num_items, tiles, visit, None)


def _by_warpgroup(*roles: Callable[[], None]) -> None:
    for warpgroup, role in enumerate(roles):

        @pl.when(lax.axis_index("wg") == warpgroup)
        def _(role=role):
            role()


def _store_rows(from_smem, to_gmem, skip, row, num_rows, cols) -> None:
    """Stores num_rows rows, from row `skip` of from_smem on, at `row`: 11 as 8, 2 and 1."""
    done, run = 0, from_smem.shape[0]
    while run:
        some = num_rows & run

        @pl.when(some != 0)
        def _(done=done, run=run):
            plgpu.copy_smem_to_gmem(
                from_smem.at[pl.ds(skip + done, run)],
                to_gmem.at[pl.ds(row + done, run), cols],
                commit_group=False,
            )

        done += some
        run //= 2
    plgpu.commit_smem_to_gmem_group()


# The products: forward and input gradient.


def _product_kernel(work, counts, x, w, y, *scratch, tiles: Tiles, flip: bool):
    s, (num_rows, num_cols) = _Scratch(*scratch), y.shape
    col_tiles, steps = pl.cdiv(num_cols, tiles.cols), pl.cdiv(x.shape[1], tiles.depth)
    num_items = counts[0] * col_tiles
    place = partial(_place, num_rows=counts[0], num_cols=col_tiles, band=tiles.snake)

    def plan(item):
        t, n = place(item)
        rows, g = pl.ds(work[t, 1] * _ALIGN, tiles.rows), work[t, 0]
        cols = pl.ds(n * tiles.cols, tiles.cols)

        def copy(k, slot):
            ks = pl.ds(k * tiles.depth, tiles.depth)
            plgpu.copy_gmem_to_smem(x.at[rows, ks], s.a.at[slot], s.landed.at[slot])
            w_tile = w.at[g, cols, ks] if flip else w.at[g, ks, cols]
            plgpu.copy_gmem_to_smem(w_tile, s.b.at[slot], s.landed.at[slot])

        return steps, copy

    def write(item, read):
        t, n = place(item)
        first = work[t, 2]
        skip, rows = first - work[t, 1] * _ALIGN, work[t, 3] - first
        for c in range(0, tiles.cols, _LINE):
            line = s.out.at[c // _LINE % 2]
            plgpu.wait_smem_to_gmem(1 if c else 0, wait_read_only=True)
            line[...] = read(c, _LINE).astype(y.dtype)
            plgpu.commit_smem()
            _store_rows(line, y, skip, first, rows, pl.ds(n * tiles.cols + c, _LINE))

    def zero(item, _turn, _):
        lines = pl.cdiv(num_cols, _LINE)
        row = counts[1] + lax.div(item, jnp.int32(lines)) * tiles.rows
        cols = pl.ds(lax.rem(item, jnp.int32(lines)) * _LINE, _LINE)
        _store_rows(s.out.at[0], y, 0, row, jnp.minimum(num_rows - row, tiles.rows), cols)

    def store():
        _drain(num_items, tiles, s, write)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        s.out[0] = jnp.zeros(s.out.shape[1:], y.dtype)
        plgpu.commit_smem()
        past = lax.div(num_rows - counts[1] + (tiles.rows - 1), jnp.int32(tiles.rows))
        _for_items(past * pl.cdiv(num_cols, _LINE), tiles, zero, None)
        plgpu.wait_smem_to_gmem(0)

    _by_warpgroup(
        lambda: _feed(num_items, tiles, s, plan),
        lambda: _multiply(num_items, tiles, s, lambda _: steps, False, flip),
        store,
    )


def _product(x_MK, w_GKN, group_sizes_G, flip: bool, tiles: Tiles):
    """y[m] = x[m] @ w[g], or x[m] @ w[g]^T if flipped; zeros past the groups' sum."""
    shape = (x_MK.shape[0], w_GKN.shape[1 if flip else 2])
    if 0 in (*x_MK.shape, *w_GKN.shape):
        return lax.full_like(x_MK, 0, shape=shape)
    x_MK, w_GKN = _padded(x_MK, (_ALIGN, _LINE)), _padded(w_GKN, (1, _LINE, _LINE))
    work, counts = _row_tiles(group_sizes_G, x_MK.shape[0], tiles.rows)
    cols = w_GKN.shape[1 if flip else 2]
    b_tile = (tiles.cols, tiles.depth) if flip else (tiles.depth, tiles.cols)
    y_MN = plgpu.kernel(
        partial(_product_kernel, tiles=tiles, flip=flip),
        out_type=jax.ShapeDtypeStruct((x_MK.shape[0], cols), x_MK.dtype),
        scratch_types=_scratch(tiles, (tiles.rows, tiles.depth), b_tile, x_MK.dtype),
        kernel_name="grouped_gemm_input_gradient" if flip else "grouped_gemm_forward",
        num_threads=3,
        **_launch(tiles),
    )(work, counts, x_MK, w_GKN)
    y_MN = _varying_as(y_MN, x_MK, w_GKN, group_sizes_G)
    return y_MN if y_MN.shape == shape else y_MN[: shape[0], : shape[1]]


# The weight gradient.


def _blocks(work, t, tiles: Tiles):
    """(how many blocks of rows, the first row of block k, whether block k holds rows of others) of
    the group in row t of `work`. Block 0 is its last one: borders come first."""
    base8, first, end = work[t, 1], work[t, 2], work[t, 3]
    blocks = lax.div(end - base8 * _ALIGN + (tiles.depth - 1), jnp.int32(tiles.depth))

    def row(k):
        return (base8 + jnp.where(k == 0, blocks - 1, k - 1) * (tiles.depth // _ALIGN)) * _ALIGN

    return blocks, row, lambda k: (row(k) < first) | (row(k) + tiles.depth > end)


def _weight_kernel(work, counts, x, dy, *refs, tiles: Tiles, add: bool):
    out, s = refs[0], _Scratch(*refs[1:])
    k_tiles, n_tiles = pl.cdiv(x.shape[1], tiles.rows), pl.cdiv(dy.shape[1], tiles.cols)
    per_group = jnp.int32(k_tiles * n_tiles)
    num_items = counts[0] * per_group

    def place(item):
        """(row of `work`, first row in dw, first column in dw)."""
        k, n = _place(lax.rem(item, per_group), k_tiles, n_tiles, tiles.snake)
        return lax.div(item, per_group), k * tiles.rows, n * tiles.cols

    def blocks(item):
        return _blocks(work, lax.div(item, per_group), tiles)

    def plan(item):
        (_, k0, n0), (num_blocks, row, border) = place(item), blocks(item)

        def copy(k, slot):
            rows = pl.ds(row(k), tiles.depth)
            landed = s.landed.at[slot + jnp.where(border(k), tiles.stages, 0)]
            plgpu.copy_gmem_to_smem(x.at[rows, pl.ds(k0, tiles.rows)], s.a.at[slot], landed)
            plgpu.copy_gmem_to_smem(dy.at[rows, pl.ds(n0, tiles.cols)], s.b.at[slot], landed)

        return num_blocks, copy

    def write(item, read):
        t, k0, n0 = place(item)
        _write_weights(out, s, tiles, (work[t, 0], k0, n0), read, add)

    def store():
        _drain(num_items, tiles, s, write)
        if not add:  # to an empty group's gradient nothing is to be added
            zeros = lambda c, width: jnp.zeros((tiles.rows, width), jnp.float32)  # noqa: E731
            empty = (out.shape[0] - counts[0]) * per_group
            _for_items(empty, tiles, lambda item, *_: write(num_items + item, zeros), None)
        plgpu.wait_smem_to_gmem(0)

    clear = partial(_clear_borders, work, s, tiles, lambda item: lax.div(item, per_group))
    _by_warpgroup(
        lambda: _feed(num_items, tiles, s, plan),
        lambda: _multiply(num_items, tiles, s, lambda item: blocks(item)[0], True, False),
        store,
        lambda: _for_items(num_items, tiles, clear, jnp.int32(0)),
    )


def _clear_borders(work, s: _Scratch, tiles: Tiles, row_of, item, _turn, count):
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
                for c in range(0, ref.shape[2], _LINE):
                    tile = ref.at[slot, :, pl.ds(c, _LINE)]
                    at = row(k) + lax.broadcasted_iota(jnp.int32, (tiles.depth, _LINE), 0)
                    tile[...] = jnp.where((at >= first) & (at < end), tile[...], 0)
            plgpu.commit_smem()
            for _ in range(2):  # in place of the two copies
                plgpu.barrier_arrive(s.landed.at[slot])

    lax.fori_loop(0, jnp.minimum(num_blocks, 2), step, None)
    return count + num_blocks


def _write_weights(out, s: _Scratch, tiles: Tiles, corner, read, add: bool):
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
    dtype = jnp.dtype(dtype or x_MK.dtype) if into_GKN is None else jnp.dtype(jnp.float32)
    if 0 in (M, K, N, G):
        return (
            lax.full_like(x_MK, 0, shape=(G, K, N), dtype=dtype) if into_GKN is None else into_GKN
        )
    x_MK, dy_MN = _padded(x_MK, (_ALIGN, _LINE)), _padded(dy_MN, (_ALIGN, _LINE))
    shape = (G, x_MK.shape[1], dy_MN.shape[1])
    # A padded copy could not be added to in place, and a kernel takes no reference that varies.
    add = into_GKN is not None and shape == (G, K, N) and _varies_nowhere(into_GKN)
    work, counts = _longest_first(group_sizes_G, x_MK.shape[0])
    kernel = plgpu.kernel(
        partial(_weight_kernel, tiles=tiles, add=add),
        out_type=() if add else jax.ShapeDtypeStruct(shape, dtype),
        scratch_types=_scratch(
            tiles, (tiles.depth, tiles.rows), (tiles.depth, tiles.cols), x_MK.dtype, dtype
        ),
        kernel_name="grouped_gemm_weight_gradient",
        num_threads=4,
        **_launch(tiles),
    )
    if add:
        into = jax.new_ref(into_GKN)
        kernel(work, counts, x_MK, dy_MN, into)
        return jax.freeze(into)
    dw_GKN = _varying_as(kernel(work, counts, x_MK, dy_MN), x_MK, dy_MN, group_sizes_G)
    dw_GKN = dw_GKN if shape == (G, K, N) else dw_GKN[:, :K, :N]
    return dw_GKN if into_GKN is None else into_GKN + dw_GKN


# What the kernels share on the host.


def _padded(a, multiples):
    pads = [(0, -size % m) for size, m in zip(a.shape, multiples, strict=True)]
    return jnp.pad(a, pads) if any(after for _, after in pads) else a


def _varying_as(y, *operands):
    """y, as varying as the operands are inside shard_map(check_vma=True), which plgpu.kernel never
    says of its output: a slice that starts at zeros of theirs, to XLA y itself."""
    zero = sum(lax.full_like(a, 0, shape=(), dtype=jnp.int32) for a in operands)
    return y if _varies_nowhere(zero) else lax.dynamic_slice_in_dim(y, zero, y.shape[0])


def _varies_nowhere(x) -> bool:
    return not jax.typeof(x).manual_axis_type.varying


def _scratch(tiles: Tiles, a_tile, b_tile, dtype, out_dtype=None):
    """The types of `_Scratch`, in its order.

    Raises ValueError for tiles that tensor memory or the ring has no form for.
    """
    if tiles.rows != 128 or tiles.depth != 64:
        raise ValueError(f"rows must be 128 and depth 64, got {tiles.rows} and {tiles.depth}")
    ring = dict(
        dtype=dtype,
        transforms=(plgpu.TilingTransform((_ALIGN, _LINE)), plgpu.SwizzleTransform(128)),
    )
    out_dtype = jnp.dtype(out_dtype or dtype)
    line = 128 // out_dtype.itemsize
    # Tiles of one row: a run of rows may start at any. Swizzling goes by address, as everywhere.
    rows = (plgpu.TilingTransform((1, line)), plgpu.SwizzleTransform(128))
    tensor = partial(plgpu.Barrier, orders_tensor_core=True)
    return _Scratch(
        a=plgpu.SMEM((tiles.stages, *a_tile), **ring),
        b=plgpu.SMEM((tiles.stages, *b_tile), **ring),
        out=plgpu.SMEM((2, tiles.rows, line), out_dtype, transforms=rows),
        acc=plgpu.TMEM((tiles.rows, 2 * tiles.cols), jnp.float32),
        landed=plgpu.Barrier(num_arrivals=2, num_barriers=2 * tiles.stages),
        used=tensor(num_barriers=tiles.stages),
        ready=tensor(num_barriers=2),
        drained=tensor(num_barriers=2),
        fetched=plgpu.Barrier(num_barriers=2),
    )


def _launch(tiles: Tiles):
    return dict(
        grid=(tiles.cores,),
        grid_names=("sm",),
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
    )


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def grouped_gemm(x_MK, w_GKN, group_sizes_G, tiles: Tiles | ByOp = DEFAULT):
    """See the package. For arguments that `refusal` has nothing against."""
    return _product(x_MK, w_GKN, group_sizes_G, False, of(tiles, "forward"))


def _forward(x_MK, w_GKN, group_sizes_G, tiles):
    return grouped_gemm(x_MK, w_GKN, group_sizes_G, tiles), (x_MK, w_GKN, group_sizes_G)


def _backward(tiles, residuals, dy_MN):
    x_MK, w_GKN, group_sizes_G = residuals
    dx_MK = _product(dy_MN, w_GKN, group_sizes_G, True, of(tiles, "input"))
    return dx_MK, weight_gradient(x_MK, dy_MN, group_sizes_G, tiles=of(tiles, "weight")), None


grouped_gemm.defvjp(_forward, _backward)
