"""Pipeline schedules as tables, by name: what each rank runs at each tick.

    python -m moejax.parallel.schedule [--plot=OUT.png] NAME PP VPP MICROBATCHES

shows one, on the terminal or as a picture. The player is lockstep: all ranks exchange after each
tick, which costs the most that any rank runs in it. Of p = pp ranks with v = vpp chunks each, and
m microbatches, where a chunk's forward costs f = 1 and its backward 2, whole or as 1 + 1:

    name         v   a rank runs in a tick   a rank r keeps            lockstep time
    1f1b         1   F or B                  p - r                     4 m + 3 p - 4
                >1   F and B                 (v-1) p + 2 (p-r-1) + 1   3 (m v + p - 1)
    zero_bubble  1   F, B or W               p - r; p until W          3 m + p - 1
                >1   F, B or W               as 1f1b; its r=0 until W  3 m v + p - 1
    merged     any   F and B                 (v-1) p + 2 (p-r-1) + 1   3 (m v + p - 1)
    forward    any   F                       nothing                   m v + p - 1

With v > 1 and q = m % p > 0 add (v - 1) (p - q) times the cost of F and B, while the last group of
microbatches goes round. zero_bubble needs m >= p (2 p where v > 1) to be as short.

Where ranks wait for messages alone, 1f1b takes 3 (m + p - 1) (Narayanan et al. 2021): it is idle by
(p - 1) / m of its work, interleaved by (p - 1) / (v m). In lockstep the few microbatches that it
keeps for v=1 go round too slowly: of all tables of 2 to 4 ranks the shortest takes 4 m + 3 p - 5
(searched). With room for 2 (p - r) - 1, merged has 3 (m + p - 1); and with v > 1 so has 1f1b. Its
table is then that of merged, but the player runs the B and the F of a tick one after the other,
for merged at once. As a loss's gradient serves the tick after its forward, they are always of
different microbatches.

zero_bubble is ZB-H1 (Qi et al. 2024): idle by (p - 1) (F + B - W), a third of 1f1b's.

Outsiders need: `make`, `SCHEDULES`, `Schedule`, `check`, `assign_slots`, `Slots`, `Buffer`,
`lockstep_time`, `ideal_time`, `bubble_share`, `in_flight`.
"""

import dataclasses
import sys
from pathlib import Path

import numpy as np
from rich.console import Console

from moejax.parallel import picture
from moejax.parallel.bubble import bubble_share, ideal_time, lockstep_time
from moejax.parallel.slots import Buffer, Slots, assign_slots
from moejax.parallel.table import Op, Schedule, after, before, check, in_flight

__all__ = [
    "SCHEDULES",
    "Buffer",
    "Schedule",
    "Slots",
    "assign_slots",
    "bubble_share",
    "check",
    "ideal_time",
    "in_flight",
    "lockstep_time",
    "make",
]

SCHEDULES = ("1f1b", "zero_bubble", "merged", "forward")

Work = tuple[int, int]
"""(chunk, microbatch)."""
FORWARD, BACKWARD, WEIGHT = range(3)


def make(name: str, pp: int, vpp: int, microbatches: int) -> Schedule:
    """Returns the table of a schedule, checked. Raises ValueError for one that does not exist."""
    if name not in SCHEDULES:
        raise ValueError(f"no pipeline schedule {name!r}; choose one of {', '.join(SCHEDULES)}")
    if min(pp, vpp, microbatches) < 1:
        raise ValueError(
            f"no schedule of pp={pp}, vpp={vpp}, {microbatches} microbatches: each is 1 or more"
        )
    run = _Run(name, pp, vpp, microbatches)
    rows = []
    while run.left():
        rows.append(run.tick())
    table = np.array(rows, np.int32)  # [ticks, pp, kinds, 2]
    forward, backward, weight = (table[:, :, kind] for kind in (FORWARD, BACKWARD, WEIGHT))
    schedule = dataclasses.replace(run.empty, forward=forward, backward=backward, weight=weight)
    check(schedule)
    return schedule


def order(pp: int, vpp: int, microbatches: int) -> list[Work]:
    """Returns a rank's forwards in the order in which they run, the same on every rank.

    Megatron-LM's interleaved order: pp microbatches through one chunk, then the same through the
    next. What is left when pp does not divide the microbatches is a smaller group at the end.
    """
    return [
        (chunk, microbatch)
        for start in range(0, microbatches, pp)
        for chunk in range(vpp)
        for microbatch in range(start, min(start + pp, microbatches))
    ]


