"""Routing: selection, weights, padding; the exact values of public bug reports."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moejax.model.moe import MoEConfig
from moejax.model.router import RouterConfig, route


def routed(logits, top_k, bias=None, valid=None, **options):
    logits = jnp.asarray(logits, jnp.float32)
    valid = jnp.ones(logits.shape[0], bool) if valid is None else jnp.asarray(valid)
    bias = None if bias is None else jnp.asarray(bias, jnp.float32)
    return route(logits, bias, valid, RouterConfig(**options), top_k)


def test_no_gradient_reaches_the_bias():
    """Case D02; 1e5 * the weight of one expert, so that a leak would show."""
    logits = jnp.asarray([[0.405465, 0.0, -0.405465, -0.847298]])

    def weights(bias):
        return routed(logits, 2, bias, score="sigmoid").weights_tK

    leak = jax.grad(lambda b: 1e5 * weights(b)[0, 0])(jnp.asarray([0.0, 0.0, 0.5, 0.0]))
    np.testing.assert_array_equal(leak, np.zeros(4))


def test_renormalised_softmax_is_top_k_then_softmax():
    made = routed([[2.0, 1.0, 3.0, -1.0]], 2)
    np.testing.assert_array_equal(made.experts_tK, [[2, 0]])
    np.testing.assert_allclose(made.weights_tK, [[0.731059, 0.268941]], atol=1e-6)
    raw = routed([[2.0, 1.0, 3.0, -1.0]], 2, renormalize=False)
    np.testing.assert_allclose(raw.weights_tK, [[0.657233, 0.241783]], atol=1e-6)


@pytest.mark.parametrize("low", [-60.0, -200.0])
def test_tiny_sigmoids_are_normalised_in_log_space(low):
    made = routed(np.tile([low, low - 1, low - 1, low - 1], (3, 1)), 1, score="sigmoid",
                  renormalize=False)  # fmt: skip
    np.testing.assert_allclose(made.probs_tE[0], [0.475367, *[0.174878] * 3], atol=1e-6)
    np.testing.assert_allclose(made.probs_tE.sum(axis=-1), np.ones(3), atol=1e-6)
    pair = routed([[low, low - 1, low - 1, low - 2]], 2, score="sigmoid")
    np.testing.assert_allclose(pair.weights_tK, [[0.731059, 0.268941]], atol=1e-6)


def test_ties_go_to_the_lowest_index():
    made = routed(np.zeros((2, 6)), 3)
    np.testing.assert_array_equal(made.experts_tK, [[0, 1, 2]] * 2)
    signed = routed([[1.0, 5.0, 5.0, 5.0]], 2, score="sigmoid")
    np.testing.assert_array_equal(signed.experts_tK, [[1, 2]])


def test_padding_reaches_no_expert_whatever_it_holds():
    logits = np.random.default_rng(0).normal(size=(6, 6))
    wild = logits.copy()
    wild[4:] = 1e4
    valid = [True] * 4 + [False] * 2
    one, two = routed(logits, 2, valid=valid), routed(wild, 2, valid=valid)
    np.testing.assert_array_equal(one.experts_tK[4:], np.full((2, 2), 6))
    np.testing.assert_array_equal(one.weights_tK[4:], np.zeros((2, 2)))
    np.testing.assert_array_equal(one.experts_tK, two.experts_tK)
    np.testing.assert_array_equal(one.weights_tK, two.weights_tK)
    np.testing.assert_allclose(one.weights_tK[:4].sum(axis=1), np.ones(4), atol=1e-6)


def test_scale_multiplies_the_normalised_weights():
    made = routed(np.zeros((1, 8)), 3, score="sigmoid", scale=2.5)
    np.testing.assert_allclose(made.weights_tK, np.full((1, 3), 2.5 / 3), rtol=1e-6)


def test_options_that_cannot_train_are_refused():
    with pytest.raises(ValueError, match="top_k=1 with router.renormalize=True"):
        MoEConfig(top_k=1)
    assert MoEConfig(top_k=1, router=RouterConfig(renormalize=False)).top_k == 1
    with pytest.raises(ValueError, match="top_k=17 is not in 1..num_experts=16"):
        MoEConfig(top_k=17)
    with pytest.raises(ValueError, match="router.score='tanh': choose from softmax, sigmoid"):
        RouterConfig(score="tanh")
    with pytest.raises(ValueError, match="moe.dispatch='teleport': choose from .*ragged"):
        MoEConfig(dispatch="teleport")
