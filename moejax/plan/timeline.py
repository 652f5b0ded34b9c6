"""A step's events played on the lanes of one GPU: how long it takes, and what it waits for.

    timeline = simulate(events, CLUSTERS["h100"])

The compute stream goes on while communication and host copies run beside it. Collectives run in the
order in which they are begun, on so many streams; those that run at once over the same link (NVLink
or the network) share it. Compute beside communication has fewer cores.
"""

import dataclasses
from collections.abc import Iterable
from math import inf
from typing import NamedTuple

from moejax.plan.cost import seconds
from moejax.plan.hardware import Cluster
from moejax.plan.operations import COLLECTIVE, HOST, IDLE, Done, Event, Loop, Run, Start, Work

COMPUTE, COMMUNICATION, COPIES = LANES = ("compute", "communication", "host")
BESIDE = 0.8
"""Speed of compute beside communication, which takes cores from it: DeepEP's 20 cores cost the
matmuls about 20 % (the Megatron Core MoE paper)."""


class Key(NamedTuple):
    """By what seconds are added up."""

    name: str
    kind: str
    role: str
    phase: str

    @staticmethod
    def of(work: Work) -> "Key":
        """Returns the key of a piece of work."""
        return Key(work.name, work.kind, work.role, work.phase)


class Span(NamedTuple):
    """Work with the seconds, from the start of its loop's body, between which it ran."""

    work: Work
    lane: str
    start: float
    end: float


@dataclasses.dataclass
class Timeline:
    """What playing a list of events gave."""

    seconds: float = 0.0
    """Length of it all."""
    spans: dict[str, tuple[Span, ...]] = dataclasses.field(default_factory=dict)
    """One turn of each loop's body in steady state, by the names of the loops around it, joined by
    "/"; "" has what is in no loop. A loop inside is one span."""
    busy: dict[Key, float] = dataclasses.field(default_factory=dict)
    """Seconds of work, on whichever lane."""
    exposed: dict[Key, float] = dataclasses.field(default_factory=dict)
    """Seconds that the compute stream waited for communication or a copy, or stood idle."""

    @property
    def compute(self) -> float:
        """Seconds in which the compute stream worked: all of them but the exposed ones."""
        return self.seconds - sum(self.exposed.values())

    def add(self, other: "Timeline", times: float) -> None:
        """Adds what a part of it gave, so many times; not its length."""
        self.spans |= other.spans
        for mine, theirs in ((self.busy, other.busy), (self.exposed, other.exposed)):
            for key, value in theirs.items():
                mine[key] = mine.get(key, 0.0) + times * value


@dataclasses.dataclass(eq=False)
class _Flow:
    """A collective or copy under way."""

    work: Work
    left: float
    """Seconds that it still takes, alone on its link."""
    begun: float | None = None
    """When it got a stream."""
    inherited: bool = False
    """From the turn before."""

    @property
    def far(self) -> bool:
        return self.work.group.size > self.work.group.local


class _Lane:
    """Streams beside compute."""

    def __init__(self, streams: int, flows: Iterable[_Flow] = ()):
        self.streams, self.now, self.flows = streams, 0.0, list(flows)
        self.ended: list[tuple[_Flow, float]] = []

    def advance(self, to: float) -> None:
        """Runs until that time."""
        while self.flows and self.now < to:
            self._step(to - self.now)
        self.now = max(self.now, to)

    def finish(self, flow: _Flow) -> float:
        """Returns when it is done, if nothing else is begun before."""
        while flow in self.flows:
            self._step(inf)
        return self.now

    def copy(self) -> "_Lane":
        """Returns the same lane again, whose future is its own."""
        again = _Lane(self.streams, (dataclasses.replace(flow) for flow in self.flows))
        again.now = self.now
        return again

    def empty_at(self) -> float:
        """Returns when all is done, if nothing else is begun."""
        again = self.copy()
        while again.flows:
            again._step(inf)
        return again.now

    def _step(self, most: float) -> None:
        """Runs until the first is done, at most so many seconds."""
        running = self.flows[: self.streams]
        sharing = [sum(other.far == flow.far for other in running) for flow in running]
        lengths = [flow.left * by for flow, by in zip(running, sharing, strict=True)]
        passed = min(most, *lengths)
        for flow, by in zip(running, sharing, strict=True):
            flow.begun = self.now if flow.begun is None else flow.begun
            flow.left -= passed / by
        self.now += passed
        if passed == min(lengths):
            first = self.flows.pop(lengths.index(passed))
            self.ended.append((first, self.now))


