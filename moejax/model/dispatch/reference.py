"""The oracle: every device sees every token of its expert group, every expert computes them all.

Obvious and wasteful: E/ep times the FLOPs of a dense layer. A token that did not choose an expert
has weight 0 there.
"""

import jax.numpy as jnp

from moejax.core import collectives
from moejax.core.mesh import Fold
from moejax.model.balance import counts_tE
from moejax.model.dispatch.base import Dispatched, Dispatcher, local_ids


def dispatch(
    x_tD, experts_tK, weights_tK, num_experts: int, fold: Fold, budget: float = 0.0
) -> Dispatched:
    """Returns e copies of all gathered tokens, one an expert, weighted by the one-hot choice.
    No budget bounds them."""
    axes, num_local = fold["ep"] + fold["etp"], num_experts // fold.degree("ep")
    x_TD, experts_TK, weights_TK = (
        collectives.all_gather(a, axes) for a in (x_tD, experts_tK, weights_tK)
    )
    ids_TK = local_ids(experts_TK, collectives.axis_index(fold["ep"]) * num_local, num_local)
    weights_Te = jnp.stack(
        [
            counts_tE(ids_TK[:, k : k + 1], num_local, weights_TK.dtype) * weights_TK[:, k : k + 1]
            for k in range(ids_TK.shape[1])
        ]
    ).sum(axis=0)
    sizes_e = jnp.full((num_local,), x_TD.shape[0], jnp.int32)
    sizes_e = sizes_e + 0 * ids_TK[0, 0]  # as varying over the mesh as the rows are
    rows_sD, weights_s = jnp.tile(x_TD, (num_local, 1)), weights_Te.T.reshape(-1)
    num_slots = (ids_TK < num_local).sum()
    return Dispatched(rows_sD, weights_s, sizes_e, num_slots, 0 * num_slots, num_local)


def combine(y_sD, num_local: int, fold: Fold):
    """Returns the sum over experts, and over the devices that hold them, for this device's t."""
    y_TD = y_sD.reshape(num_local, -1, y_sD.shape[-1]).sum(axis=0)
    return collectives.psum_scatter(y_TD, fold["ep"] + fold["etp"])


DISPATCHER = Dispatcher("reference", dispatch, combine)
