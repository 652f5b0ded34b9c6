"""What the Blackwell attention kernels share: tiles, bounds, masks, and how results leave."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

ROWS = 128  # of a tile: the lanes of tensor memory
LINE = 64  # elements of a swizzled line of 128 bytes
BY_LANE = plgpu.Layout.TCGEN05_TMEM_NATIVE  # a thread holds a row
PER_ROW = BY_LANE.reduce(1)
PER_COL = BY_LANE.reduce(0)
BY_QUAD = plgpu.Layout.TCGEN05  # four threads hold eight rows, which shared memory likes better
STEP = 64  # keys, or in dk and dv queries, of a step
PART = 32  # columns of a step that a warpgroup takes at once


class Call(NamedTuple):
    """Static facts of one call."""

    scale: float
    offset: int
    """Query i sees keys up to i + offset."""
    group: int
    """Query heads of a key head."""
    stages: int
    """Slots of a ring."""


def stages_for(H: int) -> int:
    """Slots that shared memory has room for, beside a tile of 192 columns, or less."""
    return 3 if H > 128 else 4


# Which blocks a tile visits, in XLA.


def _blocks(first_BL, S: int, rows: int, num_blocks: int):
    """The first and the last key that any row of a block sees (S, -1: none), and the first and the
    last that all see: [B or 1, blocks] each."""
    B, L = first_BL.shape
    last_R = jnp.arange(num_blocks * rows, dtype=jnp.int32) + (S - L)
    beyond = num_blocks * rows - L
    first = jnp.pad(first_BL, ((0, 0), (0, beyond)), constant_values=jnp.iinfo(jnp.int32).max)
    first, last = first.reshape(B, num_blocks, rows), last_R.reshape(1, num_blocks, rows)
    sees = first <= last
    from_ = jnp.where(sees, first, S).min(-1)
    to = jnp.where(sees, last, -1).max(-1)
    return from_, to, first.max(-1), last[..., 0]


def key_bounds(first_BL, S: int, keys: int, tiles_by: int):
    """[B, tiles of queries, 4]: the blocks of `keys` that a tile visits, from and to, and those of
    them that need no mask. `tiles_by` divides the number of tiles."""
    num_tiles = -(-first_BL.shape[1] // (ROWS * tiles_by)) * tiles_by
    from_, to, all_from, all_to = _blocks(first_BL, S, ROWS, num_tiles)
    hi = to // keys + 1
    lo = jnp.minimum(from_ // keys, hi)
    plain_from = jnp.clip(-(-all_from // keys), lo, hi)
    plain_to = jnp.clip((all_to + 1) // keys, plain_from, hi)
    return jnp.stack([lo, hi, plain_from, plain_to], -1).astype(jnp.int32)


def query_bounds(first_BL, S: int, queries: int):
    """[B, tiles of keys, 4]: the blocks of `queries` that see a tile of keys, from and to, and
    those of them that need no mask."""
    num_blocks, num_tiles = -(-first_BL.shape[1] // queries), -(-S // ROWS)
    from_, to, all_from, all_to = (
        x[..., None] for x in _blocks(first_BL, S, queries, num_blocks)
    )
    key0_T = jnp.arange(num_tiles, dtype=jnp.int32)[None, None] * ROWS
    i_I = jnp.arange(num_blocks, dtype=jnp.int32)[None, :, None]

    def span(holds_BIT):
        lo = jnp.where(holds_BIT, i_I, num_blocks).min(1)
        hi = jnp.where(holds_BIT, i_I + 1, 0).max(1)
        return jnp.minimum(lo, hi), hi

    lo, hi = span((from_ < key0_T + ROWS) & (to >= key0_T))
    plain = span((all_from <= key0_T) & (all_to >= key0_T + (ROWS - 1)))
    return jnp.stack([lo, hi, *(jnp.clip(x, lo, hi) for x in plain)], -1).astype(jnp.int32)


# In the kernels.


def span_of(bounds, batch, tile):
    """The four bounds of a tile. As read, their type varies over mesh axes inside shard_map, and no
    loop may carry them; any arithmetic makes a plain number of them."""
    return [jnp.maximum(bounds[batch, tile, i], 0) for i in range(4)]


def slot_of(n, stages: int):
    return lax.rem(n, jnp.int32(stages))


def bring_lines(rows, lines, landed) -> None:
    """Has TMA bring all columns of rows [ROWS, H], a line at a time, as they leave."""
    for c in range(lines.shape[0]):
        plgpu.copy_gmem_to_smem(rows.at[:, pl.ds(c * LINE, LINE)], lines.at[c], landed)


def sum_over_lines(acc, lines, b) -> None:
    """Issues acc = a b^T, a being [lines, ROWS, LINE] and b [STEP, H]."""
    for c in range(lines.shape[0]):
        b_line = b.at[:, pl.ds(c * LINE, LINE)].transpose((1, 0))
        plgpu.tcgen05_mma(acc, lines.at[c], b_line, accumulate=c > 0)


def across(x, shape, dim: int = 0):
    """A value per row (dim 0) or column (dim 1), in all of shape."""
    return lax.broadcast_in_dim(x, shape, (dim,))


def mask(scores, column, num_columns: int, seen) -> None:
    """Makes scores in tensor memory -inf where not seen(first of the columns, shape). Few blocks
    need it, so the others should not keep registers for it."""

    def part(turn, _):
        columns = pl.ds(column + turn * PART, PART)
        x = plgpu.async_load_tmem(scores.at[:, columns], layout=BY_LANE)
        plgpu.wait_load_tmem()
        x = jnp.where(seen(turn * PART, x.shape), x, -jnp.inf)
        plgpu.async_store_tmem(scores.at[:, columns], x)

    lax.fori_loop(0, num_columns // PART, part, None)
    plgpu.commit_tmem()


def seen_by_rows(first_R, last0, key0):
    """For `mask`: row r sees keys first_R[r] to last0 + r, and the first column is key0."""

    def seen(c, shape):
        row = plgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=PER_ROW)
        key = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=BY_LANE)
        after = key >= across(first_R - (key0 + c), shape)
        return after & (key <= across(row + (last0 - key0 - c), shape))

    return seen


def put_lines(acc, through, to, factor, some, range_=(0, 1)) -> None:
    """Stores the columns of a sum in tensor memory, times `factor` (a number, or one a row), or
    zeros if not `some`, line by line: every `range_[1]`th, from `range_[0]` on."""
    first, by = range_

    def line(turn, _):
        c = first + turn * by

        @pl.when(some)
        def _():
            x = plgpu.async_load_tmem(acc.at[:, pl.ds(c * LINE, LINE)], layout=BY_QUAD)
            by_row = factor if isinstance(factor, float) else across(factor, x.shape)
            through[c] = (x * by_row).astype(through.dtype)

        @pl.when(jnp.logical_not(some))
        def _():
            through[c] = jnp.zeros(through.shape[1:], through.dtype)

        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(through.at[c], to(pl.ds(c * LINE, LINE)))

    num_lines = acc.shape[1] // LINE
    lax.fori_loop(0, lax.div(num_lines - first + (by - 1), jnp.int32(by)), line, None)
    plgpu.wait_smem_to_gmem(0)


# On the host.


def pad_last(x, multiple: int):
    missing = -x.shape[-1] % multiple
    return jnp.pad(x, ((0, 0),) * (x.ndim - 1) + ((0, missing),)) if missing else x


def swizzled(*shape, dtype):
    transforms = plgpu.TilingTransform((8, LINE)), plgpu.SwizzleTransform(128)
    return plgpu.SMEM(shape, dtype, transforms=transforms)


def launch(tiles: int, batch: int, heads: int):
    """Heads run together, as they share keys; tiles in turn, so that long ones can come first."""
    return dict(
        grid=(tiles, batch, heads),
        grid_names=("tile", "batch", "head"),
        num_threads=3,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(
            approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Warpgroup
        ),
    )
