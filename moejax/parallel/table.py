"""A pipeline schedule as a table, tick x rank -> what to run, and what makes such a table right.

Rank r of pp holds chunks 0..vpp-1 of the model; chunk c of rank r is stage c pp + r. In one tick a
rank runs at most one forward, one backward and one weight op, and then all ranks exchange: what a
rank makes in a tick reaches its neighbour for use at the next tick or later. Activations go to the
next rank, from the last one to the next chunk of rank 0; gradients the other way. The last stage's
forward makes the loss and its gradient, which arrives at that rank like a message at the end of the
tick; no other gradient may arrive there at the same tick.

Outsiders get all of this from `moejax.parallel.schedule`.
"""

import dataclasses

import numpy as np
from jaxtyping import Int32

Op = tuple[int, int, int]
"""(rank, chunk, microbatch)."""
Ops = Int32[np.ndarray, "ticks pp 2"]


@dataclasses.dataclass(frozen=True)
class Schedule:
    """A table; each of the three arrays holds (chunk, microbatch), or (-1, -1) for nothing."""

    name: str
    pp: int
    vpp: int
    microbatches: int
    forward: Ops
    backward: Ops
    """Makes the gradient of a stage's input and, where no op is in `weight`, of its weights."""
    weight: Ops
    """Makes the gradient of a stage's weights, in a later tick than its backward."""

    @property
    def ticks(self) -> int:
        return len(self.forward)

    @property
    def splits(self) -> bool:
        """Whether gradients of weights are made apart from those of inputs."""
        return bool((self.weight >= 0).any())

    @property
    def trains(self) -> bool:
        """Whether there are backwards."""
        return bool((self.backward >= 0).any())

    def stage(self, rank: int, chunk: int) -> int:
        return chunk * self.pp + rank

    @property
    def num_stages(self) -> int:
        return self.pp * self.vpp

    def limit(self, rank: int) -> int:
        """Returns how many (chunk, microbatch) pairs a rank may hold from forward to backward.

        1F1B and ZB-H1: pp - rank. Interleaved, and merged with any vpp: (vpp - 1) pp +
        2 (pp - rank - 1) + 1, which is Megatron-LM's interleaved warm-up (Narayanan et al. 2021)
        and the first forward after it. For schedules that train.
        """
        if self.vpp == 1 and self.name in ("1f1b", "zero_bubble"):
            return self.pp - rank
        return (self.vpp - 1) * self.pp + 2 * (self.pp - rank - 1) + 1

    def limit_held(self) -> int:
        """Returns how many pairs a rank may hold until their last use, the weight op's where there
        is one: what rank 0 may hold, for all ranks allocate the same."""
        return self.limit(0)


def done_at(ops: Ops) -> dict[Op, int]:
    """Returns the tick of each op of one kind. Raises ValueError for an op that runs twice."""
    found: dict[Op, int] = {}
    for tick, rank in np.argwhere(ops[:, :, 1] >= 0).tolist():
        op = (rank, *ops[tick, rank].tolist())
        if op in found:
            raise ValueError(f"{_shown(op)} runs at tick {found[op]} and at tick {tick}")
        found[op] = tick
    return found


def check(schedule: Schedule) -> None:
    """Raises ValueError, naming tick, rank and op, for a table that cannot be played.

    Every op once and after all that it needs, no more in flight than `Schedule.limit` and
    `Schedule.limit_held`, and no two gradients arriving at a rank at the same tick.
    """
    _check_arrays(schedule)
    forward, backward, weight = (
        done_at(ops) for ops in (schedule.forward, schedule.backward, schedule.weight)
    )
    every = [
        (rank, chunk, microbatch)
        for rank in range(schedule.pp)
        for chunk in range(schedule.vpp)
        for microbatch in range(schedule.microbatches)
    ]
    trains = schedule.name != "forward"
    splits = trains and (schedule.splits or schedule.name == "zero_bubble")
    for kind, found, wanted in (
        ("forward", forward, True),
        ("backward", backward, trains),
        ("weight", weight, splits),
    ):
        missing = [op for op in every if (op in found) != wanted]
        if missing:
            what = "never runs" if wanted else "runs in an evaluation"
            raise ValueError(f"{kind} of {_shown(missing[0])} {what}")
    for (kind, op, tick), needs in _needs(schedule, forward, backward, weight):
        for other_kind, other, other_tick in needs:
            if other_tick >= tick:
                raise ValueError(
                    f"tick {tick}: {kind} of {_shown(op)} needs the {other_kind} of "
                    f"{_shown(other)}, which runs at tick {other_tick}"
                )
    _check_arrivals(schedule)
    if schedule.trains:
        _check_flight(schedule)


