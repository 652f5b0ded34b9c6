"""The Blackwell grouped GEMM in Mosaic's interpreter, races detected, and through its compiler.

bfloat16 operands, compared with the reference in float32: results in bfloat16 are sums in float32,
rounded once, so within 2^-8 of a value, and a unit more where the sums fall on two sides of a tie.
"""

import re
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from pallas_kernels.grouped_gemm import blackwell, blackwell_loop, reference
from tests.deviceless.child import printed
from tests.oracle import max_relative_error

TILES = replace(blackwell.DEFAULT, cols=128, stages=2, snake=2, cores=2)
ROUNDING, FLOAT32_SUM = 2.0**-7, 1e-5
MAIN = (328, 72, 200)  # three tiles of rows; K and N end inside a tile, and inside a line
# name: (group sizes, (M, K, N)); past their sum, rows are NaN
CASES = {
    "unaligned": ([37, 150, 3, 138], MAIN),
    "aligned": ([128, 8, 64, 128], MAIN),
    "empty groups, sum below M": ([0, 129, 0, 100], MAIN),
    "one row": ([0, 0, 1, 0], MAIN),
    "one row each": ([1, 1, 1, 1], MAIN),
    "all in one": ([0, 328, 0, 0], MAIN),
    "nothing": ([0, 0, 0, 0], MAIN),
    "borders in one block": ([3, 5, 2, 300], MAIN),
    "no padding": ([70, 0, 58], (128, 128, 64)),
    "a single row of x": ([0, 1], (1, 8, 8)),
}


@pytest.fixture(autouse=True)
def _interpreted():
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True)):
        yield


def _operands(sizes, shape):
    """(x, w, sizes, dy): random normal, NaN past the sum."""
    (M, K, N), rng, total = shape, np.random.default_rng(0), sum(sizes)
    x, w, dy = (rng.standard_normal(s) for s in ((M, K), (len(sizes), K, N), (M, N)))
    x[total:] = dy[total:] = np.nan
    x, w, dy = (jnp.asarray(a, jnp.float32).astype(jnp.bfloat16) for a in (x, w, dy))
    return x, w, jnp.asarray(sizes, jnp.int32), dy


@partial(jax.jit, static_argnums=0)
def _run(product, x, w, sizes, dy):
    """(y, dx, dw), compiled once a shape: the sizes are traced."""
    y, back = jax.vjp(lambda x, w: product(x, w, sizes), x, w)
    return y, *back(dy)


def _ours(x, w, sizes):
    return blackwell.grouped_gemm(x, w, sizes, TILES)


def _wanted(x, w, sizes, dy):
    x, w, dy = (a.astype(jnp.float32) for a in (x, w, dy))
    return _run(reference.grouped_gemm, x, w, sizes, dy)


def _agree(found, wanted):
    for a, b in zip(found, wanted, strict=True):
        assert max_relative_error(a, b) <= ROUNDING


@pytest.mark.parametrize("case", CASES)
def test_matches_reference(case):
    operands = _operands(*CASES[case])
    found, sizes = _run(_ours, *operands), np.asarray(operands[2])
    assert [a.dtype for a in found] == [jnp.bfloat16] * 3
    _agree(found, _wanted(*operands))
    y, dx, dw = map(np.asarray, found)
    assert not y[sizes.sum() :].any() and not dx[sizes.sum() :].any()
    assert not dw[sizes == 0].any()


@pytest.mark.filterwarnings("ignore:invalid value encountered in matmul")
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_nan_stays_in_its_group(bad):
    """Group 1 holds it, in blocks of rows that it shares with groups 0 and 2."""
    sizes, shape = CASES["unaligned"]
    x, w, sizes_G, dy = _operands(sizes, shape)
    rows, others, groups = slice(37, 187), np.r_[0:37, 187:328], np.array([0, 2, 3])
    y, dx, dw = _wanted(x, w, sizes_G, dy)
    wanted = y[others], dx[others], dw[groups]
    x, w, dy = x.at[rows].set(bad), w.at[1].set(bad), dy.at[rows].set(bad)
    y, dx, dw = _run(_ours, x, w, sizes_G, dy)
    _agree((y[others], dx[others], dw[groups]), wanted)


