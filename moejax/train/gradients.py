"""The gradients of a step: a scan over its microbatches, and what these gave beside gradients."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from moejax.core import collectives
from moejax.core.sharding import gathered
from moejax.model import mtp
from moejax.model.config import ModelConfig
from moejax.model.context import split_rows
from moejax.model.stream import Counts, Draw, Totals, count_batch
from moejax.train.auxes import by_layer, load_added, without
from moejax.train.loss import Losses, micro_loss, target_weights
from moejax.train.pipelined import pipelined_grads
from moejax.train.state import Layout, TrainState

Batch = dict[str, Array]


class Found(NamedTuple):
    """What one microbatch gave beside its gradients, or all of a step, stacked."""

    losses: Losses
    auxes: dict
    """Aux by stack (or further module) and block: floats."""
    chosen_tNK: Array | None
    """Experts [t, layers, K]; None where the model does not record them."""
    agreed_N: Array | None
    """Slots that chose the same experts when they were computed again, by layer; None where no
    layer is."""


def stored_to_used(layout: Layout, stored):
    """Returns what the layers read of the stored parameters, as this device's own: see `step`."""
    zero = layout.zero if layout.zero == 1 else 0
    own = collectives.vary(stored, layout.fold.all)
    return jax.tree.map(lambda w, dims: gathered(w, dims, layout.fold, zero), own, layout.dims)


def _weigh_targets(batch: Batch, mean: str, fold) -> tuple[Batch, Totals]:
    """Returns this rank's tokens of the batch with the weights of their targets, and the Totals,
    with the sum of all weights."""
    arrays = (batch["segment_ids"], batch["targets"])
    weights = jax.vmap(partial(target_weights, mean=mean))(*arrays)
    total = collectives.psum(weights.sum(), fold["dp"])
    counted = count_batch(*arrays, fold)._replace(targets=jnp.round(total))
    return split_rows(batch | {"weights": weights}, fold), counted


def _counts(micro: Batch, totals: Totals, fold) -> Counts:
    mine = jnp.sum(micro["segment_ids"] != 0, dtype=jnp.float32)
    return Counts(*totals, collectives.psum(mine, fold.batch))


def _found(cfg: ModelConfig, losses: Losses, auxes: dict, agreed_mN) -> Found:
    """Returns what all microbatches gave; auxes have them as their leading dim."""
    chosen = None
    if cfg.moe.router.record:
        chosen = jax.vmap(lambda a: by_layer(a, "experts").swapaxes(0, 1))(auxes)
    return Found(losses, without(auxes, "experts"), chosen, agreed_mN)


def sum_micro_grads(
    layout: Layout, weights, state: TrainState, batch: Batch, precision, mean: str, mtp_coeff: float
):
    """Returns (the gradients of the whole step, what its microbatches gave, stacked)."""
    fold, accum = layout.fold, precision.dtype("accum")
    key = jax.random.fold_in(state.key, state.step)
    model = layout.model(weights, state.buffers)
    cfg, scanned = model.cfg, model.scanned()
    further = [mtp.ahead(batch, by) for by in range(1, cfg.mtp_depth + 1)]
    batches, totals = zip(*(_weigh_targets(b, mean, fold) for b in (batch, *further)), strict=True)

    if layout.pipeline:
        grads, (losses, auxes, agreed_mN) = pipelined_grads(
            layout, layout.pipeline, weights, state, batches, totals, precision, mtp_coeff
        )
        return grads, _found(cfg, losses, auxes, agreed_mN)

    def add_micro(total, numbered):
        (sums, buffers), (micros, number) = total, numbered

        def loss(others, in_scans, probe_N):
            (micro, count), *further = (
                (m, _counts(m, total, fold)) for m, total in zip(micros, totals, strict=True)
            )
            draw = Draw(number, key, micro.get("routing"), probe_N, in_scans)
            model = layout.model(weights | others, buffers)
            return micro_loss(model, micro, count, draw, further, mtp_coeff)

        probe_N = None
        if cfg.remat == "full" and (layers := cfg.all_kinds().count("M")):
            probe_N = collectives.vary(jnp.zeros(layers, jnp.float32), fold.all)
        others = {name: w for name, w in weights.items() if name not in scanned}
        in_scans = {name: sums[name] for name in scanned}
        (_, (losses, auxes)), (grads, in_scans, agreed_N) = jax.value_and_grad(
            loss, argnums=(0, 1, 2), has_aux=True
        )(others, in_scans, probe_N)
        chosen = None
        if cfg.moe.router.record:
            chosen = by_layer(auxes, "experts").swapaxes(0, 1)
        sums = in_scans | {
            name: jax.tree.map(lambda s, g: s + g.astype(accum), sums[name], grads[name])
            for name in others
        }
        found = Found(losses, without(auxes, "experts"), chosen, agreed_N)
        return (sums, load_added(buffers, found.auxes, fold.tokens)), found

    zeros = jax.tree.map(lambda w: jnp.zeros(w.shape, accum), weights)
    first = (collectives.vary(zeros, fold.all), state.buffers)
    numbered = (batches, jnp.arange(batch["tokens"].shape[0], dtype=jnp.int32))
    if batch["tokens"].shape[0] == 1:  # no loop around what comes once
        (grads, _), found = add_micro(first, jax.tree.map(lambda a: a[0], numbered))
        return grads, jax.tree.map(lambda a: a[None], found)
    (grads, _), found = jax.lax.scan(add_micro, first, numbered)
    return grads, found
