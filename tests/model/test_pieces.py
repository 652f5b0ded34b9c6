"""A function of rows computed piece by piece: the same values and gradients as in one piece."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moejax.core.mesh import Fold
from moejax.model.pieces import in_pieces, num_pieces
from tests.oracle import max_relative_error


def toy(weights, rows, numbers):
    (x_tD, scale_t), (kind_t,) = rows, numbers
    y_tF = jnp.tanh(x_tD @ weights["w"][0]) * scale_t[:, None] + weights["w"][1][None, 0]
    return jnp.where(kind_t[:, None] > 1, y_tF, 0.0), {"kept": (kind_t > 1).sum(dtype=jnp.int32)}


@pytest.mark.parametrize("count", [1, 3, 12])
def test_pieces_equal_the_whole(count):
    with jax.enable_x64(True):
        compare(count)


def compare(count):
    draw = np.random.default_rng(3).normal
    weights = {"w": jnp.asarray(draw(size=(2, 5, 5)))}
    rows = (jnp.asarray(draw(size=(12, 5))), jnp.asarray(draw(size=12)))
    numbers = (jnp.arange(12, dtype=jnp.int32) % 4,)

    def loss(run):
        def of(weights, rows):
            y, counted = run(weights, rows)
            return (y * jnp.sin(y)).sum(), counted

        return jax.value_and_grad(of, argnums=(0, 1), has_aux=True)(weights, rows)

    cut = loss(lambda w, r: in_pieces(toy, count, w, r, numbers, Fold()))
    whole = loss(lambda w, r: toy(w, r, numbers))
    assert int(cut[0][1]["kept"]) == 6 and whole[0][0].dtype == jnp.float64
    for mine, right in zip(*map(jax.tree.leaves, (cut, whole)), strict=True):
        assert max_relative_error(mine, right) < 1e-12


def test_gradients_of_bfloat16_weights_are_summed_in_float32():
    """256 pieces that each give 1: summed in bfloat16 they would stop at 256 + 1 = 256."""
    one = jnp.ones((), jnp.bfloat16)

    def multiply(w, rows, _):
        return rows[0] * w, {}

    def loss(w):
        rows = jnp.ones((300,), jnp.bfloat16)
        y, _ = in_pieces(multiply, 300, w, (rows,), (rows,), Fold())
        return y.astype(jnp.float32).sum()

    assert float(jax.grad(loss)(one)) == 300


def test_the_number_of_pieces_divides_the_rows():
    assert [num_pieces(12, n) for n in (0, 1, 2, 4.5, 7, 13)] == [1, 1, 2, 6, 12, 12]
