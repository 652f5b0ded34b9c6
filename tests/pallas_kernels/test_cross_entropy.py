"""`logit_stats`: chunks against the definition, gradients included."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from pallas_kernels import logit_stats
from pallas_kernels.cross_entropy import xla
from tests.oracle import max_relative_error

TOLERANCE = {"float32": 1e-5, "float64": 1e-10, "bfloat16": 2**-6}  # bfloat16: 8 roundings of 2^-9


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


@pytest.mark.parametrize("impl", ["xla", "reference"])
def test_a_slice_may_have_no_column_that_counts(impl):
    """How many count is found on the device; padding gets a gradient of exactly 0."""
    rng = np.random.default_rng(0)
    x, w = jnp.asarray(rng.normal(size=(4, 3))), jnp.asarray(rng.normal(size=(3, 5)))
    targets = jnp.asarray([0, -1, 2, 4], jnp.int32)

    @jax.jit
    def of(valid):
        call = lambda x, w: logit_stats(x, w, targets, valid_vocab=valid, impl=impl)  # noqa: E731
        stats, vjp = jax.vjp(call, x, w)
        weight = jnp.where(jnp.isfinite(stats[0]), 1.0, 0.0)
        return stats, vjp((weight, jnp.ones(4)))

    (lse, target), grads = of(0)
    assert (lse == -jnp.inf).all() and not target.any()
    assert not any(np.asarray(g).any() for g in grads)
    (lse, target), (_, dw) = of(3)
    np.testing.assert_allclose(lse, jax.nn.logsumexp(x @ w[:, :3], axis=1), rtol=1e-6)
    assert dw[:, :3].all() and not dw[:, 3:].any() and target[3] == 0


def test_memory_is_that_of_a_chunk():
    """T*V = 8192 * 4096 float32 logits are 128 MiB; a chunk's are 16."""
    shapes = ((8192, 32), jnp.float32), ((32, 4096), jnp.float32), ((8192,), jnp.int32)
    arguments = [jax.ShapeDtypeStruct(*shape) for shape in shapes]

    def loss(x, w, targets):
        lse, target = logit_stats(x, w, targets, impl="xla")
        return (lse - target).sum()

    compiled = jax.jit(jax.grad(loss, (0, 1))).lower(*arguments).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 8192 * 4096 * 4 / 2


def test_it_runs_inside_shard_map(monkeypatch):
    """The vocabulary over 8 devices, varying types checked: the slices join to the whole."""
    monkeypatch.setattr(xla, "CHUNK", 8)
    rng = np.random.default_rng(1)
    x = jnp.asarray(rng.normal(size=(20, 6)), jnp.float32)
    w = jnp.asarray(rng.normal(size=(6, 64)), jnp.float32)
    targets = jnp.asarray(rng.integers(-1, 64, 20), jnp.int32)
    mesh = jax.make_mesh((8,), ("v",), axis_types=(jax.sharding.AxisType.Auto,))

    def part(x_1TD, w_Dv, targets_1T):
        device = jax.lax.axis_index("v")
        stats = logit_stats(x_1TD[0], w_Dv, targets_1T[0] - device * w_Dv.shape[1], impl="xla")
        return tuple(a[None] for a in stats)

    split = jax.shard_map(
        part,
        mesh=mesh,
        in_specs=(P("v"), P(None, "v"), P("v")),
        out_specs=P("v"),
        check_vma=True,
    )

    def by_slices(x, w):
        copies = jnp.broadcast_to(x, (8, *x.shape)), jnp.broadcast_to(targets, (8, 20))
        lse, target = split(copies[0], w, copies[1])
        return jax.nn.logsumexp(lse, axis=0), target.sum(axis=0)

    def whole(x, w):
        return logit_stats(x, w, targets, impl="reference")

    def with_grads(f):
        loss = lambda x, w: sum(jnp.sin(a).sum() for a in f(x, w))  # noqa: E731
        return *f(x, w), *jax.grad(loss, argnums=(0, 1))(x, w)

    run = jax.jit(with_grads, static_argnums=0)
    for got, want in zip(run(by_slices), run(whole), strict=True):
        assert max_relative_error(got, want) <= 1e-5


def test_refusals_say_why():
    x, w, targets = jnp.ones((4, 3)), jnp.ones((3, 5)), jnp.zeros((4,), jnp.int32)
    with pytest.raises(ValueError, match="valid_vocab=0 is not in 1..5"):
        logit_stats(x, w, targets, valid_vocab=0)
    with pytest.raises(ValueError, match="unknown impl='fused'"):
        logit_stats(x, w, targets, impl="fused")
