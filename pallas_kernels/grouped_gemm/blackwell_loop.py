"""The persistent loop of the grouped kernels for Blackwell: who does what in a block, with which
barriers, and the list of work. The kernels (`blackwell.py`, and the grouped MLP's) say which tiles
are brought in, multiplied and written.

Each of `cores` blocks takes the tiles of the result in turns:
- Warpgroup 0 (`feed`) has TMA bring operand tiles into a ring of `stages` slots, on and on across
  tiles of the result. No operand is transposed in memory: TMA reads them as they lie, and the MMA
  takes an operand transposed.
- Warpgroup 1 (`multiply`) issues the MMAs, into one of two accumulators in tensor memory.
- Warpgroup 2 (`drain`) empties the other one: tensor memory, registers, shared memory, TMA.
- Warpgroup 3 (weight gradient only) zeroes rows of other groups at the ends of a group.
One warp each would do for the first two, but a kernel with `warp_map` cannot be traced inside
`shard_map(check_vma=True)`: it takes no references of a varying type.

    barrier    arrives                                    waits
    landed     both TMA copies of a slot, or warpgroup 3  1, or 3 for a slot at a border
    used       the tensor core has read a slot            0
    ready      the tensor core has finished a sum         2
    drained    warpgroup 2 has read a sum                 1
    fetched    a piece that warpgroup 2 asked for         2

The sizes of the groups stay on the device: a little XLA arithmetic turns them into a list of work,
of static length, which the warpgroups read. TMA moves whole swizzled tiles of 8 rows, so a tile of
rows begins at its group's first row rounded down to 8: of groups of 5 and 9 rows, the second one's
tile begins at row 0, and holds rows 5 to 13 of it. The other rows of a product's tile are computed
and not stored: a border leaves in runs of 64, 32, .. 1 rows, each by TMA, and no element has a
mask. (A run may start at any row of shared memory, for swizzling goes by address.)

With `Tiles.pair`, products by rows give an item to two blocks, whose tensor cores work as one on
256 rows: each block brings its own 128 rows and half of the columns, and sums all columns of its
rows. The first one's warpgroup 1 issues the MMAs of both; `landed` counts in the first block what
both bring, `used` and `ready` arrive in both, and `drained` when both are. For a step of 128 rows,
256 columns and 64 deep, 4.2 MFLOP or 512 clocks of a tensor core at 8192 FLOP a clock, a block
alone brings 48 KiB into shared memory and reads 48 KiB there, 85 FLOP a byte, so that at 2.25
PFLOP/s all of them ask L2 for 26 TB/s; one of a pair 32 KiB each, 128 FLOP a byte and 18 TB/s. At
128 bytes a clock, shared memory alone takes 384 clocks each way, or 256. Off by default: Mosaic's
interpreter knows no MMA of two blocks, so it is only known to compile, for both GPUs.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.grouped_gemm.tiles import Tiles
from pallas_kernels.grouped_gemm.work import bounds, by_size, mine

ALIGN = 8  # rows: a swizzled tile in shared memory has 8, and TMA moves whole tiles
LINE = 64  # elements of bfloat16 in a swizzled line; K and N are padded to whole lines


class Scratch(NamedTuple):
    """What a block holds in shared and tensor memory."""

    a: Any  # the ring's left operands [stages, ..]
    b: Any  # and right operands
    out: Any  # what is on its way out [slots, rows, one line]
    acc: Any  # tensor memory [rows, 2 cols]
    landed: Any  # barriers: see the top; in `landed`, `stages` more for slots at a border
    used: Any
    ready: Any
    drained: Any
    fetched: Any


# The list of work, in XLA.


def row_tiles(group_sizes_G, num_rows, rows):
    """(work, counts): for each tile of rows (group, first row / 8, first and end row of the group
    in it), and [number of tiles, rows in all groups]."""
    starts_G, ends_G = bounds(group_sizes_G, num_rows)
    bases_G = starts_G // ALIGN
    tiles_G = jnp.where(ends_G > starts_G, (ends_G - bases_G * ALIGN + rows - 1) // rows, 0)
    last_G, num_groups = jnp.cumsum(tiles_G, dtype=jnp.int32), group_sizes_G.shape[0]
    # Rounding down adds up to 7 rows to a group, and its last tile may hold a single row.
    most = (num_rows + (ALIGN - 1) * num_groups) // rows + num_groups
    t_T = jnp.arange(most, dtype=jnp.int32)
    g_T = (t_T[:, None] >= last_G[None, :]).sum(1, dtype=jnp.int32)
    g_T = jnp.minimum(g_T, num_groups - 1)  # entries past the last tile are not read
    base_T = bases_G[g_T] + (t_T - last_G[g_T] + tiles_G[g_T]) * (rows // ALIGN)
    first_T = jnp.maximum(base_T * ALIGN, starts_G[g_T])
    end_T = jnp.minimum(base_T * ALIGN + rows, ends_G[g_T])
    return jnp.stack([g_T, base_T, first_T, end_T], 1), jnp.stack([last_G[-1], ends_G[-1]])


def longest_first(group_sizes_G, num_rows):
    """(work, counts): for each group, the longest first (group, first row / 8, first and end row),
    and [number of groups with rows]."""
    live_1, (group_G, first_G, end_G) = by_size(group_sizes_G, num_rows)
    return jnp.stack([group_G, first_G // ALIGN, first_G, end_G], 1), live_1


# What the warps do, in any of the kernels.


def blocks_of(tiles: Tiles) -> int:
    """How many blocks share an item."""
    return 2 if tiles.pair else 1


def block_in_pair(tiles: Tiles):
    return lax.axis_index("pair") if tiles.pair else 0


def for_items(num_items, tiles: Tiles, visit, carry):
    """Returns carry after carry = visit(item, turn, carry) for each item of this block."""
    turns, index = mine(num_items, lax.axis_index("sm"), tiles.cores // blocks_of(tiles))
    return lax.fori_loop(0, turns, lambda turn, carry: visit(index(turn), turn, carry), carry)


def place(item, num_rows, num_cols: int, band: int):
    """(row, column) of an item: by bands of rows, in each column after column."""
    per_band = jnp.int32(band * num_cols)
    first, within = lax.div(item, per_band) * band, lax.rem(item, per_band)
    height = jnp.minimum(num_rows - first, band)
    return first + lax.rem(within, height), lax.div(within, height)


def feed(num_items, tiles: Tiles, s: Scratch, plan: Callable) -> None:
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

    for_items(num_items, tiles, visit, jnp.int32(0))


def feed_rows(work, place, x, tiles: Tiles, s: Scratch, w_tile: Callable, w_dim=1) -> Callable:
    """The plan of `feed` for a product by rows: x's rows, and w_tile(group, column tile, k), whose
    columns are its dimension w_dim."""

    def bring(source, target, landed, dim):
        # Of a pair each block brings half, along dim; the first one's barrier counts both.
        part = plgpu.CopyPartition.PARTITIONED(dim) if tiles.pair else None
        axes = "pair" if tiles.pair else None
        plgpu.copy_gmem_to_smem(source, target, landed, collective_axes=axes, leader_tracked=part)

    def plan(item):
        t, n = place(item)
        rows, g = pl.ds(work[t, 1] * ALIGN, tiles.rows * blocks_of(tiles)), work[t, 0]

        def copy(k, slot):
            ks = pl.ds(k * tiles.depth, tiles.depth)
            bring(x.at[rows, ks], s.a.at[slot], s.landed.at[slot], 0)
            bring(w_tile(g, n, k), s.b.at[slot], s.landed.at[slot], w_dim)

        return pl.cdiv(x.shape[1], tiles.depth), copy

    return plan


def multiply(num_items, tiles: Tiles, s: Scratch, steps_of, operands: Callable) -> None:
    """Issues the MMAs of every item: steps_of(item) slots each, operands(slot) is (a, b). The first
    block of a pair does so for both, and each one's barriers arrive."""
    pair = "pair" if tiles.pair else None

    def visit(item, turn, count):
        steps, half = steps_of(item), lax.rem(turn, jnp.int32(2))

        @pl.when(turn >= 2)
        def _():
            plgpu.barrier_wait(s.drained.at[half])

        def step(k, _):
            slot = lax.rem(count + k, jnp.int32(tiles.stages))
            plgpu.barrier_wait(s.landed.at[slot])
            acc, (a, b) = s.acc.at[:, pl.ds(half * tiles.cols, tiles.cols)], operands(slot)
            used = s.used.at[slot]
            plgpu.tcgen05_mma(acc, a, b, used, accumulate=k > 0, collective_axis=pair)

        def issue():
            lax.fori_loop(0, steps, step, None)
            plgpu.tcgen05_commit_arrive(s.ready.at[half], collective_axis=pair)

        pl.when(block_in_pair(tiles) == 0)(issue) if tiles.pair else issue()
        return count + steps

    for_items(num_items, tiles, visit, jnp.int32(0))


