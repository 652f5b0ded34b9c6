"""The Hopper grouped MLP: run by the GPU interpreter, races looked for; compiled for an H100.

The interpreter fills new buffers with NaN, so what a kernel forgets to write shows.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.grouped_gemm import hopper as gemm
from pallas_kernels.grouped_gemm import reference as gemm_reference
from pallas_kernels.grouped_gemm.tiles import Tiles, choose
from pallas_kernels.grouped_mlp import hopper, reference
from pallas_kernels.swiglu import swiglu
from tests.deviceless.child import printed
from tests.oracle import max_relative_error

SMALL = Tiles(rows=128, cols=128, depth=64, stages=2, snake=2, cores=2)
ROUNDING = 2.0**-8  # of a bfloat16
TOLERANCE = 4 * ROUNDING
D, F = 72, 136  # one tile and a part, or two and a part


@pytest.fixture
def interpreter():
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True)):
        yield


def arrays(sizes, num_rows, d=D, f=F):
    """x, w_in, w_out, weights, the sizes and dy; NaN in all rows past the sum."""
    keys, num_groups, total = jax.random.split(jax.random.key(0), 5), len(sizes), sum(sizes)
    shapes = (num_rows, d), (num_groups, d, 2 * f), (num_groups, f, d), (num_rows, d)
    x, w_in, w_out, dy = (
        jax.random.normal(key, shape, jnp.bfloat16)
        for key, shape in zip(keys[:4], shapes, strict=True)
    )
    weights = jax.random.uniform(keys[4], (num_rows,)).at[total:].set(jnp.nan)
    w_in, w_out = w_in * jnp.bfloat16(d**-0.5), w_out * jnp.bfloat16(f**-0.5)
    x, dy = (v.at[total:].set(jnp.nan) for v in (x, dy))
    return x, w_in, w_out, weights, jnp.array(sizes, jnp.int32), dy


def step(grouped_mlp, x, w_in, w_out, weights, sizes, dy):
    """y, and the gradients of x, w_in, w_out and weights."""
    y, gradients = jax.vjp(lambda *args: grouped_mlp(*args, sizes), x, w_in, w_out, weights)
    return y, *gradients(dy)


def ours(*args):
    return hopper.grouped_mlp(*args, hopper.H100, SMALL)


def expected(*args):
    wide = (a.astype(jnp.float32) if a.dtype == jnp.bfloat16 else a for a in args)
    return step(reference.grouped_mlp, *wide)


@pytest.mark.parametrize(
    ("sizes", "num_rows"),
    [
        ((129, 0, 7), 140),  # one row over a tile; an empty group; rows past the sum
        ((0, 130), 130),  # all in one
        ((0, 0), 9),
    ],
)
def test_any_group_sizes(interpreter, sizes, num_rows):
    args = arrays(sizes, num_rows)
    y, dx, dw_in, dw_out, d_weights = results = step(ours, *args)
    for result, wanted in zip(results, expected(*args), strict=True):
        assert max_relative_error(result.astype(jnp.float32), wanted) < TOLERANCE
    assert [r.dtype for r in results] == [jnp.bfloat16] * 4 + [jnp.float32]
    total, empty = sum(sizes), np.array(sizes) == 0
    for rows in (y, dx, d_weights):
        assert not rows[total:].any()
    assert not dw_in[empty].any() and not dw_out[empty].any()


def test_the_parts_to_the_bit(interpreter):
    """h as the product alone has it, a as SwiGLU of that h, forward and backward; and all again."""
    x, w_in, w_out, weights, sizes, dy = arrays((30, 40), 90)
    h, a = hopper.first_product(x, w_in, weights, sizes, SMALL)
    alone = gemm.product(x, w_in, sizes, SMALL, transposed=False)
    np.testing.assert_array_equal(h[:70], alone[:70])
    np.testing.assert_array_equal(a[:70], swiglu(h, weights)[:70])
    backward = hopper.first_gradient(dy, w_out, h, weights, sizes, SMALL)
    twice = hopper.first_gradient(dy, w_out, h, weights, sizes, SMALL)
    for first, second in zip(backward, twice, strict=True):
        np.testing.assert_array_equal(first[:70], second[:70])
    dh, again, d_weights = backward
    np.testing.assert_array_equal(again[:70], a[:70])
    wide_dy, wide_w, wide_h = (v.astype(jnp.float32) for v in (dy[:70], w_out, h[:70]))
    da = gemm_reference.grouped_gemm(wide_dy, wide_w.swapaxes(1, 2), sizes)
    by_h, by_weights = jax.vjp(swiglu, wide_h, weights[:70])[1](da)
    assert max_relative_error(dh[:70].astype(jnp.float32), by_h) < ROUNDING
    assert max_relative_error(d_weights[:70], by_weights) < 1e-5  # of a da that was not rounded


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # numpy multiplies
def test_a_nan_stays_in_its_group(interpreter):
    """In x and dy, in rows that share a tile with other groups."""
    x, w_in, w_out, weights, sizes, dy = args = arrays((30, 20, 30), 80, d=64, f=72)
    clean = step(ours, *args)
    x, dy = x.at[30:50].set(jnp.nan), dy.at[30:50].set(jnp.inf)
    soiled = step(ours, x, w_in, w_out, weights, sizes, dy)
    for n in (0, 1, 4):
        others = [np.delete(np.asarray(v[n]), slice(30, 50), axis=0) for v in (clean, soiled)]
        np.testing.assert_array_equal(*others)
        assert jnp.isnan(soiled[n][30:50]).all()
    for n in (2, 3):
        np.testing.assert_array_equal(soiled[n][::2], clean[n][::2])
        assert jnp.isnan(soiled[n][1]).all()


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_columns_that_overhang_add_nothing_to_the_weights_gradient(interpreter):
    """Not even infinity times the zeros that are copied there."""
    x, w_in, w_out, weights, sizes, dy = (abs(v) for v in arrays((4,), 4, d=8, f=8))
    h, _ = hopper.first_product(x, w_in, weights, sizes, SMALL)
    dy = dy.at[1, 2].set(jnp.inf)
    d_weights = hopper.first_gradient(dy, w_out, h, weights, sizes, SMALL)[2]
    assert jnp.isfinite(d_weights).tolist() == [True, False, True, True]
    assert d_weights[1] == jnp.inf


def test_tiles():
    assert choose("mlp_forward", hopper.H100, 8192, 2 * 768).cols == 256
    assert choose("mlp_gradient", hopper.H100, 8192, 2880).cols == 192
    x, w_in, w_out, weights, sizes, dy = arrays((4,), 4)
    tall = Tiles(rows=256, cols=128, depth=64, stages=2, snake=2, cores=2)
    with pytest.raises(ValueError, match="as many columns"):
        hopper.first_gradient(dy, w_out, jnp.zeros((4, 2 * F), x.dtype), weights, sizes, tall)


@pytest.mark.parametrize(
    ("shape", "dtype", "reason"),
    [
        ((4, 16, 24, 2), jnp.bfloat16, None),
        ((4, 16, 24, 2), jnp.float32, "bfloat16"),
        ((4, 12, 24, 2), jnp.bfloat16, "multiples of 8"),
        ((4, 16, 20, 2), jnp.bfloat16, "F in multiples of 8"),
        ((0, 16, 24, 2), jnp.bfloat16, "nothing"),
    ],
)
def test_refusals(shape, dtype, reason):
    M, D, F, G = shape
    matrices = jnp.zeros((G, D, 2 * F), dtype), jnp.zeros((G, F, D), dtype)
    said = hopper.refusal(jnp.zeros((M, D), dtype), *matrices)
    assert said is None if reason is None else reason in str(said)


@pytest.mark.deviceless
@pytest.mark.parametrize("shape", [(8192, 2048, 768, 16), (8192, 2880, 2880, 8), (1, 8, 8, 1)])
def test_it_assembles_without_spills(shape, tmp_path):
    """All kernels, inside a shard_map. Neither the compiler nor the assembler gave up on anything:
    no spills, no local memory, no product made to wait for the one before."""
    printed("compile_grouped_mlp_hopper", *shape, dump=tmp_path)
    names = sorted(path.stem for path in tmp_path.glob("*.ptx"))
    kernels = {re.sub(r"_\d+$", "", name) for name in names}
    assert kernels >= {"grouped_mlp_forward", "grouped_mlp_gradient"} and len(names) == 6
    for name in names:
        assembly = (tmp_path / f"{name}.ptx").read_text()
        report = (tmp_path / f"{name}.ptxas").read_text(errors="replace")
        assert "wgmma.mma_async.sync.aligned.m64n" in assembly and ".local" not in assembly
        assert "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" in report
        assert " 0 bytes lmem" in report and "serialized" not in report, report
