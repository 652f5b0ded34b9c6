"""The gradients of a step by a pipeline schedule: what `gradients` does, played by `parallel`."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from moejax.core import collectives, params
from moejax.core.sharding import used_dtype
from moejax.model import balance
from moejax.model.context import spread_of
from moejax.model.stream import Counts, Draw
from moejax.model.transformer import Transformer
from moejax.parallel.chunks import Chunks
from moejax.parallel.pipeline import Ends, play
from moejax.parallel.stages import Pipeline
from moejax.parallel.units import Kind, Pass, Place, Units
from moejax.train.auxes import load_added
from moejax.train.loss import loss_of, nll_sums
from moejax.train.state import Layout, TrainState


class Microbatches:
    """The microbatches of a step, and of each again the tokens further ahead (see `mtp`)."""

    def __init__(self, layout: Layout, model: Transformer, batches, totals, key=None):
        self.layout, self.model, self.key = layout, model, key
        self.batches, self.totals = batches, totals
        count = lambda ids: jnp.sum(ids != 0, axis=(1, 2), dtype=jnp.float32)  # noqa: E731
        counted = [count(b["segment_ids"]) for b in batches]
        self.tokens_m = collectives.psum(counted, layout.fold.batch)

    def __len__(self) -> int:
        return self.batches[0]["tokens"].shape[0]

    def at(self, m) -> list[tuple[Any, Counts]]:
        """Returns (micro, its counts) of microbatch m: as it is, then of the tokens ahead."""
        return [
            (
                jax.tree.map(lambda a: lax.dynamic_index_in_dim(a, m, keepdims=False), batch),
                Counts(total.targets, total.tokens, total.documents, tokens_m[m]),
            )
            for batch, total, tokens_m in zip(self.batches, self.totals, self.tokens_m, strict=True)
        ]

    def make_pass(self, chunk, m, saved) -> Pass:
        """Returns what a forward or backward of microbatch m works on."""
        m = jnp.maximum(m, 0)
        micro, counts = self.at(m)[0]
        arrays = (micro["tokens"], micro["segment_ids"], micro["positions"])
        spread = spread_of(micro, self.layout.fold)
        draw = Draw(m, self.key, micro.get("routing"), spread=spread)
        stream, given_NtK = self.model.stream(*arrays, counts, draw)
        # As varying as what the layers make of it: then they need no copies of their own.
        made = Pass(chunk, m, saved, stream, given_NtK)
        return collectives.vary(made, self.layout.fold.all)

    @jax.named_scope("forward")
    def embed(self, m):
        """Returns the embeddings of microbatch m, on all ranks of pp alike."""
        return collectives.vary(self.model.embed(self._tokens(m)), self.layout.fold.all)

    @jax.named_scope("backward")
    def embed_back(self, dx, m):
        """Returns the gradient of the embedding, from that of what rank 0 was given."""
        fold = self.layout.fold
        if fold["pp"]:
            dx = jnp.where(collectives.axis_index(fold["pp"]) == 0, dx, 0)

        def look_up(embedding):
            model = self.replaced({"embedding": embedding})
            return collectives.vary(model.embed(self._tokens(m)), fold.all)

        return jax.vjp(look_up, params.partition(self.model)[1]["embedding"])[1](dx)[0]

    def replaced(self, others) -> Transformer:
        """Returns the model with other weights of these names."""
        _, weights, buffers = params.partition(self.model)
        return self.layout.model(weights | others, buffers)

    def _tokens(self, m):
        return lax.dynamic_index_in_dim(self.batches[0]["tokens"], m, keepdims=False)


def of_last_rank(x, fold):
    """Returns the last pipeline rank's x, on all."""
    if not fold["pp"]:
        return x
    last = collectives.axis_index(fold["pp"]) == fold.degree("pp") - 1
    return collectives.psum(jnp.where(last, x, 0), fold["pp"])


def _cotangent(cfg: balance.BalanceConfig):
    """Returns (aux of a unit, None's) -> the gradient of what it adds to the training loss."""

    def of(aux):
        zeros = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), aux)

        def added(aux):
            found = [balance.weighted(block, cfg).sum() for block in aux[0].values()]
            return sum(found[1:], found[0]) if found else jnp.zeros(())

        return jax.grad(added)(zeros)

    return of


