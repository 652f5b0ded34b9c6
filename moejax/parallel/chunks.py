"""The layers of one tick: a chunk forward, and beside it one backward, of another microbatch.

Position by position: the forward takes its chunk's i-th unit while the backward takes its own from
the end. Both stand in one body, so that XLA's latency-hiding scheduler lays the all-to-alls of one
under the products of the other. What a forward keeps for its backward goes into a buffer whose
slots the schedule has given out beforehand; weights are never kept, they are read, gathered and
cast again.

Where ranks, or chunks, differ in what they have at a position (a dense layer, a MoE layer, nothing,
no work in this tick), a `lax.switch` picks. In its branches stand collectives of other axes than
pp alone: ranks of one stage take the same branch. Reads of weights are inside, so that none is
copied; writes outside, so that what is written to is changed in place.
"""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from itertools import groupby, product
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Int

from moejax.core import collectives
from moejax.core.mesh import Fold
from moejax.model.block import Inputs
from moejax.model.stack import backward, forward
from moejax.model.stream import Stream
from moejax.parallel.layout import Placement

NOTHING = -1


@dataclasses.dataclass(frozen=True)
class Kind:
    """A stack of equal units as a stage sees it."""

    name: str
    layer: Callable
    weights_of: Callable
    """See `Transformer.unit`."""
    num_moe: int
    """MoE layers of a unit."""
    cotangent: Callable[[Any], Any]
    """aux -> what the training loss's gradient with respect to it is."""


class Pass(NamedTuple):
    """What one forward or backward of a chunk works on."""

    chunk: Int[Array, ""]
    """-1: none in this tick."""
    micro: Int[Array, ""]
    saved: Int[Array, ""]
    """Slot of what the forward keeps."""
    stream: Stream
    given_NtK: Array | None
    """See `Draw.routing_bLNK`."""


class Place(NamedTuple):
    """Where a chunk's unit is: ints, [chunks, positions], this rank's."""

    kind: Any
    """Index of the stack; -1: the chunk is shorter."""
    slot: Any
    """Of the parameters."""
    nth: Any
    """Which of its kind this is in its chunk."""
    unit: Any
    """Which of its stack: that of the buffers."""
    layer: Any
    """Number of its first MoE layer in the model."""


class Held(NamedTuple):
    """What layers leave behind: a tuple with an entry a kind, of trees with leading dims."""

    saved: tuple
    """[slots * positions + 1, ...] For the backward; the last is for what nobody needs."""
    sums: tuple
    """[slots, ...] Gradients."""
    auxes: tuple
    """[microbatches + 1, slots, ...]"""
    agreed: tuple | None
    """[microbatches + 1, slots, M] See `Draw.probe_N`; None without recomputation."""
    before: tuple
    """{block: [slots, E]} Loads of the microbatches before."""


def places(placement: Placement, stacks: Sequence[tuple[str, int]]) -> Place:
    """Returns the Place of every rank, numpy [pp, chunks, positions]."""
    longest = max(len(units) for rank in placement.chunks for units in rank)
    shape = (len(placement.chunks), len(placement.chunks[0]), max(longest, 1))
    found = Place(*(np.full(shape, fill, np.int32) for fill in (NOTHING, 0, 0, 0, 0)))
    moes = [kinds.upper().count("M") for kinds, _ in stacks]
    first = np.cumsum([0, *(m * count for m, (_, count) in zip(moes, stacks, strict=True))])
    for rank, chunks in enumerate(placement.chunks):
        for chunk, units in enumerate(chunks):
            seen = [0] * len(stacks)
            for position, (stack, slot) in enumerate(units):
                unit = int(placement.units[stack][rank, slot])
                number = int(first[stack]) + unit * moes[stack]
                values = (stack, slot, seen[stack], unit, number)
                for array, value in zip(found, values, strict=True):
                    array[rank, chunk, position] = value
                seen[stack] += 1
    return found


