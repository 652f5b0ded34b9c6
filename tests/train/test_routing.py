"""Routing options in the train step: one device against a fold with four microbatches and remat."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from moejax.core.mesh import ParallelConfig
from tests.train.folds import BIAS, SEQUENCE, Case, errors, misses, tiny_run

LAYERS, K = 3, 2
FOLD = ParallelConfig(dp=2, cp=2, tp=2, ep=4, etp=2, zero=3)
NONE = (("batch_coeff", 0.0),)
# name: (router, balance)
OPTIONS = {
    "groups, linear bias, jitter, capacity, hash": (
        (
            ("score", "sqrt_softplus"), ("num_groups", 4), ("topk_groups", 2),
            ("linear_bias", True), ("jitter", 0.1), ("capacity_factor", 1.0), ("hash_layers", 1),
        ),
        (*SEQUENCE, *BIAS),
    ),
    "skewed, drop by position, filled up": (
        (("force", "skewed"), ("capacity_factor", 1.5), ("drop_policy", "position"),
         ("pad_to_capacity", True)), SEQUENCE,
    ),
    "sinkhorn": (
        (("selection", "sinkhorn"), ("renormalize", False), ("capacity_factor", 1.25)), NONE,
    ),
    "expert choice": ((("selection", "expert_choice"), ("renormalize", False)), NONE),
}  # fmt: skip


def alone(options, **model) -> Case:
    changed = tuple(model.items())
    return Case("alone", ParallelConfig(zero=0), "reference", 1, changed, *options)


def folded(options, dispatch="ragged") -> Case:
    case = alone(options, remat="full")
    return replace(case, name="fold", parallel=FOLD, dispatch=dispatch, microbatches=4)


@pytest.mark.parametrize("name", OPTIONS)
def test_neither_fold_nor_microbatches_nor_remat_matter(name):
    with jax.enable_x64(True):
        right = tiny_run(alone(OPTIONS[name]), "float64", steps=2)
        mine = tiny_run(folded(OPTIONS[name]), "float64", steps=2)
    found = errors(mine, right)
    assert {"experts", "router", "dense"} <= set(found)
    assert not misses(found, "float64"), found
    for a, b in zip(mine.moe, right.moe, strict=True):
        np.testing.assert_array_equal(a["load"], b["load"])
        np.testing.assert_array_equal(a["dropped"], b["dropped"])
        assert b["dropped"].any() == (name != "expert choice")
    router = right.grads["stack_0"]["block_0"]["moe"]["w_router"]
    assert np.abs(router).reshape(LAYERS, -1).max(axis=1).min() > 0
