"""The exchange kernel: its list of items, its copies simulated on CPU, and what the compiler makes.

The interpreter has no other devices: here each device's blocks run alone, and write into one array
that holds all devices' outputs. Who waits for whom is `test_exchange_protocol.py`'s subject.
"""

import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import AbstractDevice, AbstractMesh

from moejax.core.mesh import fold
from moejax.model.dispatch import nvlink
from pallas_kernels import deviceless
from pallas_kernels.dispatch import mesh_refusal, mosaic, reference
from pallas_kernels.dispatch.work import Tables, items, max_items
from tests.deviceless.child import printed

P = 3


def tables_of(sizes_PP) -> Tables:
    """Returns the tables of all devices, [P, P] each, where blocks are packed at both ends."""
    sizes_PP = np.asarray(sizes_PP, np.int32)
    sent_PP = np.cumsum(sizes_PP, axis=1, dtype=np.int32) - sizes_PP
    placed_PP = np.cumsum(sizes_PP, axis=0, dtype=np.int32) - sizes_PP
    return Tables(sent_PP, sizes_PP, placed_PP, sizes_PP.T)


def of(device: int, tables: Tables) -> Tables:
    return Tables(*(jnp.asarray(table[device]) for table in tables))


SIZES = {
    "skewed": [[5, 0, 9], [1, 17, 2], [0, 0, 4]],
    "nothing": [[0] * P] * P,
    "all to one": [[0, 20, 0]] * P,
    "full": [[7] * P] * P,
}


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("rows", [1, 4, 8])
def test_items_cover_each_row_once(sizes, rows):
    """Every row of every output has one writer, and it is the right one."""
    tables, num_sent = tables_of(sizes), 24
    num_received = max(1, int(np.sum(sizes, axis=0).max()))
    writers = np.zeros((P, num_received), int)
    for me in range(P):
        count, *work = np.asarray(items(of(me, tables), me, num_sent, num_received, rows))
        work = np.reshape(work, (-1, 4))
        assert count <= len(work) == max_items(num_sent, num_received, P, rows)
        assert not work[count:].any() and (work[:count, 3] > 0).all()
        devices = [peer for peer, source, *_ in work[:count] if source >= 0]
        assert devices == sorted(devices, key=lambda peer: (peer - me) % P)
        for peer, source, to, n in work[:count]:
            assert n <= rows
            writers[peer, to : to + n] += 1
            if source < 0:
                assert peer == me and to >= tables.recv_sizes[me].sum()
            else:
                first = tables.input_offsets[me, peer]
                assert to - source == tables.output_offsets[me, peer] - first
                assert source + n <= first + tables.send_sizes[me, peer]
    assert (writers == 1).all()


# 24 columns: 8 gathered rows an item. 9216 of float32: a row is three parts, an item one of them.
@pytest.mark.parametrize(
    ("dim", "dtype", "gathered", "sizes"),
    [
        (24, "bfloat16", True, "skewed"),
        (24, "float32", False, "skewed"),
        (9216, "float32", True, "all to one"),
        (8, "int32", False, "nothing"),
    ],
)
def test_copies_match_the_definition(dim, dtype, gathered, sizes):
    """Two blocks a device; a row longer than a stage; zeros for tokens of -1 and rows of nobody."""
    generator, tables, S = np.random.default_rng(0), tables_of(SIZES[sizes]), 20
    R = int(np.sum(SIZES[sizes], axis=0).max()) + 3
    T = 6 if gathered else S
    x_PTD = jnp.asarray(generator.integers(1, 100, (P, T, dim))).astype(dtype)
    tokens_PS = jnp.asarray(generator.integers(-1, T, (P, S)), jnp.int32) if gathered else None
    beside_PSC = jnp.asarray(generator.integers(1, 100, (P, S, 4)), jnp.float32)
    launch = mosaic.Launch((), R, num_sms=2)

    @jax.jit
    def run(me, x_TD, tokens_S, beside_SC, tables):
        def there(out_gmem, device):
            each = out_gmem.shape[0] // P
            return out_gmem.at[pl.ds(device * each, each)]

        arrays = [(x_TD, tokens_S), (beside_SC, None)]
        return mosaic.launched(launch, arrays, tables, me, there, P * R)

    wanted = (
        reference.exchange_rows(x_PTD, tokens_PS, tables, R),
        reference.exchange_rows(beside_PSC, None, tables, R),
    )
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True)):
        for me in range(P):
            tokens_S = tokens_PS[me] if gathered else None
            found = run(jnp.int32(me), x_PTD[me], tokens_S, beside_PSC[me], of(me, tables))
            for out, right in zip(found, wanted, strict=True):
                out, right = np.asarray(out, np.float32).reshape(P, R, -1), np.asarray(right)
                mine = np.zeros((P, R), bool)
                for peer in range(P):
                    to = tables.output_offsets[me, peer]
                    mine[peer, to : to + tables.send_sizes[me, peer]] = True
                mine[me, tables.recv_sizes[me].sum() :] = True
                np.testing.assert_array_equal(out[mine], right[mine])
                if out.dtype == np.float32 and dtype != "int32":
                    assert np.isnan(out[~mine]).all()  # nothing else was written


