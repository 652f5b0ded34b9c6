"""The grouped MLP against its definition, gradients of all four operands included."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import grouped_mlp
from tests.oracle import max_relative_error

TOLERANCE = {"float32": 2e-6, "float64": 1e-14, "bfloat16": 2e-2}
M, D, F = 11, 6, 5


def step(impl, x, w_in, w_out, weights, sizes, dy, biases=(None, None), limit=0.0):
    """y, and the gradients of x, w_in, w_out, weights and the biases."""

    def run(x, w_in, w_out, weights, b_in, b_out):
        options = dict(b_in_GF2=b_in, b_out_GD=b_out, limit=limit, impl=impl)
        return grouped_mlp(x, w_in, w_out, weights, sizes, **options)

    y, gradients = jax.vjp(run, x, w_in, w_out, weights, *biases)
    return y, *(g for g in gradients(dy) if g is not None)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("sizes", [(4, 0, 5), (0, 0, 0), (0, 11, 0)])
def test_it_equals_the_definition(dtype, sizes):
    rng = np.random.default_rng(0)
    with jax.enable_x64(dtype == "float64"):
        shapes = ((M, D), (3, D, 2 * F), (3, F, D), (M, D))
        x, w_in, w_out, dy = (jnp.asarray(rng.normal(size=s), dtype) for s in shapes)
        weights = jnp.asarray(rng.random(M), x.dtype)
        x = x.at[sum(sizes) :].set(jnp.nan)
        sizes_G = jnp.asarray(sizes, jnp.int32)
        wide = jnp.float32 if dtype == "bfloat16" else dtype
        exact = (a.astype(wide) for a in (x, w_in, w_out, weights))
        wanted = step("reference", *exact, sizes_G, dy.astype(wide))
        for got, want in zip(
            step("xla", x, w_in, w_out, weights, sizes_G, dy), wanted, strict=True
        ):
            assert got.dtype == jnp.dtype(dtype)
            assert max_relative_error(got.astype(wide), want) <= TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("sizes", [(4, 0, 5), (0, 0, 0), (0, 11, 0)])
@pytest.mark.parametrize("has", [(True, True), (True, False), (False, False)])
def test_with_biases_and_a_clamp_it_equals_the_definition(dtype, sizes, has):
    """Rows past the sizes are NaN, with a NaN for their weight and in their gradient."""
    if dtype == "float64" and has == (True, False):
        return  # the same code as in the other two
    rng, total = np.random.default_rng(0), sum(sizes)
    with jax.enable_x64(dtype == "float64"):
        shapes = ((M, D), (3, D, 2 * F), (3, F, D), (3, 2 * F), (3, D), (M, D))
        x, w_in, w_out, b_in, b_out, dy = (jnp.asarray(rng.normal(size=s), dtype) for s in shapes)
        biases = tuple(b if there else None for b, there in zip((b_in, b_out), has, strict=True))
        weights = jnp.asarray(rng.random(M), x.dtype)
        sizes_G = jnp.asarray(sizes, jnp.int32)
        wide = jnp.float32 if dtype == "bfloat16" else dtype
        given = (x, w_in, w_out, weights)
        exact = tuple(a.astype(wide) for a in given)
        exact_biases = tuple(None if b is None else b.astype(wide) for b in biases)
        wanted = step("reference", *exact, sizes_G, dy.astype(wide), exact_biases, 1.5)
        dirty = [a.at[total:].set(jnp.nan) for a in (x, weights, dy)]
        args = (dirty[0], w_in, w_out, dirty[1], sizes_G, dirty[2])
        found = step("xla", *args, biases, 1.5)
        assert len(found) == len(wanted) == 5 + sum(has)
        for got, want in zip(found, wanted, strict=True):
            assert got.dtype == jnp.dtype(dtype)
            assert max_relative_error(got.astype(wide), want) <= TOLERANCE[dtype]
        for rows in (found[0], found[1], found[4]):  # y, dx, dweights
            assert not np.asarray(rows, np.float64)[total:].any()
        for array in (*found[2:4], *found[5:]):  # dw_in, dw_out, the biases' gradients
            assert not np.asarray(array, np.float64)[np.asarray(sizes) == 0].any()


def test_the_backward_keeps_h_alone():
    """Beside the operands, one array of M rows: no activation, no bias for each row."""
    shapes = ((64, D), (3, D, 2 * F), (3, F, D), (64,), (3, 2 * F), (3, D))
    x, w_in, w_out, weights, b_in, b_out = (jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes)
    run = lambda x, w_in, w_out, weights, b_in, b_out: grouped_mlp(  # noqa: E731
        x, w_in, w_out, weights, jnp.asarray([9, 9, 9]), b_in_GF2=b_in, b_out_GD=b_out, limit=7.0
    )
    operands = (x, w_in, w_out, weights, b_in, b_out)
    _, vjp = jax.eval_shape(lambda *a: jax.vjp(run, *a), *operands)
    kept = sum(leaf.size for leaf in jax.tree.leaves(vjp) if leaf.dtype == jnp.float32)
    assert kept == sum(a.size for a in operands) + 64 * 2 * F


def test_d30_a_square_projection_is_not_transposed():
    """down [E, inter, hidden] holds one 1, at [0, 0, 1]; the activation is [1, 0, 0, 0]."""
    w_in, w_out = jnp.zeros((2, 4, 8)), jnp.zeros((2, 4, 4)).at[0, 0, 1].set(1.0)
    b_in = jnp.zeros((2, 8)).at[0, 0].set(1.0).at[:, 4:].set(-1.0)
    b_in = b_in.at[0, 4].set(1 / (1 / (1 + np.exp(-1.702))) - 1)  # (up + 1) sigmoid(1.702) = 1
    y = grouped_mlp(
        jnp.ones((1, 4)), w_in, w_out, jnp.ones(1), jnp.asarray([1, 0]), b_in_GF2=b_in, limit=7.0
    )
    np.testing.assert_allclose(y, [[0, 1, 0, 0]], atol=1e-6)


def test_shapes_that_do_not_fit():
    x, w_in, w_out = jnp.zeros((4, D)), jnp.zeros((2, D, 2 * F)), jnp.zeros((2, F, D))
    with pytest.raises(ValueError, match=r"takes \[M, D\]"):
        grouped_mlp(x, w_in[..., 1:], w_out, jnp.ones(4), jnp.array([2, 2]))
    with pytest.raises(ValueError, match=r"b_out must be float32 \(2, 6\); got float32 \(2, 5\)"):
        b_out = jnp.zeros((2, D - 1))
        grouped_mlp(x, w_in, w_out, jnp.ones(4), jnp.array([2, 2]), b_out_GD=b_out)
