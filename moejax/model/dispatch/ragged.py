"""Send each slot to the device of its expert, exactly as many rows as there are.

The sizes are device values: every rank learns the [ep, ep] table of sizes by one small
all-gather, and `ragged_all_to_all` reads offsets from it. Only real rows travel. The receive buffer
has room for the worst case, ep * t * min(K, E/ep) rows, or with a budget for budget * t * K: where
a rank of the group would receive more, nothing is sent at all, the rows too many are counted, and
the step is run again with the worst case.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int

from moejax.core import collectives
from moejax.core.mesh import Fold
from moejax.model.dispatch.base import (
    Dispatched,
    Dispatcher,
    Sorted,
    arrive,
    rows_from_each,
    sort_rows,
    unsort_rows,
)


class Tables(NamedTuple):
    """The four size tables of one `ragged_all_to_all`."""

    input_offsets: Int[Array, " ep"]
    send_sizes: Int[Array, " ep"]
    output_offsets: Int[Array, " ep"]
    recv_sizes: Int[Array, " ep"]


class Route(NamedTuple):
    """The way back."""

    sent: Sorted
    received: Sorted
    back: Tables


def _tables(
    sizes_r: Int[Array, " ep"], rows: int, fold: Fold
) -> tuple[Tables, Tables, Int[Array, ""]]:
    """Returns the tables there and back, from the rows this device sends to each rank, and by how
    much what it receives exceeds `rows`."""
    me = collectives.axis_index(fold["ep"])
    sizes_rr = collectives.all_gather(sizes_r[None], fold["ep"])  # [sender, receiver]
    excess_r = jnp.maximum(sizes_rr.sum(axis=0, dtype=jnp.int32) - rows, 0)
    sizes_rr = jnp.where((excess_r > 0).any(), 0, sizes_rr)
    # Where a block starts at its sender, and at its receiver.
    sent_rr = jnp.cumsum(sizes_rr, axis=1, dtype=jnp.int32) - sizes_rr
    placed_rr = jnp.cumsum(sizes_rr, axis=0, dtype=jnp.int32) - sizes_rr
    there = Tables(sent_rr[me], sizes_rr[me], placed_rr[me], sizes_rr[:, me])
    back = Tables(placed_rr[:, me], sizes_rr[:, me], sent_rr[:, me], sizes_rr[me])
    return there, back, excess_r[me]


def dispatch(
    x_tD, experts_tK, weights_tK, num_experts: int, fold: Fold, budget: float = 0.0
) -> Dispatched:
    """Returns rows sorted by local expert; at most ep * etp * t * min(K, E/ep) of them."""
    ep, etp, num_ranks = fold["ep"], fold["etp"], fold.degree("ep")
    num_local = num_experts // num_ranks
    t, K = experts_tK.shape
    rows = num_ranks * rows_from_each(t, K, num_experts, num_ranks, budget)
    x_sD, weights_s, sizes_E, sent = sort_rows(x_tD, experts_tK, weights_tK, num_experts)
    sizes_r = sizes_E.reshape(num_ranks, num_local).sum(axis=1, dtype=jnp.int32)
    there, back, overflow = _tables(sizes_r, rows, fold)
    row_s = jnp.arange(x_sD.shape[0], dtype=jnp.int32)
    ends_E = jnp.cumsum(sizes_E, dtype=jnp.int32)
    expert_s = jnp.searchsorted(ends_E, row_s, side="right").astype(jnp.int32)

    def send(a, empty):
        out = collectives.vary(jnp.full((rows, *a.shape[1:]), empty, a.dtype), fold.all)
        return collectives.all_gather(collectives.ragged_all_to_all(a, out, *there, ep), etp)

    x_rD, weights_r1 = send(x_sD, 0), send(weights_s[:, None], 0)
    ids_r1 = send((expert_s % num_local)[:, None], num_local)
    arrived, received = arrive(x_rD, ids_r1, weights_r1, num_local)
    return arrived._replace(overflow=overflow, route=Route(sent, received, back))


def combine(y_sD, route: Route, fold: Fold):
    """Returns each token's sum over its experts."""
    y_rD = collectives.psum_scatter(unsort_rows(y_sD, route.received), fold["etp"])
    out = collectives.vary(
        jnp.zeros((route.sent.tokens_s.shape[0], y_rD.shape[1]), y_rD.dtype), fold.all
    )
    y_sD = collectives.ragged_all_to_all(y_rD, out, *route.back, fold["ep"])
    return unsort_rows(y_sD, route.sent)


DISPATCHER = Dispatcher("ragged", dispatch, combine)
