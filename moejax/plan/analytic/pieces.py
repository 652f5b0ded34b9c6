"""The pieces of work that layers are made of: shapes and bytes, forward and backward.

`Made` collects them in order. What is added forward has its backward: a product has two (of its
input and of its weight), a collective the opposite one, elementwise work its own bytes.
"""

import dataclasses

from moejax.plan.analytic.setup import Setup
from moejax.plan.hardware import Cluster
from moejax.plan.operations import COLLECTIVE, GEMM, GROUPED, MEMORY, Group, Loop, Run, Work

TRANSPOSED = {
    "all_gather": "reduce_scatter",
    "reduce_scatter": "all_gather",
    "all_reduce": "all_reduce",
    "all_to_all": "all_to_all",
    "ragged_all_to_all": "ragged_all_to_all",
    "fused_all_to_all": "fused_all_to_all",
}
Item = Work | Loop


@dataclasses.dataclass(frozen=True)
class Piece:
    """One step forward, what it costs backward, and when it is computed again."""

    forward: tuple[Item, ...]
    backward: tuple[Item, ...]
    tags: tuple[str, ...] = ()
    """Entries of `Setup.recompute` that have it computed again; "full" is every piece's."""
    again: bool = True
    """Whether "full" computes it again: what the backward does not read, XLA leaves out."""


class Made:
    """Collects pieces for a setup on a cluster."""

    def __init__(self, setup: Setup, cluster: Cluster):
        self.setup, self.cluster = setup, cluster
        self.pieces: list[Piece] = []
        self.ours = setup.software == "moejax"

    def take(self) -> tuple[Piece, ...]:
        """Returns what was added since the last time."""
        taken, self.pieces = tuple(self.pieces), []
        return taken

    def add(self, forward: list[Item], backward: list[Item], *tags: str, again=True) -> None:
        """Adds a piece."""
        self.pieces.append(Piece(tuple(forward), tuple(backward), tags, again))

    def memory(
        self, name: str, forward: float, backward: float, *tags: str, again=True, flops=0.0
    ) -> None:
        """Adds elementwise work of so many bytes forward and backward. flops: those forward."""
        works: list[Item] = [Work(name, MEMORY, bytes=forward, flops=flops)] if forward else []
        back: list[Item] = []
        if backward:
            back = [Work(name, MEMORY, bytes=backward, flops=2 * flops)]
        self.add(works, back, *tags, again=again)

    def product(
        self, name: str, m: float, n: float, k: float, *tags: str, dtype="", again=True
    ) -> None:
        """Adds x [m, k] times w [k, n]; of linears that read one x, n is the sum."""
        dtype = dtype or self.setup.dtype
        work = Work(name, GEMM, flops=2 * m * n * k, dtype=dtype, mnk=(m, n, k))
        back = (
            dataclasses.replace(work, mnk=(m, k, n)),
            dataclasses.replace(work, mnk=(k, n, m), bytes=self._summed(k, n, m, dtype)),
        )
        self.add(
            [*self.cast(name, m * k, dtype), work], [*self.cast(name, m * n, dtype), *back],
            *tags, again=again,
        )  # fmt: skip

    def grouped(
        self, name: str, groups: float, rows: float, n: float, k: float, *tags: str, again=True
    ) -> None:
        """Adds the product of the rows of each of so many experts with its weight [k, n]."""
        dtype, total = self.setup.dtype, groups * rows
        work = Work(
            name, GROUPED, flops=2 * total * n * k, dtype=dtype, mnk=(rows, n, k),
            groups=max(int(groups), 1),
        )  # fmt: skip
        summed = groups * self._summed(k, n, rows, dtype)
        back = (
            dataclasses.replace(work, mnk=(rows, k, n)),
            dataclasses.replace(work, mnk=(k, n, rows), bytes=summed),
        )
        self.add(
            [*self.cast(name, total * k, dtype), work],
            [*self.cast(name, total * n, dtype), *back],
            *tags, again=again,
        )  # fmt: skip

    def cast(self, name: str, elements: float, dtype: str) -> list[Item]:
        """Returns what makes 8-bit operands of 16-bit values: by rows for one product and by
        columns for the other, in one pass (Transformer Engine)."""
        return [Work(name, MEMORY, bytes=(2 + 1 + 1) * elements)] if dtype == "fp8" else []

    def _summed(self, k: float, n: float, m: float, dtype: str) -> float:
        """Bytes of a weight's gradient. Megatron's adds to a float32 sum as it is written; 0: the
        operands and the result alone."""
        size = 1 if dtype == "fp8" else 2
        return 0.0 if self.ours else (m * k + m * n) * size + 8 * k * n

    def collective(
        self, name: str, kind: str, role: str, axis: str, whole: float, *tags: str, again=True
    ) -> None:
        """Adds a gather or scatter over an axis; `whole`: bytes of the array before or after."""
        group = self.setup.group(axis, self.cluster)
        if group.size > 1:
            self.exchange(name, kind, role, ring(kind, whole, group), group, *tags, again=again)

    def exchange(
        self, name: str, kind: str, role: str, wire: float, group: Group, *tags: str, again=True
    ) -> None:
        """Adds a collective of which this GPU sends `wire` bytes, and the opposite one."""
        work = Work(name, COLLECTIVE, collective=kind, role=role, wire=wire, group=group)
        self.add(
            [work], [dataclasses.replace(work, collective=TRANSPOSED[kind])], *tags, again=again
        )


def ring(kind: str, whole: float, group: Group) -> float:
    """Returns the bytes that a GPU sends in a ring over a group, of an array of `whole` bytes."""
    return (2 if kind == "all_reduce" else 1) * whole * (group.size - 1) / group.size


def phased(item: Item, phase: str) -> Run | Loop:
    """Returns the item as an event of that phase; what says that it is done again stays so."""
    if isinstance(item, Work):
        again = item.phase == "recompute"
        return Run(item if again else dataclasses.replace(item, phase=phase))
    assert all(isinstance(event, Run | Loop) for event in item.body), item.name
    body = tuple(
        phased(event.work if isinstance(event, Run) else event, phase)
        for event in item.body
        if isinstance(event, Run | Loop)
    )
    return dataclasses.replace(item, body=body)
