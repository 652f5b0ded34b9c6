"""Training with modules that predict further tokens: folds, remat, microbatches, routers."""

from dataclasses import replace
from functools import cache

import jax
import numpy as np
import pytest

from moejax.core.mesh import ParallelConfig
from moejax.train.step import TrainConfig
from tests.oracle import max_relative_error
from tests.train.folds import Case, batches, make_trainer

DEPTH, LAYERS = 2, 1
MODEL = (("mtp_depth", DEPTH), ("num_layers", LAYERS))
ALONE = Case(
    "", ParallelConfig(zero=0), "all_gather", 1, MODEL, router=(("record", "on"),),
    balance=(("batch_coeff", 0.0), ("sequence_coeff", 0.05), ("bias_rate", 1e-3)),
)  # fmt: skip
AGAIN = replace(ALONE, model=(*MODEL, ("remat", "full")))
FOLDED = replace(
    AGAIN, parallel=ParallelConfig(dp=2, tp=4, ep=4, etp=2, zero=3), dispatch="ragged",
    microbatches=2,
)  # fmt: skip


@cache
def trainer(case: Case):
    return make_trainer(case)


@cache
def first_step(case: Case):
    return one_step(case, batches(case.microbatches, 1)[0])


def one_step(case: Case, batch: dict):
    state, metrics = trainer(case).step(trainer(case).new_state(), batch)
    return jax.tree.map(np.asarray, (state.buffers, metrics))


@pytest.mark.parametrize("case", [AGAIN, FOLDED], ids=["remat", "fold"])
def test_it_trains_as_one_device_does(case):
    (right_buffers, right), (buffers, mine) = first_step(ALONE), first_step(case)
    for name in ("loss", "mtp_loss", "grad_norm"):
        assert max_relative_error(mine[name], right[name]) < 1e-6, name
    assert mine["mtp_loss"] > 1 and mine["mtp_loss"] != mine["loss"]
    errors = jax.tree.map(max_relative_error, mine["grads"], right["grads"])
    assert max(jax.tree.leaves(errors)) < 1e-5, errors
    for depth in range(DEPTH):
        moe, expected = (b[f"mtp_{depth}"]["block"]["moe"] for b in (buffers, right_buffers))
        np.testing.assert_array_equal(moe["bias"], expected["bias"])
        assert np.abs(moe["bias"]).max() > 0
    np.testing.assert_array_equal(mine["moe"]["agreed"], np.ones(LAYERS + DEPTH))


def test_each_depth_has_its_own_tokens_and_counts_as_a_layer():
    """Of documents of 9, 7 and 3 tokens, depth d sees d + 1 fewer each."""
    batch, (_, metrics) = batches(1, 1)[0], first_step(ALONE)
    moe, ids = metrics["moe"], batch["segment_ids"][0]
    lengths = [n for row in ids for n in np.unique(row[row > 0], return_counts=True)[1]]
    slots = [2 * sum(n - depth for n in lengths) for depth in range(LAYERS + DEPTH)]
    chosen = metrics["routing"].reshape(*ids.shape, LAYERS + DEPTH, 2)
    assert [(chosen[:, :, layer] < 16).sum() for layer in range(LAYERS + DEPTH)] == slots
    assert moe["load"].shape == (LAYERS + DEPTH, 16) and not moe["dropped"].any()
    np.testing.assert_allclose(moe["load"].sum(axis=1), 1, rtol=1e-6)
    assert (moe["sequence_loss"] > 0.9).all(), "a mean over its own documents"


@pytest.mark.parametrize("case", [ALONE, FOLDED], ids=["alone", "fold"])
def test_its_routers_follow_what_they_are_given(case):
    batch = batches(case.microbatches, 1)[0]
    chosen = first_step(ALONE)[1]["routing"].reshape(*batch["tokens"].shape, LAYERS + DEPTH, 2)
    chosen = chosen.astype(np.int32)
    moved = chosen.copy()
    moved[..., -1, :] = np.where(moved[..., -1, :] < 16, (moved[..., -1, :] + 1) % 16, 16)
    (_, same), (_, other) = (one_step(case, batch | {"routing": r}) for r in (chosen, moved))
    right = first_step(ALONE)[1]
    np.testing.assert_array_equal(same["moe"]["load"], right["moe"]["load"])
    assert max_relative_error(same["mtp_loss"], right["mtp_loss"]) < 1e-6
    np.testing.assert_array_equal(other["moe"]["load"][:-1], right["moe"]["load"][:-1])
    np.testing.assert_array_equal(
        other["moe"]["load"][-1], np.roll(right["moe"]["load"][-1], 1)
    )


def test_a_negative_weight_is_refused():
    with pytest.raises(ValueError, match="train.mtp_coeff=-1 must be finite"):
        TrainConfig(mtp_coeff=-1)
