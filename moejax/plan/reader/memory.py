"""A GPU's memory by kind, from the compiler's own buffer assignment: what rests there, and what is
live at the moment when most is.

    memory = account(compiled.text, compiled.buffers, compiled.live)
    memory.kinds["weights"], memory.peak, memory.live[:5]
"""

import dataclasses
import re

from moejax.plan.reader import buffers, hlo
from moejax.plan.reader.buffers import HOST_COLOR, Allocation, Piece, Value
from moejax.plan.reader.place import CORE, Context, Places, role_of, stop_of

ARGUMENTS = {
    "state.params": "weights", "state.opt_state": "optimizer", "state.buffers": "router biases",
    "batch": "batch", "": "rest of the state",
}  # fmt: skip
SCOPES = {
    "dispatch": "dispatch buffers", "combine": "dispatch buffers", "experts": "expert activations",
    "attend": "attention", CORE: "attention", "mlp": "mlp", "route": "router",
    "losses": "router", "drop": "router",
    "loss": "logits and loss", "unembed": "logits and loss", "embed": "embedding",
    "block": "residual stream", "predict_ahead": "residual stream", "accumulate": "gradient sums",
    "apply_update": "update",
}  # fmt: skip
"""Scope -> kind. "gradients": of one microbatch; "gradient sums": over those of the step."""
ROLES = {"zero gather": "gathered weights", "zero reduce": "gradients"}
COLLECTIVE_SPACE = 7
"""XLA's memory space of buffers that collectives write."""
KEPT = {"saved_activations": "saved activations", "gradient_sums": "gradient sums"}
"""Scopes in which a pipeline writes what its loops carry -> kind."""
CARRIED = ("gradient sums", "gradients", "saved activations", "weights, copied", "gathered weights")
"""Kinds that say most where a place has several: what loops carry comes first."""
UNUSED = "fragmentation"
PARAMETER = "parameter"


@dataclasses.dataclass(frozen=True)
class Buffer:
    """What is live at the peak."""

    kind: str
    what: str
    """Instruction, and array."""
    bytes: int


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes on one GPU."""

    kinds: dict[str, int]
    """By kind, arguments and temporary memory; they add up to the compiler's totals."""
    host: dict[str, int]
    """The same of its host's memory."""
    leaves: dict[str, int]
    """Arguments by name."""
    saved: dict[str, int]
    """What the forward pass keeps for the backward, by scope and array."""
    peak: str
    """The instruction at which most temporary memory is in use."""
    where: str
    """Where in the step that is: phase and scope."""
    live: tuple[Buffer, ...]
    """Temporary memory in use then, the largest first."""

    @property
    def total(self) -> int:
        """All of it."""
        return sum(self.kinds.values())


def account(text: str, assignment: str, live: str) -> Memory:
    """Returns memory by kind, from a scheduled program, its buffer assignment and live ranges."""
    module, when = hlo.parse(text), buffers.times(live)
    found = buffers.allocations(assignment)
    names = {
        int(one.inside): one for one in module.computations[module.entry] if one.opcode == PARAMETER
    }
    kinds: tuple[dict[str, int], dict[str, int]] = ({}, {})
    leaves: dict[str, int] = {}
    for one in found:
        if one.role == "parameter":
            name = names[one.parameter].op_name
            on_host = names[one.parameter].shapes[0].space == hlo.HOST_SPACE
            _add(kinds[on_host], argument_kind(name), one.size)
            _add(leaves, name, one.size)
        elif one.role == "output":
            _add(kinds[one.color == HOST_COLOR], "outputs", one.size)
    naming = _Account(module)
    peaks = []
    for one in found:
        if one.role == "temp":
            step, pieces = buffers.peak_of(one, when)
            made = [(naming.named(piece), piece) for piece in pieces]
            for buffer, _ in made:
                _add(kinds[one.color == HOST_COLOR], buffer.kind, buffer.bytes)
            _add(kinds[one.color == HOST_COLOR], UNUSED, one.size - sum(b.bytes for b, _ in made))
            peaks.append((one, step, made))
    main, step, _ = max(
        (peak for peak in peaks if peak[0].color != HOST_COLOR), key=lambda peak: peak[0].size
    )
    everything = [buffer for one, _, made in peaks for buffer, _ in made if not _host(one)]
    saved: dict[str, int] = {}
    for _, _, made in peaks:
        for buffer, piece in made:
            if buffer.kind == "saved activations":
                _add(saved, naming.saved_as(piece), buffer.bytes)
    at = when.order[step] if step < len(when.order) else main.values[0].instruction
    live_then = tuple(sorted(everything, key=lambda buffer: -buffer.bytes))
    return Memory(kinds[0], kinds[1], leaves, saved, at, naming.where(at), live_then)


def _host(allocation: Allocation) -> bool:
    return allocation.color == HOST_COLOR


def _add(into: dict[str, int], name: str, number: int) -> None:
    into[name] = into.get(name, 0) + number


