"""Memory of a pipeline schedule: which slot of which buffer each op writes and reads.

Allocation is static, so that the player's memory is that of the table. A slot is free again in the
very tick that reads it last: an op reads before the tick's results are kept. But for "merged",
whose forward and backward run layer by layer side by side: what it saves needs a slot more. All
ranks allocate what the fullest one needs.
"""

import dataclasses
from collections.abc import Iterable

import numpy as np
from jaxtyping import Int32

from moejax.parallel.table import Op, Schedule, after, before, done_at

Ticks = Int32[np.ndarray, "ticks pp"]


@dataclasses.dataclass(frozen=True)
class Buffer:
    """Slots 0..num-1 of one buffer, and slot `num` as the trash where there is nothing."""

    write: Ticks
    """The slot into which goes what is made, or arrives, at the end of each tick."""
    read: Ticks
    """The slot that the reading op of each tick reads."""
    num: int


@dataclasses.dataclass(frozen=True)
class Slots:
    """The buffers of a rank."""

    x_in: Buffer
    """Inputs of forwards that come from the stage before, from their arrival on."""
    dx_in: Buffer
    """Gradients that backwards start from, the loss's included, from their arrival on."""
    saved: Buffer
    """What a forward keeps for its backward (`read`) and its weight op (`read_weight`)."""
    read_weight: Ticks
    """Of `saved`: the slot that the weight op of each tick reads."""
    between: Buffer
    """What a backward leaves for its weight op."""


@dataclasses.dataclass(frozen=True)
class _Life:
    rank: int
    born: int
    reads: tuple[int, ...]
    """The tick of each reading op, in the order of the buffer's kinds of readers."""


def assign_slots(schedule: Schedule) -> Slots:
    """Returns the slots of all messages and of what ops leave for each other."""
    forward, backward, weight = (
        done_at(ops) for ops in (schedule.forward, schedule.backward, schedule.weight)
    )

    def arrival(op: Op) -> int:
        following = after(schedule, op)
        return forward[op] if following is None else backward[following]

    x_in = [
        _Life(op[0], forward[previous], (tick,))
        for op, tick in forward.items()
        if (previous := before(schedule, op)) is not None
    ]
    dx_in = [_Life(op[0], arrival(op), (tick,)) for op, tick in backward.items()]
    saved = [
        _Life(op[0], forward[op], (tick, weight[op]) if weight else (tick,))
        for op, tick in backward.items()
    ]
    between = [_Life(op[0], backward[op], (tick,)) for op, tick in weight.items()]
    kept, read_weight = _allocate(schedule, saved, int(schedule.name == "merged"))
    return Slots(
        _allocate(schedule, x_in)[0],
        _allocate(schedule, dx_in)[0],
        kept,
        read_weight,
        _allocate(schedule, between)[0],
    )


def _allocate(
    schedule: Schedule, lives: Iterable[_Life], rest: int = 0
) -> tuple[Buffer, Ticks]:
    """Returns the buffer that holds all lives, and the slots that their second readers read. A slot
    rests for so many ticks after its last reader's.

    The lowest free slot, in order of birth: for intervals that takes no more slots than are alive
    at once.
    """
    write, read, second = (np.full((schedule.ticks, schedule.pp), -1, np.int32) for _ in range(3))
    free_at: list[list[int]] = [[] for _ in range(schedule.pp)]  # of each slot: its last read
    for life in sorted(lives, key=lambda life: life.born):
        slots = free_at[life.rank]
        slot = next((i for i, tick in enumerate(slots) if tick <= life.born), len(slots))
        slots[slot : slot + 1] = [max(life.reads) + rest]
        write[life.born, life.rank] = slot
        for table, tick in zip((read, second), life.reads, strict=False):
            table[tick, life.rank] = slot
    num = max(map(len, free_at))
    for table in (write, read, second):
        table[table < 0] = num
    return Buffer(write, read, num), second
