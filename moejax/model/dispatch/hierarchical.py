"""Send each token once to every node that has experts of it, then once to each of their devices.

Hop 1 crosses nodes (the role ep_out), to the device with the same place in its node; hop 2 stays
inside one (ep_in). Both send exactly as many rows as there are, as "ragged" does. A row travels
with its token's K expert ids and weights: the second hop, and the sort by expert, read them there.
`combine` is the way back: each device adds up a row's experts, each node its devices' sums, and one
row a (token, node) crosses.

Rows that one device of n nodes, with m devices of ep in each, sends under an even load; h is the
number of nodes, r the number of devices, that a token's K experts are on:

                           across nodes        inside a node
    ragged, all_to_all     t K (n - 1) / n     t K (m - 1) / (n m)
    hierarchical           t h (n - 1) / n     t r (m - 1) / m

h is at most min(n, K), and at most the groups of experts that a router allows. Drawn evenly it is
n (1 - (1 - 1/n)^K) on average: K=8 over 8 nodes crosses 5.25 times, limited to 4 of them
(DeepSeek-V3) 3.6. There a row is 2 D + 8 K bytes (bfloat16; a choice is a weight and an id, both
float32), back it is 2 D.

Room: hop 1 receives n t rows at most, hop 2 and the experts ep t min(K, E/ep), as "ragged"; with a
budget, all of them `budget` times a balanced load of t K slots, where that is less. Where a device
would send or receive more, none of those rows are sent, they are counted, and the step is run again
with the worst case.

Example, two nodes of two devices, E=4, K=3: a token of device 0 with the experts 0, 2 and 3 stays
there for expert 0, and crosses once, to device 2, for expert 2, which passes it on to device 3.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int

from moejax.core import collectives
from moejax.core.mesh import Fold
from moejax.core.precision import at_least_float32
from moejax.model.dispatch.base import (
    Dispatched,
    Dispatcher,
    Sorted,
    local_ids,
    row_weights,
    rows_from_each,
    sort_within,
    unsort_rows,
)
from moejax.model.dispatch.ragged import Tables, tables
from pallas_kernels import permute


class Room(NamedTuple):
    """Rows that a hop may send and receive."""

    sent: int
    received: int


class Hop(NamedTuple):
    """The way back over one hop."""

    sent: Sorted
    back: Tables


class Route(NamedTuple):
    """The way back."""

    outer: Hop
    inner: Hop
    received: Sorted


def rooms(
    num_tokens: int, top_k: int, num_experts: int, fold: Fold, budget: float
) -> tuple[Room, Room, int]:
    """Returns the rooms of hop 1 and hop 2, and the rows that the experts have room for.

    A hop has no more rows than the slots behind them, so what bounds slots bounds it too.
    """
    t, K, outer, inner = num_tokens, top_k, fold.degree("ep_out"), fold.degree("ep_in")
    ranks = outer * inner
    crossing = outer * rows_from_each(t, K, outer, outer, budget)
    slots = ranks * rows_from_each(t, K, num_experts, ranks, budget)
    forwarded = min(crossing * min(inner, K), slots)
    return (
        Room(t * min(outer, K), crossing),
        Room(forwarded, min(inner * crossing, slots)),
        fold.degree("etp") * slots,
    )


def _once(ranks_tK: Int[Array, "t K"], num_ranks: int) -> Int[Array, "t K"]:
    """Returns the ranks, with `num_ranks` (none) where the token named that rank before.

    >>> _once(jnp.array([[2, 0, 2, 3]]), 4)
    Array([[2, 0, 4, 3]], dtype=int32)
    """
    K = ranks_tK.shape[1]
    same_tKK = ranks_tK[:, :, None] == ranks_tK[:, None]
    before_1KK = (jnp.arange(K)[:, None] > jnp.arange(K)[None])[None]
    return jnp.where((same_tKK & before_1KK).any(axis=2), num_ranks, ranks_tK)


def _hop(arrays, num_ids: int, role: str, room: Room, fold: Fold):
    """Sends each row once to every rank of the role that has one of the row's ids.

    Returns ((rows, their ids counted from the receiver's first, weights), way back, rows too many).
    """
    x_tD, ids_tK, weights_tK = arrays
    axes, num_ranks = fold[role], fold.degree(role)
    here = num_ids // num_ranks
    ranks_tK = ids_tK // here  # num_ranks where the id is none
    order, sizes_r, unsent = sort_within(_once(ranks_tK, num_ranks), num_ranks, room.sent)
    there, back, excess = tables(sizes_r, room.received, axes)

    def send(a, empty):
        out = jnp.broadcast_to(jnp.asarray(empty, a.dtype), (room.received, a.shape[1]))
        return collectives.ragged_all_to_all(a, collectives.vary(out, fold.all), *there, axes)

    # Ids and weights go together, as numbers of one dtype that has all ids: one exchange less.
    wide, K = at_least_float32(weights_tK.dtype), ids_tK.shape[1]
    ids_sK = ids_tK[jnp.maximum(order.tokens_s, 0)].astype(wide)
    both = jnp.concatenate([permute(weights_tK.astype(wide), *order), ids_sK], axis=1)
    both = send(both, jnp.repeat(jnp.array([0, num_ids]), K))
    weights_rK, ids_rK = both[:, :K].astype(weights_tK.dtype), both[:, K:].astype(ids_tK.dtype)
    ids_rK = local_ids(ids_rK, collectives.axis_index(axes) * here, here)
    return (send(permute(x_tD, *order), 0), ids_rK, weights_rK), Hop(order, back), unsent + excess


def dispatch(
    x_tD, experts_tK, weights_tK, num_experts: int, fold: Fold, budget: float = 0.0
) -> Dispatched:
    """Returns rows sorted by local expert; at most ep * etp * t * min(K, E/ep) of them."""
    per_node, num_local = (num_experts // fold.degree(role) for role in ("ep_out", "ep"))
    t, K = experts_tK.shape
    first, second, rows = rooms(t, K, num_experts, fold, budget)
    sent = (x_tD, experts_tK, weights_tK)
    sent, outer, lost = _hop(sent, num_experts, "ep_out", first, fold)
    sent, inner, lost_inside = _hop(sent, per_node, "ep_in", second, fold)
    x_rD, ids_rK, weights_rK = (collectives.all_gather(a, fold["etp"]) for a in sent)
    received, sizes_e, excess = sort_within(ids_rK, num_local, rows)
    return Dispatched(
        permute(x_rD, *received), row_weights(weights_rK, received), sizes_e, sizes_e.sum(),
        lost + lost_inside + excess, Route(outer, inner, received),
    )  # fmt: skip


def combine(y_sD, route: Route, fold: Fold):
    """Returns each token's sum over its experts: on each device, then in each node, then here."""
    y_rD = collectives.psum_scatter(unsort_rows(y_sD, route.received), fold["etp"])
    for hop, axes in ((route.inner, fold["ep_in"]), (route.outer, fold["ep_out"])):
        out = collectives.vary(
            jnp.zeros((hop.sent.tokens_s.shape[0], y_rD.shape[1]), y_rD.dtype), fold.all
        )
        y_rD = unsort_rows(collectives.ragged_all_to_all(y_rD, out, *hop.back, axes), hop.sent)
    return y_rD


DISPATCHER = Dispatcher("hierarchical", dispatch, combine)