@pytest.mark.parametrize(
    ("dtype", "dim", "rows", "why"),
    [
        ("bfloat16", 8, 1, None),
        ("float32", 4, 1, None),
        ("int32", 4, 1, None),
        ("float32", 9216, 1, None),
        ("bfloat16", 12, 1, "units of 16 bytes"),
        ("float32", 0, 1, "units of 16 bytes"),
        ("float8_e4m3fn", 16, 1, "2 and 4 bytes"),
        ("float32", 4 * 4099, 1, "equal parts"),
        ("float32", 9216, 2**30, "32 bits"),
    ],
)
def test_refuses_rows(dtype, dim, rows, why):
    found = mosaic.refusal(jnp.dtype(dtype), dim, num_rows=rows)
    assert found is None if why is None else why in (found or "")


def test_rings_fit_beside_each_other():
    """A multiprocessor has 227 KiB, and the loads' stages are others than the stores'."""
    for dim, itemsize, gathered in itertools.product((8, 2048, 7168, 12288), (2, 4), (True, False)):
        parts = mosaic._parts(dim, itemsize)
        assert parts and dim % parts == 0 and dim // parts * itemsize % 16 == 0
        used = 0
        for width, each, ring in ((dim // parts, itemsize, mosaic.RING_BYTES), (4, 4, 16384)):
            plan = mosaic._plan(65536, width, each, gathered, ring)
            assert plan.depth > mosaic.STORES
            used += plan.depth * plan.rows * width * each
        assert used <= 160 * 1024


def mesh_of(num: int, kind: str):
    device = AbstractDevice(kind, num_cores=132, platform="gpu")
    return jax.sharding.use_abstract_mesh(AbstractMesh((num,), ("x",), abstract_device=device))


@pytest.mark.parametrize(
    ("num", "kind", "why"),
    [
        (8, "NVIDIA H100 80GB HBM3", None),
        (16, "NVIDIA H100 80GB HBM3", "NVLink joins 8"),
        (32, "NVIDIA GB200", None),
        (64, "NVIDIA GB200", "barrier of kernels serves 32"),
        (128, "NVIDIA GB300", "NVLink joins 72"),
    ],
)
def test_refuses_a_mesh_that_is_no_domain(num, kind, why):
    with mesh_of(num, kind):
        found = mesh_refusal()
    assert found is None if why is None else why in (found or "")


def test_no_pipeline_on_gpus():
    """Its ranks would wait for each other in the kernel; elsewhere nothing waits."""
    alone, staged = fold({"dp": 8}, {"ep": 8}), fold({"pp": 2, "dp": 4}, {"pp": 2, "ep": 4})
    assert nvlink._impl(staged) is None
    with mesh_of(8, "NVIDIA H100 80GB HBM3"):
        assert nvlink._impl(alone) == "mosaic"
        with pytest.raises(ValueError, match="pp=2 has them run different layers; use 'ragged'"):
            nvlink._impl(staged)


@pytest.mark.deviceless
@pytest.mark.parametrize(
    ("gpu", "hosts", "per_host", "dim", "dtype"),
    [
        ("h100", 1, 8, 2048, "bfloat16"),
        ("h100", 1, 4, 7168, "float32"),
        ("gb200", 8, 4, 7168, "bfloat16"),
    ],
)
def test_compiles(gpu, hosts, per_host, dim, dtype, tmp_path):
    """There and back, and the gradients: four launches, which write to peers, signal and wait."""
    program = printed("compile_exchange", gpu, hosts, per_host, dim, dtype, dump=tmp_path)
    kernels = sorted(path.stem for path in tmp_path.glob("exchange_*.ptx"))
    assert len(kernels) == 4
    for kernel in kernels:
        report = (tmp_path / f"{kernel}.ptxas").read_text(errors="ignore")
        assert "for 'sm_{}{}a'".format(*deviceless.GPUS[gpu].capability) in report
        assert "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" in report
        ptx = (tmp_path / f"{kernel}.ptx").read_text()
        stores = [m.start() for m in re.finditer(r"cp\.async\.bulk\.global\.shared::cta", ptx)]
        landed = re.search(r"cp\.async\.bulk\.wait_group\s+0;", ptx)
        signals = re.search(r"red\.release\.sys\.global\.add\.u32", ptx)
        waits = re.search(r"atom\.relaxed\.sys\.global\.cas\.b32", ptx)
        acquired = re.search(r"fence\.acquire\.sys", ptx)
        assert stores and landed and signals and waits and acquired
        # The compiler lays the loops of stores out at the end; what follows them is in order.
        assert landed.start() < signals.start() < waits.start() < acquired.start()
    check_program(program, hosts * per_host, several_hosts=hosts > 1)


def check_program(program: str, num_devices: int, *, several_hosts: bool):
    """The runtime's barrier and its addresses are asked for; rows are not copied on the way."""
    calls = [line for line in program.splitlines() if "/exchange/" in line and "mosaic_gpu" in line]
    everyone = ",".join(map(str, range(num_devices)))
    assert len(calls) == 4
    for call in calls:
        assert "uses_xla_collective_metadata = true" in call
        assert "skip_device_barrier = false" in call
        assert f'xla_replica_ids = "{everyone}"' in call
        assert ("symmetric_memory_parameters" in call) == several_hosts
        assert "output_to_operand_aliasing" in call  # the semaphores, zeroed
    bodies = [part for part in program.split("\n}\n") if any(call in part for call in calls)]
    assert len(bodies) == 2  # the loops' over layers, forward and back
    for body in bodies:
        assert not re.search(r"= \(?(bf16|f32)\[\d+,\d+\]\S* copy(-start)?\(", body)
    assert "ragged-all-to-all" not in program and "S(5)" not in program
    assert not [line for line in program.splitlines() if "/permute/" in line]
