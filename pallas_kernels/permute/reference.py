"""The definitions of permute, unpermute and sort_slots, in obvious jnp."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def permute(
    x_TD: Float[Array, "T D"], tokens_S: Int[Array, " S"], slots_TK: Int[Array, "T K"]
) -> Float[Array, "S D"]:
    """Returns x[tokens_S[s]]; zeros where tokens_S[s] is -1."""
    return jnp.where((tokens_S >= 0)[:, None], x_TD[jnp.maximum(tokens_S, 0)], 0)


def unpermute(
    y_SD: Float[Array, "S D"],
    slots_TK: Int[Array, "T K"],
    tokens_S: Int[Array, " S"],
    weights_TK: Float[Array, "T K"] | None,
) -> Float[Array, "T D"]:
    """Returns sum_k weights[t, k] * y[slots[t, k]]; a slot of -1 gives nothing."""
    wide = jnp.float64 if y_SD.dtype == jnp.float64 else jnp.float32
    rows_TKD = jnp.where((slots_TK >= 0)[..., None], y_SD[jnp.maximum(slots_TK, 0)], 0)
    rows_TKD = rows_TKD.astype(wide)
    if weights_TK is not None:
        rows_TKD = rows_TKD * weights_TK.astype(wide)[..., None]
    return rows_TKD.sum(axis=1).astype(y_SD.dtype)


def num_rows(num_slots: int, num_experts: int, row_multiple: int) -> int:
    """Returns the rows that the slots need at most: every group that is not empty, there are
    `num_slots` of them at most, may be short of a multiple by row_multiple - 1.

    >>> num_rows(16, 4, 1), num_rows(16, 4, 8), num_rows(2, 4, 8)
    (16, 40, 16)
    """
    most = num_slots + min(num_slots, num_experts) * (row_multiple - 1)
    return most // row_multiple * row_multiple


def sort_slots(
    experts_TK: Int[Array, "T K"], num_experts: int, row_multiple: int
) -> tuple[Int[Array, " S"], Int[Array, "T K"], Int[Array, " E"]]:
    """Returns (tokens_S, slots_TK, group_sizes_E) of a stable sort of the slots by expert."""
    (T, K), flat = experts_TK.shape, experts_TK.reshape(-1)
    ids_1E = jnp.arange(num_experts, dtype=jnp.int32)[None]
    mine = flat[:, None] == ids_1E
    sizes_E = mine.sum(axis=0, dtype=jnp.int32)
    sizes_E = (sizes_E + row_multiple - 1) // row_multiple * row_multiple
    starts_E = jnp.cumsum(sizes_E, dtype=jnp.int32) - sizes_E
    earlier = jnp.cumsum(mine, axis=0, dtype=jnp.int32) - 1  # slots of the same expert before
    rows = jnp.where(mine, starts_E[None] + earlier, 0).sum(axis=1, dtype=jnp.int32)
    S = num_rows(T * K, num_experts, row_multiple)
    tokens = jnp.arange(T * K, dtype=jnp.int32) // K
    here = flat < num_experts
    tokens_S = jnp.full(S, -1, jnp.int32).at[jnp.where(here, rows, S)].set(tokens, mode="drop")
    return tokens_S, jnp.where(here, rows, -1).reshape(T, K), sizes_E