def argument_kind(name: str) -> str:
    """Returns the kind of an argument by its name.

    >>> argument_kind("state.opt_state[0].mu['embedding']"), argument_kind("state.step")
    ('optimizer', 'rest of the state')
    """
    return next(kind for start, kind in ARGUMENTS.items() if name.startswith(start))


@dataclasses.dataclass
class _Account:
    """Names what lies in memory."""

    module: hlo.Module

    def __post_init__(self):
        self.places = Places(self.module)
        self.home: dict[str, str] = {}
        """Instruction -> its computation."""
        for computation, body in self.module.computations.items():
            for one in body:
                self.home[one.name] = computation
        self.contexts: dict[str, Context] = {}
        self.loops: dict[str, hlo.Instruction] = {}
        """Body of a loop -> the loop."""
        self._enter(self.module.entry, Context())
        self.weights = [
            sorted(one.shapes[0].dims)
            for one in self.module.computations[self.module.entry]
            if one.opcode == PARAMETER and one.op_name.startswith("state.params")
        ]

    def _enter(self, computation: str, context: Context) -> None:
        self.contexts[computation] = context
        for one in self.module.computations.get(computation, ()):
            if one.opcode == "while":
                known = one.attribute(r'known_trip_count":\{"n":"(\d+)"')
                inner = self.places.context(one, context, float(known or 1))
                self.loops[one.calls] = one
                self._enter(one.calls, inner)
            elif one.opcode == "call":
                self._enter(one.calls, context)

    def named(self, piece: Piece) -> Buffer:
        """Returns a piece of memory with its kind."""
        kinds = [(self.kind(value), value) for value in piece.values]
        kinds.sort(key=lambda one: CARRIED.index(one[0]) if one[0] in CARRIED else len(CARRIED))
        kind, value = kinds[0]
        array = re.sub(r"\{.*", "", value.type)
        return Buffer(kind, f"{value.instruction} {array}", piece.bytes)

    def where(self, name: str) -> str:
        """Returns phase and scope of an instruction."""
        one = self.module.by_name.get(name)
        if one is None:
            return ""
        scope, phase = self.places.place(one, self._context(one))
        return f"{phase}, {scope}"

    def _context(self, one: hlo.Instruction) -> Context:
        return self.contexts.get(self.home[one.name], Context())

    def kind(self, value: Value) -> str:
        """Returns the kind of a value."""
        one = self.module.by_name.get(value.instruction)
        if one is None:  # inside a start, which the text shows as one instruction
            return _by_collective(value.instruction) or "other"
        carried = self._carried(one, value.index)
        if carried:
            return self._of_carry(*carried, 0)
        return self._of_instruction(one)

    def _carried(self, one: hlo.Instruction, index: str) -> tuple[hlo.Instruction, int] | None:
        """The loop and the place in its carry, where a value is one that a loop carries."""
        if not index.isdigit():
            return None
        if one.opcode == "while":
            return one, int(index)
        if one.opcode == PARAMETER and self.home[one.name] in self.loops:
            return self.loops[self.home[one.name]], int(index)
        return None

    def _of_carry(self, loop: hlo.Instruction, index: int, depth: int) -> str:
        """The kind of what a loop carries."""
        context = self.contexts.get(loop.calls, Context())
        shape = loop.shapes[index] if index < len(loop.shapes) else None
        first = self._first(loop, index)
        if first is None or shape is None:
            return SCOPES.get(context.name, "other")
        if first.opcode == "get-tuple-element" and depth < 8:
            before = self._carried(
                self.module.by_name[first.operands[0]], first.attribute(r"index=(\d+)")
            )
            if before:
                return self._of_carry(*before, depth + 1)
        if kept := self._kept(loop, index):
            return kept
        if _received(first):
            return "dispatch buffers"
        if "broadcast" in first.name or first.opcode == "broadcast":
            stacked = bool(shape.dims) and 0 <= shape.dims[0] - context.trips <= 2
            if context.name == "microbatches":
                mine = sorted(shape.dims) in self.weights
                return "gradient sums" if mine or not stacked else "other"
            if context.name == "layers" and stacked:
                return "gradients" if context.phase == "backward" else "saved activations"
            if context.phase == "backward" and not stacked and context.name == "loss":
                return "gradients"
            return SCOPES.get(context.name, "residual stream")
        return self._of_instruction(first)

    def _kept(self, loop: hlo.Instruction, index: int) -> str:
        """The kind of what a pipeline's loop, or one inside it, writes at that place; "": none."""
        todo = [(loop.calls, index)]
        while todo:
            computation, at = todo.pop()
            root = next(one for one in self.module.computations[computation] if one.root)
            if root.opcode != "tuple" or at >= len(root.operands):
                continue
            one = self.module.by_name[root.operands[at]]
            if one.opcode == "get-tuple-element":
                at = int(one.attribute(r"index=(\d+)"))
                one = self.module.by_name[one.operands[0]]
                inside = " ".join(
                    re.findall(r"(?:body|computations?)=\{?([%\w., -]+)", one.attributes)
                )
                todo += [(name, at) for name in re.findall(r"%([\w.-]+)", inside)]
            for scope, kind in KEPT.items():
                if f"/{scope}/" in one.op_name:
                    return kind
        return ""

    def _first(self, loop: hlo.Instruction, index: int) -> hlo.Instruction | None:
        """What a loop's carry starts from."""
        made = self.module.by_name.get(loop.operands[0])
        if made is None or made.opcode != "tuple" or index >= len(made.operands):
            return None
        one = self.module.by_name.get(made.operands[index])
        while one is not None and one.opcode in ("bitcast", "copy") and one.operands:
            one = self.module.by_name.get(one.operands[0])
        if one is not None and one.opcode == "get-tuple-element":
            source = self.module.by_name[one.operands[0]]
            return one if source.opcode in ("while", PARAMETER) else source
        return one

    def _of_instruction(self, one: hlo.Instruction) -> str:
        """The kind of what an instruction makes."""
        context = self._context(one)
        if one.opcode == PARAMETER:
            return argument_kind(one.op_name) if one.op_name else "other"
        if self._of_weights(one):
            return "weights, copied"
        if _received(one):
            return "dispatch buffers"
        path = self.places.path(one)
        collective = one.opcode.removesuffix("-start")
        if path.endswith(("/all_gather", "/reduce_scatter")):
            collective = path.rpartition("/")[2].replace("_", "-")
        if found := _by_collective(collective, path):
            return found
        if self._reduced(one):
            return "gradients"
        if "broadcast" in one.name and (loop := self._started(one)):
            context = self.contexts.get(loop.calls, context)
            if context.name in SCOPES:
                return SCOPES[context.name]
        name, phase = self.places.place(one, context)
        return SCOPES.get(name, "update" if phase == "update" else "other")

    def _started(self, one: hlo.Instruction) -> hlo.Instruction | None:
        """The loop whose carry starts from a value."""
        for _ in range(4):
            users = self.module.users.get(one.name, ())
            for user in users:
                if user.opcode == "while":
                    return user
            through = ("tuple", "copy", "bitcast", "get-tuple-element")
            one, last = next((user for user in users if user.opcode in through), one), one
            if one is last:
                return None
        return None

    def _of_weights(self, one: hlo.Instruction) -> bool:
        """Whether it only lays an argument's weights out anew, or casts them."""
        for _ in range(5):
            if one.opcode == PARAMETER:
                return one.op_name.startswith("state.params")
            plain = ("transpose", "copy", "bitcast", "convert", "get-tuple-element")
            words = one.name.replace("_", " ").split(".")[0].split()
            moves = one.opcode == "fusion" and set(words) <= {"wrapped", "transpose", "convert"}
            if not (one.opcode in plain or moves) or not one.operands:
                return False
            one = self.module.by_name[one.operands[0]]
        return False

    def _reduced(self, one: hlo.Instruction) -> bool:
        """Whether it goes into a reduce-scatter: a gradient."""
        for _ in range(3):
            users = self.module.users.get(one.name, ())
            if any("reduce-scatter" in user.opcode for user in users):
                return True
            through = [u for u in users if u.opcode in ("bitcast", "get-tuple-element", "copy")]
            if not through:
                return False
            one = through[0]
        return False

    def saved_as(self, piece: Piece) -> str:
        """Returns the name of a saved activation: the scope that made it, and its array."""
        array = re.sub(r"\{.*", "", piece.values[0].type)
        for value in piece.values:
            one = self.module.by_name.get(value.instruction)
            carried = self._carried(one, value.index) if one else None
            if carried and (scope := self._kept_from(*carried)):
                return f"{scope} {array}"
        return f"block {array}"

    def _kept_from(self, loop: hlo.Instruction, index: int) -> str:
        """The scope whose values a loop's body puts into its carry."""
        root = next(one for one in self.module.computations[loop.calls] if one.root)
        if root.opcode != "tuple" or index >= len(root.operands):
            return ""
        one = self.module.by_name[root.operands[index]]
        scope = stop_of(self.places.path(one))
        return "block input" if scope in ("", "loss") else scope


def _received(one: hlo.Instruction) -> bool:
    """Whether it makes the zeros into which rows of other devices are received."""
    makes = one.opcode == "copy" or "broadcast" in one.name
    return makes and any(shape.space == COLLECTIVE_SPACE for shape in one.shapes)


def _by_collective(name: str, path: str = "") -> str:
    """The kind of what a collective makes, by its opcode or an instruction named after that."""
    plain = name.replace("_", "-")
    if "all-to-all" in plain:
        return "dispatch buffers"
    if plain.startswith("all-gather"):
        role = role_of("all_gather", path, (), False)
        return ROLES.get(role, "dispatch buffers" if role.startswith("ep") else "")
    return "gradients" if plain.startswith("reduce-scatter") else ""
