"""A vocabulary that divides over nothing, padded: the same model, and padding that nothing sees."""

from dataclasses import replace
from functools import cache

import jax
import numpy as np
import pytest
from flax import nnx

from moejax.core.mesh import ParallelConfig
from moejax.model.transformer import ModelConfig, Transformer
from moejax.train.sample import make_next_logits
from tests.oracle import max_relative_error
from tests.train.folds import Case, batches, make_trainer

TOKENS = 17  # of 32 rows: tp=4 has 8, 8, 1 and 0 of them
SMALL = (("vocab_size", TOKENS), ("num_layers", 1), ("pattern", "D"))
ALONE = Case("", ParallelConfig(zero=0), "reference", 1, SMALL)
PADDED = replace(ALONE, model=(*SMALL, ("vocab_multiple", 32)))
FOLDED = replace(PADDED, parallel=ParallelConfig(dp=2, tp=4, zero=3))


def tied(case: Case) -> Case:
    return replace(case, model=(*case.model, ("tied", True)))


def batch():
    made = batches(1, 1)[0]
    few = {name: made[name] % TOKENS for name in ("tokens", "targets")}
    return made | few | {"targets": np.where(made["targets"] < 0, -1, few["targets"])}


@cache
def first_step(case: Case):
    made = make_trainer(case)
    weights = jax.tree.map(np.asarray, made.new_state().params)
    return weights, jax.tree.map(np.asarray, made.step(made.new_state(), batch())[1])


def parts(tree: dict) -> list[tuple[np.ndarray, np.ndarray]]:
    """Returns (rows of tokens, rows of padding) of the embedding, and of the head."""
    vocab = [tree["embedding"], *([tree["head"].T] if "head" in tree else [])]
    return [(rows_VD[:TOKENS], rows_VD[TOKENS:]) for rows_VD in vocab]


@pytest.mark.parametrize("case", [PADDED, FOLDED, tied(FOLDED)], ids=["alone", "tp4", "tied"])
def test_padding_changes_nothing(case):
    plain = tied(ALONE) if case == tied(FOLDED) else ALONE
    (right_weights, right), (weights, mine) = first_step(plain), first_step(case)
    assert max_relative_error(mine["loss"], right["loss"]) < 1e-6
    assert max_relative_error(mine["grad_norm"], right["grad_norm"]) < 1e-6
    for tree, expected in ((weights, right_weights), (mine["grads"], right["grads"])):
        for (rows, padding), (whole, _) in zip(parts(tree), parts(expected), strict=True):
            assert padding.shape[0] == 32 - TOKENS and not padding.any()
            assert max_relative_error(rows, whole) < 1e-6
    dense, expected = (g["stack_0"] for g in (mine["grads"], right["grads"]))
    errors = jax.tree.leaves(jax.tree.map(max_relative_error, dense, expected))
    assert max(errors) < 2e-6


def test_no_logit_of_padding_is_shown():
    made = make_trainer(FOLDED, with_grads=False)
    state, prompt = made.new_state(), np.asarray([[5, 9, 1]], np.int32)
    weights = (state.params, state.buffers)
    logits, _ = make_next_logits(made.layout, 8)(weights, prompt, np.int32(0), None)
    alone = Transformer(made.model, rngs=nnx.Rngs(0))
    assert logits.shape == (TOKENS,) and alone(prompt).shape == (1, 3, TOKENS)


def test_a_vocabulary_that_does_not_divide_is_refused():
    case = replace(ALONE, parallel=ParallelConfig(dp=2, tp=4))
    with pytest.raises(ValueError, match=r"with 17 rows, .* tp = 4: set model.vocab_multiple=4"):
        make_trainer(case)
    with pytest.raises(ValueError, match="vocab_multiple=0 must be at least 1"):
        ModelConfig(vocab_multiple=0)
