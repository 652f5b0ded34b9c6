"""Collectives over roles; the emulated `ragged_all_to_all` against its definition in numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from moejax.core import collectives

PEERS, ROWS, OUT, D = 8, 12, 40, 3


def on_devices(function, *arrays):
    """Runs `function` over 8 devices, every array split along dim 0."""
    mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    spec = P(("a", "b"))
    return jax.jit(
        jax.shard_map(function, mesh=mesh, in_specs=(spec,) * len(arrays), out_specs=spec)
    )(*arrays)


def tables(seed: int):
    """Returns (input offsets, send sizes, output offsets, received sizes), each [peers, peers]."""
    generator = np.random.default_rng(seed)
    sizes = generator.multinomial(ROWS - 2, [1 / PEERS] * PEERS, PEERS).astype(np.int32)
    sizes[3] = 0  # a device that sends nothing
    sizes[:, 5] = 0  # and one that receives nothing
    starts = (np.cumsum(sizes, 1) - sizes).astype(np.int32)
    places = (np.cumsum(sizes, 0) - sizes + 1).astype(np.int32)  # row 0 stays
    return starts, sizes, places, np.ascontiguousarray(sizes.T)


def definition(operand, output, starts, sizes, places):
    """The meaning: a copy, sender by sender."""
    result = output.copy()
    for i in range(PEERS):
        for j in range(PEERS):
            rows = operand[i, starts[i, j] :][: sizes[i, j]]
            result[j, places[i, j] : places[i, j] + sizes[i, j]] = rows
    return result


@pytest.mark.parametrize("seed", [0, 1])
def test_the_emulation_sends_rows_where_the_tables_say(seed):
    generator = np.random.default_rng(seed)
    operand = generator.normal(size=(PEERS, ROWS, D)).astype(np.float32)
    output = generator.normal(size=(PEERS, OUT, D)).astype(np.float32)
    cotangent = generator.normal(size=output.shape).astype(np.float32)
    table = tables(seed)

    def send(x, out, weight, *table):
        def loss(x, out):
            made = collectives.ragged_all_to_all(
                x[0], out[0], *(t[0] for t in table), ("a", "b")
            )
            return (made * weight[0]).sum(), made[None]

        (dx, dout), made = jax.grad(loss, argnums=(0, 1), has_aux=True)(x, out)
        return dx, dout, made

    d_operand, d_output, made = on_devices(send, operand, output, cotangent, *table)
    starts, sizes, places, _ = table
    np.testing.assert_array_equal(made, definition(operand, output, starts, sizes, places))
    expected, kept = np.zeros_like(operand), cotangent.copy()
    for i in range(PEERS):
        for j in range(PEERS):
            there = slice(places[i, j], places[i, j] + sizes[i, j])
            expected[i, starts[i, j] : starts[i, j] + sizes[i, j]] = cotangent[j, there]
            kept[j, there] = 0
    np.testing.assert_array_equal(d_operand, expected)
    np.testing.assert_array_equal(d_output, kept)


def test_over_no_axes_nothing_is_sent():
    x = jnp.arange(6.0).reshape(3, 2)
    for function in (
        collectives.psum, collectives.pmax, collectives.all_gather,
        collectives.psum_scatter, collectives.all_to_all, collectives.vary,
    ):  # fmt: skip
        np.testing.assert_array_equal(function(x, ()), x)
    assert collectives.axis_index(()) == 0
    one = [jnp.asarray([n], jnp.int32) for n in (1, 2, 0, 2)]
    made = collectives.ragged_all_to_all(x, jnp.full((4, 2), -1.0), *one, ())
    np.testing.assert_array_equal(made, [[2, 3], [4, 5], [-1, -1], [-1, -1]])


def test_psum_counts_a_replicated_value_once_a_device_and_vary_transposes_to_it():
    def f(x):
        total = collectives.psum(jnp.ones(()), ("a", "b"))
        index = collectives.axis_index(("a", "b")).astype(jnp.float32)
        grad = jax.grad(lambda w: (collectives.vary(w, ("a", "b")) * index).sum())(jnp.ones(()))
        return x + total, x + grad

    totals, grads = on_devices(f, jnp.zeros((8,)))
    np.testing.assert_array_equal(totals, np.full(8, 8.0))
    np.testing.assert_array_equal(grads, np.full(8, 28.0))