def make_chunks(
    layout: Layout, pipeline: Pipeline, model: Transformer, num_micro: int, accum
) -> Chunks:
    """Returns the layers of this device."""
    cfg, fold = model.cfg, layout.fold
    _, weights, buffers = params.partition(model)
    names = [f"stack_{i}" for i in range(len(cfg.stacks()))]
    kinds = [
        Kind(name, *model.unit(name), kinds.upper().count("M"), _cotangent(cfg.moe.balance))
        for name, (kinds, _) in zip(names, cfg.stacks(), strict=True)
    ]
    own = {name: weights[name] for name in names}
    if layout.zero != 3:  # nothing is gathered: cast once a step, not for every microbatch
        own = {name: _cast(model, name, own[name]) for name in names}
    rank = collectives.axis_index(fold["pp"])
    mine = Place(*(jnp.asarray(a)[rank] for a in pipeline.places))
    units = Units(
        kinds, [own[n] for n in names], [buffers.get(n, {}) for n in names], fold, cfg.remat
    )
    return Chunks(units, pipeline.places, mine, num_micro, accum)


def _cast(model: Transformer, name: str, weights):
    """Returns a stack's weights in the dtypes in which they are used."""
    dims = params.dims_of(getattr(model, name))[0]
    cast = lambda w, dims: w.astype(used_dtype(w.dtype, dims[1:], model.precision))  # noqa: E731
    return jax.tree.map(cast, weights, dims)


def _by_unit(pipeline: Pipeline, k: int, tree, fold):
    """Returns arrays [microbatches, units, ...] from this rank's [microbatches + 1, slots, ...]."""
    units, count = pipeline.placement.units[k], pipeline.stacks[k][1]
    unit_s = jnp.asarray(units)[collectives.axis_index(fold["pp"])]
    unit_s = jnp.where(unit_s < 0, count, unit_s)

    def one(a):
        spread = jnp.zeros((a.shape[0] - 1, count + 1, *a.shape[2:]), a.dtype)
        return collectives.psum(spread.at[:, unit_s].set(a[:-1])[:, :count], fold["pp"])

    return jax.tree.map(one, tree)


class Tail:
    """What comes before the first layer and after the last, and the sums that it leaves.

    Its outer state is (gradients of all weights outside the stacks, (what `loss_of` gives beside
    the loss, slots that agreed) by microbatch, buffers of the further modules).
    """

    def __init__(
        self, micros: Microbatches, others, weights, state: TrainState, accum, mtp_coeff: float
    ):
        self.micros, self.others, self.weights, self.state = micros, others, weights, state
        self.accum, self.mtp_coeff, self.fold = accum, mtp_coeff, micros.layout.fold
        self.grad = jax.value_and_grad(self.loss, argnums=(0, 1, 2), has_aux=True)
        cfg, self.probe_N = micros.model.cfg, None
        if cfg.remat == "full" and cfg.mtp_depth and cfg.mtp_kind.upper() == "M":
            probe_N = jnp.zeros(cfg.all_kinds().count("M"), jnp.float32)
            self.probe_N = collectives.vary(probe_N, self.fold.all)

    def loss(self, others, x_tD, probe_N, m, buffers):
        """Returns what `loss_of` does, from the last rank's x."""
        (micro, count), *further = self.micros.at(m)
        model = self.micros.layout.model(self.weights | others, self.state.buffers | buffers)
        x_tD = model.final_norm(of_last_rank(x_tD, self.fold))
        draw = Draw(m, self.micros.key, micro.get("routing"), probe_N)
        return loss_of(model, x_tD, micro, count, draw, further, self.mtp_coeff)

    def start(self):
        """Returns the outer state before the first microbatch."""
        zeros = jax.tree.map(lambda w: jnp.zeros(w.shape, self.accum), self.others)
        first, buffers = jnp.zeros((), jnp.int32), self.state.buffers
        further = {name: node for name, node in buffers.items() if name.startswith("mtp")}
        x_tD = jax.eval_shape(self.micros.embed, first)
        (_, made), (_, _, agreed_N) = jax.eval_shape(
            self.grad, self.others, x_tD, self.probe_N, first, further
        )

        def empty(a):
            zeros = jnp.zeros((len(self.micros), *a.shape), a.dtype)
            return collectives.vary(zeros, tuple(a.manual_axis_type.varying))

        found = jax.tree.map(empty, (made, agreed_N))
        return collectives.vary(zeros, self.fold.all), found, further

    @jax.named_scope("forward")
    def leave(self, outer, x_tD, m):
        """Head and loss of microbatch m, forward and backward (see `Ends`)."""
        sums, found, buffers = outer
        (_, made), (grads, dx_tD, agreed_N) = self.grad(self.others, x_tD, self.probe_N, m, buffers)
        sums = jax.tree.map(self._add, sums, grads)
        put = lambda all_m, one: lax.dynamic_update_index_in_dim(all_m, one, m, 0)  # noqa: E731
        buffers = load_added(buffers, made[1], self.fold.tokens + self.fold["pp"])
        return (sums, jax.tree.map(put, found, (made, agreed_N)), buffers), dx_tD

    def arrive(self, outer, dx_tD, m):
        """The gradient of the embedding (see `Ends`)."""
        sums, *rest = outer
        d_embedding = self.micros.embed_back(dx_tD, m)
        summed = jax.tree.map(self._add, sums["embedding"], d_embedding)
        return sums | {"embedding": summed}, *rest

    def _add(self, total, d):
        return total + d.astype(self.accum)


