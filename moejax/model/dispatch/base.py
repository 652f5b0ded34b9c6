"""What every dispatcher shares: its contract, and the last step, sorting rows by local expert.

A dispatcher is two functions. `dispatch` brings each token to the devices of its experts and
returns rows sorted by local expert; `combine` brings the (weighted) expert outputs back and sums
them per token. What `combine` needs to know travels in `Dispatched.route`.
"""

from collections.abc import Callable
from math import ceil
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from moejax.core.mesh import Fold
from moejax.model.stack import travelled
from pallas_kernels import permute, sort_slots, unpermute


class Dispatched(NamedTuple):
    """Rows for this device's experts. Rows past `sizes_e.sum()` are zeros."""

    x_sD: Float[Array, "s D"]
    weights_s: Float[Array, " s"]
    sizes_e: Int[Array, " e"]
    num_slots: Int[Array, ""]
    """Slots that arrived here: summed over ep and edp they are all slots, or some were dropped."""
    overflow: Int[Array, ""]
    """Rows that the budget had no room for. Where any device has some, the step must not count."""
    route: Any
    """The way back: indices that `combine` reads."""


class Dispatcher(NamedTuple):
    """A pair of functions, chosen by name.

    dispatch(x_tD, experts_tK, weights_tK, num_experts, fold, budget=0.0) -> Dispatched
    combine(y_sD, route, fold) -> y_tD
    """

    name: str
    dispatch: Callable[..., Dispatched]
    combine: Callable[[Array, Any, Fold], Array]


class Sorted(NamedTuple):
    """Where each sorted row came from, and where each slot went (-1: nowhere)."""

    tokens_s: Int[Array, " s"]
    slots_tK: Int[Array, "t K"]


def row_weights(weights_tK: Float[Array, "t K"], order: Sorted) -> Float[Array, " s"]:
    """Returns the weight of each sorted row: weights[t, k] where slots[t, k] is that row.

    Written with `permute`, whose gradient is a gather: no scatter in the backward.
    """
    rows_s1 = jnp.arange(order.tokens_s.shape[0], dtype=order.slots_tK.dtype)[:, None]
    mine_sK = order.slots_tK[jnp.maximum(order.tokens_s, 0)] == rows_s1
    weights_sK = permute(weights_tK, order.tokens_s, order.slots_tK)
    return jnp.where(mine_sK, weights_sK, 0.0).sum(axis=1)


def experts_of(ends_E: Int[Array, " E"], rows: Int[Array, "..."]) -> Int[Array, "..."]:
    """Returns the experts whose sorted rows these are, where each expert's end there; E past all.

    Written as E comparisons a row: the search that halves is a loop of tiny kernels on a GPU.
    """
    return jnp.searchsorted(ends_E, rows, side="right", method="compare_all").astype(jnp.int32)


def sort_rows(
    x_tD: Float[Array, "t D"],
    experts_tK: Int[Array, "t K"],
    weights_tK: Float[Array, "t K"],
    num_experts: int,
) -> tuple[Float[Array, "s D"], Float[Array, " s"], Int[Array, " e"], Sorted]:
    """Returns rows sorted by expert (id `num_experts`: none), their weights, sizes, and order."""
    tokens_s, slots_tK, sizes_e = travelled(sort_slots(experts_tK, num_experts))
    order = Sorted(tokens_s, slots_tK)
    return permute(x_tD, tokens_s, slots_tK), row_weights(weights_tK, order), sizes_e, order


def sort_within(
    ids_tK: Int[Array, "t K"], num_ids: int, rows: int
) -> tuple[Sorted, Int[Array, " e"], Int[Array, ""]]:
    """Returns (order of `rows` rows sorted by id, sizes, by how many slots exceed the rows); where
    any do, no slot has a row and all sizes are 0."""
    tokens_s, slots_tK, sizes_e = sort_slots(ids_tK, num_ids)
    excess = jnp.maximum(sizes_e.sum(dtype=jnp.int32) - rows, 0)
    none = excess > 0
    order = Sorted(jnp.where(none, -1, tokens_s[:rows]), jnp.where(none, -1, slots_tK))
    return *travelled((order, jnp.where(none, 0, sizes_e))), excess


def arrive(x_tD, ids_tK, weights_tK, num_local: int) -> tuple[Dispatched, Sorted]:
    """Returns what `dispatch` returns, but for the route, and the order of the sorted rows."""
    x_sD, weights_s, sizes_e, order = sort_rows(x_tD, ids_tK, weights_tK, num_local)
    num_slots = sizes_e.sum()
    return Dispatched(x_sD, weights_s, sizes_e, num_slots, 0 * num_slots, order), order


def rows_from_each(
    num_tokens: int, top_k: int, num_experts: int, num_ranks: int, budget: float
) -> int:
    """Returns for how many rows, from each of the ranks of its ep group, a device has room.

    A balanced load is num_tokens * top_k rows from all of them together; the room is `budget` times
    that, and at most the worst case: from each rank every token, at each local expert it may have
    chosen. budget 0: the worst case.

    >>> rows_from_each(8, 2, 8, 4, 0), rows_from_each(8, 2, 8, 4, 1.5)
    (16, 6)
    """
    worst = num_tokens * min(top_k, num_experts // num_ranks)
    return min(worst, ceil(budget * num_tokens * top_k / num_ranks)) if budget else worst


def unsort_rows(y_sD: Float[Array, "s D"], order: Sorted) -> Float[Array, "t D"]:
    """Returns the sum of each token's rows (float32 accumulation, in the order of its slots)."""
    return unpermute(y_sD, order.slots_tK, order.tokens_s)


def local_ids(
    experts: Int[Array, "..."], first: Int[Array, ""] | int, num_local: int
) -> Int[Array, "..."]:
    """Returns expert ids counted from `first`; `num_local` for experts that are elsewhere."""
    ids = experts - first
    return jax.lax.select((ids >= 0) & (ids < num_local), ids, jnp.full_like(ids, num_local))
