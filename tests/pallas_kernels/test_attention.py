"""Attention: every implementation that runs here against the definition, gradients included."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from pallas_kernels import attention
from pallas_kernels.attention import xla
from tests.oracle import max_relative_error

# B, L, S, N, G, H, V, window, segments, sinks
CASES = {
    "causal": (2, 12, 12, 4, 2, 8, 8, None, False, False),
    "segments": (2, 12, 12, 4, 2, 8, 8, None, True, False),
    "unequal dims, sinks, S > L": (1, 12, 17, 4, 1, 8, 6, None, False, True),
    "window, segments, sinks": (2, 13, 13, 2, 2, 8, 4, 4, True, True),
    "one query": (1, 1, 9, 2, 1, 4, 4, 3, False, False),
}
TOLERANCE = {"float32": 1e-5, "float64": 1e-10, "bfloat16": 2e-2}  # bfloat16: 5 roundings of 2^-8


def _inputs(case, dtype):
    B, L, S, N, G, H, V, window, segmented, sunk = CASES[case]
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape), dtype)  # noqa: E731
    q, k, v = draw(B, L, N, H), draw(B, S, G, H), draw(B, S, G, V)
    ids = jnp.asarray(np.sort(rng.integers(0, 4, (B, S)), axis=1)[:, ::-1], jnp.int32)
    segments = (ids[:, S - L :], ids) if segmented else None
    cotangents = draw(B, L, N, V), draw(B, L, N)
    return q, k, v, draw(N) if sunk else None, segments, window, cotangents


def _run(impl, q, k, v, sinks, segments, window, cotangents):
    def call(q, k, v, sinks):
        return attention(
            q, k, v, segment_ids=segments, window=window, sinks=sinks, impl=impl
        )

    (out, lse), vjp = jax.vjp(call, q, k, v, sinks)
    d_out, d_lse = cotangents
    d_lse = jnp.where(lse < -1e29, 0, d_lse.astype(lse.dtype))
    return [out, lse, *(g for g in vjp((d_out, d_lse)) if g is not None)]


@pytest.mark.parametrize("block", [256, 5])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("case", CASES)
def test_blocks_equal_the_definition(case, dtype, block, monkeypatch):
    pass
    with jax.enable_x64(dtype == "float64"):
        arguments = _inputs(case, dtype)
        pairs = zip(_run("xla", *arguments), _run("reference", *arguments), strict=True)
        for got, want in pairs:
            assert max_relative_error(got, want) <= TOLERANCE[dtype]


def _packed(seed: int):
    rng = np.random.default_rng(seed)
    shapes = ((1, 8, 2, 4),) * 3
    return [jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes]


@pytest.mark.parametrize("impl", ["xla", "reference"])
def test_documents_do_not_see_each_other(impl, monkeypatch):
    """D24: 3 + 5 tokens in a row."""
    pass
    ids = jnp.asarray([[1, 1, 1, 2, 2, 2, 2, 2]], jnp.int32)
    first, other = _packed(0), _packed(1)
    pairs = zip(first, other, strict=True)
    mixed = [jnp.concatenate([b[:, :3], a[:, 3:]], axis=1) for a, b in pairs]

    def call(q, k, v, ids=ids):
        return attention(q, k, v, segment_ids=(ids, ids), impl=impl)[0]

    np.testing.assert_array_equal(call(*first)[:, 3:], call(*mixed)[:, 3:])
    grads = jax.grad(lambda *qkv: call(*qkv)[:, 3:].sum(), argnums=(0, 1, 2))(*first)
    assert all(not np.asarray(g[:, :3]).any() for g in grads)
    alone = call(*(a[:, 3:] for a in first), ids=jnp.ones((1, 5), jnp.int32))
    assert max_relative_error(call(*first)[:, 3:], alone) <= 1e-5


@pytest.mark.parametrize("impl", ["xla", "reference"])
def test_padding_gives_zeros_and_no_gradient(impl):
    ids = jnp.asarray([[1, 2, 2, 2, 2, 2, 0, 0]], jnp.int32)
    q, k, v = _packed(2)

    def call(q, k, v):
        return attention(q, k, v, segment_ids=(ids, ids), impl=impl)

    out, lse = call(q, k, v)
    assert not np.asarray(out[:, 6:]).any() and np.isfinite(lse).all()
    np.testing.assert_allclose(out[:, 0], v[:, 0], rtol=1e-6)  # a document of one token
    grads = jax.grad(lambda *qkv: (call(*qkv)[0] ** 2).sum(), argnums=(0, 1, 2))(q, k, v)
    assert all(np.isfinite(g).all() and not np.asarray(g[:, 6:]).any() for g in grads)


def test_memory_is_linear_in_the_length():
    def temp_bytes(length):
        array = jax.ShapeDtypeStruct((1, length, 2, 16), jnp.float32)
        loss = lambda q, k, v: attention(q, k, v, impl="xla")[0].sum()  # noqa: E731
        compiled = jax.jit(jax.grad(loss, (0, 1, 2))).lower(array, array, array).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    short, long = temp_bytes(2048), temp_bytes(4096)
    assert long < 2.3 * short
    assert long < 4096 * 4096 * 2 * 4 / 4  # a quarter of one score matrix


def test_it_runs_inside_shard_map():
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.normal(size=(8, 12, 2, 4)), jnp.float32) for _ in range(3))
    ids = jnp.ones((8, 12), jnp.int32)

    def loss(q, k, v, ids):
        out, lse = attention(q, k, v, segment_ids=(ids, ids), impl="xla")
        return (out * out).sum(axis=(1, 2, 3)) + jnp.sin(lse).sum(axis=(1, 2))

    split = jax.shard_map(
        loss, mesh=mesh, in_specs=(P("x"),) * 4, out_specs=P("x"), check_vma=True
    )
    grads = [
        jax.grad(lambda *a, f=f: f(*a, ids).sum(), argnums=(0, 1, 2))(q, k, v)
        for f in (split, loss)
    ]
    for got, want in zip(*grads, strict=True):
        assert max_relative_error(got, want) <= 1e-6


def test_refusals_say_why():
    q, k, v = _packed(0)
    with pytest.raises(ValueError, match="cudnn.*cannot serve.*NVIDIA GPUs"):
        attention(q, k, v, impl="cudnn")
    with pytest.raises(ValueError, match="unknown impl='flash'"):
        attention(q, k, v, impl="flash")
    with pytest.raises(ValueError, match="N a multiple of G"):
        attention(q, k[:, :, :1].repeat(3, axis=2), v, impl="xla")
