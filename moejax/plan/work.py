"""What one instruction of a compiled program costs: `Work` from shapes, kernels by their names.

Where the program alone cannot say, the balanced load is taken: rows of the experts' buffers hold
tokens as far as the load of an even router fills them. A slice of a large buffer counts as the
slice, and an update of one as the update.
"""

import dataclasses
import math
import re

from moejax.plan.hlo import HOST_SPACE, Instruction, Module, Shape
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

STOPS = (
    *("embed", "attend", "route", "losses", "dispatch", "experts", "combine", "mlp", "drop"),
    *("predict_ahead", "loss", "apply_update"),
)
"""Named scopes of the step, inner ones first where they nest."""
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
_NO_WORK = ("bitcast", "get-tuple-element", "tuple", "copy", "convert", "transpose", "reshape")
_FLOATS = ("bf16", "f16", "f32", "f64")
DTYPES = {"bf16": "bfloat16", "f16": "float16", "f32": "float32", "f64": "float64"}


def dtype(name: str) -> str:
    """Returns the name by which `Work` and `Cluster.peak` know an HLO dtype."""
    return "fp8" if name.startswith("f8") else "fp4" if name.startswith("f4") else DTYPES.get(
        name, name
    )  # fmt: skip


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
    differentiated once more inside, or not, is its backward, or computed again.

    >>> phase_of("a/jvp(loss)/b"), phase_of("transpose(jvp(loss))/while/body/jvp(attend)/dot")
    ('forward', 'recompute')
    >>> phase_of("transpose(jvp(loss))/body/transpose(jvp(attend))/dot"), phase_of("step/mul")
    ('backward', 'update')
    """
    _, found, inner = path.partition("transpose(jvp(loss))")
    if found:
        again = "jvp(" in inner and "transpose(" not in inner
        return "recompute" if again else "backward"
    return "forward" if "jvp(loss)" in path else "update"


@dataclasses.dataclass
class Reader:
    """What it takes to say what an instruction costs."""

    module: Module
    domain: int
    """GPUs of an NVLink domain."""
    rows: float
    """Rows of a device's experts at an even load; inf: as many as the buffers have."""

    def path(self, instruction: Instruction) -> str:
        """Returns its op_name, or that of what it reads, or of who reads it, or ""."""
        seen, below = instruction, 0
        while not (own := seen.op_name.split(":")[0]) or own.startswith(("state.", "batch[")):
            before = [self.module.by_name.get(name) for name in seen.operands[:1]]
            if not before or before[0] is None or below == 6:
                break
            seen, below = before[0], below + 1
        if own and not own.startswith(("state.", "batch[")):
            return own
        for user in self.module.users.get(instruction.name, ()):
            if user.op_name:
                return user.op_name.split(":")[0]
        return ""

    def work(self, instruction: Instruction) -> Work | None:
        """Returns what it costs; None: nothing."""
        opcode = instruction.opcode.removesuffix("-start")
        if opcode in COLLECTIVES:
            return self.collective(instruction, COLLECTIVES[opcode])
        inner = self.module.computations.get(instruction.calls, ())
        wrapped = [i for i in inner if i.opcode in COLLECTIVES]
        if wrapped:
            return self.collective(wrapped[0], COLLECTIVES[wrapped[0].opcode])
        path = self.path(instruction)
        name, phase = stop_of(path), phase_of(path)
        if opcode == "custom-call":
            return self._custom(instruction, instruction, name, phase)
        for one in self.module.reached(instruction.calls) if instruction.calls else ():
            if one.opcode == "custom-call":  # a kernel that reads a slice of a larger buffer
                return self._custom(one, one, name or stop_of(one.op_name), phase)
        moved = self.moved(instruction)
        spaces = {shape.space for shape in self._touched(instruction)}
        if HOST_SPACE in spaces:
            return Work(name or "copy", HOST, phase, bytes=moved / 2)
        dots = [i for i in self.module.reached(instruction.calls) if i.opcode == "dot"]
        if instruction.opcode == "dot":
            dots = [instruction]
        if dots:
            return self._products(dots, name, phase, moved)
        return Work(name or "copy", MEMORY, phase, bytes=moved) if moved else None

    def _touched(self, instruction: Instruction) -> tuple[Shape, ...]:
        return instruction.shapes + self.module.operand_shapes(instruction)

    def moved(self, instruction: Instruction) -> float:
        """Returns the bytes of device memory that it reads and writes."""
        body = self.module.computations.get(instruction.calls)
        operands = [self.module.by_name.get(name) for name in instruction.operands]
        sizes = [operand.bytes if operand else 0.0 for operand in operands]
        if not body:
            opcode = instruction.opcode.removesuffix("-start")
            if opcode in _SLICES:
                return 2 * instruction.bytes
            if opcode in _UPDATES:
                return 2 * sizes[_UPDATES[opcode]]
            made = instruction.shapes[0].bytes if opcode == "copy" else instruction.bytes
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
            name or "unembed", GEMM, phase, sum(flops), moved, dtype(left.dtype),
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

    def _custom(self, call: Instruction, seen: Instruction, name: str, phase: str) -> Work:
        """A kernel of ours, cuDNN's attention, a product of cuBLAS, or another one."""
        target = call.attribute(r'custom_call_target="([^"]*)"')
        read, made = self.module.operand_shapes(call), call.shapes
        moved = sum(shape.bytes for shape in (*read, *made))
        if target.startswith("__cublas"):
            return self._cublas(call, name, phase, moved)
        if target.startswith("__cudnn$fmha"):
            return self._attention(read, made, name, phase, moved)
        if "mosaic" not in target and "triton" not in target:
            return Work(name or target, MEMORY, phase, bytes=moved)
        kernel = kernel_of(seen.op_name)
        if kernel.startswith("grouped"):
            return self._grouped(read, made, kernel, name, phase)
        if "permute" in kernel:
            return Work(name, MEMORY, phase, bytes=self._permuted(read, made))
        return Work(name or kernel, MEMORY, phase, bytes=moved)

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
            name or "experts", GROUPED, phase, 2.0 * real * k * n, moved, dtype(rows.dtype),
            (real / groups, n, k), groups,
        )  # fmt: skip

    def _cublas(self, call: Instruction, name: str, phase: str, moved: float) -> Work:
        left, right = self.module.operand_shapes(call)[:2]
        over = [int(d) for d in re.findall(r"\d+", call.attribute(r'lhs_contracting_dimensions":\[([^\]]*)'))]
        batch = [int(d) for d in re.findall(r"\d+", call.attribute(r'lhs_batch_dimensions":\[([^\]]*)'))]
        k = math.prod(left.dims[d] for d in over)
        groups = math.prod(left.dims[d] for d in batch)
        m, n = (side.size / k / groups for side in (left, right))
        return Work(
            name or "unembed", GEMM, phase, 2 * groups * m * n * k, moved, dtype(left.dtype),
            (m, n, k), groups,
        )  # fmt: skip

    def _attention(self, read, made, name: str, phase: str, moved: float) -> Work:
        """cuDNN's: it skips what the causal mask hides; its backward has 5 products for 2."""
        q, k = read[0], read[1]  # [b, l, n, h], [b, s, n, h]
        batch, length, heads, width = q.dims
        products = 5 if len(read) > 4 else 2
        flops = products * 2 * batch * heads * length * k.dims[1] * width / 2
        return Work(
            name or "attend", ATTENTION, phase, flops, moved, dtype(q.dtype),
            (length, k.dims[1], width), batch * heads,
        )  # fmt: skip

    def collective(self, instruction: Instruction, kind: str) -> Work:
        """What a collective sends; rings and direct exchange send the same."""
        path = self.path(instruction)
        read = [s for s in self.module.operand_shapes(instruction)]
        group, axes = self.group(instruction)
        made = list(instruction.shapes)
        if instruction.opcode.endswith("-start"):
            made = made[len(read) : 2 * len(read)] if len(made) >= 2 * len(read) else made[-1:]
        if kind == "ragged_all_to_all":
            into, out = read[0], read[1]
            rows = min(into.dims[0], out.dims[0])
            total = rows * into.bytes / into.dims[0]
            moved, elements = 2 * total, rows
        else:
            inputs, outputs = (sum(s.bytes for s in side) for side in (read, made))
            total = max(inputs, outputs) if kind != "permute" else inputs
            moved, elements = inputs + outputs, max((s.size for s in read), default=0)
        others = 1.0 if kind == "permute" else (group.size - 1) / group.size
        wire = total * others * (2 if kind == "all_reduce" else 1)
        small = read[0].dtype.startswith("s") and elements < 1 << 16
        role = role_of(kind, path, axes, small)
        name = stop_of(path) or role
        return Work(
            name, COLLECTIVE, phase_of(path), 0.0, moved, dtype(read[0].dtype),
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


def kernel_of(path: str) -> str:
    """Returns the kernel's name: the last but one part of its op_name.

    >>> kernel_of("jit(step)/experts/grouped_mlp_forward/mpmd_map")
    'grouped_mlp_forward'
    """
    parts = path.split("/")
    return parts[-2] if len(parts) > 1 else path


def role_of(kind: str, path: str, axes: tuple[str, ...], small: bool) -> str:
    """Returns what a collective moves, from where it stands and the mesh axes that it crosses."""
    stop = stop_of(path)
    if stop in ("dispatch", "combine") or "all_to_all" in kind:
        return "ep sizes" if small else f"ep {stop or 'dispatch'}"
    tp = bool(axes) and all(axis.startswith("tp") for axis in axes)
    if kind == "all_gather":
        return "tp gather" if tp else "zero gather"
    if kind == "reduce_scatter":
        return "tp reduce" if tp else "zero reduce"
    if kind == "permute":
        return "ring"
    if tp and phase_of(path) != "update":
        return "tp sum"
    return "gradient sum" if "transpose(" in path else "metrics"
