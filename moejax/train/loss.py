"""The training loss: mean cross-entropy over the valid tokens of the *global* batch.

Each microbatch on each device gives a sum divided by global counts, so that adding up over
devices and microbatches is all it takes, whatever the fold. The vocabulary may be split over tp.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from moejax.core import collectives
from moejax.core.mesh import Fold
from moejax.model import balance
from moejax.model.stream import Counts, Draw
from moejax.model.transformer import Transformer
from pallas_kernels import logit_stats

Micro = dict[str, Int[Array, "b L"]]


def nll_sum(
    model: Transformer, x_tD: Float[Array, "t D"], targets_bL: Int[Array, "b L"], fold: Fold
) -> Float[Array, ""]:
    """Returns the summed negative log-likelihood of this row group's targets (-1: none there)."""
    tp = fold["tp"]
    x_TD, w_Dv = collectives.all_gather(x_tD, tp), model.head_weight()
    target_T = collectives.vary(targets_bL.reshape(-1), fold.all)
    local_T = target_T - collectives.axis_index(tp) * w_Dv.shape[1]
    lse_T, logit_T = logit_stats(x_TD, w_Dv, local_T)
    peak_T = collectives.pmax(lse_T, tp)
    lse_T = jnp.log(collectives.psum(jnp.exp(lse_T - peak_T), tp)) + peak_T
    nll_T = lse_T - collectives.psum(logit_T, tp)
    return jnp.where(targets_bL.reshape(-1) >= 0, nll_T, 0.0).sum()


@jax.named_scope("loss")
def micro_loss(
    model: Transformer,
    micro: Micro,
    counts: Counts,
    draw: Draw = Draw(),  # noqa: B008 - immutable
) -> tuple[Float[Array, ""], tuple[Float[Array, ""], dict]]:
    """Returns (loss to differentiate, (cross-entropy part, aux by stack and block)).

    All are this microbatch's shares of means over the step; the scalars are summed over devices.
    A step without a single target has loss 0.
    """
    fold, inputs = model.fold, (micro["tokens"], micro["segment_ids"], micro["positions"])
    x_tD, auxes = model.hidden(*inputs, counts, draw)
    nll = nll_sum(model, x_tD, micro["targets"], fold)
    nll = collectives.psum(nll / jnp.maximum(counts.targets, 1.0).astype(nll.dtype), fold.batch)
    extra = jnp.zeros((), nll.dtype)
    for aux in (aux for stack in auxes.values() for aux in stack.values()):
        extra += balance.weighted(aux, model.cfg.moe.balance).sum().astype(extra.dtype)
    return nll + collectives.psum(extra, fold.tokens), (nll, auxes)
