"""Where groups lie among the rows, and the lists of work that kernels read.

A little XLA arithmetic on the device; the lists have one length whatever the sizes are.
"""

import jax.numpy as jnp
from jax import lax


def mine(count, core, cores: int):
    """(turns, item): how many of `count` items a core takes, and item(turn), the number of each.

    Rounds go to and fro over the cores: with three, items 0 1 2 go to cores 0 1 2, items 3 4 5 to
    cores 2 1 0. Where items fall in size, who had a long one first has a short one next. For use in
    kernels: nothing is divided by what only the device knows.
    """
    full = lax.div(count, jnp.int32(cores))

    def place(turn):
        return jnp.where(lax.rem(turn, jnp.int32(2)) == 0, core, cores - 1 - core)

    turns = full + (full * cores + place(full) < count).astype(jnp.int32)
    return turns, lambda turn: turn * cores + place(turn)


def following(item, cores: int):
    """The item that a core takes after this one, there or not (see `mine`)."""
    return 2 * cores * (lax.div(item, jnp.int32(cores)) + 1) - 1 - item


def bounds(group_sizes_G, num_rows):
    """Returns (starts, ends) of the groups' rows, clipped to the rows that exist."""
    ends_G = jnp.minimum(jnp.cumsum(group_sizes_G, dtype=jnp.int32), num_rows)
    return jnp.concatenate([ends_G[:1] * 0, ends_G[:-1]]), ends_G


def row_tiles(group_sizes_G, num_rows, rows):
    """(counts_2, tiles_3T): the row tiles of a product by rows.

    Tile t holds rows tiles[1, t] up to tiles[2, t], at most `rows` of which are its own, of group
    tiles[0, t]. The first counts[0] tiles have a group; counts[1] more cover the rows past the sum.
    """
    starts_G, ends_G = bounds(group_sizes_G, num_rows)
    starts = jnp.concatenate([starts_G, ends_G[-1:]])
    ends = jnp.concatenate([ends_G, ends_G[-1:] * 0 + num_rows])
    upto = jnp.cumsum((ends - starts + rows - 1) // rows, dtype=jnp.int32)
    most = -(-num_rows // rows) + group_sizes_G.shape[0]
    tile_T = jnp.arange(most, dtype=jnp.int32)
    group_T = (tile_T[:, None] >= upto[None, :]).sum(axis=1, dtype=jnp.int32)
    group_T = jnp.minimum(group_T, group_sizes_G.shape[0])
    before_T = jnp.where(group_T > 0, upto[group_T - 1], 0)
    first_T = starts[group_T] + (tile_T - before_T) * rows
    counts_2 = jnp.stack([upto[-2], upto[-1] - upto[-2]])
    return counts_2, jnp.stack([group_T, first_T, ends[group_T]])


def by_size(group_sizes_G, num_rows):
    """(live_1, groups_3G): (group, first row, end row) by falling size, and how many have rows.

    Ranks by comparison: G is small, and a sort is a kernel.
    """
    starts_G, ends_G = bounds(group_sizes_G, num_rows)
    rows_G, group_G = ends_G - starts_G, jnp.arange(group_sizes_G.shape[0], dtype=jnp.int32)
    ahead_GG = (rows_G[None] > rows_G[:, None]) | (
        (rows_G[None] == rows_G[:, None]) & (group_G[None] < group_G[:, None])
    )
    rank_G = ahead_GG.sum(axis=1, dtype=jnp.int32)
    groups_3G = jnp.zeros((3, *group_G.shape), jnp.int32)
    groups_3G = groups_3G.at[:, rank_G].set(jnp.stack([group_G, starts_G, ends_G]))
    return (rows_G > 0).sum(dtype=jnp.int32)[None], groups_3G