class _Player:
    """One GPU while a body is played."""

    def __init__(
        self, cluster: Cluster, path: str, lanes: dict[str, _Lane], started: dict[str, _Flow]
    ):
        self.cluster, self.path, self.now = cluster, path, 0.0
        self.lanes, self.started = lanes, started
        self.found, self.spans = Timeline(), []

    def play(self, events: Iterable[Event]) -> None:
        for event in events:
            match event:
                case Run(work):
                    self._run(work)
                case Start(work, key):
                    self.started[key] = self._begin(work)
                case Done(key):
                    self._wait(self.started.pop(key, None))
                case Loop():
                    self._loop(event)
        self.found.seconds = self.now
        spans = sorted(self.spans + self._beside(), key=lambda span: (span.start, span.lane))
        self.found.spans[self.path] = tuple(spans)

    def _beside(self) -> list[Span]:
        """Returns what ran, or still runs, on the other lanes, but for what the turn before began.
        """
        spans = []
        for name, lane in self.lanes.items():
            after = lane.copy()
            while after.flows:
                after._step(inf)
            spans += [
                Span(flow.work, name, flow.begun or 0.0, end)
                for flow, end in lane.ended + after.ended
                if not flow.inherited
            ]
        return spans

    def _busy(self, work: Work, length: float) -> None:
        key = Key.of(work)
        self.found.busy[key] = self.found.busy.get(key, 0.0) + length

    def _expose(self, work: Work, length: float) -> None:
        key = Key.of(work)
        self.found.exposed[key] = self.found.exposed.get(key, 0.0) + length

    def _run(self, work: Work) -> None:
        if work.kind in (COLLECTIVE, HOST):
            self._wait(self._begin(work))
            return
        length, start = seconds(work, self.cluster), self.now
        if work.kind == IDLE:
            self._expose(work, length)
        else:  # slower while there is communication
            self.lanes[COMMUNICATION].advance(start)
            talks = self.lanes[COMMUNICATION].empty_at() - start
            beside = min(length, talks * BESIDE)
            length = beside / BESIDE + length - beside
        self.now = start + length
        self._busy(work, length)
        self.spans.append(Span(work, COMPUTE, start, self.now))

    def _begin(self, work: Work) -> _Flow:
        lane = self.lanes[COPIES if work.kind == HOST else COMMUNICATION]
        flow = _Flow(work, seconds(work, self.cluster))
        lane.advance(self.now)
        lane.flows.append(flow)
        self._busy(work, flow.left)
        return flow

    def _wait(self, flow: _Flow | None) -> None:
        if flow is None:  # what is awaited was begun a turn ago, and this is the first
            return
        lane = self.lanes[COPIES if flow.work.kind == HOST else COMMUNICATION]
        lane.advance(self.now)
        end = lane.finish(flow)
        if end > self.now:
            self._expose(flow.work, end - self.now)
            self.now = end

    def _loop(self, loop: Loop) -> None:
        path = f"{self.path}/{loop.name}" if self.path else loop.name
        same = sum(known.partition("#")[0] == path for known in self.found.spans)
        path = f"{path}#{same + 1}" if same else path  # the second of a name, and so on
        streams = self.lanes[COMMUNICATION].streams
        inside = _steady(loop.body, self.cluster, path, streams)
        self.found.add(inside, loop.times)
        begun, self.now = self.now, self.now + loop.times * inside.seconds
        if inside.busy:  # drawn as one piece of what it mostly does
            most = max(inside.busy, key=lambda key: inside.busy[key])
            work = Work(loop.name, most.kind, most.phase, role=most.role)
            self.spans.append(Span(work, COMPUTE, begun, self.now))


def _idle(streams: int) -> dict[str, _Lane]:
    return {COMMUNICATION: _Lane(streams), COPIES: _Lane(1)}


def _steady(events: Iterable[Event], cluster: Cluster, path: str, streams: int) -> Timeline:
    """Returns the second turn of a loop's body: lanes, and work begun, as the first left them."""
    first = _Player(cluster, path, _idle(streams), {})
    first.play(events)
    for lane in first.lanes.values():
        lane.advance(first.now)
        lane.ended, lane.now = [], 0.0
        for flow in lane.flows:
            flow.begun, flow.inherited = 0.0, True
    second = _Player(cluster, path, first.lanes, first.started)
    second.play(events)
    return second.found


def simulate(events: Iterable[Event], cluster: Cluster, streams: int = 1) -> Timeline:
    """Returns the Timeline of a step, or of any other list of events.

    Collectives run on so many streams. A loop's body is played in steady state (the second turn)
    and counted as often as it runs.
    """
    player = _Player(cluster, "", _idle(streams), {})
    player.play(events)
    return player.found
