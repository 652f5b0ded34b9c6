"""Routers whose layer is computed again: what they chose the first time counts."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from moejax.core.mesh import ParallelConfig
from moejax.model import choice
from tests.oracle import max_relative_error
from tests.train.folds import Case, batches, make_trainer, tiny_run

ALONE = Case("", ParallelConfig(zero=0), "all_gather", 1, (("num_layers", 2),))
FOLDED = replace(ALONE, parallel=ParallelConfig(dp=2, tp=2, ep=4, zero=3), dispatch="ragged")


def again(case: Case, microbatches: int = 1) -> Case:
    return replace(case, model=(*case.model, ("remat", "full")), microbatches=microbatches)


def first_step(case: Case):
    made = make_trainer(case)
    return made.step(made.new_state(), batches(case.microbatches, 1)[0])[1]


@pytest.mark.parametrize("case", [again(ALONE), again(FOLDED, 2)], ids=["alone", "fold"])
def test_the_same_program_chooses_the_same(case):
    np.testing.assert_array_equal(first_step(case)["moe"]["agreed"], [1, 1])


def test_another_choice_the_second_time_is_counted_and_changes_nothing(monkeypatch):
    """As if rounding differed for every token: the second pass would choose other experts."""
    right = tiny_run(ALONE, steps=1)
    assert "agreed" not in right.moe[0]
    real = choice.recall

    def otherwise(live, stream, cfg, top_k, fold):
        if stream.recalled_tK is None:
            return real(live, stream, cfg, top_k, fold)
        moved = (live.experts_tK + 1) % live.logits_tE.shape[1]
        return real(live._replace(experts_tK=moved), stream, cfg, top_k, fold)

    monkeypatch.setattr(choice, "recall", otherwise)
    found = tiny_run(again(ALONE), steps=1)
    assert (found.moe[0]["agreed"] < 0.5).all()
    errors = jax.tree.map(max_relative_error, found.grads, right.grads)
    assert max(jax.tree.leaves(errors)) < 2e-6