def pipelined_grads(
    layout: Layout, pipeline: Pipeline, weights, state: TrainState, batches, totals, precision,
    mtp_coeff: float,
):  # fmt: skip
    """Returns (gradients of the whole step, (Losses, auxes, agreed) by microbatch).

    `batches`, `totals`: the batch, with the weights of its targets, and what is ahead, each with
    its counts over the step. auxes: {stack: {block: aux}}, [microbatches, units, ...].
    """
    fold, accum = layout.fold, precision.dtype("accum")
    key = jax.random.fold_in(state.key, state.step)
    model = layout.model(weights, state.buffers)
    micros = Microbatches(layout, model, batches, totals, key)
    chunks = make_chunks(layout, pipeline, model, len(micros), accum)
    stacks = [kind.name for kind in chunks.units.kinds]
    others = {name: w for name, w in weights.items() if name not in stacks}
    tail = Tail(micros, others, weights, state, accum, mtp_coeff)
    ends = Ends(micros.make_pass, micros.embed, tail.leave, tail.arrive)
    table = pipeline.table(len(micros))
    held, (sums, (made, agreed_mN), _) = play(table, chunks, ends, tail.start())
    losses, of_further = made
    auxes = {
        name: _by_unit(pipeline, k, held.auxes[k], fold) for k, name in enumerate(stacks)
    } | jax.tree.map(partial(_together, fold), of_further)
    grads = sums | dict(zip(stacks, held.sums, strict=True))
    layers = model.cfg.all_kinds().count("M")
    return grads, (losses, auxes, _agreed(pipeline, held.agreed, agreed_mN, layers, fold))


def _together(fold, a):
    """Returns, of what a further module gave on every rank of pp, the whole: floats are parts of a
    sum, whole numbers (experts) the same on all."""
    if jnp.issubdtype(a.dtype, jnp.integer):
        return of_last_rank(a, fold)
    return collectives.psum(a, fold["pp"])


def _agreed(pipeline: Pipeline, by_kind, of_further_mN, layers: int, fold):
    """Returns [microbatches, MoE layers]: slots that would choose the same experts again."""
    if by_kind is None or not layers:
        return None
    found = []
    for k, agreed in enumerate(by_kind):
        mine = _by_unit(pipeline, k, agreed, fold)
        found.append(mine.reshape(mine.shape[0], -1))
    agreed_mN = jnp.concatenate(found, axis=1)
    if of_further_mN is None:
        return agreed_mN
    more = collectives.psum(of_further_mN / fold.degree("pp"), fold["pp"])
    return jnp.concatenate([agreed_mN, more[:, agreed_mN.shape[1] :]], axis=1)


def pipelined_nll(layout: Layout, pipeline: Pipeline, model: Transformer, batch, total):
    """Returns the summed negative log-likelihood, in nats, of this row group's targets."""
    micros = Microbatches(layout, model, [batch], [total])
    chunks = make_chunks(layout, pipeline, model, len(micros), jnp.float32)

    def leave(outer, x_tD, m):
        targets_bL = micros.at(m)[0][0]["targets"]
        states = model.final_norm(of_last_rank(x_tD, layout.fold))
        (nll,) = nll_sums(model, [states], [targets_bL], [targets_bL >= 0])
        return outer + collectives.psum(nll, layout.fold.batch).astype(outer.dtype), x_tD

    ends = Ends(micros.make_pass, micros.embed, leave, lambda outer, dx, m: outer)
    table = pipeline.table(len(micros), name="forward")
    return play(table, chunks, ends, jnp.zeros((), jnp.float32))[1]
