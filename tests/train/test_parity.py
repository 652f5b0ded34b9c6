"""One device against folds: same loss, same gradients, same norm (the covering subset).

The whole list, in float32 and float64, is `make parity` (tests/parity.py); some of it in float64,
test_parity_64.py, a file of its own so that another core runs it.
"""

from functools import cache

import jax
import numpy as np
import pytest

from moejax.core.mesh import ParallelConfig
from tests.oracle import max_relative_error
from tests.train.folds import (
    COVERING,
    FOLDS,
    GRADIENTS,
    Case,
    Record,
    batches,
    errors,
    make_trainer,
    misses,
    oracle_of,
    part_of,
    tiny_model,
    tiny_run,
)


@cache
def oracle(case, dtype: str) -> Record:
    return tiny_run(case, dtype)


@pytest.mark.parametrize("name", COVERING)
def test_a_fold_trains_as_one_device_does(name):
    case = FOLDS[name]
    actual, expected = tiny_run(case), oracle(oracle_of(case), "float32")
    found = errors(actual, expected)
    shared = {"shared"} if tiny_model(case).moe.shared_ffn_dim else set()
    assert {"experts", "router", "dense"} | shared <= set(found)
    assert not misses(found, "float32"), found
    for mine, right in zip(actual.moe, expected.moe, strict=True):
        np.testing.assert_array_equal(mine["load"], right["load"])
        # The sign of an excess load is exact, a quantile of logits is to rounding.
        np.testing.assert_allclose(mine["bias_max"], right["bias_max"], rtol=0, atol=2e-6)
        for loss in {"batch_loss", "sequence_loss", "global_loss", "z_loss"} & set(right):
            np.testing.assert_allclose(mine[loss], right[loss], rtol=1e-5, err_msg=loss)
        assert not mine["dropped"].any()


@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients_are_not_ep_times_too_big(name):
    case = FOLDS[name]
    actual = tiny_run(case, steps=1).grads
    expected = oracle(oracle_of(case), "float32").grads
    sums: dict[str, list[float]] = {}
    for path, right in jax.tree_util.tree_leaves_with_path(expected):
        part = sums.setdefault(part_of(jax.tree_util.keystr(path)), [0.0, 0.0])
        mine = actual
        for key in path:
            mine = mine[key.key]
        part[0] += float(np.vdot(mine, right))
        part[1] += float(np.vdot(right, right))
    assert set(sums) == {"experts", "router", "shared", "dense"}
    for part, (product, square) in sums.items():
        assert product / square == pytest.approx(1.0, abs=1e-5), part


def test_zero3_reduces_bfloat16_gradients_in_float32():
    """ZeRO-0 sums over dp in the parameters' float32; sums in bfloat16 would differ by 1e-3."""
    grads = []
    for zero in (0, 3):
        case = Case("bfloat16", ParallelConfig(dp=16, zero=zero), "all_gather")
        trainer = make_trainer(case, compute="bfloat16")
        grads.append(trainer.step(trainer.new_state(), batches(1, 1)[0])[1]["grads"])
    for right, mine in zip(*map(jax.tree.leaves, grads), strict=True):
        assert max_relative_error(mine, right) < 1e-5


def test_a_wrong_gradient_is_found():
    """The oracle can fail: a gradient twice too big, or a NaN, is a miss."""
    case = oracle_of(FOLDS[COVERING[0]])
    right = oracle(case, "float32")
    twice = Record(right.losses, right.norms, jax.tree.map(lambda g: 2 * g, right.grads))
    assert {"experts", "router", "shared", "dense"} <= set(misses(errors(twice, right), "float32"))
    lost = Record([float("nan")] * 3, right.norms, right.grads)
    assert {"loss_1", "loss_3"} <= set(misses(errors(lost, right), "float32"))
