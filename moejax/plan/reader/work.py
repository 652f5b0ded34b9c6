"""What one instruction of a compiled program costs: `Work` from shapes, kernels by their names.

Where the program alone cannot say, the balanced load is taken: rows of the experts' buffers hold
tokens as far as the load of an even router fills them. A slice of a large buffer counts as the
slice, and an update of one as the update.
"""

import dataclasses
import math
import re
from collections.abc import Iterable

from moejax.plan.operations import (
    ATTENTION,
    COLLECTIVE,
    GEMM,
    GROUPED,
    HOST,
    MEMORY,
    Group,
    Work,
)
from moejax.plan.reader.hlo import HOST_SPACE, Instruction, Module, Shape
from moejax.plan.reader.place import Context, Places, kernel_of, role_of

COLLECTIVES = {
    "all-gather": "all_gather", "reduce-scatter": "reduce_scatter", "all-reduce": "all_reduce",
    "all-to-all": "all_to_all", "ragged-all-to-all": "ragged_all_to_all",
    "collective-permute": "permute", "collective-broadcast": "permute",
}  # fmt: skip
_MESH = re.compile(r"mesh\[([^\]]*)\](?:, device_ids=\S+)? \{([^}]*)\}")
_LIST = re.compile(r"replica_groups=\{\{([\d,]*)\}")
_IOTA = re.compile(r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_PAIR = re.compile(r"source_target_pairs=\{\{(\d+),(\d+)\}")
_SLICES = ("dynamic-slice", "slice", "gather")
_UPDATES = {"dynamic-update-slice": 1, "scatter": 2}
"""Opcode -> the operand that is written into operand 0."""
_ATTENTION = {"forward": (1, 1), "query_gradient": (2, 1), "key_value_gradient": (2, 2)}
"""Kernel of ours, "attention_..." -> how many products as wide as keys, and as values: the scores
again, and what each gradient takes."""
_NO_WORK = ("bitcast", "get-tuple-element", "tuple", "copy", "convert", "transpose", "reshape")
_FLOATS = ("bf16", "f16", "f32", "f64")
DTYPES = {"bf16": "bfloat16", "f16": "float16", "f32": "float32", "f64": "float64"}


def dtype(name: str) -> str:
    """Returns the name by which `Work` and `Cluster.peak` know an HLO dtype."""
    return "fp8" if name.startswith("f8") else "fp4" if name.startswith("f4") else DTYPES.get(
        name, name
    )  # fmt: skip


@dataclasses.dataclass
class Reader:
    """What it takes to say what an instruction costs."""

    module: Module
    domain: int
    """GPUs of an NVLink domain."""
    rows: float
    """Rows of a device's experts at an even load; inf: as many as the buffers have."""
    seen: float = 1.0
    """Of the pairs of query and key that causality leaves, the mean share that layers see."""

    def __post_init__(self):
        self.places = Places(self.module)
        self.copies = _copies(self.module.by_name)

    def work(self, instruction: Instruction, context: Context) -> Work | None:
        """Returns what it costs; None: nothing."""
        name, phase = self.places.place(instruction, context)
        if self.again(instruction):
            phase = "recompute"
        opcode = instruction.opcode.removesuffix("-start")
        inner = self.module.computations.get(instruction.calls, ())
        wrapped = [i for i in inner if i.opcode in COLLECTIVES]
        if opcode in COLLECTIVES or wrapped:
            return self.collective(instruction, wrapped, name, phase)
        calls = [i for i in self._all(instruction) if i.opcode == "custom-call"]
        if calls:  # its own, or of a fusion that hands a slice of a larger buffer to a kernel
            if not instruction.op_name:
                name, phase = self.places.place(calls[0], context)
            return self._custom(calls[0], name, phase)
        moved = self.moved(instruction)
        spaces = {shape.space for shape in self._touched(instruction)}
        if HOST_SPACE in spaces:
            return Work(name, HOST, phase, bytes=moved / 2)
        dots = [i for i in self._all(instruction) if i.opcode == "dot"]
        if dots:
            return self._products(dots, "unembed" if name == "loss" else name, phase, moved)
        return Work(name, MEMORY, phase, bytes=moved) if moved else None

    def again(self, instruction: Instruction) -> bool:
        """Whether XLA's rematerialisation put it there a second time."""
        return instruction.name in self.copies

    def _all(self, instruction: Instruction) -> list[Instruction]:
        reached = self.module.reached(instruction.calls) if instruction.calls else ()
        return [instruction, *reached]

    def made(self, instruction: Instruction) -> tuple[Shape, ...]:
        """Returns the arrays that it makes; of a start those that its done hands on."""
        if instruction.opcode.endswith("-start"):
            for user in self.module.users.get(instruction.name, ()):
                if user.opcode.endswith("-done"):
                    return user.shapes
        return instruction.shapes

    def _touched(self, instruction: Instruction) -> tuple[Shape, ...]:
        return self.made(instruction) + self.module.operand_shapes(instruction)

    def moved(self, instruction: Instruction) -> float:
        """Returns the bytes of device memory that it reads and writes."""
        body = self.module.computations.get(instruction.calls)
        operands = [self.module.by_name.get(name) for name in instruction.operands]
        sizes = [operand.bytes if operand else 0.0 for operand in operands]
        if not body:
            opcode = instruction.opcode.removesuffix("-start")
            made = sum(shape.bytes for shape in self.made(instruction))
            if opcode in _SLICES:
                return 2 * made
            if opcode in _UPDATES:
                return 2 * sizes[_UPDATES[opcode]]
            return made + sum(sizes)
        read = 0.0
        for inner in body:
            if inner.opcode == "parameter" and int(inner.inside) < len(sizes):
                read += min(sizes[int(inner.inside)], self._read_of(inner))
        root = next(inner for inner in body if inner.root)
        return read + self._written(root)

    def _read_of(self, value: Instruction) -> float:
        """Bytes of a fused computation's parameter that are read."""
        total = 0.0
        for user in self.module.users.get(value.name, ()):
            if user.opcode in _SLICES and user.operands[0] == value.name:
                total += user.bytes
            elif user.opcode in _UPDATES and user.operands[0] == value.name:
                total += 0
            elif user.opcode in ("bitcast", "get-tuple-element"):
                total += self._read_of(user)
            else:
                return value.bytes
        return total

    def _written(self, root: Instruction) -> float:
        """Bytes that a fused computation writes."""
        if root.opcode in _UPDATES:
            return self.module.by_name[root.operands[_UPDATES[root.opcode]]].bytes
        if root.opcode == "tuple":
            return sum(self._written(self.module.by_name[name]) for name in root.operands)
        if root.opcode in ("bitcast", "copy", "convert", "transpose") and root.operands:
            below = self.module.by_name[root.operands[0]]
            if below.opcode in (*_UPDATES, *_NO_WORK):
                return min(root.bytes, self._written(below))
        return root.bytes

    def _products(self, dots: list[Instruction], name: str, phase: str, moved: float) -> Work:
        """A fusion of products."""
        sizes = [self.product(dot) for dot in dots]
        flops = [2 * groups * m * n * k for groups, m, n, k in sizes]
        most = flops.index(max(flops))
        groups, *mnk = sizes[most]
        left = self.module.by_name[dots[most].operands[0]].shapes[0]
        return Work(
            name, GEMM, phase, sum(flops), moved, dtype(left.dtype),
            (mnk[0], mnk[1], mnk[2]), int(groups),
        )  # fmt: skip

    def product(self, dot: Instruction) -> tuple[float, float, float, float]:
        """Returns (batch, m, n, k) of a dot."""
        left, right = (self.module.by_name[name].shapes[0].dims for name in dot.operands[:2])
        batch = dot.numbers("lhs_batch_dims")
        over = dot.numbers("lhs_contracting_dims")
        k = math.prod(left[d] for d in over)
        groups = math.prod(left[d] for d in batch)
        return groups, math.prod(left) / k / groups, math.prod(right) / k / groups, k

    def _custom(self, call: Instruction, name: str, phase: str) -> Work:
        """A kernel of ours, cuDNN's attention, a product of cuBLAS, or another one."""
        target = call.attribute(r'custom_call_target="([^"]*)"')
        read, made = self.module.operand_shapes(call), call.shapes
        moved = sum(shape.bytes for shape in (*read, *made))
        if target.startswith("__cublas"):
            return self._cublas(call, name, phase, moved)
        if target.startswith("__cudnn$fmha"):
            return self._attention(read, 5 if "Backward" in target else 2, name, phase, moved)
        if "mosaic" not in target and "triton" not in target:
            return Work(name, MEMORY, phase, bytes=moved)
        kernel = kernel_of(call.op_name)
        if kernel.startswith("attention_"):
            return self._fused(read, kernel.removeprefix("attention_"), name, phase, moved)
        if kernel.startswith("grouped"):
            return self._grouped(read, made, kernel, name, phase)
        if "permute" in kernel:
            return Work(name, MEMORY, phase, bytes=self._permuted(read, made))
        return Work(name, MEMORY, phase, bytes=moved)

    def _permuted(self, read: tuple[Shape, ...], made: tuple[Shape, ...]) -> float:
        """Every row is written, rows of tokens are read."""
        rows = min(max(read[0].dims[0], made[0].dims[0]), self.rows)
        return made[0].bytes + rows * read[0].bytes / read[0].dims[0]

    def _grouped(self, read, made, kernel: str, name: str, phase: str) -> Work:
        """A grouped product: rows [s, k], and weights [g, k, n] read or made."""
        rows = next(s for s in read if len(s.dims) == 2 and s.dtype in _FLOATS)
        slots, width = rows.dims
        weights = next(s for s in (*read, *made) if len(s.dims) == 3 and s.dims[0] != slots)
        groups = weights.dims[0]
        k, n = weights.dims[1:] if weights.dims[1] == width else weights.dims[:0:-1]
        share = min(1.0, self.rows / slots)
        moved = sum(
            shape.bytes * (share if shape.dims[0] == slots else 1) for shape in (*read, *made)
        )
        real = slots * share
        return Work(
            name, GROUPED, phase, 2.0 * real * k * n, moved, dtype(rows.dtype),
            (real / groups, n, k), groups,
        )  # fmt: skip

    def _cublas(self, call: Instruction, name: str, phase: str, moved: float) -> Work:
        left, right = self.module.operand_shapes(call)[:2]

        def over(which: str) -> float:
            dims = call.attribute(rf'lhs_{which}_dimensions":\[([^\]]*)')
            return math.prod(left.dims[int(d)] for d in re.findall(r"\d+", dims))

        k, groups = over("contracting"), over("batch")
        m, n = (side.size / k / groups for side in (left, right))
        name = "unembed" if name == "loss" else name
        return Work(
            name, GEMM, phase, 2 * groups * m * n * k, moved, dtype(left.dtype), (m, n, k),
            int(groups),
        )  # fmt: skip

    def _attention(self, read, products: int, name: str, phase: str, moved: float) -> Work:
        """cuDNN's: it skips what the causal mask hides; its backward has 5 products for 2."""
        q, k = read[0], read[1]  # [b, l, n, h], [b, s, n, h]
        batch, length, heads, width = q.dims
        flops = products * 2 * batch * heads * length * k.dims[1] * width / 2
        return Work(
            name, ATTENTION, phase, flops, moved, dtype(q.dtype),
            (length, k.dims[1], width), batch * heads,
        )  # fmt: skip

    def _fused(self, read, kernel: str, name: str, phase: str, moved: float) -> Work:
        """Attention of ours, where each row is one document."""
        q, k, v = [s for s in read if len(s.dims) == 4 and s.dtype in _FLOATS][:3]
        batch, length, heads, width = q.dims
        by_keys, by_values = _ATTENTION[kernel]
        pairs = self.seen * batch * heads * length * k.dims[1] / 2
        flops = 2 * pairs * (by_keys * width + by_values * v.dims[3])
        return Work(
            name, ATTENTION, phase, flops, moved, dtype(q.dtype),
            (length, k.dims[1], min(width, v.dims[3])), batch * heads,
        )  # fmt: skip

    def collective(
        self, instruction: Instruction, wrapped: list[Instruction], name: str, phase: str
    ) -> Work:
        """What a collective sends; rings and direct exchange send the same."""
        one = wrapped[0] if wrapped else instruction
        kind = COLLECTIVES[one.opcode.removesuffix("-start")]
        read, made = self.module.operand_shapes(instruction), self.made(instruction)
        group, axes = self.group(one)
        inputs, outputs = (sum(shape.bytes for shape in side) for side in (read, made))
        moved, total = inputs + outputs, max(inputs, outputs)
        if kind == "ragged_all_to_all":  # rows of tokens alone travel; one of the two has no others
            total = min(read[0].bytes, read[1].bytes)
            moved = 2 * total
        others = 1.0 if kind == "permute" else (group.size - 1) / group.size
        wire = total * others * (2 if kind == "all_reduce" else 1)
        few = all(shape.size < 1 << 16 for shape in read)
        path = one.op_name or self.places.path(instruction)
        role = role_of(kind, path, axes, few and read[0].dtype.startswith(("s", "u")))
        if role == "gradient sum":
            phase = "backward"  # XLA joins it with sums of other phases
        return Work(
            role if name in ("", "step", "block", "loss", "accumulate") else name,
            COLLECTIVE, phase, 0.0, moved, dtype(read[0].dtype),
            collective=kind, role=role, wire=wire, group=group,
        )  # fmt: skip

    def group(self, instruction: Instruction) -> tuple[Group, tuple[str, ...]]:
        """Returns the group that the first GPU is in, and its mesh axes where they are named."""
        text, axes = instruction.attributes, ()
        if mesh := _MESH.search(text):
            sizes = {n: int(s) for n, s in re.findall(r"'([^']*)'=(\d+)", mesh[1])}
            axes = tuple(re.findall(r"'([^']*)'", mesh[2]))
            members, stride = [0], 1
            for axis, size in reversed(sizes.items()):
                if axis in axes:
                    members = [m + stride * i for m in members for i in range(size)]
                stride *= size
        elif iota := _IOTA.search(text):
            members = _first_iota(iota)
        elif listed := _LIST.search(text):
            members = [int(n) for n in listed[1].split(",")]
        elif pair := _PAIR.search(text):
            members = [int(pair[1]), int(pair[2])]
        else:
            members = list(range(int(instruction.attribute(r"num_partitions=(\d+)") or 1)))
        first = members[0] // self.domain
        local = sum(member // self.domain == first for member in members)
        return Group(len(members), local), axes


def _copies(names: Iterable[str]) -> set[str]:
    """The instructions that XLA's rematerialisation copied: "x.remat2" beside "x" or "x.remat".

    >>> sorted(_copies(["x", "x.remat2", "y.remat", "y.remat3", "z.remat"]))
    ['x.remat2', 'y.remat3']
    """
    found: dict[str, list[str]] = {}
    for name in names:
        found.setdefault(name.partition(".remat")[0], []).append(name)
    copies = set()
    for first, alike in found.items():
        keeps = first if first in alike else alike[0]
        copies |= {name for name in alike if name != keeps}
    return copies


def _first_iota(found: re.Match) -> list[int]:
    """The first row of [groups, size]<=[dims]T(order): an iota, reshaped, transposed, reshaped.

    >>> _first_iota(_IOTA.search("replica_groups=[2,4]<=[4,2]T(1,0)"))
    [0, 2, 4, 6]
    """
    size = int(found[2])
    dims = [int(d) for d in found[3].split(",")]
    order = [int(d) for d in found[4].split(",")] if found[4] else list(range(len(dims)))
    strides = [math.prod(dims[d + 1 :]) for d in range(len(dims))]
    members = []
    for index in range(size):
        at = 0
        for d in reversed(order):
            index, digit = divmod(index, dims[d])
            at += digit * strides[d]
        members.append(at)
    return members
