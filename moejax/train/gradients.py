"""The gradients of a step: a scan over its microbatches, and what these gave beside gradients."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from moejax.core import collectives
from moejax.core.sharding import gathered
from moejax.model import mtp
from moejax.model.stream import Counts, Draw, Totals, count_batch
from moejax.train.loss import Losses, micro_loss, target_weights
from moejax.train.state import Layout, TrainState

Batch = dict[str, Array]


def _in_order(names: dict) -> list[str]:
    """Returns the names of stacks or blocks as the layers come: 2 before 10, "mtp_.." last."""
    return sorted(names, key=lambda name: (name.startswith("mtp"), len(name), name))


def by_layer(auxes: dict, name: str) -> Array:
    """Returns one aux of every MoE layer, stacked in the order of the layers: [layers, ...].

    A stack's have a leading dim of layers, a further module's have none.
    """
    found = []
    for stack in _in_order(auxes):
        each = [auxes[stack][block][name] for block in _in_order(auxes[stack])]
        if stack.startswith("mtp"):
            found += [a[None] for a in each]
        elif each:
            per_block = jnp.stack(each, axis=1)
            found.append(per_block.reshape(-1, *per_block.shape[2:]))
    return jnp.concatenate(found)


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


def _without(auxes: dict, name: str) -> dict:
    """Returns auxes that do not hold the entry of that name."""
    drop = lambda aux: {k: v for k, v in aux.items() if k != name}  # noqa: E731
    return {
        stack: {block: drop(aux) for block, aux in blocks.items()}
        for stack, blocks in auxes.items()
    }


def stored_to_used(layout: Layout, stored):
    """Returns what the layers read of the stored parameters, as this device's own: see `step`."""
    zero = layout.zero if layout.zero == 1 else 0
    own = collectives.vary(stored, layout.fold.all)
    return jax.tree.map(lambda w, dims: gathered(w, dims, layout.fold, zero), own, layout.dims)


def by_block(tree: dict, name: str) -> dict:
    """Returns {stack: {block: the entry of that name}} of the blocks that have one."""
    return {
        stack: {block: node[name] for block, node in blocks.items()}
        for stack, blocks in tree.items()
        if all(name in node for node in blocks.values()) and blocks
    }


def _load_added(buffers, auxes: dict, fold):
    """Returns the buffers with this microbatch's load added to that of those before it."""
    plain = by_block(auxes, "plain_load_E")
    if not plain:  # no loss reads it
        return buffers
    plain = collectives.psum(plain, fold.tokens)
    moes = by_block(buffers, "moe")
    return jax.tree.map(
        lambda moe, load: {"moe": moe | {"load_before": moe["load_before"] + load}},
        moes, plain, is_leaf=lambda node: "load_before" in node,
    )  # fmt: skip


def _weigh_targets(batch: Batch, mean: str, fold) -> tuple[Batch, Totals]:
    """Returns the batch with the weights of its targets, and the Totals, with their sum."""
    arrays = (batch["segment_ids"], batch["targets"])
    weights = jax.vmap(partial(target_weights, mean=mean))(*arrays)
    total = collectives.psum(weights.sum(), fold.batch)
    counted = count_batch(*arrays, fold)._replace(targets=jnp.round(total))
    return batch | {"weights": weights}, counted


def _counts(micro: Batch, totals: Totals, fold) -> Counts:
    mine = count_batch(micro["segment_ids"], micro["targets"], fold)
    return Counts(totals.targets, totals.tokens, totals.documents, mine.tokens)


def sum_micro_grads(
    layout: Layout, weights, state: TrainState, batch: Batch, precision, mean: str, mtp_coeff: float
):
    """Returns (the gradients of the whole step, what its microbatches gave, stacked)."""
    fold, accum = layout.fold, precision.dtype("accum")
    key = jax.random.fold_in(state.key, state.step)
    model = layout.model(weights, state.buffers)
    cfg, scanned = model.cfg, model.scanned()
    further = [mtp.ahead(batch, by) for by in range(1, cfg.mtp_depth + 1)]
    batches, totals = zip(
        *(_weigh_targets(b, mean, fold) for b in (batch, *further)), strict=True
    )

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
        if cfg.remat != "none" and (layers := cfg.all_kinds().count("M")):
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
        found = Found(losses, _without(auxes, "experts"), chosen, agreed_N)
        return (sums, _load_added(buffers, found.auxes, fold)), found

    zeros = jax.tree.map(lambda w: jnp.zeros(w.shape, accum), weights)
    first = (collectives.vary(zeros, fold.all), state.buffers)
    numbered = (batches, jnp.arange(batch["tokens"].shape[0], dtype=jnp.int32))
    if batch["tokens"].shape[0] == 1:  # no loop around what comes once
        (grads, _), found = add_micro(first, jax.tree.map(lambda a: a[0], numbered))
        return grads, jax.tree.map(lambda a: a[None], found)
    (grads, _), found = jax.lax.scan(add_micro, first, numbered)
    return grads, found
