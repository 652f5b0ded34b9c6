"""The compiler's own account of memory: allocations, the values in them, and when each is live.

XLA lays a program's temporary values out in one preallocated block (one more for each further
memory space); values that are never live together share addresses. `peak_of` finds the moment at
which a block is fullest, and which of its bytes are then in use.
"""

import dataclasses
import re
from collections.abc import Iterable

HOST_COLOR = 5
"""XLA's memory space of the host."""

_ALLOCATION = re.compile(r"allocation (\d+): size (\d+),(.*)")
_VALUE = re.compile(r" value: <\d+ ([^ {]+)(\{[\d,]*\})?.* \(size=(\d+),offset=(\d+)\): (.*)")
_RANGE = re.compile(r"    ([^ {]+)(\{[\d,]*\}):(\d+)-(\d+)")
_ORDER = re.compile(r"    (\d+):(\S+)")


@dataclasses.dataclass(frozen=True)
class Value:
    """An array in an allocation."""

    instruction: str
    index: str
    """Which of the arrays that the instruction makes, e.g. "3"; "" for the only one."""
    size: int
    offset: int
    type: str


@dataclasses.dataclass(frozen=True)
class Allocation:
    """A piece of memory."""

    size: int
    role: str
    """"parameter", "temp", "output", "constant", or "other" (of a thread)."""
    parameter: int
    """Number of the parameter; -1: none."""
    color: int
    """Memory space."""
    values: tuple[Value, ...]


@dataclasses.dataclass(frozen=True)
class Times:
    """When values are live, in steps of the schedule (a loop's body once)."""

    order: tuple[str, ...]
    """Instructions as they are scheduled."""
    live: dict[tuple[str, str], tuple[int, int]]
    """(instruction, index) -> first and last step."""


def allocations(text: str) -> list[Allocation]:
    """Returns the allocations of a buffer-assignment text.

    Raises ValueError where the text has none.
    """
    found: list[tuple[re.Match, list[Value]]] = []
    for line in text.splitlines():
        if head := _ALLOCATION.match(line):
            found.append((head, []))
        elif found and (value := _VALUE.match(line)):
            index = (value[2] or "").strip("{}")
            found[-1][1].append(Value(value[1], index, int(value[3]), int(value[4]), value[5]))
        elif line.startswith("Used values"):
            break
    if not found:
        raise ValueError("this text has no allocation: it is no buffer assignment")
    return [_allocation(head, tuple(values)) for head, values in found]


def _allocation(head: re.Match, values: tuple[Value, ...]) -> Allocation:
    says = head[3]
    parameter = re.search(r"parameter (\d+)", says)
    color = re.search(r"color (\d+)", says)
    roles = {
        "parameter": bool(parameter), "temp": "preallocated-temp" in says,
        "constant": "constant" in says, "output": "maybe-live-out" in says or "output" in says,
    }  # fmt: skip
    role = next((name for name, holds in roles.items() if holds), "other")
    number = int(parameter[1]) if parameter else -1
    return Allocation(int(head[2]), role, number, int(color[1]) if color else 0, values)


def times(text: str) -> Times:
    """Returns when values are live, from a live-range text."""
    order, live, part = [], {}, ""
    for line in text.splitlines():
        if line.startswith("  ") and line[2] != " ":
            part = line.split()[0]
        elif part.startswith("InstructionSequence") and (step := _ORDER.match(line)):
            order.append(step[2])
        elif part.startswith("BufferLiveRange") and (found := _RANGE.match(line)):
            live[found[1], found[2].strip("{}")] = int(found[3]), int(found[4])
        elif part == "Live":
            break
    return Times(tuple(order), live)


@dataclasses.dataclass(frozen=True)
class Piece:
    """Bytes of a block that are in use at its peak."""

    bytes: int
    values: tuple[Value, ...]
    """What is live there: more than one where a loop carries a value on."""


def peak_of(allocation: Allocation, when: Times) -> tuple[int, list[Piece]]:
    """Returns (the step at which a block is fullest, the pieces that are then in use).

    Bytes of values that overlap count once, for the largest. What the pieces leave is in use at
    other moments, or lost between them.
    """
    steps: dict[int, int] = {}
    spans = [(value, *_span(value, when)) for value in allocation.values]
    for places in _by_place(spans).values():
        for first, last in _joined(places):
            steps[first] = steps.get(first, 0) + places[0][0].size
            steps[last + 1] = steps.get(last + 1, 0) - places[0][0].size
    used, most, peak = 0, -1, 0
    for step in sorted(steps):
        used += steps[step]
        if used > most:
            most, peak = used, step
    live = [value for value, first, last in spans if first <= peak <= last]
    return peak, _pieces(live)


def _span(value: Value, when: Times) -> tuple[int, int]:
    return when.live.get((value.instruction, value.index), (-1, -2))


def _by_place(spans: Iterable[tuple[Value, int, int]]) -> dict[tuple[int, int], list]:
    found: dict[tuple[int, int], list] = {}
    for span in spans:
        if span[1] >= 0 and span[0].size:
            found.setdefault((span[0].offset, span[0].size), []).append(span)
    return found


def _joined(spans: list[tuple[Value, int, int]]) -> list[tuple[int, int]]:
    """The union of the times in which one place is in use."""
    joined: list[tuple[int, int]] = []
    for first, last in sorted((first, last) for _, first, last in spans):
        if joined and first <= joined[-1][1] + 1:
            joined[-1] = joined[-1][0], max(joined[-1][1], last)
        else:
            joined.append((first, last))
    return joined


def _pieces(live: list[Value]) -> list[Piece]:
    """The bytes of values that are live together, larger ones first, each byte once."""
    places: dict[tuple[int, int], list[Value]] = {}
    for value in live:
        places.setdefault((value.offset, value.size), []).append(value)
    pieces, covered = [], []
    for (offset, size), values in sorted(places.items(), key=lambda place: -place[0][1]):
        free = size
        for start, end in covered:
            free -= max(0, min(end, offset + size) - max(start, offset))
        if free > 0:
            pieces.append(Piece(free, tuple(values)))
            covered = _merged([*covered, (offset, offset + size)])
    return pieces


def _merged(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Ranges of addresses, joined where they overlap."""
    merged: list[tuple[int, int]] = []
    for start, end in sorted(ranges):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], end)
        else:
            merged.append((start, end))
    return merged
