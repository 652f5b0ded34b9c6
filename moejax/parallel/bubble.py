"""How long a pipeline schedule takes, by two clocks, and how much of that ranks stand idle."""

from collections.abc import Callable

import numpy as np

from moejax.parallel.table import Op, Schedule, after, before


def lockstep_time(
    schedule: Schedule, forward: float = 1.0, backward: float = 2.0, weight: float = 1.0
) -> float:
    """Returns the time when all ranks wait for all others after each tick, as the player does.

    The costs are of one chunk: a forward, a whole backward, and the part of that which a split
    backward leaves to the weight op.
    """
    return float(_costs(schedule, forward, backward, weight).sum(-1).max(-1).sum())


def ideal_time(
    schedule: Schedule, forward: float = 1.0, backward: float = 2.0, weight: float = 1.0
) -> float:
    """Returns the time when a rank waits only for the messages that it needs, which take no time.

    Each rank runs its ops in the order of the ticks; within a tick its backward, its weight op,
    its forward. Costs as in `lockstep_time`.
    """
    costs = _costs(schedule, forward, backward, weight)
    free = [0.0] * schedule.pp
    ends: tuple[dict[Op, float], dict[Op, float], dict[Op, float]] = ({}, {}, {})
    tables = (schedule.forward, schedule.backward, schedule.weight)
    for tick in range(schedule.ticks):
        for rank in range(schedule.pp):
            for kind in (1, 2, 0):
                chunk, microbatch = tables[kind][tick, rank].tolist()
                if chunk < 0:
                    continue
                op = (rank, chunk, microbatch)
                # What a rank made itself is there before it is free again.
                needs = before(schedule, op) if kind == 0 else after(schedule, op)
                ready = ends[kind][needs] if kind < 2 and needs is not None else 0.0
                free[rank] = max(free[rank], ready) + float(costs[tick, rank, kind])
                ends[kind][op] = free[rank]
    return max(free)


def bubble_share(
    schedule: Schedule,
    forward: float = 1.0,
    backward: float = 2.0,
    weight: float = 1.0,
    clock: Callable[[Schedule, float, float, float], float] = lockstep_time,
) -> float:
    """Returns the share of the time by `clock` in which a rank, on average, runs nothing."""
    work = _costs(schedule, forward, backward, weight).sum() / schedule.pp
    return 1.0 - float(work) / clock(schedule, forward, backward, weight)


def _costs(schedule: Schedule, forward: float, backward: float, weight: float) -> np.ndarray:
    """Returns the cost of each op, float64 [ticks, pp, 3]."""
    each = np.array([forward, backward - weight * schedule.splits, weight])
    tables = (schedule.forward, schedule.backward, schedule.weight)
    return np.stack([ops[:, :, 1] >= 0 for ops in tables], -1) * each