def in_flight(schedule: Schedule, ends: Ops) -> Int32[np.ndarray, "ticks pp"]:
    """Returns how many pairs each rank holds after each tick: forward done, the op of `ends` not.

    Within a tick what ends makes room for what begins: an op of the tick reads before the tick's
    results are kept.
    """
    return np.cumsum((schedule.forward[:, :, 1] >= 0).astype(np.int32), 0, dtype=np.int32) - (
        np.cumsum((ends[:, :, 1] >= 0).astype(np.int32), 0, dtype=np.int32)
    )


def before(schedule: Schedule, op: Op) -> Op | None:
    """Returns the op of the stage before, same microbatch; None at the first stage."""
    rank, chunk, microbatch = op
    if rank > 0:
        return rank - 1, chunk, microbatch
    return (schedule.pp - 1, chunk - 1, microbatch) if chunk > 0 else None


def after(schedule: Schedule, op: Op) -> Op | None:
    """Returns the op of the stage after, same microbatch; None at the last stage."""
    rank, chunk, microbatch = op
    if rank < schedule.pp - 1:
        return rank + 1, chunk, microbatch
    return (0, chunk + 1, microbatch) if chunk < schedule.vpp - 1 else None


def _shown(op: Op) -> str:
    rank, chunk, microbatch = op
    return f"rank {rank}, chunk {chunk}, microbatch {microbatch}"


def _needs(schedule: Schedule, forward: dict, backward: dict, weight: dict):
    """Yields ((kind, op, tick), [(kind, op, tick) that it needs]) of all ops."""
    for op, tick in forward.items():
        previous = before(schedule, op)
        yield (
            ("forward", op, tick),
            ([("forward", previous, forward[previous])] if previous is not None else []),
        )
    for op, tick in backward.items():
        following = after(schedule, op)
        needs = [("forward", op, forward[op])]
        if following is not None:
            needs.append(("backward", following, backward[following]))
        yield ("backward", op, tick), needs
    for op, tick in weight.items():
        yield ("weight", op, tick), [("backward", op, backward[op])]


def _check_arrays(schedule: Schedule) -> None:
    shape = (schedule.ticks, schedule.pp, 2)
    for kind in ("forward", "backward", "weight"):
        ops = getattr(schedule, kind)
        if ops.shape != shape or ops.dtype != np.int32:
            raise ValueError(f"{kind} is {ops.dtype} {ops.shape}, it should be int32 {shape}")
        most = np.array([schedule.vpp, schedule.microbatches])
        bad = ((ops < -1) | (ops >= most)).any(-1) | ((ops < 0).any(-1) != (ops < 0).all(-1))
        if bad.any():
            tick, rank = np.argwhere(bad)[0].tolist()
            raise ValueError(
                f"tick {tick}, rank {rank}: {kind} of {tuple(ops[tick, rank].tolist())}, which is "
                f"no (chunk, microbatch) of {schedule.vpp} x {schedule.microbatches}"
            )


def _check_arrivals(schedule: Schedule) -> None:
    own = (schedule.forward[:, -1, 0] == schedule.vpp - 1) & schedule.trains
    both = own & (schedule.backward[:, 0, 0] > 0)
    if both.any():
        tick = int(np.argmax(both))
        raise ValueError(
            f"tick {tick}: rank {schedule.pp - 1} makes the loss's gradient of microbatch "
            f"{schedule.forward[tick, -1, 1]} while rank 0 sends it one, by its backward of chunk "
            f"{schedule.backward[tick, 0, 0]}, microbatch {schedule.backward[tick, 0, 1]}"
        )


def _check_flight(schedule: Schedule) -> None:
    limits = np.array([schedule.limit(rank) for rank in range(schedule.pp)])
    held = schedule.weight if schedule.splits else schedule.backward
    for ends, most, until in (
        (schedule.backward, limits, "backward"),
        (held, np.full(schedule.pp, schedule.limit_held()), "last use"),
    ):
        number = in_flight(schedule, ends)
        if (number > most).any():
            tick, rank = np.argwhere(number > most)[0].tolist()
            chunk, microbatch = schedule.forward[tick, rank].tolist()
            raise ValueError(
                f"tick {tick}: with the forward of {_shown((rank, chunk, microbatch))} "
                f"the rank holds {number[tick, rank]} until their {until}, more than {most[rank]}"
            )
