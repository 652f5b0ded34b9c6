"""The Blackwell grouped MLP in Mosaic's interpreter, races detected, and through its compiler.

bfloat16 operands, compared with the reference in float32. Between them h, a and dh are rounded to
bfloat16, each by up to 2^-9 of a value; results are sums of such terms, rounded once more, so the
largest error stays below 2^-6 of the largest value. Rows past the groups' sum are NaN.
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

from pallas_kernels import swiglu
from pallas_kernels.grouped_gemm import blackwell as gemm
from pallas_kernels.grouped_gemm.blackwell_loop import row_tiles
from pallas_kernels.grouped_mlp import blackwell, reference
from tests.deviceless.child import printed
from tests.oracle import max_relative_error
from tests.pallas_kernels.reshaped import allow_reshaped_reads

TILES = replace(gemm.DEFAULT, stages=2, snake=2, cores=2)
TOLERANCE = 2.0**-6
MAIN = (264, 72, 264)  # D and F end inside a line; 128 gate columns and 256 of da overhang 320
# Sizes of four groups
CASES = {
    "unaligned": [37, 150, 3, 74],
    "aligned": [128, 8, 64, 64],
    "empty groups, sum below M": [0, 129, 0, 100],
    "one row over a tile": [129, 0, 135, 0],
    "one row": [0, 0, 1, 0],
    "all in one": [0, 264, 0, 0],
    "nothing": [0, 0, 0, 0],
    "borders in one block": [3, 5, 2, 230],
}


@pytest.fixture(autouse=True)
def _interpreted(monkeypatch):
    allow_reshaped_reads(monkeypatch)
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True)):
        yield


def _operands(sizes, shape):
    """(x, w_in, w_out, weights, sizes, dy): random, h and y of about 1, NaN past the sum."""
    (M, D, F), rng, total = shape, np.random.default_rng(0), sum(sizes)
    x, dy = rng.standard_normal((2, M, D))
    w_in = rng.standard_normal((len(sizes), D, 2 * F)) / np.sqrt(D)
    w_out = rng.standard_normal((len(sizes), F, D)) / np.sqrt(F)
    weights = rng.uniform(0.1, 1, M)
    x[total:] = dy[total:] = weights[total:] = np.nan
    x, w_in, w_out, dy = (
        jnp.asarray(a, jnp.float32).astype(jnp.bfloat16) for a in (x, w_in, w_out, dy)
    )
    return x, w_in, w_out, jnp.asarray(weights, jnp.float32), jnp.asarray(sizes, jnp.int32), dy


@partial(jax.jit, static_argnums=0)
def _run(mlp, x, w_in, w_out, weights, sizes, dy):
    """(y, dx, dw_in, dw_out, dweights), compiled once a shape: the sizes are traced."""
    y, back = jax.vjp(lambda *args: mlp(*args, sizes), x, w_in, w_out, weights)
    return y, *back(dy)


def _ours(*args):
    return blackwell.grouped_mlp(*args, tiles=TILES)


def _wanted(*operands):
    wide = [a.astype(jnp.float32) if a.dtype == jnp.bfloat16 else a for a in operands]
    return _run(reference.grouped_mlp, *wide)


def _agree(found, wanted):
    for a, b in zip(found, wanted, strict=True):
        assert max_relative_error(a, b) <= TOLERANCE


@pytest.mark.parametrize("case", CASES)
def test_matches_reference(case):
    operands = _operands(CASES[case], MAIN)
    found, sizes = _run(_ours, *operands), np.asarray(operands[4])
    assert [a.dtype for a in found] == [*[jnp.bfloat16] * 4, jnp.float32]
    _agree(found, _wanted(*operands))
    y, dx, dw_in, dw_out, dweights = map(np.asarray, found)
    for by_row in y, dx, dweights:
        assert not by_row[sizes.sum() :].any()
    assert not dw_in[sizes == 0].any() and not dw_out[sizes == 0].any()


@pytest.mark.filterwarnings("ignore:invalid value encountered in matmul")
def test_a_nan_stays_in_its_group():
    """Group 1 holds it, in tiles of rows that it shares with groups 0 and 2."""
    x, w_in, w_out, weights, sizes, dy = _operands(CASES["unaligned"], MAIN)
    others, groups = np.r_[0:37, 187:264], np.array([0, 2, 3])

    def pick(y, dx, dw_in, dw_out, dweights):
        return y[others], dx[others], dw_in[groups], dw_out[groups], dweights[others]

    wanted = pick(*_wanted(x, w_in, w_out, weights, sizes, dy))
    x, dy, weights = (a.at[37:187].set(jnp.nan) for a in (x, dy, weights))
    w_in, w_out = (w.at[1].set(jnp.nan) for w in (w_in, w_out))
    _agree(pick(*_run(_ours, x, w_in, w_out, weights, sizes, dy)), wanted)


def test_same_bits_twice():
    operands = _operands(CASES["empty groups, sum below M"], MAIN)
    first, again = (_run(_ours, *operands) for _ in range(2))
    jax.tree.map(np.testing.assert_array_equal, first, again)


def test_activation_is_swiglu_of_what_is_saved():
    """In the backward too; columns past F are zeros, and whatever they hold later on adds nothing
    to the weights' gradient."""
    x, w_in, w_out, weights, sizes, dy = operands = _operands(CASES["unaligned"], MAIN)
    total, F = int(sizes.sum()), MAIN[2]
    h, a = jax.jit(partial(blackwell.activations, tiles=TILES))(x, w_in, weights, sizes)
    assert h.dtype == a.dtype == jnp.bfloat16 and h.shape == (264, 2, 320)
    gate_up = h[:total, :, :F].reshape(total, 2 * F)
    np.testing.assert_array_equal(a[:total, :F], swiglu(gate_up, weights[:total]))
    assert not np.asarray(h[:total, :, F:]).any()
    h = h.at[:, :, F:].set(jnp.nan)
    slopes_of = jax.jit(partial(blackwell.slopes_of, tiles=TILES))
    _, again, dweights = slopes_of(dy, w_out, weights, h, sizes)
    np.testing.assert_array_equal(again[:total, :F], a[:total, :F])
    assert max_relative_error(dweights, _wanted(*operands)[4]) <= TOLERANCE


