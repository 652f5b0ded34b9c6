"""The Hopper grouped GEMM: run by the GPU interpreter, races looked for; compiled for an H100.

The interpreter fills new buffers with NaN, so what a kernel forgets to write shows.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.grouped_gemm import hopper, reference, work
from pallas_kernels.grouped_gemm.tiles import Tiles, choose
from tests.deviceless.child import printed
from tests.oracle import max_relative_error

SMALL = Tiles(rows=128, cols=64, depth=64, stages=2, snake=2, cores=2)
ROUNDING = 2.0**-8  # of a bfloat16
M, K, N = 300, 72, 136  # one tile and a part, or two and a part, in every direction


@pytest.fixture
def interpreter():
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True)):
        yield


def arrays(num_rows, num_groups, sizes, k=K, n=N):
    """x, w, dy in bfloat16, and the sizes; NaN in all rows past the sum."""
    keys = jax.random.split(jax.random.key(0), 3)
    x = jax.random.normal(keys[0], (num_rows, k), jnp.bfloat16)
    w = jax.random.normal(keys[1], (num_groups, k, n), jnp.bfloat16)
    dy = jax.random.normal(keys[2], (num_rows, n), jnp.bfloat16)
    total = sum(sizes)
    return x.at[total:].set(jnp.nan), w, dy.at[total:].set(jnp.nan), jnp.array(sizes, jnp.int32)


def step(grouped_gemm, x, w, dy, sizes):
    """y, dx, dw of one call."""
    y, gradients = jax.vjp(lambda x, w: grouped_gemm(x, w, sizes), x, w)
    return y, *gradients(dy)


def ours(x, w, sizes):
    return hopper.grouped_gemm(x, w, sizes, hopper.H100, SMALL)


def expected(x, w, dy, sizes):
    wide = (a.astype(jnp.float32) for a in (x, w, dy))
    return step(reference.grouped_gemm, *wide, sizes)


@pytest.mark.parametrize(
    "sizes",
    [
        (128, 0, 64, 108),  # an empty group, whole tiles and halves
        (129, 1, 63, 50),  # one row over a tile, one row, one less than half; rows past the sum
        (0, 300, 0, 0),  # all in one
        (0, 0, 0, 0),
    ],
)
def test_any_group_sizes(interpreter, sizes):
    x, w, dy, sizes_G = arrays(M, len(sizes), sizes)
    y, dx, dw = results = step(ours, x, w, dy, sizes_G)
    for result, wanted in zip(results, expected(x, w, dy, sizes_G), strict=True):
        assert result.dtype == jnp.bfloat16
        assert max_relative_error(result.astype(jnp.float32), wanted) < ROUNDING
    total = sum(sizes)
    assert not y[total:].any() and not dx[total:].any()
    assert not dw[np.array(sizes) == 0].any()


@pytest.mark.parametrize("num_rows", [1, 8, 129])
def test_few_rows(interpreter, num_rows):
    x, w, dy, sizes_G = arrays(num_rows, 2, (0, num_rows), k=8, n=8)
    results = step(ours, x, w, dy, sizes_G)
    for result, wanted in zip(results, expected(x, w, dy, sizes_G), strict=True):
        assert max_relative_error(result.astype(jnp.float32), wanted) < ROUNDING


def test_sizes_beyond_the_rows_are_clipped(interpreter):
    x, w, dy, _ = arrays(130, 3, (130,))
    results = step(ours, x, w, dy, jnp.array([100, 100, 100], jnp.int32))
    clipped = step(ours, x, w, dy, jnp.array([100, 30, 0], jnp.int32))
    for result, wanted in zip(results, clipped, strict=True):
        np.testing.assert_array_equal(result, wanted)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # numpy multiplies
def test_a_nan_stays_in_its_group(interpreter):
    """In x and in dy, in the rows that share a tile or a block with other groups."""
    x, w, dy, sizes_G = arrays(192, 3, (70, 60, 62))
    clean = step(ours, x, w, dy, sizes_G)
    soiled = step(ours, x.at[70:130].set(jnp.nan), w, dy.at[70:130].set(jnp.inf), sizes_G)
    for rows in (slice(0, 70), slice(130, 192)):
        for of_clean, of_soiled in zip(clean[:2], soiled[:2], strict=True):
            np.testing.assert_array_equal(of_soiled[rows], of_clean[rows])
    for group in (0, 2):
        np.testing.assert_array_equal(soiled[2][group], clean[2][group])
    assert jnp.isnan(soiled[0][70:130]).all() and jnp.isnan(soiled[2][1]).all()


def test_large_tiles(interpreter):
    """Two wgmma instructions high, two blocks deep, four chunks wide."""
    tiles = Tiles(rows=256, cols=128, depth=128, stages=2, snake=1, cores=1)
    x, w, dy, sizes_G = arrays(M, 2, (130, 150))
    gemm = lambda x, w, s: hopper.grouped_gemm(x, w, s, hopper.H100, tiles)  # noqa: E731
    results = step(gemm, x, w, dy, sizes_G)
    for result, wanted in zip(results, expected(x, w, dy, sizes_G), strict=True):
        assert max_relative_error(result.astype(jnp.float32), wanted) < ROUNDING


def test_float32_weight_gradient(interpreter):
    x, w, dy, sizes_G = arrays(M, 3, (130, 0, 100))
    dw = hopper.weight_gradient(x, dy, sizes_G, SMALL, jnp.float32)
    assert dw.dtype == jnp.float32
    assert max_relative_error(dw, expected(x, w, dy, sizes_G)[2]) < 1e-6


def test_accumulated_weight_gradient(interpreter, monkeypatch):
    """The interpreter lacks adding copies: here each adds in shared memory and then copies."""
    copy = plgpu.copy_smem_to_gmem

    def add_and_copy(source, target, *, reduction_op):
        assert reduction_op == "add"
        source[...] = source[...] + target[...]
        plgpu.commit_smem()
        copy(source, target)

    monkeypatch.setattr(plgpu, "copy_smem_to_gmem", add_and_copy)
    x, w, dy, sizes_G = arrays(M, 3, (130, 0, 100), k=128, n=64)  # whole tiles: it reads them
    into = jax.random.normal(jax.random.key(3), w.shape, jnp.float32)
    total = hopper.weight_gradient(x, dy, sizes_G, SMALL, into=into)
    assert max_relative_error(total, into + expected(x, w, dy, sizes_G)[2]) < 1e-6
    np.testing.assert_array_equal(total[1], into[1])


@pytest.mark.parametrize("count", range(1, 8))
def test_the_snake_visits_every_tile_once(count):
    walk = [tuple(map(int, hopper._snake(jnp.int32(i), count, 5, 3))) for i in range(count * 5)]
    assert sorted(walk) == [(row, col) for row in range(count) for col in range(5)]
    assert walk[0] == (0, 0)


def test_work_lists():
    sizes = jnp.array([5, 0, 130, 128, 300], jnp.int32)  # the last two are clipped to 265 rows
    counts, tiles = work.row_tiles(sizes, 265, 128)
    assert counts.tolist() == [5, 0]
    assert tiles[:, :5].T.tolist() == [
        [0, 0, 5],
        [2, 5, 135],
        [2, 133, 135],
        [3, 135, 263],
        [4, 263, 265],
    ]
    live, groups = work.by_size(sizes, 265)
    assert live.tolist() == [4]
    assert groups[0].tolist() == [2, 3, 0, 4, 1]


@pytest.mark.parametrize(
    ("shape", "dtype", "reason"),
    [
        ((4, 16, 24, 2), jnp.bfloat16, None),
        ((4, 16, 24, 2), jnp.float32, "bfloat16"),
        ((4, 12, 24, 2), jnp.bfloat16, "multiples of 8"),
        ((4, 16, 20, 2), jnp.bfloat16, "multiples of 8"),
        ((0, 16, 24, 2), jnp.bfloat16, "nothing"),
    ],
)
def test_refusals(shape, dtype, reason):
    M, K, N, G = shape
    said = hopper.refusal(jnp.zeros((M, K), dtype), jnp.zeros((G, K, N), dtype))
    assert said is None if reason is None else reason in str(said)


def test_tiles():
    assert choose("forward", hopper.H100, 8192, 1536).cols == 256
    assert choose("forward", hopper.H100, 8192, 2880).cols == 192
    assert choose("forward", hopper.H100, 8, 8).cols == 64
    with pytest.raises(KeyError):
        choose("backward", hopper.H100, 8, 8)
    with pytest.raises(ValueError, match="rows by 128s"):
        Tiles(rows=64, cols=64, depth=64, stages=2, snake=1, cores=1)


@pytest.mark.deviceless
@pytest.mark.parametrize("shape", [(8192, 2048, 1536, 16), (8192, 2880, 5760, 8), (1, 8, 8, 1)])
def test_it_assembles_without_spills(shape, tmp_path):
    """All kernels, inside a shard_map. Neither the compiler nor the assembler gave up on anything:
    no spills, no local memory, no product made to wait for the one before."""
    said = printed("compile_grouped_gemm_hopper", *shape, dump=tmp_path)
    names = sorted(path.stem for path in tmp_path.glob("*.ptx"))
    kernels = ("forward", "input_gradient", "weight_gradient", "weight_gradient")
    assert [re.sub(r"_\d+$", "", name) for name in names] == [f"grouped_gemm_{k}" for k in kernels]
    for name in names:
        assembly = (tmp_path / f"{name}.ptx").read_text()
        report = (tmp_path / f"{name}.ptxas").read_text(errors="replace")
        assert "wgmma.mma_async.sync.aligned.m64n" in assembly and ".local" not in assembly
        assert "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" in report
        assert " 0 bytes lmem" in report and "serialized" not in report, report
    added = [
        n for n in names if "cp.reduce.async.bulk.tensor" in (tmp_path / f"{n}.ptx").read_text()
    ]
    assert len(added) == 1 and "weight" in added[0]
    _, K, N, G = shape
    aliased, temporary = map(int, said.split("accumulate ")[1].split())
    assert aliased == G * K * N * 4 and temporary < 2**16
