"""A backward in two parts: the same results, no product twice, and little in between."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import Literal

from moejax.core.mesh import ParallelConfig
from moejax.parallel import units
from moejax.parallel.split import split
from tests.oracle import max_relative_error
from tests.parallel.test_pipeline import branches, traced
from tests.train.folds import Case, batches, make_trainer

T, D, F = 8, 4, 6


@jax.jit
def activation(x):
    return jnp.tanh(x) * x


def layer(weights, x_tD):
    w_in_DF, w_out_FD, scale_1D = weights
    hidden_tF = activation(activation(x_tD * scale_1D) @ w_in_DF)
    return x_tD + hidden_tF @ w_out_FD


def backward(remat: bool, weights, x_tD, dy_tD):
    """Returns (dx, d_weights): known are the weights, kept is x."""
    run = jax.checkpoint(layer) if remat else layer
    d_weights, dx_tD = jax.vjp(run, weights, x_tD)[1](dy_tD)
    return dx_tD, d_weights


def arrays():
    generator = np.random.default_rng(0)
    shapes = ((D, F), (F, D), (1, D), (T, D), (T, D))
    *weights, x_tD, dy_tD = (jnp.asarray(generator.normal(size=s), jnp.float32) for s in shapes)
    return tuple(weights), x_tD, dy_tD


def count(jaxpr, *names: str) -> int:
    return sum(eqn.primitive.name in names for eqn, _ in branches(jaxpr))


@pytest.mark.parametrize("remat", [False, True])
def test_the_parts_do_what_the_whole_does_and_no_product_twice(remat):
    given, run = arrays(), partial(backward, remat)
    parts = split(run, *given, ())
    weights, x_tD, _ = given
    dx_tD, crossing = parts.run_first(*given)
    d_weights = parts.run_second(weights, x_tD, crossing)
    errors = jax.tree.map(max_relative_error, (dx_tD, d_weights), run(*given))
    assert max(jax.tree.leaves(errors)) < 1e-6
    # Forward again: one (the last product gives nothing that is needed); to dx two, to dw two.
    assert count(parts.first, "dot_general") == 3 and count(parts.second, "dot_general") == 2
    assert count(parts.second, "tanh") == 0
    # dy; of each product its other factor, of the first also its gradient; the gradient of a scale.
    shapes = [(T, D), (T, F), (T, D), (T, F), (D,)]
    assert sorted(a.shape for a in parts.crossing) == sorted(shapes)


def test_what_follows_from_what_both_know_does_not_cross():
    """A mask of the known, and a view of what crosses."""

    def run(known, kept, now):
        first = now * known.sum()
        wide = jnp.broadcast_to(first[None], (3, T))
        return jnp.sin(wide).sum(0), jnp.cos(wide * jnp.exp(known) + kept).sum()

    given = jnp.float32(2.0), jnp.float32(3.0), jnp.arange(T, dtype=jnp.float32)
    parts = split(run, *given, ())
    assert [a.shape for a in parts.crossing] == [(T,)]
    assert count(parts.second, "exp") == 1 and count(parts.first, "exp") == 0
    _, crossing = parts.run_first(*given)
    np.testing.assert_allclose(parts.run_second(*given[:2], crossing), run(*given)[1], rtol=1e-6)


def test_results_may_be_given_or_constant():
    parts = split(lambda known, kept, now: (now, (now, kept, jnp.ones(2))), 1.0, 2.0, 3.0, ())
    now, crossing = parts.run_first(1.0, 2.0, 3.0)
    again, kept, ones = parts.run_second(1.0, 2.0, crossing)
    assert (now, again, kept, ones.tolist(), len(crossing)) == (3.0, 3.0, 2.0, [1.0, 1.0], 1)


def test_arrays_of_another_type_are_refused():
    given = arrays()
    parts = split(partial(backward, False), *given, ())
    with pytest.raises(TypeError, match="was split for"):
        parts.run_first(given[0], given[1].astype(jnp.float16), given[2])


@pytest.mark.parametrize("remat", ["none", "full"])
def test_a_layer_sends_rows_in_the_first_part_alone(remat, monkeypatch):
    """The second has products, no attention and no dispatch, and adds up over ranks (ZeRO-3)."""
    found = []
    monkeypatch.setattr(units, "split", lambda *args: found.append(split(*args)) or found[-1])
    parallel = ParallelConfig(pp=2, dp=2, tp=2, ep=4, zero=3, schedule="zero_bubble")
    traced(Case("split", parallel, "all_to_all", 4, (("num_layers", 4), ("remat", remat))))
    (parts,) = found
    assert count(parts.first, "all_to_all") >= 2 and count(parts.second, "all_to_all") == 0
    assert count(parts.second, "reduce_scatter") and count(parts.second, "all_gather") == 0
    assert count(parts.second, "exp") == 0
    assert count(parts.first, "reduce_scatter") < 4 * count(parts.second, "reduce_scatter")
    assert not [v for v in parts.second.outvars if isinstance(v, Literal)]


@cache
def gradients(schedule: str, remat: str):
    """Returns those of a step; two kinds of layers, five over four chunks: some rank has nothing at
    some position."""
    model = (("num_layers", 5), ("first_k_dense", 1), ("remat", remat))
    parallel = ParallelConfig(pp=2, vpp=2, zero=0, schedule=schedule)
    trainer = make_trainer(Case("split", parallel, "all_gather", 4, model))
    return trainer.step(trainer.new_state(), batches(4, 1)[0])[1]["grads"]


@pytest.mark.parametrize("remat", ["none", "selective"])  # "full": a fold of `COVERING`
def test_a_split_backward_gives_the_gradients_of_a_whole_one(remat):
    found, right = gradients("zero_bubble", remat), gradients("1f1b", "none")
    for error in jax.tree.leaves(jax.tree.map(max_relative_error, found, right)):
        assert error < 2e-6