def drain(num_items, tiles: Tiles, s: Scratch, write: Callable, early=lambda _: None) -> None:
    """Empties accumulators: write(item, read, early(item)) stores one, read(c, width) is some of
    its columns. What early loads is on its way while the tensor core finishes the sum."""

    def visit(item, turn, _):
        half, loaded = lax.rem(turn, jnp.int32(2)), early(item)
        plgpu.barrier_wait(s.ready.at[half])

        def read(c, width):
            columns = pl.ds(half * tiles.cols + c, width)
            return plgpu.async_load_tmem(s.acc.at[:, columns])

        write(item, read, loaded)
        plgpu.wait_load_tmem()
        plgpu.barrier_arrive(s.drained.at[half])

    for_items(num_items, tiles, visit, None)


def by_warpgroup(*roles: Callable[[], None]) -> None:
    for warpgroup, role in enumerate(roles):

        @pl.when(lax.axis_index("wg") == warpgroup)
        def _(role=role):
            role()


def tile_rows(work, t, tiles: Tiles):
    """Of row t of `work`, this block's (rows before the group's, the first one's row, how many)."""
    base, first, end = work[t, 1] * ALIGN, work[t, 2], work[t, 3]
    if tiles.pair:
        base += block_in_pair(tiles) * tiles.rows
        first, end = jnp.maximum(first, base), jnp.minimum(end, base + tiles.rows)
        end = jnp.maximum(first, end)
    return first - base, first, end - first