def test_sizes_beyond_the_rows_are_clipped():
    x, w, _, dy = _operands([100, 100, 100, 28], MAIN)
    found = _run(_ours, x, w, jnp.asarray([100, 100, 400, 7], jnp.int32), dy)
    _agree(found, _wanted(x, w, jnp.asarray([100, 100, 128, 0], jnp.int32), dy))


@pytest.mark.parametrize("shape", [(136, 64, 128), (136, 24, 40)])
def test_weight_gradient_in_float32_and_added(shape):
    """With and without padding; what is in the buffer for an empty group stays."""
    sizes = [61, 0, 70]
    x, w, sizes_G, dy = _operands(sizes, shape)
    wanted = _wanted(x, w, sizes_G, dy)[2]
    into = jnp.asarray(np.random.default_rng(1).standard_normal(w.shape), jnp.float32)
    plain = partial(blackwell.weight_gradient, dtype=jnp.float32, tiles=TILES)
    dw = jax.jit(plain)(x, dy, sizes_G)
    assert dw.dtype == jnp.float32 and max_relative_error(dw, wanted) <= FLOAT32_SUM
    added = partial(blackwell.weight_gradient, tiles=TILES)
    total = jax.jit(lambda *args: added(*args[:3], into_GKN=args[3]))(x, dy, sizes_G, into)
    assert max_relative_error(total, into + wanted) <= FLOAT32_SUM
    np.testing.assert_array_equal(total[1], into[1])


def test_in_a_shard_map_that_checks_types():
    """One device: the interpreter mixes up kernels that several devices run at once."""
    x, w, sizes, dy = _operands([60, 68], (128, 64, 64))

    def local(x, w, sizes, dy):
        y, back = jax.vjp(lambda x, w: _ours(x, w, sizes), x, w)
        into = jnp.ones_like(w, jnp.float32)
        return (y, *back(dy), blackwell.weight_gradient(x, dy, sizes, into_GKN=into, tiles=TILES))

    mesh = Mesh(jax.devices()[:1], ("e",))
    run = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=P("e"), out_specs=P("e")))
    (*found, added), wanted = run(x, w, sizes, dy), _wanted(x, w, sizes, dy)
    _agree(found, wanted)
    assert max_relative_error(added - 1, wanted[2]) <= FLOAT32_SUM


