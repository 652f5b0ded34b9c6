"""Documents, window and causality as one number a query: the first key that it sees.

Query i sees the keys first_i <= j <= i + S - L. The numbers never fall along a row, so those of the
queries of a block bound which blocks of keys any of them sees, and which all of them see.
"""

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Int


def first_visible(
    segment_ids: tuple[Int[Array, "B L"], Int[Array, "B S"]] | None,
    window: int | None,
    batch: int,
    num_queries: int,
    num_keys: int,
) -> Int[Array, "B L"]:
    """Returns the first key that each query sees, int32; padding (id 0), which sees nothing, gets
    i + S - L + 1.

    Equal ids have to be neighbours in their row, and the queries are its last L tokens. Without ids
    a row is one document.

    With ids 1 1 0 2 2 0:    0 0 3 3 3 6
    and a window of 1:       0 1 3 3 4 6
    """
    at_L = jnp.arange(num_keys - num_queries, num_keys, dtype=jnp.int32)  # the keys of the queries
    first_BL = jnp.zeros((batch, num_queries), jnp.int32)
    if segment_ids is not None:
        ids_BL, ids_BS = segment_ids
        begins_BS = jnp.pad(ids_BS[:, 1:] != ids_BS[:, :-1], ((0, 0), (1, 0)))
        at_1S = jnp.arange(num_keys, dtype=jnp.int32)[None]
        start_BS = lax.cummax(jnp.where(begins_BS, at_1S, 0), axis=1)
        first_BL = jnp.where(ids_BL == 0, at_L[None] + 1, start_BS[:, num_keys - num_queries :])
    if window is not None:
        first_BL = jnp.maximum(first_BL, at_L[None] - (window - 1))
    return first_BL


def key_blocks(first_BL, rows: int, keys: int):
    """Returns int32 [4, B, blocks of `rows` queries], numbers of blocks of `keys` keys, L = S:
    begin <= whole begin <= whole end <= end.

    Before begin and from end on no query of the block sees a key. Between the whole ones every
    query sees every key, so that nothing needs a mask.
    """
    (B, L), count = first_BL.shape, pl.cdiv(first_BL.shape[1], rows)
    padding = ((0, 0), (0, count * rows - L))
    first = jnp.pad(first_BL, padding, mode="edge").reshape(B, count, rows)
    at = jnp.arange(count * rows, dtype=jnp.int32).reshape(1, count, rows)
    sees = (first <= at) & (at < L)
    low = jnp.where(sees, first, L).min(axis=2)
    high = jnp.where(sees, at + 1, 0).max(axis=2)
    whole = pl.cdiv(first.max(axis=2), keys), (at[:, :, 0] + 1) // keys + 0 * low
    return _in_order(low // keys, *whole, pl.cdiv(high, keys))


def query_blocks(first_BL, rows: int, keys: int):
    """Returns int32 [4, B, blocks of `keys` keys], numbers of blocks of `rows` queries, as
    `key_blocks` does: which queries see any key of the block, and which see all of them.

    The queries from L on, of the last block of rows, may count as seeing.
    """
    L = first_BL.shape[1]
    key = jnp.arange(0, L, keys, dtype=jnp.int32)[None, :, None]
    until = lambda last: (first_BL[:, None] <= last).sum(axis=2, dtype=jnp.int32)  # noqa: E731
    every, some = until(key), until(key + (keys - 1))
    begin = key[..., 0] // rows + 0 * some
    whole = pl.cdiv(key[..., 0] + (keys - 1), rows) + 0 * some
    return _in_order(begin, whole, jnp.where(every == L, pl.cdiv(L, rows), every // rows),
                     pl.cdiv(some, rows))  # fmt: skip


def _in_order(begin, whole_begin, whole_end, end):
    end = jnp.maximum(begin, end)
    whole_begin = jnp.clip(whole_begin, begin, end)
    return jnp.stack([begin, whole_begin, jnp.clip(whole_end, whole_begin, end), end])
