"""How a model's layers lie over the ranks of a pipeline, and in which order they run."""

import dataclasses
from collections.abc import Callable
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp

from moejax.core.mesh import ParallelConfig
from moejax.model.config import ModelConfig
from moejax.parallel import layout, schedule
from moejax.parallel.units import Place, places

CHOICES = ("1f1b", "merged", "zero_bubble")


@dataclasses.dataclass(frozen=True)
class Pipeline:
    """A model's stages. Hashable by what makes it: the model's stacks, the layout, the name."""

    stacks: tuple[tuple[str, int], ...]
    layout: layout.Layout
    schedule: str

    @cached_property
    def placement(self) -> layout.Placement:
        """Where units rest."""
        return layout.place(self.layout, self.stacks)

    @cached_property
    def places(self) -> Place:
        """Where the units of every rank's chunks are, numpy [pp, chunks, positions]."""
        return places(self.placement, self.stacks)

    @property
    def slots(self) -> tuple[tuple[int, ...], ...]:
        """For each stack, the unit in each slot of all ranks (`Transformer`'s `places`)."""
        return tuple(tuple(units.ravel().tolist()) for units in self.placement.units)

    def table(self, microbatches: int, *, name: str = "") -> schedule.Schedule:
        """Returns the schedule of so many microbatches; by default the configured one."""
        pp, vpp = self.layout.pp, self.layout.num_chunks
        return schedule.make(name or self.schedule, pp, vpp, microbatches)


def in_slots(pipeline: Pipeline, tree: Any) -> Any:
    """Returns a tree of parameters (or of what is like them: moments, gradients) with the leading
    dim of each stack's as ranks hold them, from that of the units in order. Empty slots get zeros.
    """

    def one(k: int, a):
        places = jnp.asarray(pipeline.slots[k])
        return jnp.where(places.reshape(-1, *(1,) * (a.ndim - 1)) >= 0, a[places], 0)

    return _by_stack(one, tree)


def in_units(pipeline: Pipeline, tree: Any) -> Any:
    """The inverse of `in_slots`."""

    def one(k: int, a):
        slots = pipeline.slots[k]
        return a[jnp.asarray([slots.index(unit) for unit in range(pipeline.stacks[k][1])])]

    return _by_stack(one, tree)


def _by_stack(change: Callable[[int, Any], Any], tree: Any) -> Any:
    def one(path, leaf):
        names = (key.key for key in path if isinstance(key, jax.tree_util.DictKey))
        stack = next((n for n in names if str(n).startswith("stack_")), None)
        return leaf if stack is None else change(int(stack.removeprefix("stack_")), leaf)

    return jax.tree_util.tree_map_with_path(one, tree)


def pipeline_of(parallel: ParallelConfig, model: ModelConfig) -> Pipeline | None:
    """Returns the pipeline of a configuration; None: one microbatch after the other, no stages.

    Raises ValueError for a layout that is not the model's, and for what stages cannot do.
    """
    pp, vpp, name = parallel.pp, parallel.vpp, parallel.schedule
    if name and name not in CHOICES:
        raise ValueError(f"parallel.schedule={name!r}: choose from {', '.join(CHOICES)}")
    if pp == 1 and name == "zero_bubble":
        raise ValueError(
            "parallel.schedule='zero_bubble' fills what ranks of pp would wait, and pp=1 has none: "
            "set pp too, or choose 1f1b or merged"
        )
    if pp == 1 and not name:
        return None
    size = model.num_layers, model.mtp_depth, pp
    if parallel.layout:
        stages = layout.parse(parallel.layout, *size, vpp)
    else:
        stages = layout.balanced(*size, vpp, stacks=model.stacks())
    return Pipeline(model.stacks(), stages, name or "1f1b")
