"""Send each slot to the device of its expert in padded blocks, one a destination; and back.

A block holds C = t * min(K, E/ep) rows, the worst case, or with a budget C = budget * t * K / ep;
slots that find no room are counted, and the step is run again with the worst case. Rows travel with
their weight and their expert's local id; padding has the id that no expert has. Inside an etp
group, whose devices hold slices of the same experts, rows are gathered, and results reduced.

Example, ep=2, E=4, t=2, K=1, experts [[3], [0]]: sorted slots are token 1 (expert 0), token 0
(expert 3); block 0 is [token 1, -], block 1 is [token 0, -].
"""

import jax.numpy as jnp

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
from pallas_kernels import permute, sort_slots


def _blocks(experts_tK, num_experts: int, num_ranks: int, capacity: int):
    """Returns (order of the send buffer, local id of each of its rows, slots without room)."""
    num_local = num_experts // num_ranks
    tokens_s, slots_tK, sizes_E = sort_slots(experts_tK, num_experts)
    sizes_r = sizes_E.reshape(num_ranks, num_local).sum(axis=1, dtype=jnp.int32)
    starts_r = jnp.cumsum(sizes_r, dtype=jnp.int32) - sizes_r
    place_c = jnp.arange(capacity, dtype=jnp.int32)
    filled_rc = place_c[None] < sizes_r[:, None]
    row_rc = jnp.where(filled_rc, starts_r[:, None] + place_c[None], 0)
    tokens_rc = jnp.where(filled_rc, tokens_s[row_rc], -1)
    rank_tK = jnp.minimum(experts_tK // num_local, num_ranks - 1)
    sent_tK = rank_tK * capacity + slots_tK - starts_r[rank_tK]
    nowhere_tK = (slots_tK < 0) | (slots_tK - starts_r[rank_tK] >= capacity)
    order = travelled(Sorted(tokens_rc.reshape(-1), jnp.where(nowhere_tK, -1, sent_tK)))
    ends_E = jnp.cumsum(sizes_E, dtype=jnp.int32)
    expert_rc = experts_of(ends_E, row_rc)
    ids_rc = jnp.where(filled_rc, expert_rc % num_local, num_local)
    return order, ids_rc.reshape(-1), jnp.maximum(sizes_r - capacity, 0).sum()


def dispatch(
    x_tD, experts_tK, weights_tK, num_experts: int, fold: Fold, budget: float = 0.0
) -> Dispatched:
    """Returns rows sorted by local expert; at most ep * etp * C of them."""
    ep, etp, num_ranks = fold["ep"], fold["etp"], fold.degree("ep")
    num_local = num_experts // num_ranks
    t, K = experts_tK.shape
    capacity = rows_from_each(t, K, num_experts, num_ranks, budget)
    sent, ids_c, overflow = _blocks(experts_tK, num_experts, num_ranks, capacity)
    outgoing = (permute(x_tD, *sent), ids_c, row_weights(weights_tK, sent))
    x_cD, ids_c, weights_c = (
        collectives.all_gather(collectives.all_to_all(a, ep), etp) for a in outgoing
    )
    arrived, received = arrive(x_cD, ids_c[:, None], weights_c[:, None], num_local)
    return arrived._replace(overflow=overflow, route=(sent, received))


def combine(y_sD, route, fold: Fold):
    """Returns each token's sum over its experts."""
    sent, received = route
    y_cD = collectives.psum_scatter(unsort_rows(y_sD, received), fold["etp"])
    return unsort_rows(collectives.all_to_all(y_cD, fold["ep"]), sent)


DISPATCHER = Dispatcher("all_to_all", dispatch, combine)