class _Run:
    """Plays a schedule's rules: each rank runs its ops in a fixed order, each as soon as it may.

    As orders and limits are those of a table known to exist (merged's; for vpp=1, 1F1B's), no rank
    waits for ever.
    """

    def __init__(self, name: str, pp: int, vpp: int, microbatches: int):
        none = np.zeros((0, pp, 2), np.int32)
        self.empty = Schedule(name, pp, vpp, microbatches, none, none, none)
        forwards = order(pp, vpp, microbatches)
        backwards = [(vpp - 1 - chunk, i) for chunk, i in forwards] if name != "forward" else []
        self.splits = name == "zero_bubble"
        self.orders = (forwards, backwards, backwards if self.splits else [])
        # With one op a tick: which goes first. Forwards first keeps what feeds the other ranks
        # going, and leaves weight ops for when a rank would wait.
        self.first: tuple[int, ...] = ()
        if self.splits:
            self.first = (FORWARD, BACKWARD, WEIGHT)
        elif name == "1f1b" and vpp == 1:
            self.first = (BACKWARD, FORWARD)
        self.done: tuple[set[Op], ...] = (set(), set(), set())
        self.counts = [[0, 0, 0] for _ in range(pp)]

    def left(self) -> bool:
        return any(list(map(len, self.orders)) != counts for counts in self.counts)

    def tick(self) -> list[list[Work]]:
        """Runs one tick; returns what each rank ran, by kind, (-1, -1) for nothing."""
        ran: list[list[Work | None]] = []
        for rank in range(self.empty.pp):
            ops: list[Work | None] = [None, None, None]
            ran.append(ops)
            for kind in self.first or (BACKWARD, FORWARD):
                may = self._ready(rank, kind)
                if kind == FORWARD and may is not None and not self._room(rank, may, ran):
                    may = None
                ops[kind] = may
                if may is not None and self.first:
                    break
        assert any(work for ops in ran for work in ops), (
            "no rank can go on: orders and limits clash"
        )
        for rank, ops in enumerate(ran):
            for kind, work in enumerate(ops):
                if work is not None:
                    self.done[kind].add((rank, *work))
                    self.counts[rank][kind] += 1
        return [[(-1, -1) if work is None else work for work in ops] for ops in ran]

    def _ready(self, rank: int, kind: int) -> Work | None:
        """Returns the rank's next op of a kind if all that it needs was made in earlier ticks."""
        at = self.counts[rank][kind]
        if at == len(self.orders[kind]):
            return None
        work = self.orders[kind][at]
        op = (rank, *work)
        if kind == WEIGHT:
            return work if op in self.done[BACKWARD] else None
        sender = before(self.empty, op) if kind == FORWARD else after(self.empty, op)
        arrived = sender is None or sender in self.done[kind]
        return work if arrived and (kind == FORWARD or op in self.done[FORWARD]) else None

    def _room(self, rank: int, forward: Work, ran: list[list[Work | None]]) -> bool:
        """Whether the rank may keep one more, and its loss's gradient arrives alone."""
        if not self.orders[BACKWARD]:
            return True
        forwards, backwards, weights = self.counts[rank]
        backwards += ran[rank][BACKWARD] is not None
        held = forwards - (weights if self.splits else backwards)
        if forwards - backwards >= self.empty.limit(rank) or held >= self.empty.limit_held():
            return False
        sent = ran[0][BACKWARD]
        arrives = sent is not None and sent[0] > 0
        return not (arrives and (rank, forward[0]) == (self.empty.pp - 1, self.empty.vpp - 1))


def main(arguments: list[str]) -> int:
    """Shows the schedule that the arguments name; returns the exit status."""
    plots = [a.removeprefix("--plot=") for a in arguments if a.startswith("--plot=")]
    rest = [a for a in arguments if not a.startswith("--plot=")]
    try:
        name, *sizes = rest
        pp, vpp, microbatches = map(int, sizes)
        schedule = make(name, pp, vpp, microbatches)
    except ValueError as error:
        usage = "moejax.parallel.schedule [--plot=OUT.png] NAME PP VPP MICROBATCHES"
        print(f"usage: python -m {usage}\n{error}", file=sys.stderr)
        return 2
    for path in plots:
        picture.plot(schedule, Path(path))
    if not plots:
        picture.show(schedule, Console())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
