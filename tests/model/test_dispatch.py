"""Every dispatcher against plain numpy, outputs and gradients, on an ep x etp fold of 8 devices."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from moejax.core import collectives
from moejax.core.mesh import ParallelConfig, fold, make_mesh
from moejax.model.dispatch import DISPATCHERS
from pallas_kernels import grouped_gemm, swiglu
from tests.oracle import max_relative_error

E, K, D, F, DEVICES, EACH = 8, 2, 8, 6, 8, 4
TOKENS = DEVICES * EACH
NAMES = sorted(DISPATCHERS)


def inputs():
    generator = np.random.default_rng(0)
    shapes = ((TOKENS, D), (TOKENS, K), (E, D, 2, F), (E, F, D), (TOKENS, D))
    return [jnp.asarray(generator.normal(size=shape), jnp.float32) for shape in shapes]


def expected(x, experts, weights, w_in, w_out):
    """The definition: every token through its experts one by one; padding (id E) gives nothing."""
    hidden = jnp.einsum("td,edcf->tecf", x, w_in)
    act = jax.nn.silu(hidden[:, :, 0]) * hidden[:, :, 1]
    each = jnp.einsum("tef,efd->ted", act, w_out)
    chosen = (jax.nn.one_hot(experts, E, dtype=x.dtype) * weights[..., None]).sum(axis=1)
    return jnp.einsum("te,ted->td", chosen, each)


@cache
def compiled(name: str, ep: int, etp: int):
    """Returns the jitted (x, experts, weights, w_in, w_out, cotangent) -> (y, slots, gradients)."""
    # Nodes of half an expert group: for all dispatchers, whose ep then has two axes.
    parallel = ParallelConfig(dp=DEVICES, ep=ep, etp=etp, node=ep * etp // 2)
    grid = fold(*parallel.readings(DEVICES))
    dispatcher, everyone = DISPATCHERS[name], P(grid.all)
    sharded = (P(grid["ep"] or None, None, None, grid["etp"] or None),
               P(grid["ep"] or None, grid["etp"] or None))  # fmt: skip

    def layer(x, experts, weights, w_in, w_out):
        w_in, w_out = collectives.vary((w_in, w_out), grid.all)
        rows = dispatcher.dispatch(x, experts, weights, E, grid)
        w_in = w_in.reshape(*w_in.shape[:2], -1)
        act = swiglu(grouped_gemm(rows.x_sD, w_in, rows.sizes_e), rows.weights_s)
        y = grouped_gemm(act, w_out, rows.sizes_e)
        slots = collectives.psum(rows.num_slots, grid["ep"] + grid["edp"])
        return dispatcher.combine(y, rows.route, grid), slots[None]

    mapped = jax.shard_map(
        layer, mesh=make_mesh(grid), in_specs=(everyone, everyone, everyone, *sharded),
        out_specs=(everyone, P(grid["etp"] or None)),
    )  # fmt: skip

    def run(x, experts, weights, w_in, w_out, cotangent):
        def loss(x, weights, w_in, w_out):
            y, slots = mapped(x, experts, weights, w_in, w_out)
            return (y * cotangent).sum(), (y, slots)

        grads, out = jax.grad(loss, argnums=(0, 1, 2, 3), has_aux=True)(x, weights, w_in, w_out)
        return *out, grads

    return jax.jit(run)


@jax.jit
def oracle(x, experts, weights, w_in, w_out, cotangent):
    def loss(x, weights, w_in, w_out):
        y = expected(x, experts, weights, w_in, w_out)
        return (y * cotangent).sum(), y

    grads, y = jax.grad(loss, argnums=(0, 1, 2, 3), has_aux=True)(x, weights, w_in, w_out)
    return y, grads


def choice(kind: str):
    """Returns experts [tokens, K]: distinct per token."""
    generator = np.random.default_rng(1)
    if kind == "spread":
        picks = np.stack([generator.permutation(E)[:K] for _ in range(TOKENS)])
    else:
        pair = {"first": [0, 1], "last": [E - 2, E - 1]}[kind]
        picks = np.stack([generator.permutation(pair) for _ in range(TOKENS)])
    return picks.astype(np.int32)


def check(name, ep, etp, experts):
    """Compares one dispatcher with the oracle; returns its gradients."""
    x, weights, w_in, w_out, cotangent = inputs()
    weights = jnp.where(jnp.asarray(experts) < E, weights, 0.0)
    experts = jnp.asarray(experts)
    y, slots, grads = compiled(name, ep, etp)(x, experts, weights, w_in, w_out, cotangent)
    y_right, grads_right = oracle(x, experts, weights, w_in, w_out, cotangent)
    assert max_relative_error(y, y_right) < 2e-6
    names = ("x", "weights", "w_in", "w_out")
    for part, mine, right in zip(names, grads, grads_right, strict=True):
        if part == "weights":  # a padding slot's weight has no gradient here, and none is read
            mine, right = (jnp.where(experts < E, g, 0.0) for g in (mine, right))
        assert max_relative_error(mine, right) < 5e-6, part
    np.testing.assert_array_equal(slots, int((experts < E).sum()))
    return grads


@pytest.mark.parametrize("name", NAMES)
def test_ep_and_etp_together(name):
    check(name, 4, 2, choice("spread"))


@pytest.mark.parametrize("name", NAMES)
def test_padding_in_the_middle_and_a_device_of_nothing_else(name):
    experts = choice("spread")
    experts[5] = experts[17] = E
    experts[12:16] = E  # all tokens of device 3
    check(name, 4, 2, experts)


@pytest.mark.parametrize("where", ["first", "last"])
@pytest.mark.parametrize("name", NAMES)
def test_all_tokens_on_one_rank(name, where):
    """Worst case capacity: every slot arrives, nothing is dropped, idle experts learn nothing."""
    grads = check(name, 4, 2, choice(where))
    busy = {"first": {0, 1}, "last": {E - 2, E - 1}}[where]
    for expert in range(E):
        for grad in grads[2:]:
            assert bool((grad[expert] == 0).all()) == (expert not in busy), expert


@pytest.mark.parametrize("name", ["all_to_all", "ragged", "hierarchical", "nvlink"])
def test_experts_replicated_over_edp(name):
    check(name, 4, 1, choice("spread"))