@dataclasses.dataclass(frozen=True)
class Chunks:
    """The layers of this device's chunks."""

    kinds: Sequence[Kind]
    params: Sequence[Any]
    """Of each kind, [slots, ...]: this rank's."""
    buffers: Sequence[Any]
    """Of each kind, [units, ...]."""
    every: Place
    """Of all ranks, numpy."""
    mine: Place
    """This rank's."""
    num_micro: int
    fold: Fold
    remat: str
    accum: Any
    """dtype of sums of gradients."""
    trees: dict[int, Any] = dataclasses.field(default_factory=dict)
    """Of each kind, what its saved arrays are leaves of: that of the first trace, for every trace
    makes an equal one that JAX holds for another."""

    @property
    def per_chunk(self) -> list[int]:
        """How many units of each kind the chunk with most of them has."""
        return [int((self.every.kind == k).sum(axis=-1).max()) for k in range(len(self.kinds))]

    def held(self, x, made: Pass, num_saved: int, with_backward: bool) -> Held:
        """Returns zeros for all that layers will leave behind."""
        nothing = jax.tree.map(lambda _: jnp.zeros((), jnp.int32), self.mine)
        abstract = [
            jax.eval_shape(partial(self._forward, k), x, nothing, made, self._before(k))
            for k in range(len(self.kinds))
        ]
        slots = [len(jax.tree.leaves(p)[0]) for p in self.params]

        def zeros(tree, *leading):
            make = lambda a: jnp.zeros((*leading, *a.shape), a.dtype)  # noqa: E731
            return collectives.vary(jax.tree.map(make, tree), self.fold.all)

        agreed = None
        if self.remat == "full":
            agreed = tuple(
                zeros(jnp.zeros(kind.num_moe, jnp.float32), self.num_micro + 1, n)
                for kind, n in zip(self.kinds, slots, strict=True)
            )
        per = zip(abstract, self.per_chunk, strict=True)
        return Held(
            tuple(
                zeros(saved, num_saved * positions + 1) if with_backward else None
                for (_, _, saved), positions in per
            ),
            tuple(
                zeros(jax.tree.map(lambda a: jnp.zeros(a.shape, self.accum), p))
                for p in (self.params if with_backward else ())
            ),
            tuple(
                zeros(aux, self.num_micro + 1, n)
                for (_, aux, _), n in zip(abstract, slots, strict=True)
            ),
            agreed,
            tuple(zeros(self._before(k), n) for k, n in enumerate(slots)),
        )

    def _before(self, k: int):
        """Zeros for the loads, of each block of a unit, of the microbatches before."""
        blocks = self.buffers[k]
        return {
            name: jnp.zeros(node["moe"]["load_before"].shape[1:], jnp.float32)
            for name, node in blocks.items()
            if "moe" in node
        }

    def run(self, x, dx, held: Held, f: Pass | None, b: Pass | None, idle: bool):
        """Returns (x through chunk f, the gradient dx through chunk b, held). `idle`: some rank
        may have no forward, or no backward, in a tick of this program."""
        positions = self.every.kind.shape[-1]
        sets = [self._options(self.every.kind, i, idle) for i in range(positions)]
        forwards = sets if f is not None else [()] * positions
        backwards = sets[::-1] if b is not None else [()] * positions
        pairs = list(zip(forwards, backwards, strict=True))
        if any(max(len(one), len(other)) > 1 for one, other in pairs):
            # One loop with a switch: every option at every position.
            every = [tuple(sorted(set().union(*s))) for s in (forwards, backwards)]
            pairs = [(every[0], every[1])] * positions
        start = 0
        for (one, other), group in groupby(pairs):
            count = len(list(group))
            step = partial(self._step, one, other, f, b)
            numbers = jnp.arange(start, start + count, dtype=jnp.int32)
            (x, dx, held), _ = lax.scan(step, (x, dx, held), numbers)
            start += count
        return x, dx, held

    @staticmethod
    def _options(kinds, position: int, idle: bool) -> tuple[int, ...]:
        found = set(kinds[..., position].ravel().tolist()) | ({NOTHING} if idle else set())
        return tuple(sorted(found))

    def _step(self, forwards, backwards, f: Pass | None, b: Pass | None, carry, i):
        """One position."""
        x, dx, held = carry
        last = self.every.kind.shape[-1] - 1
        f_place, b_place = (self._at(p, n) for p, n in ((f, i), (b, last - i)))
        options = list(product(forwards or (NOTHING,), backwards or (NOTHING,)))
        branches = [partial(self._pair, *option, (forwards, backwards)) for option in options]
        # As operands, not closed over: a branch knows its own arrays again by identity.
        operands = [x, dx, f_place, b_place, f, b, held, None, self.params, self.buffers]
        if len(branches) == 1:
            held, *operands[6:8] = self._read(options[0][1], b, b_place, held)
            out_f, out_b = branches[0](*operands)
        else:
            f_kind, b_kind = (NOTHING if p is None else p.kind for p in (f_place, b_place))
            wanted = [jnp.asarray((f_kind == one) & (b_kind == other)) for one, other in options]
            index = jnp.argmax(jnp.stack(wanted)).astype(jnp.int32)
            out_f, out_b = lax.switch(index, branches, *operands)
        if f is not None and f_place is not None:
            x, held = self._keep_forward(out_f, f, f_place, held)
        if b is not None and b_place is not None:
            dx, held = self._keep_backward(out_b, b, b_place, held)
        return (x, dx, held), None

    def _at(self, made: Pass | None, position) -> Place | None:
        """Returns the place, scalars, of a chunk's unit; its kind is -1 where there is no chunk."""
        if made is None:
            return None
        place = Place(*(a[jnp.maximum(made.chunk, 0), position] for a in self.mine))
        return place._replace(kind=jnp.where(made.chunk < 0, NOTHING, place.kind))

    def _pair(
        self, f_kind, b_kind, options, x, dx, f_place, b_place, f, b, held: Held, saved, params,
        buffers,
    ):  # fmt: skip
        """Returns what a forward of one kind and a backward of another give; for other kinds that
        a branch may have, zeros."""
        self = dataclasses.replace(self, params=params, buffers=buffers)
        forwards, backwards = options
        out_f = out_b = None
        ran_f, ran_b = ((), ())
        if b is not None and b_kind != NOTHING:
            if saved is None:
                saved = self._saved(b_kind, b, b_place, held)
            ran_b = self._backward(b_kind, saved, dx, b_place, b)
        if f is not None and f_kind != NOTHING:
            ran_f = self._forward(f_kind, x, f_place, f, _nth_of(held.before, f_kind, f_place))
        if f is not None:
            out_f = self._filled(ran_f, f_kind, forwards, x, partial(self._no_forward, f, held, x))
        if b is not None:
            out_b = self._filled(ran_b, b_kind, backwards, dx, self._no_backward)
        return out_f, out_b

    def _saved(self, k: int, b: Pass, place: Place, held: Held):
        at = b.saved * self.per_chunk[k] + place.nth
        return jax.tree.map(lambda a: _nth(a, at), held.saved[k])

    @jax.named_scope("backward")
    def _read(self, k: int, b: Pass | None, place: Place | None, held: Held):
        """Returns (held, held again, what the backward needs), the reading done before anything is
        written: XLA else copies the whole buffer, for it does not see that the slots differ."""
        if b is None or place is None or k == NOTHING:
            return held, held, None
        saved, every = lax.optimization_barrier((self._saved(k, b, place, held), held.saved[k]))
        held = held._replace(saved=(*held.saved[:k], every, *held.saved[k + 1 :]))
        return held, held, saved

    def _filled(self, ran, kind, options, unchanged, empty):
        """Returns (x, {kind: the rest}): of the kind that ran what it gave, of others zeros."""
        rest = {k: ran[1:] if k == kind else empty(k) for k in options if k != NOTHING}
        found = (ran[0] if ran else unchanged, rest)
        return collectives.vary(found, self.fold.all)

    def _no_forward(self, f: Pass, held: Held, x, k: int):
        place = jax.tree.map(lambda _: jnp.zeros((), jnp.int32), self.mine)
        run = lambda: self._forward(k, x, place, f, _nth_of(held.before, k, place))[1:]  # noqa: E731
        return _zeros(jax.eval_shape(run))

    def _no_backward(self, k: int):
        probe = jnp.zeros(self.kinds[k].num_moe, jnp.float32)
        unit = jax.tree.map(lambda a: jnp.zeros(a.shape[1:], a.dtype), self.params[k])
        return unit, (probe if self.remat == "full" else None)

    def _inputs(self, k: int, place: Place, made: Pass, before):
        """Returns (stored parameters with the probe, buffers with Inputs) of a unit."""
        kind = self.kinds[k]
        params = jax.tree.map(lambda a: _nth(a, place.slot), self.params[k])
        buffers = jax.tree.map(lambda a: _nth(a, place.unit), self.buffers[k])
        for name, load_E in before.items():
            moe = buffers[name]["moe"]
            moe = moe | {"load_before": moe["load_before"] + load_E}
            buffers = buffers | {name: buffers[name] | {"moe": moe}}
        given = None
        if made.given_NtK is not None and kind.num_moe:
            given = lax.dynamic_slice_in_dim(made.given_NtK, place.layer, kind.num_moe)
        probe = None
        if self.remat == "full":
            probe = collectives.vary(jnp.zeros(kind.num_moe, jnp.float32), self.fold.all)
        return (params, (probe, None)), (buffers, Inputs(place.layer, given, None))

    @jax.named_scope("forward")
    def _forward(self, k: int, x, place: Place, made: Pass, before):
        """Returns (y, aux with the experts chosen, what the backward needs)."""
        kind = self.kinds[k]
        stored, kept = self._inputs(k, place, made, before)
        y, (auxes, _), choices, saved = forward(
            kind.layer, kind.weights_of(stored), kept, x, made.stream, self.remat
        )
        auxes = {name: aux | {"experts": choices[name]} for name, aux in auxes.items()}
        leaves, tree = jax.tree.flatten(saved)
        self.trees.setdefault(k, tree)
        return y, auxes, (leaves, before)

    @jax.named_scope("backward")
    def _backward(self, k: int, saved, dy, place: Place, made: Pass):
        """Returns (dx, gradients of the unit's parameters, slots that agreed)."""
        kind, (saved, before) = self.kinds[k], saved
        stored, kept = self._inputs(k, place, made, before)
        weights, pull = jax.vjp(kind.weights_of, stored)
        aux = jax.eval_shape(partial(self._outputs, kind), weights, kept, dy, made.stream)
        saved = jax.tree.unflatten(self.trees[k], saved)
        cotangents = (dy, collectives.vary(kind.cotangent(aux), self.fold.all))
        d_weights, dx = backward(
            kind.layer, weights, kept, saved, made.stream, cotangents, self.remat
        )
        ((d_params, (agreed, _)),) = pull(d_weights)
        return dx, d_params, agreed

    @staticmethod
    def _outputs(kind: Kind, weights, kept, x, stream):
        return kind.layer(weights, kept, x, stream, None)[1]

    @jax.named_scope("forward")
    def _keep_forward(self, out, f: Pass, place: Place, held: Held):
        x, found = out
        saved, auxes, before = list(held.saved), list(held.auxes), list(held.before)
        for k, (aux, mine) in found.items():
            ran = place.kind == k
            if saved[k] is not None:
                trash = len(jax.tree.leaves(saved[k])[0]) - 1
                at = jnp.where(ran, f.saved * self.per_chunk[k] + place.nth, trash)
                saved[k] = jax.tree.map(partial(_put, at), saved[k], mine)
            micro = jnp.where(ran, f.micro, self.num_micro)
            auxes[k] = jax.tree.map(partial(_put_two, micro, place.slot), auxes[k], aux)
            if any("plain_load_E" in block for block in aux.values()):
                load = {name: block["plain_load_E"] for name, block in aux.items()}
                load = collectives.vary(collectives.psum(load, self.fold.tokens), self.fold.all)
                load = jax.tree.map(partial(jnp.where, ran), load, _zeros(load))
                before[k] = jax.tree.map(partial(_add, place.slot), before[k], load)
        return x, held._replace(saved=tuple(saved), auxes=tuple(auxes), before=tuple(before))

    @jax.named_scope("backward")
    def _keep_backward(self, out, b: Pass, place: Place, held: Held):
        dx, found = out
        sums, agreed = list(held.sums), held.agreed
        for k, (d_params, slots_M) in found.items():
            add = lambda s, d: jax.tree.map(partial(_add, place.slot), s, d)  # noqa: E731
            mine = place.kind == k if len(found) > 1 else True  # other kinds' are not touched
            sums[k] = lax.cond(mine, add, lambda s, d: s, sums[k], d_params)
            if agreed is not None:
                micro = jnp.where(place.kind == k, b.micro, self.num_micro)
                new = _put_two(micro, place.slot, agreed[k], slots_M)
                agreed = (*agreed[:k], new, *agreed[k + 1 :])
        return dx, held._replace(sums=tuple(sums), agreed=agreed)


def _zeros(tree):
    return jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), tree)


def _nth(a, i):
    return lax.dynamic_index_in_dim(a, i, keepdims=False)


def _nth_of(trees: tuple, k: int, place: Place):
    return jax.tree.map(lambda a: _nth(a, place.slot), trees[k])


def _put(i, a, value):
    return lax.dynamic_update_index_in_dim(a, value.astype(a.dtype), i, 0)


def _put_two(i, j, a, value):
    starts = (i, j, *(jnp.zeros((), jnp.int32),) * value.ndim)
    return lax.dynamic_update_slice(a, value.astype(a.dtype)[None, None], starts)


def _add(i, sums, d):
    return _put(i, sums, _nth(sums, i) + d.astype(sums.dtype))
