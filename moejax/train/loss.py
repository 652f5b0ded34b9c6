"""The training loss: the mean cross-entropy over the targets of the *global* batch or, so that
short documents count as much as long ones, over its documents' means.

Each microbatch on each device gives a sum divided by global counts, so that adding up over
devices and microbatches is all it takes, whatever the fold. The vocabulary may be split over tp.

A model that predicts further tokens (`mtp`) is given each microbatch several times: as it is, then
one token ahead, two, ..., each with targets and counts of its own.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

from moejax.core import collectives
from moejax.model import balance
from moejax.model.context import spread_of
from moejax.model.stream import Counts, Draw, number_documents
from moejax.model.transformer import Transformer
from pallas_kernels import logit_stats

MEANS = ("token", "document")
Micro = dict[str, Shaped[Array, "b L ..."]]


def target_weights(
    segment_ids_bL: Int[Array, "b L"], targets_bL: Int[Array, "b L"], mean: str
) -> Float[Array, "b L"]:
    """Returns how much each target counts: 1, or 1 / those of its document (a piece, as packed)."""
    scored_bL = targets_bL >= 0
    if mean == "token":
        return scored_bL.astype(jnp.float32)
    document_S = number_documents(segment_ids_bL).reshape(-1)
    in_each_S = jax.ops.segment_sum(
        scored_bL.reshape(-1).astype(jnp.float32), document_S, num_segments=document_S.size
    )
    in_mine_bL = in_each_S[document_S].reshape(scored_bL.shape)
    return jnp.where(scored_bL, 1 / jnp.maximum(in_mine_bL, 1.0), 0.0)


def token_nll(
    model: Transformer, states: Sequence[Float[Array, "t D"]], targets: Sequence[Int[Array, "b L"]]
) -> list[Float[Array, " T"]]:
    """Returns the negative log-likelihoods, in nats, of each target of this row group: one array
    for each of the states and its targets. The head is gathered once for all of them."""
    fold = model.fold
    tp, vocab = fold["tp"], fold["vocab"]
    x_TD = jnp.concatenate([collectives.all_gather(x_tD, tp) for x_tD in states])
    w_Dv = model.head_weight()
    flat_T = jnp.concatenate([targets_bL.reshape(-1) for targets_bL in targets])
    target_T = collectives.vary(flat_T, fold.all)
    local_T = target_T - collectives.axis_index(vocab) * w_Dv.shape[1]
    lse_T, logit_T = logit_stats(x_TD, w_Dv, local_T, valid_vocab=model.tokens_here())
    peak_T = collectives.pmax(lse_T, vocab)
    lse_T = jnp.log(collectives.psum(jnp.exp(lse_T - peak_T), vocab)) + peak_T
    return jnp.split(lse_T - collectives.psum(logit_T, vocab), len(states))


def nll_sums(
    model: Transformer,
    states: Sequence[Float[Array, "t D"]],
    targets: Sequence[Int[Array, "b L"]],
    weights: Sequence[Shaped[Array, "b L"]],
) -> list[Float[Array, ""]]:
    """Returns the weighted sums of the negative log-likelihoods of this row group's targets, one
    for each of the states."""
    found = []
    for nll_T, weights_bL in zip(token_nll(model, states, targets), weights, strict=True):
        weight_T = weights_bL.reshape(-1).astype(nll_T.dtype)
        found.append(jnp.where(weight_T > 0, nll_T * weight_T, 0.0).sum())
    return found


class Losses(NamedTuple):
    """This microbatch's shares of what is reported, the same on every device."""

    nll: Float[Array, ""]
    """Cross-entropy of the next token."""
    mtp: Float[Array, ""]
    """Mean of the cross-entropies of the tokens after it; 0 where the model predicts none."""


@jax.named_scope("loss")
def micro_loss(
    model: Transformer,
    micro: Micro,
    counts: Counts,
    draw: Draw = Draw(),  # noqa: B008 - immutable
    further: Sequence[tuple[Micro, Counts]] = (),
    mtp_coeff: float = 0.0,
) -> tuple[Float[Array, ""], tuple[Losses, dict]]:
    """Returns (loss to differentiate, (Losses, aux by stack or further module, and block)).

    `micro["weights"]`: see `target_weights`; `counts.targets` is their sum over the step. `further`
    is the same for each module that predicts further tokens. All are this microbatch's shares of
    means over the step; the scalars are summed over devices. A step without a single target has
    loss 0.
    """
    draw = draw._replace(spread=spread_of(micro, model.fold))
    x_tD, auxes = model.hidden(*_inputs(micro), counts, draw)
    loss, (losses, more) = loss_of(model, x_tD, micro, counts, draw, further, mtp_coeff)
    extra = jnp.zeros((), loss.dtype)
    for aux in (aux for stack in auxes.values() for aux in stack.values()):
        extra += balance.weighted(aux, model.cfg.moe.balance).sum().astype(extra.dtype)
    return loss + collectives.psum(extra, model.fold.tokens), (losses, auxes | more)


def loss_of(
    model: Transformer,
    x_tD: Float[Array, "t D"],
    micro: Micro,
    counts: Counts,
    draw: Draw,
    further: Sequence[tuple[Micro, Counts]],
    mtp_coeff: float,
) -> tuple[Float[Array, ""], tuple[Losses, dict]]:
    """Returns what `micro_loss` does, from the states that the layers gave, normed, and without
    the layers' own losses. The states are the same on all ranks of pp."""
    fold, states, auxes = model.fold, [x_tD], {}
    for depth, (moved, count) in enumerate(further):
        draw = draw._replace(spread=spread_of(moved, fold))
        x_tD, auxes[f"mtp_{depth}"] = model.predict_ahead(
            depth, x_tD, *_inputs(moved), count, draw
        )
        states.append(x_tD)
    nll, *others = _mean_nlls(model, states, [(micro, counts), *further])
    ahead = sum(others, jnp.zeros_like(nll)) / max(len(further), 1)
    nll, ahead = collectives.psum((nll, ahead), fold.batch)
    loss = nll + mtp_coeff * ahead
    # Every rank of pp runs the further modules, so each counts its part of what they add.
    part = lambda a: a if jnp.issubdtype(a.dtype, jnp.integer) else a / fold.degree("pp")  # noqa: E731
    auxes = jax.tree.map(part, auxes)
    if auxes:
        extra = jnp.zeros((), nll.dtype)
        for aux in (aux for module in auxes.values() for aux in module.values()):
            extra += balance.weighted(aux, model.cfg.moe.balance).sum().astype(extra.dtype)
        loss += collectives.psum(extra, fold.tokens + fold["pp"])
    return loss, (Losses(nll, ahead), auxes)


def _inputs(micro: Micro) -> tuple[Array, Array, Array]:
    return micro["tokens"], micro["segment_ids"], micro["positions"]


def _mean_nlls(
    model: Transformer, states: Sequence[Array], micros: Sequence[tuple[Micro, Counts]]
) -> list[Float[Array, ""]]:
    """Returns this microbatch and row group's shares of the means over the step."""
    targets, weights = ([micro[name] for micro, _ in micros] for name in ("targets", "weights"))
    return [
        nll / jnp.maximum(counts.targets, 1.0).astype(nll.dtype)
        for nll, (_, counts) in zip(
            nll_sums(model, states, targets, weights), micros, strict=True
        )
    ]
