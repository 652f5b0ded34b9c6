"""Generating: what comes is what calls for the whole text give, piece by piece."""

from dataclasses import replace

import numpy as np
import pytest

from moejax import generate, trained
from moejax.core.mesh import ParallelConfig
from moejax.train.sample import draw, make_next_logits
from tests.models import log_probs, opened

PROMPT = "t5 t9 t2"


def greedy(name, ids, count):
    """Returns the likeliest tokens, each by a call for the whole text."""
    ids = list(ids)
    for _ in range(count):
        ids.append(int(log_probs(name, ids)[-1].argmax()))
    return ids[-count:]


def options(*arguments):
    return trained.parse(generate.options(), ["--from=x", *arguments])


def said(model, *arguments, prompt=PROMPT):
    """Returns (the text of each sample, how many tokens each took)."""
    parsed = options(*arguments)
    found = []
    next_logits = make_next_logits(model.layout, 64)
    for pieces, clock in generate.texts(model, next_logits, prompt, parsed):
        found.append(("".join(pieces), len(clock.times) - 1))
    return found


@pytest.mark.parametrize("name", ["qwen3_moe_untied", "deepseek_v3_yarn"])
def test_at_temperature_0_it_is_the_likeliest_token_each_time(name):
    model = opened(name)
    right = greedy(name, [5, 9, 2], 8)
    model = replace(model, ends=frozenset())
    text = " ".join(f"t{i}" for i in right if i)
    assert [t.strip() for t, _ in said(model, "--temperature=0", "--max-tokens=8")] == [text]
    end = right[3]
    first = right.index(end)
    stopped = said(replace(model, ends=frozenset([end])), "--temperature=0", "--max-tokens=8")
    assert stopped[0][0].strip() == " ".join(f"t{i}" for i in right[:first] if i)


def test_an_empty_prompt_begins_as_a_document_does():
    model = replace(opened("qwen3_moe_untied"), ends=frozenset())
    right = greedy("qwen3_moe_untied", [0], 3)
    text, _ = said(model, "--temperature=0", "--max-tokens=3", prompt="")[0]
    assert text.strip() == " ".join(f"t{i}" for i in right if i)


def test_a_fold_says_the_same():
    one = replace(opened("qwen3_moe_untied"), ends=frozenset())
    folded = opened("qwen3_moe_untied", ParallelConfig(dp=4, ep=4, zero=0))
    folded = replace(folded, ends=frozenset())
    arguments = ("--temperature=0", "--max-tokens=6")
    assert said(one, *arguments) == said(folded, *arguments)


def test_samples_differ_and_a_seed_repeats_them():
    model = replace(opened("qwen3_moe_untied"), ends=frozenset())
    arguments = ("--samples=3", "--max-tokens=12", "--temperature=1.5")
    first = said(model, *arguments, "--seed=3")
    assert [count for _, count in first] == [12] * 3 and len({text for text, _ in first}) == 3
    assert said(model, *arguments, "--seed=3") == first != said(model, *arguments, "--seed=4")


def test_a_draw_has_the_chances_of_the_softmax():
    logits, generator = np.log([0.5, 0.2, 0.2, 0.1]), np.random.default_rng(0)
    for temperature, top_p, right in (
        (1.0, 1.0, [0.5, 0.2, 0.2, 0.1]),
        (1.0, 0.6, [5 / 7, 2 / 7, 0, 0]),
        (1.0, 0.4, [1, 0, 0, 0]),
        (0.5, 1.0, np.square([5, 2, 2, 1]) / 34),
        (0, 1.0, [1, 0, 0, 0]),
    ):
        drawn = [draw(logits, generator, temperature, top_p) for _ in range(4000)]
        shares = np.bincount(drawn, minlength=4) / 4000
        np.testing.assert_allclose(shares, right, atol=0.03)


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("--max-tokens=0", "--max-tokens=0 is below 1"),
        ("--samples=0", "--samples=0 is below 1"),
        ("--temperature=-1", "--temperature=-1.0 is not 0 or more"),
        ("--top-p=0", r"--top-p=0.0 is not in \(0, 1\]"),
    ],
)
def test_a_value_that_cannot_be_is_refused(argument, message):
    with pytest.raises(ValueError, match=message):
        generate.check(options(argument))
