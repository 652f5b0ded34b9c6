"""Documents, window and causality as one number a query: the first key that it sees.

Query i sees the keys first_i <= j <= i + S - L. The numbers never fall along a row, so those of the
first and last query of a block bound what the block sees, and what all of it sees.
"""

import jax.numpy as jnp
from jax import lax
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


def first_of_blocks(first_BL, rows: int):
    """Returns (first key that any query of a block of `rows` sees, first that its last one sees,
    so that all do), [B, blocks] each. Rows past L count as those that see nothing."""
    L = first_BL.shape[1]
    nothing = jnp.iinfo(jnp.int32).max // 2
    padded = jnp.pad(first_BL, ((0, 0), (0, -L % rows)), constant_values=nothing)
    blocks = padded.reshape(first_BL.shape[0], -1, rows)
    return blocks[:, :, 0], blocks[:, :, -1]
