"""The layers of one tick: a chunk forward, and beside it one backward, of another microbatch.

Position by position: the forward takes its chunk's i-th unit while the backward takes its own from
the end. Both stand in one body, so that XLA's latency-hiding scheduler lays the all-to-alls of one
under the products of the other. What a forward keeps for its backward goes into a buffer whose
slots the schedule has given out beforehand, and so does what a split backward leaves for its weight
op; weights are never kept, they are read, gathered and cast again (`units`).

Where ranks, or chunks, differ in what they have at a position (a dense layer, a MoE layer, nothing,
no work in this tick), a `lax.switch` picks. In its branches stand collectives of other axes than
pp alone: ranks of one stage take the same branch. Reads of weights are inside, so that none is
copied; writes outside, so that what is written to is changed in place.
"""

import dataclasses
from functools import partial
from itertools import groupby, product
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from moejax.core import collectives
from moejax.parallel.units import NOTHING, Pass, Place, Units, nth


class Held(NamedTuple):
    """What layers leave behind: a tuple with an entry a kind, of trees with leading dims."""

    saved: tuple
    """[slots * positions + 1, ...] For the backward; the last is for what nobody needs."""
    between: tuple
    """Likewise, what a backward leaves for its weight op; None where it does both."""
    sums: tuple
    """[slots, ...] Gradients."""
    auxes: tuple
    """[microbatches + 1, slots, ...]"""
    agreed: tuple | None
    """[microbatches + 1, slots, M] See `Draw.probe_N`; None without recomputation."""
    before: tuple
    """{block: [slots, E]} Loads of the microbatches before."""


