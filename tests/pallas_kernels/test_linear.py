"""The dense projection and its gradients against products in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.linear import contract_rows, linear
from tests.oracle import max_relative_error

TOLERANCE = {"float32": 1e-6, "float64": 1e-14, "bfloat16": 2**-8}


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_it_equals_the_product(dtype):
    rng = np.random.default_rng(0)
    with jax.enable_x64(dtype == "float64"):
        x, w, dy = (jnp.asarray(rng.normal(size=s), dtype) for s in ((50, 24), (24, 18), (50, 18)))
        y, vjp = jax.jit(lambda x, w: jax.vjp(linear, x, w))(x, w)
        got = (y, *vjp(dy), contract_rows(x, dy))
        exact_x, exact_w, exact_dy = (np.asarray(a, np.float64) for a in (x, w, dy))
        dw = exact_x.T @ exact_dy
        for a, want in zip(got, (exact_x @ exact_w, exact_dy @ exact_w.T, dw, dw), strict=True):
            assert max_relative_error(a, want) <= TOLERANCE[dtype]
        assert [a.dtype for a in got[:3]] == [x.dtype] * 3
        assert got[3].dtype == ("float32" if dtype == "bfloat16" else dtype)


def test_a_long_sum_in_bfloat16_loses_nothing():
    """4096 ones and one of 2^12: in bfloat16 sums they would vanish in each other."""
    x = jnp.ones((4097, 8), jnp.bfloat16).at[0].set(4096)
    assert (contract_rows(x, jnp.ones((4097, 8), jnp.bfloat16)) == 8192).all()
