"""One unit of a stage's layers: its forward, its backward, and the two ops of a split backward.

Of every kind (stack) a rank holds some units, parameters stacked by slot; here stands what one of
them computes, from weights read, gathered and cast where they are used. `chunks` has the order and
the memory.

A split backward (see `split`) gives the gradient of the unit's input, and what its weight op needs
beside what the forward saved. The weight op reads and gathers those weights again that it needs.

Outsiders need: `Kind`, `Pass`, `Place`, `places`, `Units`, `nth`.
"""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
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
from moejax.parallel.split import Split, split

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
    """What one forward, backward or weight op of a chunk works on."""

    chunk: Int[Array, ""]
    """-1: none in this tick."""
    micro: Int[Array, ""]
    saved: Int[Array, ""]
    """Slot of what the forward keeps."""
    stream: Stream
    given_NtK: Array | None
    """See `Draw.routing_bLNK`."""
    between: Int[Array, ""] | None = None
    """Slot of what the backward leaves for its weight op; None: it has none, and does it all."""


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
class Units:
    """The units of this device."""

    kinds: Sequence[Kind]
    params: Sequence[Any]
    """Of each kind, [slots, ...]: this rank's."""
    buffers: Sequence[Any]
    """Of each kind, [units, ...]."""
    fold: Fold
    remat: str
    trees: dict[int, Any] = dataclasses.field(default_factory=dict)
    """Of each kind, what its saved arrays are leaves of: that of the first trace, for every trace
    makes an equal one that JAX holds for another."""
    splits: dict[int, Split] = dataclasses.field(default_factory=dict)
    """Of each kind, its backward in two parts: also of the first trace, by which both run."""

    def no_loads(self, k: int):
        """Returns zeros for the loads, of each block of a unit, of the microbatches before."""
        return {
            name: jnp.zeros(node["moe"]["load_before"].shape[1:], jnp.float32)
            for name, node in self.buffers[k].items()
            if "moe" in node
        }

    @jax.named_scope("forward")
    def forward(self, k: int, x, place: Place, made: Pass, before):
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
    def backward(self, k: int, saved, dy, place: Place, made: Pass):
        """Returns (dx, gradients of the unit's parameters, slots that agreed)."""
        saved, before = saved
        known = (*self._inputs(k, place, made, before), made.stream)
        (dx, agreed), d_params = self._pull(k, known, saved, dy)
        return dx, d_params, agreed

    @jax.named_scope("backward")
    def input_backward(self, k: int, saved, dy, place: Place, made: Pass):
        """Returns (dx, what the weight op needs beside, slots that agreed)."""
        saved, before = saved
        known = (*self._inputs(k, place, made, before), made.stream)
        if k not in self.splits:
            self.splits[k] = split(partial(self._pull, k), known, saved, dy, self.fold.all)
        (dx, agreed), crossing = self.splits[k].run_first(known, saved, dy)
        return dx, crossing, agreed

    @jax.named_scope("backward")
    def weight_backward(self, k: int, saved, crossing, place: Place, made: Pass):
        """Returns the gradients of the unit's parameters."""
        saved, before = saved
        known = (*self._inputs(k, place, made, before), made.stream)
        return self.splits[k].run_second(known, saved, crossing)

    def _inputs(self, k: int, place: Place, made: Pass, before):
        """Returns (stored parameters with the probe, buffers with Inputs) of a unit."""
        kind = self.kinds[k]
        params = jax.tree.map(lambda a: nth(a, place.slot), self.params[k])
        buffers = jax.tree.map(lambda a: nth(a, place.unit), self.buffers[k])
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

    def _pull(self, k: int, known, saved, dy):
        """Returns ((dx, slots that agreed), gradients of the unit's parameters)."""
        kind, (stored, kept, stream) = self.kinds[k], known
        weights, pull = jax.vjp(kind.weights_of, stored)
        aux = jax.eval_shape(lambda x: kind.layer(weights, kept, x, stream, None)[1], dy)
        saved = jax.tree.unflatten(self.trees[k], saved)
        cotangents = (dy, collectives.vary(kind.cotangent(aux), self.fold.all))
        d_weights, dx = backward(kind.layer, weights, kept, saved, stream, cotangents, self.remat)
        ((d_params, (agreed, _)),) = pull(d_weights)
        return (dx, agreed), d_params


def nth(a, i):
    """Returns a[i] for an index i that is in range."""
    return lax.dynamic_index_in_dim(a, i, keepdims=False)
