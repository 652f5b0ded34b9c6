"""Gather all tokens of the expert group, keep those that chose a local expert, reduce-scatter back.

Moves ep*etp times the tokens whatever K is: best on one device (nothing moves), for small groups,
and for K near E.
"""

from moejax.core import collectives
from moejax.core.mesh import Fold
from moejax.model.dispatch.base import Dispatched, Dispatcher, arrive, local_ids, unsort_rows


def dispatch(
    x_tD, experts_tK, weights_tK, num_experts: int, fold: Fold, budget: float = 0.0
) -> Dispatched:
    """Returns rows sorted by local expert; at most (tokens of the group) * K of them.

    They are here in any case, so no budget bounds them.
    """
    axes, num_local = fold["ep"] + fold["etp"], num_experts // fold.degree("ep")
    x_TD, experts_TK, weights_TK = (
        collectives.all_gather(a, axes) for a in (x_tD, experts_tK, weights_tK)
    )
    first = collectives.axis_index(fold["ep"]) * num_local
    ids_TK = local_ids(experts_TK, first, num_local)
    return arrive(x_TD, ids_TK, weights_TK, num_local)[0]


def combine(y_sD, order, fold: Fold):
    """Returns each token's sum over its experts, wherever they are."""
    return collectives.psum_scatter(unsort_rows(y_sD, order), fold["ep"] + fold["etp"])


DISPATCHER = Dispatcher("all_gather", dispatch, combine)
