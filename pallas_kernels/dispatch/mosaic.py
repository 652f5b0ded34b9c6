"""Exchange of rows between GPUs of one NVLink domain: each device writes into its peers' buffers.

`protocol.py` says who waits for whom, `work.py` what is copied where; this file is the copies.

Grid: one block of one warpgroup for each streaming multiprocessor. A block takes every (number of
blocks)th item of the list, and keeps a ring of shared-memory stages: loads of later items in flight
while it starts the store of the oldest. All data moves by bulk copies, device to shared memory to
the receiver's device; no register sees it. Rows are gathered on the way by index (`tokens`), so a
sorted copy of them is never made. An item of R rows is one store, since they are neighbours at
their receiver, or one for each row where it has fewer. Rows longer than a stage count as several.

A second, narrow array (`beside`) travels in the same launch, for it would pay the barriers again.

How a peer's buffer is found: `remote_ref` adds to an address of this device the distance between
the two devices' buffers for the same operand of the call. XLA's runtime collects these addresses
before the launch ("collective metadata": a rendezvous of the mesh's devices when the program
starts), so nothing has to be symmetric, and no NVSHMEM is involved. In one process it needs peer
access between all GPUs of the mesh. In several, Mosaic asks XLA for buffers in its collective
memory space, which NCCL registers as windows. In both cases the group is the whole mesh, not the
axes of the exchange: every device of it has to run this call, and all have to lie in one NVLink
domain.

Compiled only: the interpreter has neither semaphores nor remote references. What a block does with
its list runs there on one device (`tests/pallas_kernels/test_exchange_mosaic.py`); the order of the
steps is checked by the model. Not yet run on a GPU.
"""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.dispatch.protocol import run_block
from pallas_kernels.dispatch.work import Tables, items

STAGE_BYTES = 16 * 1024
RING_BYTES = 96 * 1024
"""Shared memory of the rows' ring: 132 blocks have 9 MB in flight; 450 GB/s at 3 us need 1.4."""
BESIDE_BYTES = 16 * 1024
MAX_GATHERED, MAX_ROWS = 8, 128
"""Rows of an item: each gathered one is a copy of its own, and its index is held in registers."""
STORES = 2
"""Stores that may still be reading shared memory while later items are served."""
UNIT = 16
"""Bytes that a bulk copy counts in."""
MAX_INDEX = 2**31 - 2**22
"""Rows are numbered in 32 bits."""

_PARAMS = plgpu.CompilerParams(
    lowering_semantics=plgpu.LoweringSemantics.Warpgroup,
    # No shared memory is touched but by bulk copies, and the wait for them is a barrier.
    unsafe_no_auto_barriers=True,
    skip_device_barrier=False,  # step 0 of the protocol
)


def refusal(dtype, dim: int, *, num_rows: int) -> str | None:
    """Returns why rows of `dim` elements cannot travel, or None; `num_rows`: the most anywhere."""
    itemsize = jnp.dtype(dtype).itemsize
    if itemsize not in (2, 4):
        return f"rows of {jnp.dtype(dtype).name}; elements of 2 and 4 bytes are served"
    if dim == 0 or dim * itemsize % UNIT:
        return f"D={dim}: rows are copied in units of {UNIT} bytes"
    if (parts := _parts(dim, itemsize)) is None:
        return f"D={dim} cannot be cut into up to 64 equal parts of at most {STAGE_BYTES} bytes"
    if num_rows * parts >= MAX_INDEX:
        return f"{num_rows} rows cannot be numbered in 32 bits"
    return None


