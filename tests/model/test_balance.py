"""Balance losses, loads and the expert bias: the exact values of public bug reports."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moejax.core.mesh import Fold
from moejax.model import balance
from moejax.model.balance import BalanceConfig
from moejax.model.dispatch import DISPATCHERS
from moejax.model.router import RouterConfig, route
from moejax.model.stream import Counts, count_batch, make_stream

ALONE = Fold()


BATCH = BalanceConfig(batch_coeff=1.0)
SEQUENCE = BalanceConfig(batch_coeff=0.0, sequence_coeff=1.0)


def step_aux(logits_mtE, segments_mbL, top_k=1, cfg=BATCH, **options):
    """Returns aux summed over microbatches: logits [m, t, E], segment ids [m, rows, L]."""
    router = RouterConfig(renormalize=top_k > 1, **options)
    segments = jnp.asarray(segments_mbL, jnp.int32)
    counted = count_batch(segments, segments, ALONE)
    total, before = None, jnp.zeros(logits_mtE[0].shape[-1])
    for logits, segment in zip(logits_mtE, segments, strict=True):
        counts = Counts(*counted, count_batch(segment, segment, ALONE).tokens)
        stream = make_stream(segment, None, counts, ALONE)
        routing = route(logits, None, stream.valid_t, router, top_k)
        aux = balance.losses(routing, stream, cfg, ALONE, before)
        before = before + aux.get("plain_load_E", 0.0)
        total = aux if total is None else jax.tree.map(jnp.add, total, aux)
    return total


def one(logits, **options):
    logits = jnp.asarray(logits, jnp.float32)
    return step_aux(logits[None], np.ones((1, 1, logits.shape[0])), **options)


def test_scores_are_normalised_once():
    logits = np.tile([4.0, 0, 0, 0], (5, 1))
    assert float(one(logits)["batch_loss"]) == pytest.approx(3.791660, abs=1e-5)
    assert float(one(logits + 100)["batch_loss"]) == pytest.approx(3.791660, abs=1e-5)


def test_perfect_balance_has_value_one_and_the_normaliser_has_no_epsilon():
    assert float(one(4 * np.eye(4), top_k=1)["batch_loss"]) == pytest.approx(1.0, abs=1e-6)
    assert float(one(np.zeros((8, 4)), top_k=4)["batch_loss"]) == pytest.approx(1.0, abs=1e-6)
    for low in (-60.0, -200.0):
        tiny = np.tile([low, low - 1, low - 1, low - 1], (3, 1))
        assert float(one(tiny, score="sigmoid")["batch_loss"]) == pytest.approx(1.901468, abs=1e-5)


@pytest.mark.parametrize("num_experts", [2, 6])  # 6 = the tokens: a wrong broadcast would pass
@pytest.mark.parametrize("loss", ["batch", "sequence", "global"])
def test_padding_counts_nowhere(num_experts, loss):
    rows = [[5.0, -5.0]] * 2 + [[-5.0, 5.0]] * 2 + [[5.0, -5.0]] * 2
    logits = np.full((6, num_experts), -1e3, np.float32)
    logits[:, :2] = rows
    segments = np.array([[[1, 1, 1, 1, 0, 0]]])
    cfg = BalanceConfig(**{"batch_coeff": 0.0, f"{loss}_coeff": 1.0})

    def value(logits, wild=None):
        logits = jnp.asarray(logits).at[4:].set(1e4) if wild else jnp.asarray(logits)
        made = step_aux(logits[None], segments, cfg=cfg)
        return made[f"{loss}_loss"] + made["z_loss"], made

    (total, made), grad = jax.value_and_grad(value, has_aux=True)(jnp.asarray(logits))
    (wild_total, wild), wild_grad = jax.value_and_grad(value, has_aux=True)(
        jnp.asarray(logits), True
    )
    assert float(made[f"{loss}_loss"]) == pytest.approx(num_experts / 2, abs=1e-4)
    assert float(made["z_loss"]) == pytest.approx(25.00045, abs=1e-4)
    np.testing.assert_array_equal(made["load_E"][:2], [2, 2])
    bias = balance.update_bias(jnp.zeros(2), made["load_E"][:2], 1e-3)
    np.testing.assert_array_equal(bias, [0, 0])
    np.testing.assert_array_equal(total, wild_total)
    np.testing.assert_array_equal(made["load_E"], wild["load_E"])
    np.testing.assert_array_equal(grad, wild_grad)
    np.testing.assert_array_equal(grad[4:], np.zeros((2, num_experts)))


@pytest.mark.parametrize("name", sorted(set(DISPATCHERS) - {"reference"}))
def test_padding_is_not_dispatched(name):
    valid = jnp.asarray([True] * 4 + [False] * 2)
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(6, 6)), jnp.float32)
    routing = route(logits, None, valid, RouterConfig(), 2)
    x = jnp.ones((6, 3))
    rows = DISPATCHERS[name].dispatch(x, routing.experts_tK, routing.weights_tK, 6, ALONE)
    assert int(rows.sizes_e.sum()) == 8 == int(rows.num_slots)
    back = DISPATCHERS[name].combine(rows.x_sD, rows.route, ALONE)
    np.testing.assert_array_equal(back, np.repeat([[2.0]] * 4 + [[0.0]] * 2, 3, axis=1))


TO_0, TO_1 = [10.0, -10.0], [-10.0, 10.0]
FOUR = np.array([[row] * 8 for row in (TO_0, TO_1, TO_0, TO_1)], np.float32)  # [4, 8, 2]


def sequence_value(rows: int, logits):
    """Aux of the four sequences split into microbatches of `rows`; 0: all packed in one row."""
    if rows == 0:
        return step_aux(
            logits.reshape(1, 32, 2), np.repeat([1, 2, 3, 4], 8)[None, None], cfg=SEQUENCE
        )["sequence_loss"]
    micro = 4 // rows
    return step_aux(
        logits.reshape(micro, rows * 8, 2), np.ones((micro, rows, 8)), cfg=SEQUENCE
    )["sequence_loss"]


def test_the_sequence_loss_does_not_depend_on_how_rows_are_split():
    """The case's value at saturated logits, and gradients where the softmax has some."""
    mild = jnp.asarray(FOUR) / 10 + jnp.asarray(
        np.random.default_rng(0).normal(size=FOUR.shape) / 4, jnp.float32
    )
    grads = []
    for rows in (1, 2, 4, 0):
        assert float(sequence_value(rows, jnp.asarray(FOUR))) == pytest.approx(2.0, abs=1e-6)
        grads.append(jax.grad(lambda x, rows=rows: sequence_value(rows, x))(mild))
    scale = float(jnp.abs(grads[0]).max())
    assert scale > 1e-4
    for grad in grads[1:]:
        assert float(jnp.abs(grad - grads[0]).max()) <= 1e-6 * scale
    batch = step_aux(jnp.asarray(FOUR).reshape(1, 32, 2), np.ones((1, 4, 8)))["batch_loss"]
    assert float(batch) == pytest.approx(1.0, abs=1e-6)


