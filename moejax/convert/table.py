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

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...], dict[str, int]]]:
        """Yields (name, shape, number along each dim that counts tensors) of their tensors."""
        sizes, spread = self._sizes(), self.rule.spread()
        shape = tuple(
            int(np.prod([sizes[dim] for dim in axis], dtype=np.int64)) for axis in self.rule.axes()
        )
        for numbers in product(*(range(sizes[dim]) for dim in spread)):
            at = dict(zip(spread, numbers, strict=True))
            words = {dim: self.rule.names.get(dim, range(sizes[dim]))[n] for dim, n in at.items()}
            yield self.prefix + self.rule.name.format(**words), shape, at

    def read(self, read: Any, index: Index, dtype: Any) -> np.ndarray:
        """Returns a slice of our array; `read(name)` gives one of their tensors, as a lazy array.

        Only what the slice needs is looked at.
        """
        ours, sizes = self.rule.ours.split(), self._sizes()
        wanted = {
            dim: range(size)[part] for (dim, size), part in zip(sizes.items(), index, strict=True)
        }
        made = np.empty([len(wanted[dim]) for dim in ours], dtype)
        inner = [dim for axis in self.rule.axes() for dim in axis]
        order = [inner.index(dim) for dim in ours if dim in inner]
        place = {dim: {n: i for i, n in enumerate(wanted[dim])} for dim in self.rule.spread()}
        for name, _, at in self.tensors():
            if any(n not in place[dim] for dim, n in at.items()):
                continue
            viewed = read(name).reshape([sizes[dim] for dim in inner])
            part = viewed[tuple(_slice(wanted[dim]) for dim in inner)]
            target = tuple(place[dim][at[dim]] if dim in at else slice(None) for dim in ours)
            made[target] = part.transpose(order).astype(dtype)
        return made

    def write(self, ours: np.ndarray, at: Mapping[str, int]) -> np.ndarray:
        """Returns one of their tensors, of our whole array; `at` as `tensors` gives it."""
        dims = self.rule.ours.split()
        part = ours[tuple(at[dim] if dim in at else slice(None) for dim in dims)]
        left = [dim for dim in dims if dim not in at]
        inner = [dim for axis in self.rule.axes() for dim in axis]
        turned = part.transpose([left.index(dim) for dim in inner])
        sizes = self._sizes()
        return turned.reshape(
            [int(np.prod([sizes[dim] for dim in axis])) for axis in self.rule.axes()]
        )


def _slice(numbers: range) -> slice:
    return slice(numbers.start, numbers.stop, numbers.step)