def test_every_row_is_in_one_tile():
    """The list of work against a loop, its static length at its tightest included."""
    rng, num_rows = np.random.default_rng(0), 480
    drawn = [(rng.integers(0, 60, 8) * rng.integers(0, 2, 8)).tolist() for _ in range(40)]
    make = jax.jit(blackwell_loop.row_tiles, static_argnums=(1, 2))
    # The third has the most tiles there can be: 7 rows before each group, and one in its last tile.
    for sizes in [*drawn, [7, 2] * 4, [7, *[58] * 7], [0] * 8, [0, 0, 480, 0, 0, 0, 0, 0]]:
        work, (tiles, total) = map(np.asarray, make(jnp.asarray(sizes), num_rows, 16))
        found, start = [tuple(row) for row in work[:tiles].tolist()], 0
        wanted = []
        for g, size in enumerate(sizes):
            end = start + size
            for row in range(start - start % 8, end if size else 0, 16):
                wanted.append((g, row // 8, max(row, start), min(row + 16, end)))
            start = end
        assert found == wanted and len(work) >= len(wanted) and total == sum(sizes)


def test_a_pair_of_blocks_shares_its_rows():
    """Every row of every group in one block, at its place in the block's 128 rows."""
    tiles, num_rows = replace(blackwell.DEFAULT, pair=True), 1000
    for sizes in [300, 0, 1, 256, 443], [7, 249, 128, 129, 487], [0, 0, 500, 0, 3], [0] * 5:
        work, (count, total) = blackwell_loop.row_tiles(jnp.asarray(sizes), num_rows, 256)
        found = []
        for t in range(count):
            rows_of = lambda _, work=work, t=t: blackwell_loop.tile_rows(work, t, tiles)  # noqa: E731
            parts = jax.vmap(rows_of, axis_name="pair")(jnp.arange(2))
            for block, (skip, row, rows) in enumerate(zip(*map(np.asarray, parts), strict=True)):
                found += [*range(row, row + rows)]
                if rows:
                    assert 0 <= skip < 128 and skip + rows <= 128
                    assert row - skip == work[t, 1] * 8 + 128 * block
        assert found == [*range(total)]


def test_longest_groups_first():
    work, (used,) = blackwell_loop.longest_first(jnp.asarray([9, 0, 30, 9, 0]), 48)
    wanted = [[2, 1, 9, 39], [0, 0, 0, 9], [3, 4, 39, 48]]
    assert used == 3 and work[:3].tolist() == wanted
    assert sorted(work[:, 0].tolist()) == [0, 1, 2, 3, 4]


def test_refusal_names_what_is_wrong():
    def of(K, N, dtype=jnp.bfloat16):
        shapes = (16, K), (2, K, N)
        return blackwell.refusal(*(jax.ShapeDtypeStruct(s, dtype) for s in shapes)) or "none"

    assert of(8, 24) == "none"
    assert "bfloat16" in of(8, 8, jnp.float32)
    assert "multiples of 8" in of(8, 20) and "multiples of 8" in of(12, 8)
    for changed in ({"rows": 64}, {"cols": 512}, {"stages": 1}, {"depth": 32}):
        with pytest.raises(ValueError, match=f"{[*changed.values()][0]}"):
            replace(blackwell.DEFAULT, **changed)
    x, w = jnp.zeros((16, 64), jnp.bfloat16), jnp.zeros((2, 64, 64), jnp.bfloat16)
    for changed in ({"rows": 256}, {"depth": 128}):  # these have a form on Hopper
        tiles, sizes = replace(blackwell.DEFAULT, **changed), jnp.array([8, 8], jnp.int32)
        with pytest.raises(ValueError, match="rows must be 128 and depth 64"):
            jax.eval_shape(lambda x, w, t=tiles, s=sizes: blackwell.grouped_gemm(x, w, s, t), x, w)


@pytest.mark.deviceless
@pytest.mark.parametrize("gpu", ["b200", "gb300"])
@pytest.mark.parametrize(
    "shape", [(8192, 2048, 1536, 16), (8192, 2880, 5760, 8), (1, 8, 8, 2)], ids=str
)
def test_compiles_without_spills(gpu, shape, tmp_path):
    """All six kernels: tensor cores used, no local memory, within shared and tensor memory."""
    said = printed("compile_grouped_gemm_blackwell", gpu, *shape, dump=tmp_path)
    _, K, N, G = shape
    in_place = 4 * G * K * N if K % 64 == N % 64 == 0 else None
    if in_place:
        assert f"aliased bytes: {in_place}" in said
    # The three kinds of report number the kernels each in an order of its own.
    read = lambda kind: [p.read_text(errors="replace") for p in tmp_path.glob(f"*.{kind}")]  # noqa: E731
    codes, reports, budgets = read("ptx"), read("ptxas"), read("resources.txt")
    assert len(codes) == len(reports) == len(budgets) == 6
    assert sum("tcgen05.mma.cta_group::2" in code for code in codes) == 2
    for code in codes:
        assert "tcgen05.mma" in code and ".local" not in code
    for report in reports:
        assert "0 bytes spill stores, 0 bytes spill loads" in report, report
        assert re.search(r"\b0 stack\b.*\b0 bytes lmem", report), report
        assert ("sm_103a" if gpu == "gb300" else "sm_100a") in report, report
    for budget in budgets:
        assert re.search(r"tmem_(collective_)?scratch_cols=512", budget), budget
        shared = re.search(r"smem_scratch_bytes=(\d+)", budget)
        assert shared and int(shared.group(1)) <= 224 * 1024, budget
