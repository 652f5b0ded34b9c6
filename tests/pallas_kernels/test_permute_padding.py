"""Rows that fill every expert's group to a multiple: where they are; they count nowhere."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import PartitionSpec as P

from pallas_kernels import grouped_gemm, permute, sort_slots, unpermute
from pallas_kernels.permute import mosaic
from pallas_kernels.permute.reference import num_rows
from tests.oracle import max_relative_error

IMPLS = ["xla", "reference"]
MULTIPLES = [1, 8, 16, 128]


@partial(jax.jit, static_argnums=(1, 2, 3))
def padded(experts, num_experts, multiple, impl):
    return sort_slots(experts, num_experts, row_multiple=multiple, impl=impl)


def oracle(experts, num_experts, multiple):
    """(tokens, slots, sizes): groups appended one after the other, as lists."""
    T, K = experts.shape
    tokens, slots, sizes = [], np.full((T, K), -1), []
    for e in range(num_experts):
        start = len(tokens)
        for t, k in np.argwhere(experts == e):
            slots[t, k] = len(tokens)
            tokens.append(t)
        tokens += [-1] * (-(len(tokens) - start) % multiple)
        sizes.append(len(tokens) - start)
    return tokens, slots, sizes


def check(found, experts, num_experts, multiple):
    tokens, slots, sizes = (np.asarray(a) for a in found)
    wanted = oracle(experts, num_experts, multiple)
    used = len(wanted[0])
    assert tokens.size == num_rows(experts.size, num_experts, multiple) >= used
    assert tokens[:used].tolist() == wanted[0] and (tokens[used:] == -1).all()
    assert slots.tolist() == wanted[1].tolist() and sizes.tolist() == wanted[2]
    assert tokens.dtype == slots.dtype == sizes.dtype == np.int32


@pytest.mark.parametrize("multiple", MULTIPLES)
@pytest.mark.parametrize("impl", IMPLS)
@settings(max_examples=30)
@given(data=st.data())
def test_matches_lists(impl, multiple, data):
    """5 is the sentinel; a token may name an expert twice, and experts may be empty."""
    row = st.lists(st.integers(0, 5), min_size=2, max_size=2)
    experts = np.asarray(data.draw(st.lists(row, min_size=10, max_size=10)), np.int32)
    check(padded(experts, 5, multiple, impl), experts, 5, multiple)


@pytest.mark.parametrize("multiple", MULTIPLES)
@pytest.mark.parametrize("impl", IMPLS)
def test_extremes(impl, multiple):
    """No valid slot; all slots of one expert, first, last or between empty ones; every group one
    row beyond a multiple, which fills the rows there are; fewer slots than experts; no token."""
    ones = np.ones((6, 4), np.int32)
    full = np.repeat(np.arange(3, dtype=np.int32), multiple + 1)[:, None]
    for experts in (3 * ones, 0 * ones, ones, 2 * ones, full, ones[:1, :2], ones[:0]):
        found = padded(experts, 3, multiple, impl)
        check(found, experts, 3, multiple)
        if experts is full:
            assert found[2].sum() == found[0].size
    assert not np.asarray(padded(3 * ones, 3, multiple, impl)[2]).any()


def _routing(T, K, E, seed):
    rng = np.random.default_rng(seed)
    experts = np.argsort(rng.random((T, E)), axis=1)[:, :K]
    experts[experts == 1] = E  # expert 1 is empty, and its slots nobody's
    return np.where(rng.random((T, K)) < 0.2, E, experts).astype(np.int32)


def _there_and_back(run_permute, run_unpermute, experts, E, multiple, x, weights, dy):
    """(sorted rows, y, dx, dweights) of y = unpermute(2 * permute(x)), and the sorted tokens."""
    tokens, slots, _ = sort_slots(experts, E, row_multiple=multiple)

    def run(x, weights):
        rows = run_permute(x, tokens, slots)
        return run_unpermute(2 * rows, slots, tokens, weights), rows

    y, pull, rows = jax.vjp(run, x, weights, has_aux=True)
    return tokens, rows, y, *pull(dy)


@pytest.mark.parametrize(
    ("impl", "multiple"), [("xla", 8), ("xla", 128), ("reference", 8), ("mosaic", 8)]
)
def test_padding_changes_nothing_of_what_comes_back(impl, multiple):
    """Forward and gradients are those without padding, and rows of no token are zeros. The kernels
    run in the simulator with race detection."""
    T, K, E, D = 6, 2, 4, 8
    experts, rng = jnp.asarray(_routing(T, K, E, 0)), np.random.default_rng(0)
    x, weights, dy = (
        jnp.asarray(rng.standard_normal(s), jnp.float32) for s in ((T, D), (T, K), (T, D))
    )
    if impl == "mosaic":
        moves = partial(mosaic.permute, num_sms=1), partial(mosaic.unpermute, num_sms=1)
    else:
        moves = (
            partial(permute, impl=impl),
            lambda y, slots, tokens, w: unpermute(y, slots, tokens, weights_TK=w, impl=impl),
        )
    plain = (
        partial(permute, impl="reference"),
        lambda y, slots, tokens, w: unpermute(y, slots, tokens, weights_TK=w, impl="reference"),
    )
    there_and_back = jax.jit(_there_and_back, static_argnums=(0, 1, 3, 4))
    wanted = there_and_back(*plain, experts, E, 1, x, weights, dy)
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True)):
        found = there_and_back(*moves, experts, E, multiple, x, weights, dy)
    tokens, rows = np.asarray(found[0]), np.asarray(found[1])
    assert rows.shape[0] == tokens.size > T * K and not rows[tokens < 0].any()
    assert np.array_equal(rows[tokens >= 0], np.asarray(x)[tokens[tokens >= 0]])
    for a, b in zip(found[2:], wanted[2:], strict=True):
        assert max_relative_error(a, b) <= 1e-6


def test_a_grouped_gemm_over_padded_groups():
    """The padded sizes are the groups of the padded rows: same product, same weight gradient."""
    T, K, E, D, F = 20, 2, 4, 8, 3
    experts, rng = jnp.asarray(_routing(T, K, E, 1)), np.random.default_rng(1)
    x, w = (jnp.asarray(rng.standard_normal(s), jnp.float32) for s in ((T, D), (E, D, F)))

    def run(x, w, multiple):
        tokens, slots, sizes = sort_slots(experts, E, row_multiple=multiple)
        return unpermute(grouped_gemm(permute(x, tokens, slots), w, sizes), slots, tokens)

    @partial(jax.jit, static_argnums=2)
    def both_ways(x, w, multiple):
        y, pull = jax.vjp(partial(run, multiple=multiple), x, w)
        return y, *pull(x[:, :F])

    for a, b in zip(both_ways(x, w, 16), both_ways(x, w, 1), strict=True):
        assert max_relative_error(a, b) <= 1e-6


@pytest.mark.parametrize("impl", IMPLS)
def test_inside_fully_manual_shard_map(impl):
    experts = np.stack([_routing(5, 2, 3, seed) for seed in range(4)])
    mesh = jax.make_mesh((4,), ("a",), axis_types=(jax.sharding.AxisType.Auto,))

    def local(experts):
        return [a[None] for a in sort_slots(experts[0], 3, row_multiple=8, impl=impl)]

    mapped = jax.shard_map(local, mesh=mesh, in_specs=P("a"), out_specs=P("a"), check_vma=True)
    found = jax.jit(mapped)(experts)
    for d in range(4):
        check([a[d] for a in found], experts[d], 3, 8)


def test_a_multiple_below_one_is_refused():
    with pytest.raises(ValueError, match="row_multiple=0 is not at least 1"):
        sort_slots(jnp.zeros((2, 1), jnp.int32), 2, row_multiple=0)
