"""`logit_stats`: chunks against the definition, gradients included."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import logit_stats
from pallas_kernels.cross_entropy import xla
from tests.oracle import max_relative_error

TOLERANCE = {"float32": 1e-5, "float64": 1e-12, "bfloat16": 2e-2}


@pytest.mark.parametrize("valid_vocab", [None, 30])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_chunks_equal_the_definition(dtype, valid_vocab, monkeypatch):
    """50 tokens in chunks of 16; targets -1 and beyond the slice have the logit 0."""
    monkeypatch.setattr(xla, "CHUNK", 16)
    rng = np.random.default_rng(0)
    targets = jnp.asarray(rng.integers(-1, 40, 50), jnp.int32)
    results = []
    with jax.enable_x64(dtype == "float64"):
        x = jnp.asarray(rng.normal(size=(50, 8)), dtype)
        w = jnp.asarray(rng.normal(size=(8, 37)), dtype)
        for impl in ("xla", "reference"):

            def call(x, w, impl=impl):
                return logit_stats(x, w, targets, valid_vocab=valid_vocab, impl=impl)

            stats, vjp = jax.vjp(call, x, w)
            results.append((*stats, *vjp((jnp.cos(stats[0]), jnp.sin(stats[1])))))
        for got, want in zip(*results, strict=True):
            assert max_relative_error(got, want) <= TOLERANCE[dtype]
    outside = (np.asarray(targets) < 0) | (np.asarray(targets) >= (valid_vocab or 37))
    assert not np.asarray(results[0][1])[outside].any()


def test_a_padded_column_counts_nowhere():
    x, w = jnp.ones((4, 3)), jnp.ones((3, 5)).at[:, 4].set(1e3)
    targets = jnp.zeros((4,), jnp.int32)
    for impl in ("xla", "reference"):
        lse, target = logit_stats(x, w, targets, valid_vocab=4, impl=impl)
        np.testing.assert_allclose(lse, 3 + np.log(4), rtol=1e-6)
        np.testing.assert_allclose(target, 3)
