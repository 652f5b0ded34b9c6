"""The text of a compiled XLA program, as computations of instructions: just enough to read a plan
off it. Source of the grammar: what XLA prints (`HloModule::ToString`).

    module = parse(text)
    for instruction in module.computations[module.entry]: ...
"""

import dataclasses
import functools
import math
import re
from collections.abc import Iterator
from typing import NamedTuple

HOST_SPACE = 5
"""Memory space of host buffers."""

_BITS = {"pred": 8, "token": 0, "bf16": 16}
_INSTRUCTION = re.compile(r"^  (ROOT )?%?([\w.-]+) = ")
_OPCODE = re.compile(r" ([a-z][a-z0-9-]*)\(")
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.-]+) (?:\(|\{)")
_SHAPE = re.compile(r"([a-z][a-z0-9]*)\[([\d,]*)\](?:\{([^}]*)\})?")
_OPERAND = re.compile(r"%([\w.-]+)")
_OP_NAME = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')
_CALLS = re.compile(r"(?:calls|to_apply|body|called_computations)=\{?%([\w.-]+)")
_SPACE = re.compile(r"S\((\d+)\)")


class Shape(NamedTuple):
    """An array."""

    dtype: str
    dims: tuple[int, ...]
    space: int
    """Memory space; `HOST_SPACE` is the host's."""

    @property
    def size(self) -> int:
        """Elements."""
        return math.prod(self.dims)

    @property
    def bytes(self) -> float:
        """Bytes."""
        return self.size * bits(self.dtype) / 8


@functools.cache
def bits(dtype: str) -> int:
    """Returns the bits of an element, e.g. 8 of f8e4m3fn."""
    found = re.match(r"[a-z]+(\d+)", dtype)
    return _BITS[dtype] if dtype in _BITS else int(found[1]) if found else 0


@functools.cache
def shapes(text: str) -> tuple[Shape, ...]:
    """Returns the arrays of a type, those of a tuple in order."""
    found = []
    for dtype, dims, layout in _SHAPE.findall(text):
        space = _SPACE.search(layout)
        sizes = tuple(map(int, dims.split(","))) if dims else ()
        found.append(Shape(dtype, sizes, int(space[1]) if space else 0))
    return tuple(found)


@dataclasses.dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction of a computation."""

    name: str
    opcode: str
    type: str
    operands: tuple[str, ...]
    attributes: str
    """What follows the operands."""
    root: bool
    inside: str
    """What stands between the parentheses: of a constant its value, of a parameter its number."""

    @property
    def shapes(self) -> tuple[Shape, ...]:
        """The arrays that it makes."""
        return shapes(self.type)

    @property
    def bytes(self) -> float:
        """Bytes that it makes."""
        return sum(shape.bytes for shape in self.shapes)

    @property
    def op_name(self) -> str:
        """Where in the traced function it comes from; "" where XLA does not say."""
        found = _OP_NAME.search(self.attributes)
        return found[1].replace("\\'", "'") if found else ""

    @property
    def calls(self) -> str:
        """The computation that it calls, a loop's body; "" for none."""
        found = _CALLS.search(self.attributes)
        return found[1] if found else ""

    def attribute(self, pattern: str) -> str:
        """Returns the first group of a pattern in the attributes, or ""."""
        found = re.search(pattern, self.attributes)
        return found[1] if found else ""

    def numbers(self, name: str) -> tuple[int, ...]:
        """Returns the numbers of an attribute such as dimensions={0,1}; () where it has none."""
        found = self.attribute(name + r"=\{([\d,]*)\}")
        return tuple(map(int, found.split(","))) if found else ()


@dataclasses.dataclass(frozen=True)
class Module:
    """A program."""

    computations: dict[str, tuple[Instruction, ...]]
    """Instructions in the order in which they run."""
    entry: str

    @functools.cached_property
    def by_name(self) -> dict[str, Instruction]:
        """Every instruction; their names are unique."""
        return {i.name: i for body in self.computations.values() for i in body}

    @functools.cached_property
    def users(self) -> dict[str, list[Instruction]]:
        """Who reads an instruction."""
        found: dict[str, list[Instruction]] = {}
        for body in self.computations.values():
            for instruction in body:
                for operand in instruction.operands:
                    found.setdefault(operand, []).append(instruction)
        return found

    def operand_shapes(self, instruction: Instruction) -> tuple[Shape, ...]:
        """Returns the arrays that an instruction reads."""
        made = (self.by_name[name] for name in instruction.operands if name in self.by_name)
        return tuple(shape for one in made for shape in one.shapes)

    def reached(self, computation: str) -> Iterator[Instruction]:
        """Yields the instructions of a computation and of those that it calls."""
        for instruction in self.computations.get(computation, ()):
            yield instruction
            if instruction.calls:
                yield from self.reached(instruction.calls)


def parse(text: str) -> Module:
    """Returns the program of a scheduled HLO text. Raises ValueError where it has no entry."""
    computations: dict[str, tuple[Instruction, ...]] = {}
    entry, name, body = "", "", []
    for line in text.splitlines():
        if line.startswith("  "):
            if name and (found := _instruction(line)):
                body.append(found)
        elif line.startswith("}"):
            computations[name] = tuple(body)
            name = ""
        elif line.startswith(("%", "ENTRY")) and (head := _COMPUTATION.match(line)):
            name, body = head[2], []
            entry = name if head[1] else entry
    if not entry:
        raise ValueError("this text has no ENTRY computation: it is no HLO program")
    return Module(computations, entry)


def _instruction(line: str) -> Instruction | None:
    head = _INSTRUCTION.match(line)
    opcode = _OPCODE.search(line, head.end() - 1) if head else None
    if not head or not opcode:
        return None
    end = line.find(")", opcode.end())
    inside = line[opcode.end() : end]
    attributes = line[end + 1 :]
    if opcode[1] == "custom-call" and "mosaic" in attributes[:200]:
        attributes = attributes.partition("backend_config={")[0]  # a kernel's code, megabytes
    kind = line[head.end() : opcode.start()]
    operands = tuple(_OPERAND.findall(inside))
    return Instruction(head[2], opcode[1], kind, operands, attributes, bool(head[1]), inside)