@dataclasses.dataclass(frozen=True)
class Chunks:
    """The layers of this device's chunks."""

    units: Units
    every: Place
    """Of all ranks, numpy."""
    mine: Place
    """This rank's."""
    num_micro: int
    accum: Any
    """dtype of sums of gradients."""

    @property
    def per_chunk(self) -> list[int]:
        """How many units of each kind the chunk with most of them has."""
        return [int((self.every.kind == k).sum(axis=-1).max()) for k in self._kinds]

    @property
    def _kinds(self) -> range:
        return range(len(self.units.kinds))

    def held(self, x, made: Pass, num_saved: int, num_between: int, with_backward: bool) -> Held:
        """Returns zeros for all that layers will leave behind."""
        units, none = self.units, jax.tree.map(lambda _: jnp.zeros((), jnp.int32), self.mine)
        abstract = [
            jax.eval_shape(partial(units.forward, k), x, none, made, units.no_loads(k))
            for k in self._kinds
        ]
        slots = [len(jax.tree.leaves(p)[0]) for p in units.params]
        agreed, zeros = None, self._zeros
        if units.remat == "full":
            agreed = tuple(
                zeros(jnp.zeros(kind.num_moe, jnp.float32), self.num_micro + 1, n)
                for kind, n in zip(units.kinds, slots, strict=True)
            )
        saved, between = [], []
        for (_, _, of_one), positions in zip(abstract, self.per_chunk, strict=True):
            rows = num_saved * positions + 1
            saved.append(zeros(of_one, rows) if with_backward else None)
        for k, positions in enumerate(self.per_chunk):
            crossing = self._crossing(k, x, made, saved[k]) if num_between else None
            between.append(zeros(crossing, num_between * positions + 1))
        return Held(
            tuple(saved),
            tuple(between),
            tuple(
                zeros(jax.tree.map(lambda a: jnp.zeros(a.shape, self.accum), p))
                for p in (units.params if with_backward else ())
            ),
            tuple(
                zeros(aux, self.num_micro + 1, n)
                for (_, aux, _), n in zip(abstract, slots, strict=True)
            ),
            agreed,
            tuple(zeros(units.no_loads(k), n) for k, n in enumerate(slots)),
        )

    def _zeros(self, tree, *leading):
        make = lambda a: jnp.zeros((*leading, *a.shape), a.dtype)  # noqa: E731
        return collectives.vary(jax.tree.map(make, tree), self.units.fold.all)

    def _crossing(self, k: int, x, made: Pass, saved):
        """Returns the shapes of what a unit's backward leaves for its weight op."""
        saved, place = jax.tree.map(lambda a: a[0], saved), self._at(made, 0)
        run = partial(self.units.input_backward, k)
        return jax.eval_shape(run, saved, self._zeros(x), place, made)[1]

    def run(self, x, dx, held: Held, f: Pass | None, b: Pass | None, idle: bool):
        """Returns (x through chunk f, the gradient dx through chunk b, held). `idle`: some rank
        may have no forward, or no backward, in a tick of this program. dx None: chunk b's weight
        op, in the place of its backward."""
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
        units = self.units
        operands = [x, dx, f_place, b_place, f, b, held, None, units.params, units.buffers]
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
        units = dataclasses.replace(self.units, params=params, buffers=buffers)
        forwards, backwards = options
        out_f = out_b = None
        ran_f, ran_b = ((), ())
        if b is not None and b_kind != NOTHING:
            if saved is None:
                saved = self._saved(b_kind, b, b_place, held)
            ran_b = self._back(units, b_kind, saved, dx, b_place, b, held)
        if f is not None and f_kind != NOTHING:
            before = _nth_of(held.before, f_kind, f_place)
            ran_f = units.forward(f_kind, x, f_place, f, before)
        if f is not None:
            no_f = partial(self._no_forward, units, f, held, x)
            out_f = self._filled(ran_f, f_kind, forwards, x, no_f)
        if b is not None:
            no_b = partial(self._no_backward, units, dx is not None and b.between is not None)
            out_b = self._filled(ran_b, b_kind, backwards, dx, no_b)
        return out_f, out_b

    def _back(self, units: Units, k: int, saved, dx, place: Place, b: Pass, held: Held):
        """Returns (dx, gradients or what crosses to the weight op, slots that agreed)."""
        if b.between is None:
            return units.backward(k, saved, dx, place, b)
        if dx is not None:
            return units.input_backward(k, saved, dx, place, b)
        at = b.between * self.per_chunk[k] + place.nth
        crossing = jax.tree.map(lambda a: nth(a, at), held.between[k])
        d_params = units.weight_backward(k, saved, crossing, place, b)
        return None, d_params, self._no_probe(units, k)

    def _saved(self, k: int, b: Pass, place: Place, held: Held):
        at = b.saved * self.per_chunk[k] + place.nth
        return jax.tree.map(lambda a: nth(a, at), held.saved[k])

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
        return collectives.vary(found, self.units.fold.all)

    def _no_forward(self, units: Units, f: Pass, held: Held, x, k: int):
        place = jax.tree.map(lambda _: jnp.zeros((), jnp.int32), self.mine)
        run = lambda: units.forward(k, x, place, f, _nth_of(held.before, k, place))[1:]  # noqa: E731
        return _zeros(jax.eval_shape(run))

    def _no_backward(self, units: Units, splits: bool, k: int):
        if splits:
            left = _zeros(units.splits[k].crossing)
        else:
            left = jax.tree.map(lambda a: jnp.zeros(a.shape[1:], a.dtype), units.params[k])
        return left, self._no_probe(units, k)

    @staticmethod
    def _no_probe(units: Units, k: int):
        return jnp.zeros(units.kinds[k].num_moe, jnp.float32) if units.remat == "full" else None

    @jax.named_scope("forward")
    def _keep_forward(self, out, f: Pass, place: Place, held: Held):
        (x, found), fold = out, self.units.fold
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
                load = collectives.vary(collectives.psum(load, fold.tokens), fold.all)
                load = jax.tree.map(partial(jnp.where, ran), load, _zeros(load))
                before[k] = jax.tree.map(partial(_add, place.slot), before[k], load)
        return x, held._replace(saved=tuple(saved), auxes=tuple(auxes), before=tuple(before))

    @jax.named_scope("backward")
    def _keep_backward(self, out, b: Pass, place: Place, held: Held):
        dx, found = out
        sums, between, agreed = list(held.sums), list(held.between), held.agreed
        for k, (left, slots_M) in found.items():
            ran = place.kind == k
            if dx is None or b.between is None:
                add = lambda s, d: jax.tree.map(partial(_add, place.slot), s, d)  # noqa: E731
                if len(found) == 1:
                    sums[k] = add(sums[k], left)
                else:  # those of other kinds are not touched
                    sums[k] = lax.cond(ran, add, lambda s, d: s, sums[k], left)
            else:
                trash = len(between[k][0]) - 1
                at = jnp.where(ran, b.between * self.per_chunk[k] + place.nth, trash)
                between[k] = jax.tree.map(partial(_put, at), between[k], left)
            if agreed is not None and dx is not None:
                micro = jnp.where(ran, b.micro, self.num_micro)
                new = _put_two(micro, place.slot, agreed[k], slots_M)
                agreed = (*agreed[:k], new, *agreed[k + 1 :])
        return dx, held._replace(sums=tuple(sums), between=tuple(between), agreed=agreed)


def _zeros(tree):
    return jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), tree)


def _nth_of(trees: tuple, k: int, place: Place):
    return jax.tree.map(lambda a: nth(a, place.slot), trees[k])


def _put(i, a, value):
    return lax.dynamic_update_index_in_dim(a, value.astype(a.dtype), i, 0)


def _put_two(i, j, a, value):
    starts = (i, j, *(jnp.zeros((), jnp.int32),) * value.ndim)
    return lax.dynamic_update_slice(a, value.astype(a.dtype)[None, None], starts)


def _add(i, sums, d):
    return _put(i, sums, nth(sums, i) + d.astype(sums.dtype))