def test_the_z_loss_is_the_mean_square_of_logsumexp():
    logits = np.random.default_rng(1).normal(size=(7, 5)).astype(np.float32)
    expected = np.mean(np.log(np.exp(logits.astype(np.float64)).sum(axis=1)) ** 2)
    assert float(one(logits, top_k=2)["z_loss"]) == pytest.approx(expected, rel=1e-6)


def test_the_bias_moves_against_the_excess_load():
    counts = jnp.asarray([40840.0, 41080.0])
    moved = balance.update_bias(jnp.ones(2), counts, 1e-3)
    np.testing.assert_allclose(moved, [1.001, 0.999], rtol=1e-7)
    np.testing.assert_array_equal(balance.update_bias(jnp.zeros(2), jnp.full(2, 5.0), 1e-3), [0, 0])
    stacked = balance.update_bias(jnp.zeros((2, 2)), jnp.asarray([[3.0, 1], [0, 4]]), 0.5)
    np.testing.assert_array_equal(stacked, [[-0.5, 0.5], [0.5, -0.5]])


def test_no_loss_where_none_is_asked_for():
    none = one(np.tile([4.0, 0], (4, 1)), cfg=BalanceConfig(batch_coeff=0.0))
    assert set(none) == {"z_loss", "load_E"}
    assert float(balance.weighted(none, BalanceConfig(batch_coeff=0.0))) == 0.0
