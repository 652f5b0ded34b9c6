"""Permutation: every implementation against the reference, and the reference against numpy.

A gathered row is a copy, so permute is exact. A sum of K rows carries K roundings of float32, and
one of bfloat16 where that is the dtype (2^-7: the two may round a tie apart).
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from pallas_kernels import permute, sort_slots, unpermute
from tests.oracle import max_relative_error

IMPLS = ["xla"]
ALL = ["reference", *IMPLS]
TOLERANCE = {"float32": 1e-6, "float64": 2e-15, "bfloat16": 2.0**-7}


def _routing(T: int, K: int, E: int, seed: int):
    """[T, K] of different experts a token; some slots hold the sentinel E."""
    rng = np.random.default_rng(seed)
    experts = np.argsort(rng.random((T, max(E, K))), axis=1)[:, :K].astype(np.int32)
    return np.where(rng.random((T, K)) < 0.2, E, np.minimum(experts, E)).astype(np.int32)


@partial(jax.jit, static_argnums=(1, 2))
def _sorted(experts, num_experts, impl):
    return sort_slots(experts, num_experts, impl=impl)


@partial(jax.jit, static_argnums=(0, 1))
def _run(impl, weighted, x, weights, tokens, slots, dx, dy):
    """(permute, its gradient, unpermute, its gradients), compiled."""
    x_sorted, back = jax.vjp(lambda x: permute(x, tokens, slots, impl=impl), x)

    def undo(y, weights):
        weights = weights if weighted else None
        return unpermute(y, slots, tokens, weights_TK=weights, impl=impl)

    y, undo_back = jax.vjp(undo, dx, weights)
    return x_sorted, *back(dx), y, *undo_back(dy)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("T, K, E, D", [(37, 3, 5, 24), (8, 1, 4, 16), (1, 1, 1, 1), (64, 4, 3, 8)])
@pytest.mark.parametrize("impl", IMPLS)
def test_matches_reference(impl, T, K, E, D, weighted, dtype):
    with jax.enable_x64(dtype == "float64"):
        experts = jnp.asarray(_routing(T, K, E, seed=T))
        tokens, slots, _ = sort_slots(experts, E, impl="reference")
        rng = np.random.default_rng(0)
        shapes = ((T, D), (T, K), (T * K, D), (T, D))
        x, weights, dx, dy = (jnp.asarray(rng.standard_normal(s)).astype(dtype) for s in shapes)
        if dtype == "bfloat16":
            weights = weights.astype(jnp.float32)  # as a router has them
        operands = (weighted, x, weights, tokens, slots, dx, dy)
        wanted, found = _run("reference", *operands), _run(impl, *operands)
        for a, b in zip(found, wanted, strict=True):
            assert a.dtype == b.dtype
            assert max_relative_error(a, b) <= TOLERANCE[dtype] * np.sqrt(max(K, D))


@pytest.mark.parametrize("impl", ALL)
def test_nan_in_a_row_nobody_owns_stays_there(impl):
    """Rows past the last group are of no token: by select, whatever they hold and receive."""
    slots = jnp.array([[0, -1], [1, -1]], jnp.int32)
    tokens = jnp.array([0, 1, -1, -1], jnp.int32)
    y = jnp.ones((4, 3)).at[2:].set(jnp.nan)
    weights = jnp.full((2, 2), 2.0)
    run = lambda y, w: unpermute(y, slots, tokens, weights_TK=w, impl=impl)  # noqa: E731
    out, back = jax.vjp(run, y, weights)
    dy, dw = back(jnp.ones((2, 3)))
    assert (np.asarray(out) == 2).all() and np.asarray(dw).tolist() == [[3, 0], [3, 0]]
    assert np.asarray(dy)[:, 0].tolist() == [2, 2, 0, 0]
    _, back = jax.vjp(lambda x: permute(x, tokens, slots, impl=impl), jnp.ones((2, 3)))
    assert (np.asarray(back(y)[0]) == 1).all()


@pytest.mark.parametrize("K", [1, 3])
@pytest.mark.parametrize("impl", ALL)
@given(data=st.data())
def test_sort_is_stable_and_each_map_is_the_others_inverse(impl, K, data):
    """Against numpy; 5 is the sentinel, and a token may name an expert twice."""
    row = st.lists(st.integers(0, 5), min_size=K, max_size=K)
    experts = np.asarray(data.draw(st.lists(row, min_size=12, max_size=12)), np.int32)
    tokens, slots, sizes = (np.asarray(a) for a in _sorted(experts, 5, impl))
    flat = experts.reshape(-1)
    order, here = np.argsort(flat, kind="stable"), flat < 5
    assert sizes.tolist() == np.bincount(flat, minlength=6)[:5].tolist()
    assert tokens.tolist() == np.where(flat[order] < 5, order // K, -1).tolist()
    place = slots.reshape(-1)
    assert (order[place[here]] == np.flatnonzero(here)).all() and (place[~here] == -1).all()
    assert tokens.dtype == slots.dtype == sizes.dtype == np.int32


@pytest.mark.parametrize("impl", IMPLS)
def test_gradients_gather_and_never_scatter(impl):
    tokens, slots, _ = sort_slots(jnp.asarray(_routing(16, 2, 4, 0)), 4)

    def loss(x, weights):
        y = permute(x, tokens, slots, impl=impl)
        return (unpermute(y, slots, tokens, weights_TK=weights, impl=impl) ** 2).sum()

    program = jax.jit(jax.grad(loss, (0, 1))).lower(jnp.ones((16, 4)), jnp.ones((16, 2)))
    assert "gather" in program.as_text() and "scatter" not in program.as_text()


@pytest.mark.parametrize("impl", ALL)
def test_inside_fully_manual_shard_map(impl):
    """Eight devices of two axes, each sorting its own tokens, under check_vma."""
    devices, T, K, E, D = 8, 12, 2, 3, 4
    experts = np.stack([_routing(T, K, E, seed) for seed in range(devices)])
    rng = np.random.default_rng(0)
    x = rng.standard_normal((devices, T, D)).astype(np.float32)
    weights = rng.random((devices, T, K)).astype(np.float32)

    def local(experts, x, weights):
        tokens, slots, sizes = sort_slots(experts[0], E, impl=impl)

        def there_and_back(x, weights):
            y = permute(x, tokens, slots, impl=impl)
            return unpermute(y, slots, tokens, weights_TK=weights, impl=impl)

        y, back = jax.vjp(there_and_back, x[0], weights[0])
        return [a[None] for a in (sizes, y, *back(y))]

    mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    spec = P(("a", "b"))
    mapped = jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=True)
    found = jax.jit(mapped)(experts, x, weights)
    kept = np.where(experts < E, weights, 0).sum(axis=2)[..., None]
    assert max_relative_error(found[1], x * kept) <= 1e-6
    assert max_relative_error(found[2], x * kept * kept) <= 1e-6
    assert np.asarray(found[0]).sum() == (experts < E).sum()
