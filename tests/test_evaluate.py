"""Perplexity and choices against numpy, from logits of calls for whole texts."""

import json
from math import exp, log

import numpy as np
import pytest

from moejax import evaluate
from moejax.core.mesh import ParallelConfig
from moejax.train.score import windows
from tests.convert.golden import golden
from tests.models import log_probs, opened

FOLD = ParallelConfig(dp=4, ep=4, zero=0)
NAME = "qwen3_moe_untied"


def words(ids) -> str:
    return " ".join(f"t{i}" for i in ids)


def drawn(count: int, seed: int = 0) -> list[int]:
    vocab_size = golden(NAME).cfg.vocab_size
    return np.random.default_rng(seed).integers(2, vocab_size, count).tolist()


@pytest.mark.parametrize(("context", "stride"), [(8, 8), (8, 3), (8, 1), (40, 20), (1, 1)])
def test_every_token_is_scored_once_in_the_first_window_that_holds_it(context, stride):
    ids, seen = list(range(30)), {}
    for number, row in enumerate(windows(ids, 1, context, stride)):
        assert row.ids[0] == number * stride and len(row.ids) <= context + 1 and row.first >= 1
        for at in range(row.first, len(row.ids)):
            assert row.ids[at] not in seen
            seen[row.ids[at]] = at
    assert sorted(seen) == ids[1:]
    assert all(at == token or at > context - stride for token, at in seen.items())


@pytest.mark.parametrize("parallel", [ParallelConfig(), FOLD], ids=["one", "fold"])
def test_the_perplexity_of_a_text(parallel):
    ids = drawn(45)
    context, stride, one = 16, 5, opened(NAME)
    whole, nats, done = [one.tokenizer.eos_id, *ids], 0.0, 1
    for start in range(0, 45, stride):
        window = whole[start : start + context + 1]
        if done >= len(whole):
            break
        table = log_probs(NAME, window[:-1])
        new = range(done - start, len(window))
        nats -= sum(table[at - 1, window[at]] for at in new)
        done = start + len(window)
    found = evaluate.fit(opened(NAME, parallel), words(ids), context, stride)
    assert found.nats == pytest.approx(nats, rel=1e-5)
    assert (found.num_tokens, found.num_bytes) == (45, len(words(ids)))
    figures = [float(line.split()[-1]) for line in found.lines()]
    right = [nats / 45, nats / log(2) / len(words(ids)), exp(nats / 45)]
    assert figures == pytest.approx(right, rel=1e-4)


@pytest.mark.parametrize("parallel", [ParallelConfig(), FOLD], ids=["one", "fold"])
def test_the_log_likelihood_of_choices(parallel):
    one, questions, right = opened(NAME), [], []
    for q in range(5):
        prompt, choices = drawn(3 + 7 * q, q), [drawn(1 + (q + c) % 4, 9 * q + c) for c in range(3)]
        questions.append(evaluate.Question(words(prompt), tuple(map(words, choices)), 0))
        scores = []
        for choice in choices:
            ids = [one.tokenizer.eos_id, *prompt, *choice]
            table = log_probs(NAME, ids[:-1])
            first = len(ids) - len(choice)
            scores.append([table[at - 1, ids[at]] for at in range(first, len(ids))])
        right.append(scores)
    sums, means = evaluate.answers(opened(NAME, parallel), questions, context=64)
    for found, how in ((sums, np.sum), (means, np.mean)):
        expected = [[how(scores) for scores in question] for question in right]
        np.testing.assert_allclose(np.asarray(found), expected, rtol=1e-5)


def test_where_a_choice_begins_and_what_is_cut():
    model = opened(NAME)
    row = evaluate.row_of(model, "t5 t6", "t7 t8", 64)
    assert (list(row.ids), row.first) == ([0, 5, 6, 7, 8], 3)
    spaced = evaluate.row_of(model, "t5 t6 ", " t7 t8", 64)
    assert spaced == row
    cut = evaluate.row_of(model, words(range(2, 40)), "t41 t42", 4)
    assert (list(cut.ids), cut.first) == ([37, 38, 39, 41, 42], 3)
    alone = evaluate.row_of(model, "", "t7", 64)
    assert (list(alone.ids), alone.first) == ([0, 7], 1)
    within = evaluate.row_of(model, "t5", "\n", 64)
    assert within.first == 1, "a choice without tokens of its own is scored by the last there is"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "q.jsonl:2 is not JSON"),
        ("[]", "q.jsonl:2 is no JSON object"),
        ('{"choices": ["a", "b"], "answer": 0}', 'no text "question" or "prompt"'),
        ('{"prompt": "x", "choices": ["a"], "answer": 0}', 'q.jsonl:2 has no "choices"'),
        ('{"prompt": "x", "choices": ["a", "b"], "answer": 2}', '"answer" is 2, not 0 to 1'),
        ('{"prompt": "x", "choices": ["a", "b"], "answer": true}', '"answer" is True, not 0 to 1'),
    ],
)
def test_a_wrong_question_is_named(line, message, tmp_path):
    good = json.dumps({"question": "x", "choices": ["a", "b"], "answer": 1})
    path = tmp_path / "q.jsonl"
    path.write_text(f"{good}\n{line}\n")
    with pytest.raises(ValueError, match=message):
        evaluate.read_questions(str(path))
    path.write_text(f"{good}\n\n{good}\n")
    assert evaluate.read_questions(str(path)) == [evaluate.Question("x", ("a", "b"), 1)] * 2
