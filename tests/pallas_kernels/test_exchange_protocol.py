"""The exchange's protocol, in all orders of events: two calls one after the other, into one buffer.

Each block's steps are those of `protocol.run_block`, which the kernel runs. Around them every
device has a stream: its semaphores are zeroed, it comes to the runtime's barrier, passes it when
all have come, runs the kernel, and reads what it has received. Copies and signals are under way
until they arrive, in any order; the explorer visits every state that can be reached.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import pytest

from pallas_kernels.dispatch import protocol

CALLS = 2
STREAM = ("zero", "come", "pass", "kernel", "begin reading", "end reading")


@dataclass(frozen=True)
class World:
    """What runs, and on what."""

    devices: int
    blocks: int
    chunks: int = 1
    """Copies of one block to one device."""
    run_block: Callable = protocol.run_block
    stream: tuple[str, ...] = STREAM
    room: int = 9
    """Blocks that a device can run at a time."""
    by_number: bool = True
    """Blocks start in the order of their numbers."""
    takes_off: bool = True
    """Whether `collect` subtracts."""


class Recorder:
    """Writes down a block's steps (`protocol.Steps`)."""

    def __init__(self):
        self.steps = []

    def send(self):
        self.steps.append(("send", 0))

    def land(self):
        self.steps.append(("land", 0))

    def signal_all(self):
        self.steps.append(("signal", 0))

    def collect(self, signals):
        self.steps.append(("collect", signals))


class State(NamedTuple):
    """Of all devices, `d` of them; tuples only, to be hashed."""

    at_d: tuple
    """How many steps of its stream each has done."""
    done_db: tuple
    """Steps done of each block of the kernel that runs; -1: it has not started."""
    sems_db: tuple
    rows_ds: tuple
    """Which call wrote each row: sender, block and chunk."""
    copies: frozenset
    """Under way: (call, from, block, to, chunk)."""
    signals: frozenset
    """Under way: (call, from, block, to)."""


def put(items, place, value):
    return (*items[:place], value, *items[place + 1 :])


class Explorer:
    def __init__(self, world: World):
        recorder = Recorder()
        world.run_block(recorder, world.devices)
        self.world, self.program, self.faults = world, recorder.steps, set()
        self.all_d, self.all_b = range(world.devices), range(world.blocks)

    def explore(self, until: Callable[[set[str]], bool]) -> tuple[set[str], int]:
        """Returns what went wrong in some order, and the number of states; ends early once
        `until` says of the former that it is enough."""
        w = self.world
        idle = ((-1,) * w.blocks,) * w.devices
        none = ((0,) * w.blocks,) * w.devices
        rows = ((0,) * (w.devices * w.blocks * w.chunks),) * w.devices
        first = State((0,) * w.devices, idle, none, rows, frozenset(), frozenset())
        seen, todo = {first}, [first]
        while todo and not until(self.faults):
            state = todo.pop()
            following = list(self.following(state))
            if not following and any(at < CALLS * len(w.stream) for at in state.at_d):
                self.faults.add("deadlock")
            for new in following:
                if new not in seen:
                    seen.add(new)
                    todo.append(new)
            if not following and (state.signals or any(map(any, state.sems_db))):
                self.faults.add("semaphore not zero")
        return self.faults, len(seen)

    def following(self, state: State):
        for d in self.all_d:
            yield from self.stream(state, d)
        for copy in state.copies:
            yield self.arrive(state, copy)
        for signal in state.signals:
            _, _, b, to = signal
            sems = put(state.sems_db[to], b, state.sems_db[to][b] + 1)
            yield state._replace(
                sems_db=put(state.sems_db, to, sems), signals=state.signals - {signal}
            )

    def place(self, state: State, d: int) -> tuple[int, str]:
        """Returns (call, from 1; the next step of the stream)."""
        call, step = divmod(state.at_d[d], len(self.world.stream))
        return call + 1, self.world.stream[step] if call < CALLS else "end"

    def has_done(self, state: State, d: int, call: int, step: str) -> bool:
        return state.at_d[d] > (call - 1) * len(self.world.stream) + self.world.stream.index(step)

    def stream(self, state: State, d: int):
        """Yields the states that device d's next step leads to."""
        call, step = self.place(state, d)
        if step == "end":
            return
        after = state._replace(at_d=put(state.at_d, d, state.at_d[d] + 1))
        if step == "kernel":
            yield from self.kernel(state, d, call)
            if all(done == len(self.program) for done in state.done_db[d]):
                if any(state.sems_db[d]):
                    self.faults.add("semaphore not zero")
                idle = (-1,) * self.world.blocks
                yield after._replace(done_db=put(state.done_db, d, idle))
        elif step == "zero":
            zeros = (0,) * self.world.blocks
            yield after._replace(sems_db=put(state.sems_db, d, zeros))
        elif step == "pass":
            if all(self.has_done(state, peer, call, "come") for peer in self.all_d):
                yield after
        else:
            if step == "end reading" and set(state.rows_ds[d]) != {call}:
                self.faults.add("read before it was written")
            yield after

    def kernel(self, state: State, d: int, call: int):
        """Yields the states that a step of one of device d's blocks leads to."""
        w, end = self.world, len(self.program)
        waiting = [b for b in self.all_b if state.done_db[d][b] < 0]
        running = sum(0 <= done < end for done in state.done_db[d])
        startable = waiting[:1] if w.by_number else waiting
        for b in self.all_b:
            done = state.done_db[d][b]
            after = state._replace(
                done_db=put(state.done_db, d, put(state.done_db[d], b, done + 1))
            )
            if done < 0:
                if b in startable and running < w.room:
                    yield after
                continue
            if done == end:
                continue
            step, signals = self.program[done]
            if step == "send":
                new = itertools.product([call], [d], [b], self.all_d, range(w.chunks))
                yield after._replace(copies=state.copies | set(new))
            elif step == "land":
                if not any(copy[:3] == (call, d, b) for copy in state.copies):
                    yield after
            elif step == "signal":
                new = itertools.product([call], [d], [b], self.all_d)
                yield after._replace(signals=state.signals | set(new))
            elif state.sems_db[d][b] >= signals:
                left = state.sems_db[d][b] - signals * w.takes_off
                yield after._replace(sems_db=put(state.sems_db, d, put(state.sems_db[d], b, left)))

    def arrive(self, state: State, copy) -> State:
        call, sender, b, to, chunk = copy
        if not self.has_done(state, to, call, "come"):
            self.faults.add("written while the last call's rows were in use")
        if self.has_done(state, to, call, "kernel"):
            self.faults.add("written after the kernel")
        row = (sender * self.world.blocks + b) * self.world.chunks + chunk
        rows = put(state.rows_ds, to, put(state.rows_ds[to], row, call))
        return state._replace(rows_ds=rows, copies=state.copies - {copy})


