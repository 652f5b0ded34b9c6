"""Balance losses, loads and the expert bias of one device; see also `tests/train/test_cases.py`."""

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


def test_perfect_balance_has_value_one():
    assert float(one(4 * np.eye(4), top_k=1)["batch_loss"]) == pytest.approx(1.0, abs=1e-6)
    assert float(one(np.zeros((8, 4)), top_k=4)["batch_loss"]) == pytest.approx(1.0, abs=1e-6)


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


def test_the_z_loss_is_the_mean_square_of_logsumexp():
    logits = np.random.default_rng(1).normal(size=(7, 5)).astype(np.float32)
    expected = np.mean(np.log(np.exp(logits.astype(np.float64)).sum(axis=1)) ** 2)
    assert float(one(logits, top_k=2)["z_loss"]) == pytest.approx(expected, rel=1e-6)


def test_the_bias_moves_against_the_excess_load():
    np.testing.assert_array_equal(balance.update_bias(jnp.zeros(2), jnp.full(2, 5.0), 1e-3), [0, 0])
    stacked = balance.update_bias(jnp.zeros((2, 2)), jnp.asarray([[3.0, 1], [0, 4]]), 0.5)
    np.testing.assert_array_equal(stacked, [[-0.5, 0.5], [0.5, -0.5]])


def test_no_loss_where_none_is_asked_for():
    none = one(np.tile([4.0, 0], (4, 1)), cfg=BalanceConfig(batch_coeff=0.0))
    assert set(none) == {"z_loss", "load_E"}
    assert float(balance.weighted(none, BalanceConfig(batch_coeff=0.0))) == 0.0
