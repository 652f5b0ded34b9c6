"""Where in the step an instruction stands, from XLA's op_name: the named scopes of the tour, the
phase, our kernel's name, and what a collective moves.

An op_name is a path such as jit(step)/shard_map/while/body/transpose(jvp(loss))/while/body/
jvp(attend)/dot_general: functions, loops, transformations and scopes, outer ones first.
"""

import dataclasses
import functools
import re

from moejax.plan.reader.hlo import Instruction, Module

STOPS = (
    *("embed", "attend", "attention", "route", "losses", "dispatch", "experts", "combine", "mlp"),
    *("drop", "predict_ahead", "loss", "apply_update"),
)
"""Named scopes of the step, inner ones first where they nest."""
BETWEEN = {"microbatches": "accumulate", "layers": "block"}
"""A loop -> what stands in it and in no scope: norms, residual sums, slices of stacked weights."""
CORE = "attention"
"""Attention without its projections."""
GRADIENT = "transpose(jvp(loss))"
LAYER = ("attend", CORE, "mlp", "experts")
"""Scopes that a layer has, and only a layer."""


def stop_of(path: str) -> str:
    """Returns the innermost named scope of an op_name, e.g. "experts"; "" where none is named.

    >>> stop_of("jit(step)/while/body/transpose(jvp(loss))/while/body/jvp(attend)/dot_general")
    'attend'
    """
    for part in reversed(re.split(r"[/()]", path)):
        if part in STOPS:
            return part
    return ""


def phase_of(path: str) -> str:
    """Returns the phase of an op_name: gradients are taken of the scope "loss", and what is
    differentiated once more inside, or not, is its backward, or computed again; a pipeline's layers
    have the scopes "forward" and "backward".

    >>> phase_of("a/jvp(loss)/b"), phase_of("transpose(jvp(loss))/while/body/jvp(attend)/dot")
    ('forward', 'recompute')
    >>> phase_of("transpose(jvp(loss))/body/transpose(jvp(attend))/dot"), phase_of("step/mul")
    ('backward', 'update')
    >>> phase_of("body/forward/jvp(attend)/dot"), phase_of("body/backward/jvp(attend)/dot")
    ('forward', 'recompute')
    """
    _, found, inner = path.replace("/backward/", GRADIENT).partition(GRADIENT)
    if found:
        again = "jvp(" in inner and "transpose(" not in inner
        return "recompute" if again or "rematted_computation" in inner else "backward"
    _, found, inner = path.partition("/forward/")
    if found and "transpose(" in inner:  # the loss's own gradient
        return "backward"
    return "forward" if found or "jvp(loss)" in path else "update"


def kernel_of(path: str) -> str:
    """Returns the kernel's name: the last but one part of its op_name.

    >>> kernel_of("jit(step)/experts/grouped_mlp_forward/mpmd_map")
    'grouped_mlp_forward'
    """
    parts = path.split("/")
    return parts[-2] if len(parts) > 1 else path


def role_of(kind: str, path: str, axes: tuple[str, ...], small: bool) -> str:
    """Returns what a collective moves, from where it stands and the mesh axes that it crosses.

    XLA joins collectives: `path` may then be PREFIX(PATH:PATH:..), and of its pieces those in no
    scope, of weights, say most.

    >>> role_of("all_gather", "jvp(loss)/while/body/all_gather", ("dp",), False)
    'zero gather'
    >>> role_of("ragged_all_to_all", "jvp(loss)/while/body/combine/x", (), False)
    'ep combine'
    """
    pieces = path.split(":")
    stops = [stop_of(piece) for piece in pieces]
    between = {"", "loss", "embed"}.intersection(stops)
    stop = "" if between and "all_to_all" not in kind else stops[0]
    if stop == "embed":
        return "embed"
    if stop in ("dispatch", "combine") or "all_to_all" in kind:
        return "ep sizes" if small else f"ep {stop or 'dispatch'}"
    tp = bool(axes) and all(axis.startswith("tp") for axis in axes)
    if kind == "all_gather":
        return "tp gather" if tp else "zero gather"
    if kind == "reduce_scatter":
        return "tp reduce" if tp else "zero reduce"
    if kind == "permute":
        return "pp" if axes == ("pp",) else "ring"
    if any("transpose(" in piece.replace("transpose(jvp(loss))", "") for piece in pieces):
        return "tp sum" if tp else "gradient sum"
    if tp and phase_of(path) != "update":
        return "tp sum"
    return "balance" if stop == "losses" else "metrics"


@dataclasses.dataclass(frozen=True)
class Context:
    """The loop in which an instruction stands."""

    name: str = ""
    """"microbatches", "layers", or the scope of the loop."""
    phase: str = "update"
    trips: float = 1


@dataclasses.dataclass(eq=False)
class Places:
    """Names and phases of a module's instructions."""

    module: Module

    def path(self, instruction: Instruction) -> str:
        """Returns its op_name, or that of what it reads, or of who reads it, or ""."""
        seen: Instruction | None = instruction
        for _ in range(6):
            if seen is None or (own := _traced(seen)):
                break
            seen = self.module.by_name.get(seen.operands[0]) if seen.operands else None
        if seen is not None and (own := _traced(seen)):
            return own
        users = self.module.users.get(instruction.name, ())
        return next((own for user in users if (own := _traced(user))), "")

    def place(self, instruction: Instruction, context: Context) -> tuple[str, str]:
        """Returns (name, phase) of an instruction in a loop."""
        path = self.path(instruction)
        name, phase = stop_of(path), phase_of(path) if path else context.phase
        if not name or (name == "loss" and context.name == "layers"):
            name = BETWEEN.get(context.name, context.name)
        if name == "attend" and context.name == CORE:
            name = CORE
        if context.name == "microbatches" and phase == "update":
            phase = "backward"  # gradients are added up
        elif phase == "update":
            phase = context.phase
        elif context.phase in ("backward", "recompute") and phase == "forward":
            phase = "recompute"  # one computation serves both
        return name or "step", phase

    def context(self, loop: Instruction, outer: Context, trips: float) -> Context:
        """Returns what the instructions of a loop's body stand in."""
        own = _traced(loop)
        stops, phases = self.inside(loop.calls)
        phase = phase_of(own) if own else "backward" if "backward" in phases else "forward"
        if outer.phase in ("backward", "recompute") and phase == "forward":
            phase = "recompute"
        if not stops.intersection(LAYER):
            return Context(stop_of(own) or outer.name, phase, trips)
        if stop_of(own) in ("attend", CORE):
            return Context(CORE, phase, trips)
        return Context("microbatches" if own and phase == "update" else "layers", phase, trips)

    @functools.cache  # noqa: B019  # it lives as long as its module
    def inside(self, computation: str) -> tuple[set[str], set[str]]:
        """Returns (scopes, phases) of the instructions of a computation and of loops in it."""
        stops, phases = set(), set()
        for one in self.module.computations[computation]:
            if path := _traced(one):
                stops.add(stop_of(path))
                phases.add(phase_of(path))
            if one.opcode in ("while", "call"):
                for all_of, more in zip((stops, phases), self.inside(one.calls), strict=True):
                    all_of |= more
        return stops, phases


def _traced(instruction: Instruction) -> str:
    """Its op_name, of several the first; "" for arguments, which are named by what they hold."""
    own = instruction.op_name.split(":")[0]
    return "" if own.startswith(("state.", "batch[")) else own