def put_rows(s: Scratch, sends, rows, slot: int = 0, others: int = 0) -> None:
    """Stores rows of values through slots of `out`, from `slot` on, which at most `others` calls
    came after. See `store_rows` for sends, (value, to), and rows."""
    plgpu.wait_smem_to_gmem(others, wait_read_only=True)
    for at, (value, _) in enumerate(sends, slot):
        s.out[at] = value
    plgpu.commit_smem()
    store_rows([(s.out.at[at], to) for at, (_, to) in enumerate(sends, slot)], *rows)


def store_rows(sends, skip, row, num_rows) -> None:
    """Stores num_rows rows, from row `skip` of each from_smem on, in to(rows) from `row` on, rows
    being a slice of the result: 11 as 8, 2 and 1. Sends are (from_smem, to)."""
    full = sends[0][0].shape[0]

    def store(done, run):
        for from_smem, to in sends:
            target = to(pl.ds(row + done, run))
            piece = from_smem.at[pl.ds(skip + done, run)]
            plgpu.copy_smem_to_gmem(piece, target, commit_group=False)

    @pl.when(num_rows == full)
    def _():
        store(0, full)

    @pl.when(num_rows != full)
    def _():
        run = full // 2
        while run:
            # Longer runs are in num_rows' higher bits.
            pl.when((num_rows & run) != 0)(partial(store, num_rows & -(2 * run), run))
            run //= 2

    plgpu.commit_smem_to_gmem_group()


# What the kernels share on the host.


def padded(a, multiples):
    pads = [(0, -size % m) for size, m in zip(a.shape, multiples, strict=True)]
    return jnp.pad(a, pads) if any(after for _, after in pads) else a


def scratch_types(tiles: Tiles, a_tile, b_tile, dtype, out: tuple[int, int], out_dtype=None):
    """The types of `Scratch`, in its order; `out` is its slots and columns. A tile of rank 3 holds
    the columns of two matrices, one after the other.

    Raises ValueError for tiles that tensor memory or the ring has no form for.
    """
    if tiles.rows != 128 or tiles.depth != 64:
        raise ValueError(f"rows must be 128 and depth 64, got {tiles.rows} and {tiles.depth}")
    if tiles.pair and (tiles.cols % (2 * LINE) or tiles.cores % 2):
        raise ValueError(f"a pair of blocks halves whole lines, and cores; got {tiles}")

    def ring(tile):
        tiling = plgpu.TilingTransform((ALIGN, *[1] * (len(tile) - 2), LINE))
        return plgpu.SMEM(
            (tiles.stages, *tile), dtype, transforms=(tiling, plgpu.SwizzleTransform(128))
        )

    tensor = partial(plgpu.Barrier, orders_tensor_core=True)
    drained = tensor(num_barriers=2)
    if tiles.pair:
        drained = plgpu.ClusterBarrier(
            collective_axes=("pair",), num_barriers=2, orders_tensor_core=True
        )
    return Scratch(
        a=ring(a_tile),
        b=ring(b_tile),
        out=pieces((out[0], tiles.rows, out[1]), out_dtype or dtype),
        acc=plgpu.TMEM((tiles.rows, 2 * tiles.cols), jnp.float32, collective=tiles.pair),
        landed=plgpu.Barrier(num_arrivals=2, num_barriers=2 * tiles.stages),
        used=tensor(num_barriers=tiles.stages),
        ready=tensor(num_barriers=2),
        drained=drained,
        fetched=plgpu.Barrier(num_barriers=2),
    )


def pieces(shape, dtype):
    """Shared memory for pieces of rows. Tiles of one row: a run of rows may start at any. Swizzling
    goes by address, as everywhere."""
    line = shape[-1]
    swizzle = plgpu.SwizzleTransform(line * jnp.dtype(dtype).itemsize)
    return plgpu.SMEM(shape, dtype, transforms=(plgpu.TilingTransform((1, line)), swizzle))


def launch(tiles: Tiles):
    blocks = blocks_of(tiles)
    return dict(
        grid=(tiles.cores // blocks,),
        grid_names=("sm",),
        cluster=(blocks,) if tiles.pair else (),
        cluster_names=("pair",) if tiles.pair else (),
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
    )
