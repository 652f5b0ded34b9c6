"""The weighted SwiGLU against its definition, gradients of activation and weight included."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.swiglu import swiglu
from tests.oracle import max_relative_error

TOLERANCE = {"float32": 1e-6, "float64": 1e-14, "bfloat16": 1e-2}


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("limit", [0.0, 4.0])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_it_equals_the_definition(dtype, weighted, limit):
    rng = np.random.default_rng(0)
    results = []
    with jax.enable_x64(dtype == "float64"):
        h = jnp.asarray(rng.normal(size=(9, 14)) * 4, dtype)
        dy = jnp.asarray(rng.normal(size=(9, 7)), dtype)
        weights = jnp.asarray(rng.random(9), h.dtype) if weighted else None
        for impl in ("xla", "reference"):
            run = lambda h, w, impl=impl: swiglu(h, w, limit=limit, impl=impl)  # noqa: E731
            y, vjp = jax.vjp(run, h, weights)
            results.append((y, *(g for g in vjp(dy) if g is not None)))
        for got, want in zip(*results, strict=True):
            assert max_relative_error(got, want) <= TOLERANCE[dtype]


@pytest.mark.parametrize("impl", ["xla", "reference"])
def test_the_clamped_one(impl):
    """D30: figures of gpt-oss. What is cut has no gradient, what is at the limit has; a gate has no
    lower bound."""
    gate = jnp.asarray([1.0, 10.0, 7.0, -9.0, 0.0])
    up = jnp.asarray([0.5, -9.0, 7.0, 8.0, 0.0])
    h = jnp.stack([gate, up], axis=1)
    y, vjp = jax.vjp(lambda h: swiglu(h, limit=7.0, impl=impl), h)
    np.testing.assert_allclose(y[:2, 0], [1.268694, -41.99972], rtol=1e-6)
    assert y[4, 0] == 0
    kept = np.asarray(vjp(jnp.ones_like(y))[0]) != 0
    np.testing.assert_array_equal(kept[:4], [[1, 1], [0, 0], [1, 1], [1, 0]])


def test_the_backward_keeps_h_alone():
    h = jax.ShapeDtypeStruct((64, 32), jnp.bfloat16)
    weights = jax.ShapeDtypeStruct((64,), jnp.float32)
    _, vjp = jax.eval_shape(lambda h, w: jax.vjp(swiglu, h, w), h, weights)
    assert sum(leaf.size for leaf in jax.tree.leaves(vjp)) == 64 * 32 + 64
