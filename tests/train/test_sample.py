"""Sampling on a fold: a prompt, then token by token, gives what the whole text at once gives."""

import numpy as np

from moejax.core.mesh import ParallelConfig
from moejax.train.sample import make_next_logits, sample
from tests.oracle import max_relative_error
from tests.train.folds import VOCAB, Case, make_trainer

TEXT = [5, 9, 1, 33, 60, 2, 7]


def test_logits_by_pieces_are_those_of_the_whole():
    case = Case("sample", ParallelConfig(dp=2, tp=2, ep=4), "all_to_all")
    made = make_trainer(case, with_grads=False)
    next_logits, state = make_next_logits(made.layout, slots=16), made.new_state()
    weights = (state.params, state.buffers)
    whole, _ = next_logits(weights, np.asarray([TEXT], np.int32), np.int32(0), None)
    logits, cache = next_logits(weights, np.asarray([TEXT[:5]], np.int32), np.int32(0), None)
    for place in (5, 6):
        token = np.asarray([TEXT[place : place + 1]], np.int32)
        logits, cache = next_logits(weights, token, np.int32(place), cache)
    assert logits.shape == (VOCAB,)
    assert max_relative_error(logits, whole) < 1e-5
    ids = sample(next_logits, weights, TEXT[:5], num_tokens=20, vocab_size=VOCAB)
    assert ids[:5] == TEXT[:5] and len(ids) == 25, "also beyond what is remembered"
    again = sample(next_logits, weights, TEXT[:5], num_tokens=3, vocab_size=VOCAB)
    assert again == ids[:8]
