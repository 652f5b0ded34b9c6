"""The grouped MLP against its definition, gradients of all four operands included."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import grouped_mlp
from tests.oracle import max_relative_error

TOLERANCE = {"float32": 2e-6, "float64": 1e-14, "bfloat16": 2e-2}
M, D, F = 11, 6, 5


def step(impl, x, w_in, w_out, weights, sizes, dy):
    """y, and the gradients of x, w_in, w_out and weights."""
    run = lambda *args: grouped_mlp(*args, sizes, impl=impl)  # noqa: E731
    y, gradients = jax.vjp(run, x, w_in, w_out, weights)
    return y, *gradients(dy)


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


def test_shapes_that_do_not_fit():
    x, w_in, w_out = jnp.zeros((4, D)), jnp.zeros((2, D, 2 * F)), jnp.zeros((2, F, D))
    with pytest.raises(ValueError, match=r"takes \[M, D\]"):
        grouped_mlp(x, w_in[..., 1:], w_out, jnp.ones(4), jnp.array([2, 2]))