def _parts(dim: int, itemsize: int) -> int | None:
    """Returns into how many equal parts a row is cut, each a stage at most; None: it cannot be."""
    units, most = dim * itemsize // UNIT, STAGE_BYTES // UNIT
    return next((m for m in range(1, 65) if units % m == 0 and units // m <= most), None)


@dataclasses.dataclass(frozen=True)
class Plan:
    """How one array's rows are cut into items."""

    rows: int
    """Rows of an item."""
    width: int
    depth: int
    """Stages of the ring."""
    gathered: bool


def _plan(num_rows: int, width: int, itemsize: int, gathered: bool, ring_bytes: int) -> Plan:
    """Worked example, bfloat16, gathered: 2048 columns give 4 rows a stage, and 6 stages."""
    most = MAX_GATHERED if gathered else MAX_ROWS
    rows = max(1, min(most, STAGE_BYTES // (width * itemsize), num_rows))
    depth = max(STORES + 1, min(8, ring_bytes // (rows * width * itemsize)))
    return Plan(rows, width, depth, gathered)


def _load(source, dst, barrier):
    plgpu.copy_gmem_to_smem(source, dst, barrier, oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS)


class Mover:
    """One array's share of a block: its items, through its ring, to their receivers."""

    def __init__(self, plan: Plan, num_blocks: int, there, refs, scratch):
        self.plan, self.num_blocks, self.there = plan, num_blocks, there
        self.x_gmem, self.zeros_gmem, self.work_gmem, *tokens, self.out_gmem = refs
        self.tokens_gmem = tokens[0] if tokens else None
        self.stages_smem, self.loaded = scratch
        self.block = lax.axis_index("block")

    def item(self, step):
        """Returns (device, first row here, first row there, rows) of the block's item."""
        # Where the list ends the last item is read again; nothing is done with it.
        last = (self.work_gmem.shape[0] - 1) // 4 - 1
        place = 1 + 4 * jnp.minimum(self.block + step * self.num_blocks, last)
        return [self.work_gmem[place + column] for column in range(4)]

    def rows_of(self, source):
        """Returns the rows to load, -1 for zeros; those past the item's end are not stored."""
        last = self.x_gmem.shape[0] - 1
        if self.tokens_gmem is None:
            # A box that starts early enough to end inside the array.
            return [jnp.where(source < 0, source, jnp.minimum(source, last + 1 - self.plan.rows))]
        end = self.tokens_gmem.shape[0] - 1
        places = [jnp.minimum(jnp.maximum(source, 0) + r, end) for r in range(self.plan.rows)]
        return [jnp.where(source < 0, source, self.tokens_gmem[place]) for place in places]

    def load(self, step, rows):
        """Starts the copies of an item's rows into its stage."""
        stage = lax.rem(step, self.plan.depth)
        for r, row in enumerate(rows):
            if self.plan.gathered:
                to = self.stages_smem.at[stage, r], self.loaded.at[stage]
                pl.when(row >= 0)(partial(_load, self.x_gmem.at[row], *to))
                pl.when(row < 0)(partial(_load, self.zeros_gmem.at[0], *to))
            else:
                to = self.stages_smem.at[stage], self.loaded.at[stage]
                box = pl.ds(row, self.plan.rows)
                pl.when(row >= 0)(partial(_load, self.x_gmem.at[box], *to))
                pl.when(row < 0)(partial(_load, self.zeros_gmem, *to))

    def store(self, step):
        """Starts the copies of an item's rows to their receiver, one group of copies."""
        stage = lax.rem(step, self.plan.depth)
        peer, source, place, count = self.item(step)
        out = self.there(self.out_gmem, peer)
        [first] = self.rows_of(source) if not self.plan.gathered else [source]
        skipped = jnp.where(source < 0, 0, source - first)  # rows of the box before the item's own

        def whole():
            to = out.at[pl.ds(place, self.plan.rows)]
            plgpu.copy_smem_to_gmem(self.stages_smem.at[stage], to, commit_group=False)

        def one(r, _):
            rows = self.stages_smem.at[stage, skipped + r], out.at[place + r]
            plgpu.copy_smem_to_gmem(*rows, commit_group=False)

        pl.when(count == self.plan.rows)(whole)
        pl.when(count < self.plan.rows)(lambda: lax.fori_loop(0, count, one, None))
        plgpu.commit_smem_to_gmem_group()

    def run(self):
        """Moves the block's items; the last stores may still be under way."""
        ahead = self.plan.depth - STORES
        left = self.work_gmem[0] - self.block + self.num_blocks - 1
        steps = lax.div(jnp.maximum(left, 0), self.num_blocks)

        def start(step, _):
            self.load(step, self.rows_of(self.item(step)[1]))

        def serve(step, _):
            later = self.rows_of(self.item(step + ahead)[1])
            plgpu.barrier_wait(self.loaded.at[lax.rem(step, self.plan.depth)])
            self.store(step)
            plgpu.wait_smem_to_gmem(STORES, wait_read_only=True)
            pl.when(step + ahead < steps)(lambda: self.load(step + ahead, later))

        lax.fori_loop(0, jnp.minimum(steps, ahead), start, None)
        lax.fori_loop(0, steps, serve, None)


class Block:
    """One block's steps (`protocol.Steps`), for devices along mesh axes; `()`: this device
    alone."""

    def __init__(self, movers, axes: tuple[str, ...], num_devices: int, arrived):
        self.movers, self.axes, self.num_devices = movers, axes, num_devices
        self.arrived = arrived

    def send(self):
        for mover in self.movers:
            mover.run()

    def land(self):
        plgpu.wait_smem_to_gmem(0)

    def signal_all(self):
        def signal(device, _):
            pl.semaphore_signal(self.arrived, 1, device_id={self.axes: device})

        if self.axes:
            lax.fori_loop(0, self.num_devices, signal, None)

    def collect(self, signals: int):
        if self.axes:
            pl.semaphore_wait(self.arrived, signals)


def _scratch(plan: Plan, dtype):
    arrivals = plan.rows if plan.gathered else 1
    return [
        plgpu.SMEM((plan.depth, plan.rows, plan.width), dtype),
        plgpu.Barrier(num_arrivals=arrivals, num_barriers=plan.depth),
    ]


def there(axes: tuple[str, ...], out_gmem, device):
    """Returns the same operand of the same call on another device."""
    return plgpu.remote_ref(out_gmem, {axes: device}) if axes else out_gmem


@dataclasses.dataclass(frozen=True)
class Launch:
    """What an exchange is, but for its arrays."""

    axes: tuple[str, ...]
    """Mesh axes along which devices exchange; (): this device alone."""
    num_rows: int
    """Rows of each output."""
    num_sms: int


def exchange(launch: Launch, arrays, tables: Tables):
    """Returns what arrives here of each array, rows that nobody sends as zeros.

    `arrays` is pairs of rows [T, D] and of the row to send in each place, an int32 array, or None
    where the rows lie as they are sent. One launch moves them all.
    """
    me = lax.axis_index(launch.axes) if launch.axes else 0
    return launched(launch, arrays, tables, me, partial(there, launch.axes), launch.num_rows)


def launched(launch: Launch, arrays, tables: Tables, me, there, out_rows: int):
    """Returns `exchange` of device `me`, whose blocks write to `there(output, device)`, a part of
    outputs of `out_rows` rows."""
    num_devices, num_blocks = tables.send_sizes.shape[0], launch.num_sms
    operands, outputs, scratch, plans = [], [], [], []
    for i, (x_TD, tokens_S) in enumerate(arrays):
        parts = _parts(x_TD.shape[1], x_TD.dtype.itemsize)
        assert parts is not None  # `refusal` says so
        width = x_TD.shape[1] // parts
        x_TD = x_TD.reshape(-1, width)
        tokens = [] if tokens_S is None else [_in_parts(tokens_S, parts)]
        num_sent = tokens[0].shape[0] if tokens else x_TD.shape[0]
        ring = BESIDE_BYTES if i else RING_BYTES
        plan = _plan(num_sent, width, x_TD.dtype.itemsize, bool(tokens), ring)
        scaled = Tables(*(table * parts for table in tables))
        work = items(scaled, me, num_sent, launch.num_rows * parts, plan.rows)
        zeros = jnp.zeros((1 if plan.gathered else plan.rows, width), x_TD.dtype)
        operands += [x_TD, zeros, work, *tokens]
        shape = (out_rows * parts, width)
        outputs.append(jax.typeof(x_TD).update(shape=shape, weak_type=False))
        scratch += _scratch(plan, x_TD.dtype)
        plans.append(plan)

    def body(*refs):
        ins, outs, rest = _split(refs, len(operands), len(outputs))
        movers = []
        for plan, out in zip(plans, outs, strict=True):
            mine, ins = _split(ins, 4 if plan.gathered else 3)
            rings, rest = _split(rest, 2)
            movers.append(Mover(plan, num_blocks, there, [*mine, out], rings))
        steps = Block(movers, launch.axes, num_devices, rest[0] if launch.axes else None)
        run_block(steps, num_devices)

    outs = plgpu.kernel(
        body,
        out_type=outputs,
        scratch_types=[*scratch, *([plgpu.SemaphoreType.REGULAR] if launch.axes else [])],
        grid=(num_blocks,),
        grid_names=("block",),
        compiler_params=_PARAMS,
        kernel_name="exchange",
    )(*operands)
    return [
        out.reshape(out_rows, x_TD.shape[1]) for out, (x_TD, _) in zip(outs, arrays, strict=True)
    ]


def _split(refs, *sizes):
    """Returns the first sizes[0] of refs, the next sizes[1], .., and the rest."""
    found, start = [], 0
    for size in sizes:
        found.append(refs[start : start + size])
        start += size
    return *found, refs[start:]


def _in_parts(tokens_S, parts: int):
    """Returns the rows to send where each row of the array counts as `parts`."""
    each = tokens_S[:, None] * parts + jnp.arange(parts, dtype=tokens_S.dtype)[None]
    return jnp.where(tokens_S[:, None] < 0, -1, each).reshape(-1)
