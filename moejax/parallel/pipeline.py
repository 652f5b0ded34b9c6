"""The player: one loop over the ticks of any schedule (`schedule.Schedule`), on every rank alike.

In a tick each rank runs what its column of the table says: a chunk forward, a chunk backward, or
both, or the weight op of an earlier backward (`chunks`). Around that stands what all ranks do
together, and what may wait for all of them: the embedding of the microbatch that enters, head and
loss of the one that leaves, the gradient of the embedding, and the messages to the neighbours.
Where that is not the same in all ticks, a `lax.cond` decides by the table, alike on all ranks.

A run of ticks without any backward (the first), or any forward (the last), is a loop of its own,
whose program has no part for the other. What a loop has of each stands one after the other, weight
op, backward, forward, so that each reads before another writes; but in "merged" a forward beside
the backward of another microbatch. One rank alone, with one chunk, has no switch at all.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from moejax.core import collectives
from moejax.core.mesh import Fold
from moejax.parallel.chunks import Chunks, Held
from moejax.parallel.schedule import Schedule, Slots, assign_slots
from moejax.parallel.units import Pass


@dataclasses.dataclass(frozen=True)
class Ends:
    """What happens to a microbatch before the first layer and after the last."""

    make_pass: Callable[[Array, Array, Array], Pass]
    """(chunk, microbatch, slot) -> Pass."""
    enter: Callable[[Array], Array]
    """microbatch -> x_tD, on every rank."""
    leave: Callable[[Any, Array, Array], tuple[Any, Array]]
    """(outer, x_tD, microbatch) -> (outer, its gradient, or x itself): x, and the gradient, are
    those of the last rank, what others are given or give has no meaning."""
    arrive: Callable[[Any, Array, Array], Any]
    """(outer, gradient of what entered: of rank 0, microbatch) -> outer."""


class Row(NamedTuple):
    """A tick of the table: of each rank, but for the last three."""

    f_chunk: Any
    f_micro: Any
    f_saved: Any
    b_chunk: Any
    b_micro: Any
    b_saved: Any
    b_between: Any
    w_chunk: Any
    w_micro: Any
    w_saved: Any
    w_between: Any
    x_read: Any
    x_write: Any
    dx_read: Any
    dx_write: Any
    enters: Any
    """Microbatch that enters; -1: none."""
    leaves: Any
    arrives: Any


class Carry(NamedTuple):
    """Between ticks."""

    x_in: Array | None
    """[slots + 1, t, D] Messages from the stage before; None: there is one stage."""
    dx_in: Array | None
    held: Held
    outer: Any


def table_of(schedule: Schedule) -> tuple[Row, Slots]:
    """Returns the ticks as a Row of numpy arrays [ticks, pp] and [ticks], and the slots."""
    slots = assign_slots(schedule)
    f, b, w = schedule.forward, schedule.backward, schedule.weight
    last = schedule.vpp - 1
    at = lambda ops, rank, chunk: np.where(ops[:, rank, 0] == chunk, ops[:, rank, 1], -1)  # noqa: E731
    row = Row(
        f[..., 0], f[..., 1], slots.saved.write,
        b[..., 0], b[..., 1], slots.saved.read, slots.between.write,
        w[..., 0], w[..., 1], slots.read_weight, slots.between.read,
        slots.x_in.read, slots.x_in.write, slots.dx_in.read, slots.dx_in.write,
        at(f, 0, 0), at(f, -1, last), at(b, 0, 0),
    )  # fmt: skip
    row = Row(*(np.asarray(a, np.int32) for a in row))
    return row, slots


def play(schedule: Schedule, chunks: Chunks, ends: Ends, outer: Any) -> tuple[Held, Any]:
    """Returns (what the layers leave behind, what the ends did)."""
    rows, slots = table_of(schedule)
    fold, one_stage = chunks.units.fold, schedule.num_stages == 1
    trains = schedule.trains
    zero = jnp.zeros((), jnp.int32)
    x_tD = jax.eval_shape(ends.enter, zero)
    x_in, dx_in = (
        collectives.vary(jnp.zeros((num + 1, *x_tD.shape), x_tD.dtype), fold.all) if used else None
        for num, used in ((slots.x_in.num, not one_stage), (slots.dx_in.num, trains))
    )
    first = ends.make_pass(zero, zero, zero)
    held = chunks.held(x_tD, first, slots.saved.num, slots.between.num, trains)
    carry = Carry(x_in, dx_in, held, outer)
    for start, stop in _phases(rows):
        part = Row(*(a[start:stop] for a in rows))
        step = partial(_tick, schedule, chunks, ends, part)
        if stop - start == 1:
            carry = step(carry, Row(*(a[0] for a in part)))
        else:
            scanned = lambda c, row, step=step: (step(c, row), None)  # noqa: E731
            carry, _ = lax.scan(scanned, carry, jax.tree.map(jnp.asarray, part))
    return carry.held, carry.outer


def _phases(rows: Row) -> list[tuple[int, int]]:
    """Returns (first tick, tick after the last) of: forwards alone, all sorts, no forwards."""
    has_f, has_b = ((a >= 0).any(axis=1) for a in (rows.f_chunk, rows.b_chunk))
    ticks = len(has_f)
    begin = int(np.argmax(has_b)) if has_b.any() else ticks
    end = ticks - int(np.argmax(has_f[::-1]))
    cuts = sorted({0, min(begin, end), end, ticks})
    return [(a, b) for a, b in zip(cuts, cuts[1:], strict=False) if b > a]


def _tick(schedule: Schedule, chunks: Chunks, ends: Ends, part: Row, carry: Carry, row: Row):
    """One tick; `part` has all ticks of its loop, by which the program is made."""
    fold = chunks.units.fold
    rank = collectives.axis_index(fold["pp"])
    mine = Row(*(jnp.asarray(a)[rank] if a.ndim else jnp.asarray(a) for a in row))
    every = (part.f_chunk, part.b_chunk, part.w_chunk)
    has_f, has_b, has_w = (bool((a >= 0).any()) for a in every)
    idle = any(bool((a >= 0).any() and (a < 0).any()) for a in every)
    x = dx = f = b = None
    if has_f:
        f = ends.make_pass(mine.f_chunk, mine.f_micro, mine.f_saved)
        x = _input(part, mine, carry, ends, rank)
    if has_b:
        assert carry.dx_in is not None
        b = ends.make_pass(mine.b_chunk, mine.b_micro, mine.b_saved)
        b = b._replace(between=mine.b_between if schedule.splits else None)
        dx = lax.dynamic_index_in_dim(carry.dx_in, mine.dx_read, keepdims=False)
    held = carry.held
    if has_w:
        w = ends.make_pass(mine.w_chunk, mine.w_micro, mine.w_saved)
        w = w._replace(between=mine.w_between)
        _, _, held = chunks.run(None, None, held, None, w, idle)
    if schedule.name == "merged" or not (has_f and has_b):
        if has_f or has_b:
            x, dx, held = chunks.run(x, dx, held, f, b, idle)
    else:  # one after the other
        _, dx, held = chunks.run(None, dx, held, None, b, idle)
        x, _, held = chunks.run(x, None, held, f, None, idle)
    return _exchange(schedule, part, mine, ends, fold, rank, x, dx, carry._replace(held=held))


def _input(part: Row, mine: Row, carry: Carry, ends: Ends, rank):
    """Returns what this rank's forward starts from."""
    waiting = None
    if carry.x_in is not None:
        waiting = lax.dynamic_index_in_dim(carry.x_in, mine.x_read, keepdims=False)
    if not (part.enters >= 0).any():
        return waiting
    if waiting is None:
        return ends.enter(mine.enters)
    none = lambda m: waiting  # noqa: E731
    entered = _by_table(part.enters, mine.enters, ends.enter, none, mine.enters)
    return jnp.where((rank == 0) & (mine.f_chunk == 0), entered, waiting)


