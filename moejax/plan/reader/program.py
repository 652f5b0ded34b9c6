"""Reads a compiled step as the events of `operations`: what one GPU does, in the order that XLA
scheduled, loops with their trip counts, collectives that run beside it as starts and dones.

    program = read_step(compiled.text, config, cluster, num_gpus)
    for row in collectives(program): ...
"""

import dataclasses
import re
from collections.abc import Iterator

from moejax.config import Config
from moejax.model import flops as model_flops
from moejax.plan.hardware import Cluster
from moejax.plan.operations import (
    ATTENTION,
    COLLECTIVE,
    MEMORY,
    Done,
    Event,
    Group,
    Loop,
    Run,
    Start,
    Work,
)
from moejax.plan.reader import hlo
from moejax.plan.reader.place import CORE, Context, kernel_of
from moejax.plan.reader.work import Reader

SKIPPED = {
    *("parameter", "constant", "get-tuple-element", "tuple", "bitcast", "partition-id"),
    *("replica-id", "after-all", "opt-barrier", "iota", "add-dependency"),
}
FLOPS_A_BYTE = 300
"""What a GPU does of either in the same time, about: it orders lists by importance."""


@dataclasses.dataclass(frozen=True)
class Program:
    """A step on one GPU."""

    events: tuple[Event, ...]
    kernels: dict[str, float]
    """Our kernels by name: calls a step."""
    again: dict[str, float]
    """FLOPs by name that XLA's own rematerialisation computes a second time, short of memory."""
    notes: tuple[str, ...]
    """What the program leaves open, and how it was taken."""
    by_instruction: dict[str, tuple[Event, ...]]
    """What each instruction that takes time does; a loop, or a call, all that is inside."""


def balanced_rows(config: Config, num_gpus: int) -> float:
    """Returns the rows that the experts of a device get of a microbatch where all get the same."""
    train, experts = config.train, config.model.moe
    tokens = train.batch_size // train.microbatches * train.sequence_length
    etp, pp = (config.fold_over(num_gpus).degree(role) for role in ("etp", "pp"))
    return tokens * experts.top_k * etp * pp / num_gpus  # a stage's GPUs share a microbatch


def read_step(text: str, config: Config, cluster: Cluster, num_gpus: int) -> Program:
    """Returns the events of the compiled step of a configuration, at an even load."""
    rows, window = balanced_rows(config, num_gpus), config.model.attention.window
    return read(text, cluster, rows=rows, window=window, seen=seen_share(config))


def seen_share(config: Config) -> float:
    """Returns the share that layers see, in the mean, of the pairs of query and key that causality
    leaves, in rows of one document."""
    length, windows = config.train.sequence_length, config.model.windows()
    seen = [min(window or length, length) for window in windows]
    return sum(2 * length * n - n**2 for n in seen) / length**2 / len(seen)


def read(
    text: str,
    cluster: Cluster,
    *,
    rows: float = float("inf"),
    window: int = 0,
    seen: float = 1.0,
) -> Program:
    """Returns the events of a scheduled program.

    `rows`: what a device's experts get of a microbatch (`balanced_rows`); their buffers have room
    for more. `window`: keys that a token of a layer with a window sees. `seen`: see `seen_share`.
    Raises ValueError for a text that is no program.
    """
    module = hlo.parse(text)
    walk = _Walk(module, Reader(module, cluster.domain, rows, seen), window)
    events = walk.events(module.entry, 1, Context())
    notes = [f"experts' rows: {rows:,.0f} a device and microbatch, an even load"] * (rows < 1e18)
    notes += dict.fromkeys(walk.notes)
    return Program(events, walk.kernels, walk.again, tuple(notes), walk.by_instruction)


