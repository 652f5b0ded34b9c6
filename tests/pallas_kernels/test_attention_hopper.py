"""Hopper attention: results and gradients in Mosaic's interpreter with race detection, and what the
real assembler makes of the kernels."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from pallas_kernels import attention
from pallas_kernels.attention import hopper, reference
from tests.deviceless.child import printed
from tests.oracle import max_relative_error
from tests.pallas_kernels.registers import interpreted

RESULTS = ("out", "lse", "dq", "dk", "dv", "dsinks")
ROUNDING = 2.0**-8  # of a bfloat16
# L, N, G, H, V, window, lengths of the documents of each row (0: padding, to the end), sinks
CASES = {
    "causal, a part of a block": (200, 1, 1, 64, 64, None, None, False),
    "documents, window, groups, sinks": (200, 2, 1, 64, 64, 50, [(30, 110, 40), (200,)], True),
    "unequal dims": (144, 1, 1, 192, 128, None, [(100, 30)], False),
    "wide heads, a window over blocks": (300, 1, 1, 128, 128, 140, None, False),
    "many documents, no multiple of 8": (261, 2, 2, 64, 64, None, [(3, 130, 1, 60)], False),
}
RUNS = [*((case, "bfloat16") for case in CASES), ("documents, window, groups, sinks", "float16")]


def ids_of(documents, L):
    rows = [np.repeat(np.arange(1, len(row) + 1), row) for row in documents]
    return jnp.asarray([np.pad(row, (0, L - row.size)) for row in rows], jnp.int32)


def operands(case, dtype):
    """q, k, v, sinks; segment ids; window; cotangents, that of an empty row's lse 0."""
    L, N, G, H, V, window, documents, sunk = CASES[case]
    rng, B = np.random.default_rng(0), len(documents or [()])
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape), dtype)  # noqa: E731
    ids = None if documents is None else ids_of(documents, L)
    d_lse = jnp.asarray(rng.normal(size=(B, L, N)), jnp.float32)
    d_lse = d_lse if ids is None else jnp.where(ids[..., None] == 0, 0, d_lse)
    sinks = jnp.asarray(rng.normal(size=N), jnp.float32) if sunk else None
    arrays = draw(B, L, N, H), draw(B, L, G, H), draw(B, L, G, V), sinks
    return arrays, None if ids is None else (ids, ids), window, (draw(B, L, N, V), d_lse)


def run(attend, arrays, segments, window, cotangents):
    """out, lse and the gradients in q, k, v and the sinks."""
    scale = arrays[0].shape[-1] ** -0.5
    call = lambda q, k, v, sinks: attend(q, k, v, segments, window, sinks, scale)  # noqa: E731
    results, pull = jax.vjp(call, *arrays)
    return [*results, *(g for g in pull(cotangents) if g is not None)]


@pytest.mark.parametrize(("case", "dtype"), RUNS)
def test_it_equals_the_definition(case, dtype):
    arrays, segments, window, cotangents = operands(case, dtype)
    with interpreted():
        got = run(hopper.attention, arrays, segments, window, cotangents)
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), (arrays, cotangents))
    wanted = run(reference.attention, wide[0], segments, window, wide[1])
    for one, other in zip(got[2:], (*arrays,), strict=False):
        assert one.dtype == other.dtype and one.shape == other.shape
    for name, one, other in zip(RESULTS, got, wanted, strict=False):
        empty = other == reference.NOTHING
        np.testing.assert_array_equal(empty, one == reference.NOTHING)
        one, other = (jnp.where(empty, 0, x.astype(jnp.float32)) for x in (one, other))
        once = name == "out" and arrays[3] is None  # sinks round the result again
        tolerance = 1e-6 if name == "lse" else ROUNDING * (1 if once else 2)
        assert max_relative_error(one, other) < tolerance, name


def test_blocks_that_nothing_sees_are_not_loaded():
    """A NaN in them would show. The documents are 128, 200 and 64 tokens, 120 are padding."""
    ids = ids_of([(128, 200, 64)], 512)
    rng = np.random.default_rng(0)
    arrays = [jnp.asarray(rng.normal(size=(1, 512, 1, 64)), jnp.bfloat16) for _ in range(4)]

    def call(q, k, v, do):
        attend = lambda *a: hopper.attention(*a, (ids, ids), None, None, 0.1)[0]  # noqa: E731
        out, pull = jax.vjp(attend, q, k, v)
        return out, *pull(do)

    with interpreted():
        clean = call(*arrays)
        soiled = call(*(a.at[:, :128].set(jnp.nan) for a in arrays))
    for one, other in zip(soiled, clean, strict=True):
        np.testing.assert_array_equal(one[:, 128:], other[:, 128:])
        assert not one[:, 392:].any()


def test_it_runs_inside_shard_map():
    """With varying types checked; of one device, for this interpreter has one set of barriers."""
    mesh = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.normal(size=(1, 64, 1, 64)), jnp.bfloat16) for _ in range(3))
    ids = ids_of([(30, 30)], 64)

    def loss(q, k, v, ids):
        out, lse = hopper.attention(q, k, v, (ids, ids), None, None, 0.1)
        out = out.astype(jnp.float32)
        return (out * out).sum(axis=(1, 2, 3)) + jnp.sin(lse).sum(axis=(1, 2))

    split = jax.shard_map(
        loss, mesh=mesh, in_specs=(P("x"),) * 4, out_specs=P("x"), check_vma=True
    )
    with interpreted():
        of_split, of_all = (
            jax.grad(lambda *a, f=f: f(*a, ids).sum(), argnums=(0, 1, 2))(q, k, v)
            for f in (split, loss)
        )
    for one, other in zip(of_split, of_all, strict=True):
        np.testing.assert_array_equal(one, other)


def test_elsewhere_it_refuses():
    q = jnp.zeros((1, 8, 1, 64), jnp.bfloat16)
    with pytest.raises(ValueError, match="hopper.*cannot serve.*runs on Hopper GPUs"):
        attention(q, q, q, impl="hopper")


@pytest.mark.deviceless
@pytest.mark.parametrize(
    "shape",
    [
        (1, 4096, 32, 4, 128, 128),
        (2, 8192, 16, 16, 192, 128),
        (3, 1001, 64, 8, 64, 64),
        (1, 2048, 8, 8, 128, 128, "float16"),
    ],
)
def test_it_assembles_without_spills(shape, tmp_path):
    """All kernels, inside a shard_map, chosen by the package. Neither the compiler nor the
    assembler gave up on anything: no spills, no local memory, no product made to wait."""
    printed("compile_attention_hopper", *shape, dump=tmp_path)
    names = sorted(path.stem for path in tmp_path.glob("*.ptx"))
    kernels = [re.sub(r"_\d+$", "", name) for name in names]
    expected = ["forward", "key_value_gradient", "query_gradient"]
    assert kernels == [f"attention_{name}" for name in expected]
    for name in names:
        assembly = (tmp_path / f"{name}.ptx").read_text()
        report = (tmp_path / f"{name}.ptxas").read_text(errors="replace")
        assert "wgmma.mma_async.sync.aligned.m64n" in assembly and ".local" not in assembly
        assert "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" in report
        assert " 0 bytes lmem" in report and "serialized" not in report, report