def test_every_row_finds_its_sums():
    """Sums that name their tile and row, against a loop over groups."""
    for sizes in [37, 150, 3, 74], [0, 129, 0, 100], [0, 0, 0, 0], [1, 1, 1, 1]:
        work, counts = row_tiles(jnp.asarray(sizes), 264, 128)
        sums = jnp.arange(2 * work.shape[0] * 128, dtype=jnp.float32).reshape(2, -1)
        found, wanted, start, tile = blackwell._of_rows(sums, work, counts, 264, 128), [], 0, 0
        for size in sizes:
            base = start // 8 * 8
            places = [tile * 128 + row - base for row in range(start, start + size)]
            wanted += [float(sums[0, place] + sums[1, place]) for place in places]
            start, tile = start + size, tile + (-(-(start + size - base) // 128) if size else 0)
        np.testing.assert_array_equal(found, wanted + [0.0] * (264 - start))


def test_types_in_a_shard_map_that_checks_them():
    """Traced alone, for the interpreter mixes up kernels that several devices run at once."""
    x, w_in, w_out, weights, sizes, dy = operands = _operands([1] * 4, (8, 8, 8))

    def local(x, w_in, w_out, weights, sizes, dy):
        y, back = jax.vjp(lambda *args: _ours(*args, sizes), x, w_in, w_out, weights)
        return y, *back(dy)

    mesh = Mesh(jax.devices()[:4], ("e",))
    run = jax.shard_map(local, mesh=mesh, in_specs=P("e"), out_specs=P("e"))
    types = [(a.shape, a.dtype) for a in jax.eval_shape(run, *operands)]
    assert types == [(a.shape, a.dtype) for a in (dy, x, w_in, w_out, weights)]


def test_refusal_names_what_is_wrong():
    def of(D, F, dtype=jnp.bfloat16):
        shapes = (16, D), (2, D, 2 * F), (2, F, D)
        return blackwell.refusal(*(jax.ShapeDtypeStruct(s, dtype) for s in shapes)) or "none"

    assert of(8, 24) == "none"
    assert "bfloat16" in of(8, 8, jnp.float32)
    assert "multiples of 8" in of(8, 20) and "multiples of 8" in of(12, 8)
    x, w_in, w_out, weights, sizes, _ = _operands([1, 1], (8, 8, 8))
    narrow = partial(blackwell.grouped_mlp, tiles=replace(TILES, cols=192))
    with pytest.raises(ValueError, match="cols must be 128 or 256"):
        jax.eval_shape(narrow, x, w_in, w_out, weights, sizes)
    none = jax.eval_shape(_ours, x[:0], w_in, w_out, weights[:0], sizes)
    assert none.shape == (0, 8) and none.dtype == jnp.bfloat16


@pytest.mark.deviceless
@pytest.mark.parametrize("gpu", ["b200", "gb300"])
@pytest.mark.parametrize("shape", [(8192, 2048, 768, 16), (8192, 2880, 2880, 8), (1, 8, 8, 1)])
def test_compiles_without_spills(gpu, shape, tmp_path):
    """Both kernels, and those of the grouped GEMM, inside shard_map(check_vma=True)."""
    printed("compile_grouped_mlp_blackwell", gpu, *shape, dump=tmp_path)
    names = {re.sub(r"_\d+$", "", p.stem) for p in tmp_path.glob("*.ptx")}
    assert {"grouped_mlp_forward", "grouped_mlp_gradient", "grouped_gemm_forward"} <= names
    read = lambda kind: [p.read_text(errors="replace") for p in tmp_path.glob(f"*.{kind}")]  # noqa: E731
    codes, reports, budgets = read("ptx"), read("ptxas"), read("resources.txt")
    assert len(codes) == len(reports) == len(budgets) == 6
    for code in codes:
        assert "tcgen05.mma" in code and ".local" not in code
    for report in reports:
        assert "0 bytes spill stores, 0 bytes spill loads" in report, report
        assert re.search(r"\b0 stack\b.*\b0 bytes lmem", report), report
        assert ("sm_103a" if gpu == "gb300" else "sm_100a") in report, report
    for budget in budgets:
        assert "tmem_scratch_cols=512" in budget, budget
        shared = re.search(r"smem_scratch_bytes=(\d+)", budget)
        assert shared and int(shared.group(1)) <= 224 * 1024, budget