@dataclasses.dataclass
class _Walk:
    module: hlo.Module
    reader: Reader
    window: int
    kernels: dict[str, float] = dataclasses.field(default_factory=dict)
    again: dict[str, float] = dataclasses.field(default_factory=dict)
    notes: list[str] = dataclasses.field(default_factory=list)
    by_instruction: dict[str, tuple[Event, ...]] = dataclasses.field(default_factory=dict)

    def events(self, computation: str, times: float, context: Context) -> tuple[Event, ...]:
        """The events of a computation that runs `times` a step."""
        found: list[Event] = []
        for one in self.module.computations[computation]:
            if one.opcode not in SKIPPED:
                self.by_instruction[one.name] = made = tuple(self.made(one, times, context))
                found += made
        return tuple(found)

    def made(self, one: hlo.Instruction, times: float, context: Context) -> Iterator[Event]:
        """The events of an instruction."""
        if one.opcode == "while":
            trips = self.trips(one, context)
            inner = self.reader.places.context(one, context, trips)
            body = self.events(one.calls, times * trips, inner)
            yield Loop(inner.name or "step", trips, body)
        elif one.opcode == "call":
            yield from self.events(one.calls, times, context)
        elif one.opcode == "conditional":
            yield from self.branch(one, times, context)
        elif one.opcode.endswith("-done"):
            yield Done(one.operands[0])
        elif work := self.reader.work(one, context):
            self.count(one, times)
            if work.flops and self.reader.again(one):
                self.again[work.name] = self.again.get(work.name, 0) + times * work.flops
            beside = one.opcode.endswith("-start")
            yield Start(work, one.name) if beside else Run(work)
        elif one.opcode.endswith("-start"):
            yield Start(Work(one.name, MEMORY), one.name)

    def count(self, instruction: hlo.Instruction, times: float) -> None:
        """Counts kernels of ours."""
        inside = self.module.reached(instruction.calls) if instruction.calls else ()
        for one in (instruction, *inside):
            if one.opcode == "custom-call" and "mosaic" in one.attributes:
                name = kernel_of(one.op_name)
                self.kernels[name] = self.kernels.get(name, 0) + times

    def branch(
        self, one: hlo.Instruction, times: float, context: Context
    ) -> tuple[Event, ...]:
        """The longest branch of a conditional (of dynamic cp the largest groups), as often as its
        name says it is taken (the pipeline player's `_by_table`); else every time."""
        names = re.findall(r"%([\w.-]+)", one.attribute(r"branch_computations=\{([^}]*)\}"))
        names += re.findall(r"(?:true|false)_computation=%([\w.-]+)", one.attributes)
        taken = re.search(r"/taken_(\d+)_of_(\d+)/", one.op_name)
        share = int(taken[1]) / int(taken[2]) if taken else 1.0
        branches = [self.events(name, times * share, context) for name in names]
        longest = max(branches, key=_weight, default=())
        if taken:
            return (Loop(f"taken {taken[1]} of {taken[2]}", share, longest),) if longest else ()
        self.notes.append(f"{one.name} has branches: the longest is taken")
        return longest

    def trips(self, loop: hlo.Instruction, context: Context) -> float:
        """Trips of a loop, on average: known, or those of attention over the keys that it sees."""
        known = loop.attribute(r'known_trip_count":\{"n":"(\d+)"')
        if known:
            return float(known)
        cut = [
            (self.module.by_name[one.operands[0]].shapes[0].dims, one.shapes[0].dims)
            for one in self.module.reached(loop.calls)
            if one.opcode == "dynamic-slice"
        ]
        cuts = [
            (full, piece)
            for dims, part in cut
            for full, piece in zip(dims, part, strict=True)
            if piece != full and piece > 1
        ]
        if context.name != CORE or not cuts:
            self.notes.append(f"{loop.name} has no known trip count: counted once")
            return 1.0
        length, keys = max(cuts)
        documents = "/causal/" in loop.op_name  # for which, alone, keys may be skipped too
        windowed = self.window if self.starts_late(loop) and not documents else 0
        return seen_blocks(length, int(length // context.trips), keys, windowed)

    def starts_late(self, loop: hlo.Instruction) -> bool:
        """Whether a loop's counter starts elsewhere than at 0: with a window, keys are skipped."""
        made = self.module.by_name[loop.operands[0]]
        first = self.module.by_name[made.operands[0]]
        while first.opcode in ("copy", "bitcast") and first.operands:
            first = self.module.by_name[first.operands[0]]
        return not (first.opcode == "constant" and first.inside == "0")


def _weight(events: tuple[Event, ...]) -> float:
    """Bytes, read, written or sent, and FLOPs as bytes, of events."""
    return sum(
        times * (work.bytes + work.wire + work.flops / FLOPS_A_BYTE)
        for work, times, _ in flat(events)
    )


def seen_blocks(length: int, rows: int, keys: int, window: int) -> float:
    """Returns the blocks of `keys` keys that a block of `rows` queries sees, on average, under a
    causal mask; those of a window further back than that are skipped.

    >>> seen_blocks(4096, 128, 512, 0), seen_blocks(4096, 128, 512, 128)
    (4.5, 1.21875)
    """
    total, blocks = 0, length // rows
    for block in range(blocks):
        first = max(block * rows - window + 1, 0) // keys if window else 0
        total += -(-(block + 1) * rows // keys) - first
    return total / blocks


@dataclasses.dataclass(frozen=True)
class Flops:
    """Where the FLOPs of a step go, on one GPU."""

    executed: float
    model: float
    """What the model needs, by the field's formula (`moejax.model.flops`)."""
    waste: dict[str, float]
    """By cause what is executed beyond that; with it they add up to `executed`."""


def flops(program: Program, config: Config, num_gpus: int) -> Flops:
    """Returns the products that a step executes, and what of them the model does not need.

    One document a row is taken, as the throughputs of the field are.
    """
    train, cfg = config.train, config.model
    share = train.batch_size / num_gpus
    tokens = share * train.sequence_length
    core = share * model_flops.attention_flops(cfg, [train.sequence_length])
    model = tokens * model_flops.linear_flops_per_token(cfg) + core
    sums: dict[str, float] = {}
    for work, times, _ in flat(program.events):
        what = "core" if work.kind == ATTENTION or work.name == CORE else work.name
        for key in ("executed", work.phase, f"{what} {work.phase}"):
            sums[key] = sums.get(key, 0.0) + times * work.flops
    forward, backward = (sums.get(f"core {phase}", 0.0) for phase in ("forward", "backward"))
    wider = forward / (core / 3) if core and forward else 1.0
    waste = {
        "recompute": sums.get("recompute", 0.0),
        "masked attention": core * (wider - 1),
        "attention's scores again": backward - core * 2 / 3 * wider,
        "router": sum(sums.get(f"route {phase}", 0.0) for phase in ("forward", "backward")),
        "logits again": sums.get("unembed backward", 0.0) - 2 * sums.get("unembed forward", 0.0),
    }
    waste["rows without a token, and other"] = sums["executed"] - model - sum(waste.values())
    return Flops(sums["executed"], model, waste)


def flat(events: tuple[Event, ...], times: float = 1) -> Iterator[tuple[Work, float, bool]]:
    """Yields (work, how often a step, whether beside the compute stream) of all events."""
    for event in events:
        if isinstance(event, Loop):
            yield from flat(event.body, times * event.times)
        elif not isinstance(event, Done):
            yield event.work, times, isinstance(event, Start)


@dataclasses.dataclass(frozen=True)
class Row:
    """Collectives of a step that are alike."""

    role: str
    collective: str
    phase: str
    group: Group
    beside: bool
    """Whether it runs beside the compute stream; else the GPU waits for it."""
    count: float
    """How many a step."""
    wire: float
    """Bytes that a GPU sends in all of them."""
    inside: tuple[str, ...]
    """What runs between start and done: kind and name, the longest first."""


def collectives(program: Program) -> list[Row]:
    """Returns the collectives of a step, the most bytes first."""
    found: dict[Row, tuple[float, float, dict[str, float]]] = {}
    for work, times, beside, inside in spans_of(program.events, 1):
        alike = Row(work.role, work.collective, work.phase, work.group, beside, 0, 0, ())
        count, wire, sizes = found.setdefault(alike, (0.0, 0.0, {}))
        found[alike] = count + times, wire + times * work.wire, sizes
        for one in inside:
            name = f"{one.kind} {one.name}"
            sizes[name] = sizes.get(name, 0.0) + times * (one.bytes + one.flops / FLOPS_A_BYTE)
    rows = [
        dataclasses.replace(
            row, count=count, wire=wire, inside=tuple(sorted(sizes, key=lambda n: -sizes[n]))
        )
        for row, (count, wire, sizes) in found.items()
    ]
    return sorted(rows, key=lambda row: -row.wire)


def spans_of(
    events: tuple[Event, ...], times: float
) -> Iterator[tuple[Work, float, bool, list[Work]]]:
    """Yields (collective, how often, whether beside, the work inside its span) of all loops."""
    done = {event.key: at for at, event in enumerate(events) if isinstance(event, Done)}
    for at, event in enumerate(events):
        if isinstance(event, Loop):
            yield from spans_of(event.body, times * event.times)
        elif isinstance(event, Run | Start) and event.work.kind == COLLECTIVE:
            beside = isinstance(event, Start)
            span = events[at + 1 : done.get(event.key, at)] if isinstance(event, Start) else ()
            inside = [work for work, _, other in flat(tuple(span)) if not other]
            yield event.work, times, beside, inside
