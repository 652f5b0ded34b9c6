"""Send each slot to the device of its expert, exactly as many rows as there are.

The sizes are device values: every rank learns the [ep, ep] table of sizes by one small
all-gather, and `ragged_all_to_all` reads offsets from it. Only real rows travel. The receive buffer
has room for the worst case, ep * t * min(K, E/ep) rows, or with a budget for budget * t * K: where
a rank of the group would receive more, nothing is sent at all, the rows too many are counted, and
the step is run again with the worst case.
"""

from collections.abc import Callable
from functools import partial
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
    experts_of,
    row_weights,
    rows_from_each,
    unsort_rows,
)
from moejax.model.stack import travelled
from pallas_kernels import Tables, permute, sort_slots


class Route(NamedTuple):
    """The way back."""

    sent: Sorted
    received: Sorted
    there: Tables
    back: Tables


class Transport(NamedTuple):
    """What moves rows by such tables: "ragged" and "nvlink" differ in nothing else.

    send(x_tD, sent, weights_s, ids_s, no_id, there, back, rows, fold) -> (x_rD, weights_r, ids_r):
    the rows x_tD[sent.tokens_s] and what goes with them; ids of rows that nobody sends are `no_id`.
    give_back(y_rD, sent, there, back, fold) -> y_tD: each token's sum of the rows that come back.
    """

    send: Callable[..., tuple[Array, Array, Array]]
    give_back: Callable[..., Array]


def tables(
    sizes_r: Int[Array, " ep"], rows: int, axes: collectives.Axes
) -> tuple[Tables, Tables, Int[Array, ""]]:
    """Returns the tables there and back, from the rows this device sends to each rank along `axes`,
    and by how much what it receives exceeds `rows`."""
    me = collectives.axis_index(axes)
    sizes_rr = collectives.all_gather(sizes_r[None], axes)  # [sender, receiver]
    excess_r = jnp.maximum(sizes_rr.sum(axis=0, dtype=jnp.int32) - rows, 0)
    sizes_rr = jnp.where((excess_r > 0).any(), 0, sizes_rr)
    # Where a block starts at its sender, and at its receiver.
    sent_rr = jnp.cumsum(sizes_rr, axis=1, dtype=jnp.int32) - sizes_rr
    placed_rr = jnp.cumsum(sizes_rr, axis=0, dtype=jnp.int32) - sizes_rr
    there = Tables(sent_rr[me], sizes_rr[me], placed_rr[me], sizes_rr[:, me])
    back = Tables(placed_rr[:, me], sizes_rr[:, me], sent_rr[:, me], sizes_rr[me])
    return *travelled((there, back)), excess_r[me]


def _send(x_tD, sent, weights_s, ids_s, no_id, there: Tables, back: Tables, rows: int, fold: Fold):
    def send(a, empty):
        out = collectives.vary(jnp.full((rows, *a.shape[1:]), empty, a.dtype), fold.all)
        return collectives.ragged_all_to_all(a, out, *there, fold["ep"])

    x_rD, weights_r1 = send(permute(x_tD, *sent), 0), send(weights_s[:, None], 0)
    return x_rD, weights_r1[:, 0], send(ids_s[:, None], no_id)[:, 0]


def _give_back(y_rD, sent, there: Tables, back: Tables, fold: Fold):
    shape = sent.tokens_s.shape[0], y_rD.shape[1]
    out = collectives.vary(jnp.zeros(shape, y_rD.dtype), fold.all)
    return unsort_rows(collectives.ragged_all_to_all(y_rD, out, *back, fold["ep"]), sent)


def dispatch(
    transport: Transport,
    x_tD,
    experts_tK,
    weights_tK,
    num_experts: int,
    fold: Fold,
    budget: float = 0.0,
) -> Dispatched:
    """Returns rows sorted by local expert; at most ep * etp * t * min(K, E/ep) of them."""
    etp, num_ranks = fold["etp"], fold.degree("ep")
    num_local = num_experts // num_ranks
    t, K = experts_tK.shape
    rows = num_ranks * rows_from_each(t, K, num_experts, num_ranks, budget)
    tokens_s, slots_tK, sizes_E = travelled(sort_slots(experts_tK, num_experts))
    sent = Sorted(tokens_s, slots_tK)
    sizes_r = sizes_E.reshape(num_ranks, num_local).sum(axis=1, dtype=jnp.int32)
    there, back, overflow = tables(sizes_r, rows, fold["ep"])
    row_s = jnp.arange(tokens_s.shape[0], dtype=jnp.int32)
    ends_E = jnp.cumsum(sizes_E, dtype=jnp.int32)
    expert_s = experts_of(ends_E, row_s)
    weights_s, ids_s = row_weights(weights_tK, sent), expert_s % num_local
    came = transport.send(x_tD, sent, weights_s, ids_s, num_local, there, back, rows, fold)
    x_rD, weights_r, ids_r = (collectives.all_gather(a, etp) for a in came)
    arrived, received = arrive(x_rD, ids_r[:, None], weights_r[:, None], num_local)
    return arrived._replace(overflow=overflow, route=Route(sent, received, there, back))


def combine(transport: Transport, y_sD, route: Route, fold: Fold):
    """Returns each token's sum over its experts."""
    y_rD = collectives.psum_scatter(unsort_rows(y_sD, route.received), fold["etp"])
    return transport.give_back(y_rD, route.sent, route.there, route.back, fold)


def dispatcher(name: str, transport: Transport) -> Dispatcher:
    """Returns the dispatcher that moves rows by `transport`."""
    return Dispatcher(name, partial(dispatch, transport), partial(combine, transport))


DISPATCHER = dispatcher("ragged", Transport(_send, _give_back))
