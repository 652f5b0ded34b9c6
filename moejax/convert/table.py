"""How the arrays of a model lie in the tensors of a Hugging Face checkpoint: a list of rules.

A `Rule` says of one of our arrays, in words, where each of its elements is:

    Rule("moe/experts/w_in", "mlp.experts.{expert}.{glu}_proj.weight",
         ours="expert in glu out", theirs="out in", glu=("gate", "up"))

The dims of `ours` that stand in braces in the name count tensors; the others are dims of each one,
in the order of `theirs`, where brackets join dims that share one axis: "expert in (out glu)" is an
array [E, in, 2 out] whose last axis alternates gate and up. Both directions, and every slice of
either, follow from that.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import numpy as np

Index = tuple[slice, ...]


@dataclass(frozen=True)
class Rule:
    """Where one of our arrays is."""

    path: str
    """Our array, e.g. "moe/w_router": within a layer, or within the model."""
    name: str
    """Their tensor, after "model.layers.{layer}." for one of a layer."""
    ours: str
    theirs: str
    names: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """What stands for 0, 1, ... of a dim in braces, where that is not the number."""

    def spread(self) -> tuple[str, ...]:
        """Returns our dims that count tensors."""
        return tuple(dim for dim in self.ours.split() if f"{{{dim}}}" in self.name)

    def axes(self) -> tuple[tuple[str, ...], ...]:
        """Returns the dims on each axis of a tensor."""
        groups = re.findall(r"\(([^)]*)\)|(\S+)", self.theirs)
        return tuple(tuple((joined or alone).split()) for joined, alone in groups)

    def check(self) -> None:
        """Raises ValueError where the two sides do not name the same dims."""
        flat = [dim for axis in self.axes() for dim in axis]
        left = [dim for dim in self.ours.split() if dim not in self.spread()]
        if sorted(flat) != sorted(left) or len(set(flat)) != len(flat):
            raise ValueError(f"rule {self.path}: {self.ours!r} is not {self.name} {self.theirs!r}")


@dataclass(frozen=True)
class Placed:
    """A rule with sizes: one layer's array, or one of the whole model."""

    rule: Rule
    prefix: str
    shape: tuple[int, ...]
    """Of our array."""

    def _sizes(self) -> dict[str, int]:
        return dict(zip(self.rule.ours.split(), self.shape, strict=True))

    def tensors(
        self, within: Mapping[str, range] | None = None
    ) -> Iterator[tuple[str, tuple[int, ...], dict[str, int]]]:
        """Yields (name, shape, number along each dim that counts tensors) of their tensors: of all,
        or of those with numbers within ranges."""
        sizes, spread = self._sizes(), self.rule.spread()
        shape = tuple(
            int(np.prod([sizes[dim] for dim in axis], dtype=np.int64)) for axis in self.rule.axes()
        )
        within = {dim: range(sizes[dim]) for dim in spread} if within is None else within
        for numbers in product(*(within[dim] for dim in spread)):
            at = dict(zip(spread, numbers, strict=True))
            words = {dim: self.rule.names.get(dim, range(sizes[dim]))[n] for dim, n in at.items()}
            yield self.prefix + self.rule.name.format(**words), shape, at

    def _inner(self) -> list[str]:
        return [dim for axis in self.rule.axes() for dim in axis]

    def _wanted(self, index: Index) -> dict[str, range]:
        return {
            dim: range(size)[part]
            for (dim, size), part in zip(self._sizes().items(), index, strict=True)
        }

    def chunk(self, max_elements: int, multiple: tuple[int, ...] = ()) -> tuple[int, ...]:
        """Returns the shape of a piece of our array that is some whole tensors of theirs, or some
        rows of one: of at most so many elements, if `multiple`, in whose multiples it is cut, is
        not larger.

        Only one dim is cut: the one that counts tensors if it is our first ("expert"), otherwise
        the first of theirs.
        """
        sizes, ours = self._sizes(), self.rule.ours.split()
        cut = ours[0] if ours[0] in self.rule.spread() else self._inner()[0]
        step = multiple[ours.index(cut)] if multiple else 1
        one = int(np.prod(self.shape, dtype=np.int64)) // sizes[cut]
        sizes[cut] = min(max(max_elements // one // step, 1) * step, sizes[cut])
        return tuple(sizes.values())

    def read(self, read: Any, index: Index, dtype: Any) -> np.ndarray:
        """Returns a slice of our array; `read(name)` gives one of their tensors, as a lazy array.

        Only what the slice needs is looked at.
        """
        ours, sizes, wanted = self.rule.ours.split(), self._sizes(), self._wanted(index)
        made = np.empty([len(wanted[dim]) for dim in ours], dtype)
        inner = self._inner()
        order = [inner.index(dim) for dim in ours if dim in inner]
        for name, _, at in self.tensors(wanted):
            viewed = read(name).reshape([sizes[dim] for dim in inner])
            part = viewed[tuple(_slice(wanted[dim]) for dim in inner)]
            target = tuple(wanted[dim].index(at[dim]) if dim in at else slice(None) for dim in ours)
            copy(made[target], part.transpose(order))
        return made

    def write(
        self, values: np.ndarray, index: Index | None = None
    ) -> Iterator[tuple[str, int, np.ndarray]]:
        """Yields (name, flat place of its first element, elements) of what a slice of our array
        holds of their tensors: of the whole array, or of a slice as `chunk` cuts them."""
        sizes, ours = self._sizes(), self.rule.ours.split()
        wanted = self._wanted((slice(None),) * len(ours) if index is None else index)
        inner = self._inner()
        for name, shape, at in self.tensors(wanted):
            source = tuple(wanted[dim].index(at[dim]) if dim in at else slice(None) for dim in ours)
            left = [dim for dim in ours if dim not in at]
            turned = values[source].transpose([left.index(dim) for dim in inner])
            made = np.empty(turned.shape, values.dtype)
            copy(made, turned)
            first = wanted[inner[0]]
            rows = len(first) * shape[0] // sizes[inner[0]]
            yield name, first.start * (made.size // len(first)), made.reshape(rows, *shape[1:])


COLUMNS = 16
"""Columns that `copy` turns into rows at a time: they then share the cache lines of the rows."""


def copy(target: np.ndarray, source: np.ndarray) -> None:
    """Copies values into another array of the same shape, eight times as fast as an assignment
    does where the order of the dims differs."""
    if target.dtype == source.dtype:  # bits are copied faster than what numpy does not know
        bits = np.dtype(f"u{target.dtype.itemsize}")
        target, source = target.view(bits), source.view(bits)
    if target.ndim < 2 or source.strides[-1] == source.dtype.itemsize:
        target[...] = source
        return
    for first in range(0, target.shape[-1], COLUMNS):
        at = (..., slice(first, first + COLUMNS))
        target[at] = source[at]


def _slice(numbers: range) -> slice:
    return slice(numbers.start, numbers.stop, numbers.step)
