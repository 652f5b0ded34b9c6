"""What a train step does on one GPU, as a list of events: the common language of the program that
XLA scheduled (`reader`), of the analytic plan (`analytic`), of the price (`cost`) and the report.

A GPU has one compute stream, and beside it communication and host copies. `Run` occupies the
compute stream; `Start` begins work beside it, and `Done` makes the compute stream wait for that.

    (Start(gather_next, "w"), Run(attention), Run(experts), Done("w"))
"""

import dataclasses

GEMM, GROUPED, ATTENTION, MEMORY = "gemm", "grouped gemm", "attention", "memory"
COLLECTIVE, HOST, IDLE = "collective", "host copy", "idle"
KINDS = (GEMM, GROUPED, ATTENTION, MEMORY, COLLECTIVE, HOST, IDLE)
PHASES = ("forward", "recompute", "backward", "update")


@dataclasses.dataclass(frozen=True)
class Group:
    """The GPUs of a collective, as one of them sees it."""

    size: int
    """GPUs in the group, this one included."""
    local: int
    """Those of them in this GPU's NVLink domain, this one included."""


@dataclasses.dataclass(frozen=True)
class Work:
    """One kernel, collective or copy, on one GPU, once."""

    name: str
    """What it is for, by the field's names: "attend", "experts", "dispatch", "unembed", ..."""
    kind: str
    """One of `KINDS`."""
    phase: str = "forward"
    """One of `PHASES`."""
    flops: float = 0.0
    """Floating-point operations that it executes (not those that the model needs)."""
    bytes: float = 0.0
    """Device memory that it reads and writes."""
    dtype: str = "bfloat16"
    """What is multiplied, or moved."""
    mnk: tuple[float, float, float] = (0.0, 0.0, 0.0)
    """Sizes of a product [m, k] x [k, n]; of a grouped one, m is the mean of a group's rows."""
    groups: int = 1
    """Products of that size (batch, experts, heads)."""
    collective: str = ""
    """all_gather, reduce_scatter, all_reduce, all_to_all, ragged_all_to_all, permute; or
    fused_all_to_all: a kernel that sends a token once to each GPU, or domain, that wants it."""
    role: str = ""
    """Of a collective: what it moves, "ep dispatch", "zero gather", "zero reduce", "tp", ..."""
    wire: float = 0.0
    """Bytes that this GPU sends, whichever way they go; to itself not counted."""
    group: Group = Group(1, 1)
    wait: float = 0.0
    """Of idling: its seconds."""

    def __post_init__(self):
        if self.kind not in KINDS or self.phase not in PHASES:
            raise ValueError(f"{self.name}: kind {self.kind!r} or phase {self.phase!r} is unknown")


@dataclasses.dataclass(frozen=True)
class Run:
    """Work on the compute stream; a collective here lets the GPU wait."""

    work: Work


@dataclasses.dataclass(frozen=True)
class Start:
    """Work that goes on beside the compute stream until `Done(key)`."""

    work: Work
    key: str


@dataclasses.dataclass(frozen=True)
class Done:
    """The compute stream waits for the work that was started as `key`."""

    key: str


@dataclasses.dataclass(frozen=True)
class Loop:
    """The same events again and again: layers, microbatches."""

    name: str
    times: float
    body: tuple["Event", ...]


Event = Run | Start | Done | Loop