def _by_table(every: np.ndarray, micro, run, none, *operands):
    """Runs `run(*operands)` in the ticks that have a microbatch, else `none(*operands)`."""
    if (every >= 0).all():
        return run(*operands)
    if (every < 0).all():
        return none(*operands)
    # The planner reads from the name how often it is taken.
    with jax.named_scope(f"taken_{(every >= 0).sum()}_of_{len(every)}"):
        return lax.cond(micro >= 0, run, none, *operands)


def _exchange(schedule, part: Row, mine: Row, ends: Ends, fold: Fold, rank, x, dx, carry: Carry):
    """Head and loss, the gradient of the embedding, and the messages of a tick."""
    x_in, dx_in, outer = carry.x_in, carry.dx_in, carry.outer
    leaving = None
    if x is not None and (part.leaves >= 0).any():
        zeros = collectives.vary(jnp.zeros_like(x), fold.all)
        none = lambda outer, x, m: (outer, zeros)  # noqa: E731
        ran = _by_table(part.leaves, mine.leaves, ends.leave, none, outer, x, mine.leaves)
        outer, leaving = ran
    if dx is not None and (part.arrives >= 0).any():
        none = lambda outer, dx, m: outer  # noqa: E731
        outer = _by_table(part.arrives, mine.arrives, ends.arrive, none, outer, dx, mine.arrives)
    if x is not None and x_in is not None:
        x_in = _put(x_in, mine.x_write, collectives.shift(x, fold["pp"], 1))
    if dx_in is not None:
        message = None
        if dx is not None and schedule.num_stages > 1:
            message = collectives.shift(dx, fold["pp"], -1)
        if leaving is not None:
            own = (rank == schedule.pp - 1) & (mine.leaves >= 0)
            message = leaving if message is None else jnp.where(own, leaving, message)
        if message is not None:
            dx_in = _put(dx_in, mine.dx_write, message)
    return Carry(x_in, dx_in, carry.held, outer)


def _put(box, slot, message):
    return lax.dynamic_update_index_in_dim(box, message, slot, 0)
