"""A plan: a config on a cluster, with what it needs of a GPU's memory and of its time.

What made it, the compiler or the estimate, is written in it; everything that prints or compares
plans reads this one class.
"""

import dataclasses
from collections.abc import Iterable, Iterator

from moejax.config import Config
from moejax.model.flops import attention_flops, linear_flops_per_token
from moejax.plan.cost import seconds
from moejax.plan.estimate import Memory, room
from moejax.plan.guide import streams
from moejax.plan.hardware import Cluster
from moejax.plan.operations import COLLECTIVE, HOST, IDLE, MEMORY, Done, Event, Loop, Work
from moejax.plan.timeline import Timeline, simulate


@dataclasses.dataclass(frozen=True)
class Plan:
    """One train step on a cluster."""

    name: str
    config: Config
    cluster: Cluster
    num_gpus: int
    memory: Memory
    timeline: Timeline
    events: tuple[Event, ...]
    compiled: bool = False
    """Whether memory and events are the compiler's; else they are the estimate's."""
    again: Memory | None = None
    """Memory of the step that runs an overflowed batch again; None: not looked at."""
    live: tuple[tuple[str, str, float], ...] = ()
    """(kind, instruction and array, bytes) of the largest buffers at the peak, if compiled."""
    facts: tuple[tuple[str, str], ...] = ()
    """Further lines for a reader: seconds of the compile, its memory, ..."""

    @property
    def room(self) -> float:
        """Bytes of a GPU that a program may fill."""
        return room(self.cluster)

    @property
    def over(self) -> float:
        """Bytes by which the step exceeds the room; 0: it fits."""
        return max(self.memory.total - self.room, 0.0)

    @property
    def over_again(self) -> float:
        """The same of the step that runs an overflowed batch again; 0 where that was not asked."""
        return max(self.again.total - self.room, 0.0) if self.again else 0.0

    @property
    def fits(self) -> bool:
        """Whether all that was looked at fits."""
        return not self.over and not self.over_again

    @property
    def seconds(self) -> float:
        """Predicted length of a step."""
        return self.timeline.seconds

    @property
    def tokens(self) -> int:
        """Tokens of a step, of all GPUs together."""
        return self.config.train.batch_size * self.config.train.sequence_length

    @property
    def tokens_per_second(self) -> float:
        """Predicted, of one GPU."""
        return self.tokens / self.num_gpus / self.seconds

    @property
    def flops(self) -> float:
        """Model FLOP/s of one GPU (`moejax.model.flops`: recomputation is not counted)."""
        return model_flops(self.config) * self.tokens_per_second

    @property
    def utilization(self) -> float:
        """Share of the GPU's peak in the compute dtype (MFU)."""
        dtype = self.config.precision.compute_dtype
        return self.flops / self.cluster.peak("bfloat16" if dtype == "auto" else dtype)


def model_flops(config: Config) -> float:
    """Returns the model's FLOPs for a token, forward and backward, of whole rows."""
    length = config.train.sequence_length
    return linear_flops_per_token(config.model) + attention_flops(config.model, [length]) / length


def make_plan(
    config: Config, cluster: Cluster, num_gpus: int, memory: Memory, events: Iterable[Event]
) -> Plan:
    """Returns the plan of those events, played on the cluster."""
    events = tuple(events)
    timeline = simulate(events, cluster, streams(config))
    return Plan(config.name, config, cluster, num_gpus, memory, timeline, events)


def walk(events: Iterable[Event], times: float = 1.0) -> Iterator[tuple[Work, float]]:
    """Yields (work, how often a step does it) of all loops."""
    for event in events:
        if isinstance(event, Loop):
            yield from walk(event.body, times * event.times)
        elif not isinstance(event, Done):
            yield event.work, times


@dataclasses.dataclass(frozen=True)
class Traffic:
    """Collectives, or host copies, of one role in a step, on one GPU."""

    role: str
    collective: str
    phases: str
    size: int
    """GPUs of a group."""
    count: float
    bytes: float
    """Sent by a GPU; of a host copy: moved."""
    busy: float
    """Seconds."""
    exposed: float
    """Seconds in which the GPU waited for it."""


def traffic(plan: Plan) -> list[Traffic]:
    """Returns a row for each role, kind and size of collective, the most exposed first.

    What a step waits for work of one name, role and phase is shared out by the seconds it takes.
    """
    found: dict[tuple[str, str, int], list] = {}
    taken: dict[tuple[str, str, str, str], dict[tuple[str, str, int], float]] = {}
    for work, times in walk(plan.events):
        if work.kind not in (COLLECTIVE, HOST):
            continue
        at = (work.role or work.name, work.collective or "copy", work.group.size)
        spent = times * seconds(work, plan.cluster)
        row = found.setdefault(at, [set(), 0.0, 0.0, 0.0, 0.0])
        row[0].add(work.phase)
        row[1] += times
        row[2] += times * (work.wire or work.bytes)
        row[3] += spent
        shares = taken.setdefault((work.name, work.kind, work.role, work.phase), {})
        shares[at] = shares.get(at, 0.0) + spent
    for key, waited in plan.timeline.exposed.items():
        shares = taken.get(tuple(key), {})
        for at, spent in shares.items():
            found[at][4] += waited * spent / (sum(shares.values()) or 1.0)
    order = ("forward", "recompute", "backward", "update")
    rows = [
        Traffic(role, kind, ", ".join(p for p in order if p in phases), size, *numbers)
        for (role, kind, size), (phases, *numbers) in found.items()
    ]
    return sorted(rows, key=lambda row: (-row.exposed, -row.busy))


def label(name: str) -> str:
    """Returns what a reader sees of a name that `exposed` gives."""
    return "bound by memory" if name == MEMORY else name


def exposed(plan: Plan) -> list[tuple[str, float]]:
    """Returns (what, seconds) of a step: compute by kind of work, then what compute waited for."""
    compute: dict[str, float] = {}
    for key, value in plan.timeline.busy.items():
        if key.kind not in (COLLECTIVE, HOST, IDLE):
            compute[key.kind] = compute.get(key.kind, 0.0) + value
    waited: dict[str, float] = {}
    for key, value in plan.timeline.exposed.items():
        name = f"waiting: {key.role or key.name}"
        waited[name] = waited.get(name, 0.0) + value
    by_size = lambda table: sorted(table.items(), key=lambda pair: -pair[1])  # noqa: E731
    return by_size(compute) + by_size(waited)