WORLDS = {
    "two devices, two blocks": World(2, 2),
    "three devices": World(3, 1),
    "two copies": World(2, 1, chunks=2),
    "room for one block of three": World(2, 3, room=1),
}


@pytest.mark.parametrize("world", WORLDS.values(), ids=WORLDS)
def test_no_order_of_events_goes_wrong(world):
    faults, states = Explorer(world).explore(until=bool)
    assert not faults
    assert states > 1000


def signals_before_its_copies_land(steps, num_devices):
    steps.send()
    steps.signal_all()
    steps.land()
    steps.collect(num_devices)


def does_not_wait_for_its_copies(steps, num_devices):
    steps.send()
    steps.signal_all()
    steps.collect(num_devices)


def waits_for_one_too_few(steps, num_devices):
    steps.send()
    steps.land()
    steps.signal_all()
    steps.collect(num_devices - 1)


def waits_for_one_too_many(steps, num_devices):
    steps.send()
    steps.land()
    steps.signal_all()
    steps.collect(num_devices + 1)


def waits_for_nobody(steps, num_devices):
    steps.send()
    steps.land()
    steps.signal_all()


EARLY, LATE = "read before it was written", "written after the kernel"
IN_USE = "written while the last call's rows were in use"
STUCK, LEFT = "deadlock", "semaphore not zero"
SMALL = World(2, 1)
ZEROED_LATE = ("come", "pass", "zero", "kernel", "begin reading", "end reading")
NO_BARRIER = ("zero", "come", "kernel", "begin reading", "end reading")


@pytest.mark.parametrize(
    ("world", "expected"),
    [
        (replace(SMALL, run_block=signals_before_its_copies_land), {EARLY, LATE}),
        (replace(SMALL, run_block=does_not_wait_for_its_copies), {EARLY, LATE}),
        (replace(SMALL, run_block=waits_for_one_too_few), {EARLY, LATE, LEFT}),
        (replace(SMALL, run_block=waits_for_one_too_many), {STUCK}),
        (replace(SMALL, run_block=waits_for_nobody), {EARLY, LATE, LEFT}),
        (replace(SMALL, takes_off=False), {LEFT}),
        (replace(SMALL, stream=NO_BARRIER), {IN_USE, STUCK}),
        (replace(SMALL, stream=ZEROED_LATE), {STUCK}),
        (World(2, 2, room=1, by_number=False), {STUCK}),
    ],
    ids=lambda value: getattr(getattr(value, "run_block", None), "__name__", None),
)
def test_a_planted_fault_is_found(world, expected):
    """Each breaks a different promise of the protocol's header."""
    faults, _ = Explorer(world).explore(until=expected.issubset)
    assert faults >= expected
