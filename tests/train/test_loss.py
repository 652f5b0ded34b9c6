"""The two means of the cross-entropy, and that balance losses know neither."""

from dataclasses import replace
from functools import cache

import jax
import numpy as np
import pytest

from moejax.core.mesh import ParallelConfig
from moejax.train.loss import MEANS
from moejax.train.step import TrainConfig
from tests.oracle import max_relative_error
from tests.train.folds import LENGTH, SEQUENCE, Case, batches, make_trainer

ALONE = Case("", ParallelConfig(zero=0), "all_gather", 1, (("num_layers", 2),), (), SEQUENCE)
FOLDED = replace(
    ALONE, parallel=ParallelConfig(dp=4, tp=2, ep=4, etp=2, zero=1), dispatch="ragged",
    microbatches=4,
)  # fmt: skip


@cache
def trainer(case: Case, mean: str):
    return make_trainer(case, loss_mean=mean)


def first_step(case: Case, mean: str, batch):
    cut = {k: a.reshape(case.microbatches, -1, LENGTH) for k, a in batch.items()}
    made = trainer(case, mean)
    return jax.tree.map(np.asarray, made.step(made.new_state(), cut)[1])


def uneven():
    """Two documents a row, of 9 and 7 tokens, some without a target, some with one."""
    batch = {k: a[0].copy() for k, a in batches(1, 1)[0].items()}
    batch["targets"][2, 1:9] = -1
    batch["targets"][7, 9:] = -1
    return batch


def errors(mine, right):
    return max(jax.tree.leaves(jax.tree.map(max_relative_error, mine, right)))


def test_a_mean_over_documents_gives_each_the_same_weight():
    batch, made = uneven(), trainer(ALONE, "document")
    state = made.new_state()
    model = made.layout.model(state.params, state.buffers)
    logits = model(batch["tokens"], batch["segment_ids"], batch["positions"])
    log_p = np.asarray(jax.nn.log_softmax(logits), np.float64)
    means = []
    for row, targets in enumerate(batch["targets"]):
        for document in (slice(0, 9), slice(9, 16)):
            scored = [i for i in range(16)[document] if targets[i] >= 0]
            if scored:
                means.append(-np.mean([log_p[row, i, targets[i]] for i in scored]))
    assert len(means) == 29  # 2 of each of 16 rows, less an empty row's and one without a target
    found = first_step(ALONE, "document", batch)["loss"]
    assert max_relative_error(found, np.mean(means)) < 1e-6
    assert max_relative_error(found, first_step(ALONE, "token", batch)["loss"]) > 1e-4


def test_neither_fold_nor_microbatches_change_the_mean_over_documents():
    mine, right = (first_step(case, "document", uneven()) for case in (FOLDED, ALONE))
    assert max_relative_error(mine["loss"], right["loss"]) < 1e-6
    assert errors(mine["grads"], right["grads"]) < 1e-5


@pytest.mark.parametrize("case", [ALONE, FOLDED], ids=["alone", "fold"])
def test_the_gradient_of_the_balance_losses_is_the_same_under_both(case):
    """Case D09: no target, so that the balance losses alone move the routers."""
    batch = uneven() | {"targets": np.full_like(uneven()["targets"], -1)}
    right = first_step(ALONE, "token", batch)["grads"]
    router = right["stack_0"]["block_0"]["moe"]["w_router"]
    assert np.abs(router).max() > 1e-6
    for mean in MEANS:
        assert errors(first_step(case, mean, batch)["grads"], right) < 1e-5


def test_another_mean_is_refused():
    with pytest.raises(ValueError, match="train.loss_mean='row': choose from token, document"):
        TrainConfig(loss_mean="row")
