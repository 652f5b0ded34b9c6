"""The trigram model against one written with dictionaries, and against what it should learn."""

import math
from collections import Counter, defaultdict

import numpy as np
import pytest

from moejax.data import ngram

VOCAB = 7


def batch(rows):
    """Rows of (tokens, targets, segment_ids)."""
    names = ("tokens", "targets", "segment_ids")
    return {n: np.array([row[i] for row in rows], np.int32) for i, n in enumerate(names)}


def random_batches(seed, num_batches=3, rows=4, length=30, vocab=VOCAB):
    """Texts in which a token is often its predecessor plus the one before, in random segments."""
    rng = np.random.default_rng(seed)
    out = []
    for _ in range(num_batches):
        tokens = rng.integers(0, vocab, (rows, length + 1))
        for i in range(2, length + 1):
            follows = rng.random(rows) < 0.7
            tokens[:, i] = np.where(
                follows, (tokens[:, i - 1] + tokens[:, i - 2]) % vocab, tokens[:, i]
            )
        segments = np.cumsum(rng.random((rows, length)) < 0.1, axis=1) + 1
        targets = tokens[:, 1:].copy()
        targets[rng.random(targets.shape) < 0.1] = -1
        out.append(
            {
                "tokens": tokens[:, :-1].astype(np.int32),
                "targets": targets.astype(np.int32),
                "segment_ids": segments.astype(np.int32),
            }
        )
    return out


def slow_events(batches, vocab):
    events = []
    for one in batches:
        for tokens, targets, segments in zip(*one.values(), strict=True):
            for i, target in enumerate(targets):
                if target >= 0:
                    inside = i > 0 and segments[i - 1] == segments[i]
                    u = int(tokens[i - 1]) if inside else vocab
                    events.append((u, int(tokens[i]), int(target)))
    return events


class SlowTrigram:
    """The formulas of the module, one token at a time."""

    def __init__(self, batches, vocab):
        self.vocab = vocab
        events = slow_events(batches, vocab)
        split, self.fitted = int(len(events) * 0.9), []
        self.count(events[:split])
        self.weights = [defaultdict(lambda: 0.5) for _ in range(3)]
        for _ in range(50):
            self.em_step(events[split:])
        self.fitted = [sorted(b for b in weights if b != "unseen") for weights in self.weights]
        self.count(events)

    def count(self, events):
        self.grams = [Counter((e[2 - n : 2], e[2]) for e in events) for n in range(3)]
        self.contexts = [Counter(e[2 - n : 2] for e in events) for n in range(3)]
        self.kinds = [Counter(context for context, _ in grams) for grams in self.grams]

    def bucket(self, n, context):
        count, kinds = self.contexts[n][context], self.kinds[n][context]
        if count == 0:
            return "unseen"
        return min(int(math.log2(count)), 13), min(int(2 * math.log2(count / kinds)), 7)

    def weight(self, n, bucket):
        if bucket == "unseen":
            return 0.0
        if not self.fitted:
            return self.weights[n][bucket]
        apart = {b: abs(b[0] - bucket[0]) + abs(b[1] - bucket[1]) for b in self.fitted[n]}
        return self.weights[n][min(apart, key=apart.get)] if apart else 0.5

    def levels(self, event):
        """[(bucket, own ratio, probability with all levels up to this one)] of levels 0, 1, 2."""
        p, out = 1 / self.vocab, []
        for n in range(3):
            context = event[2 - n : 2]
            ratio = self.grams[n][context, event[2]] / max(self.contexts[n][context], 1)
            bucket = self.bucket(n, context)
            weight = self.weight(n, bucket)
            p = weight * ratio + (1 - weight) * p
            out.append((bucket, ratio, p))
        return out

    def em_step(self, events):
        here, everything = ([defaultdict(float) for _ in range(3)] for _ in range(2))
        for event in events:
            reach = 1.0
            for n, (bucket, ratio, p) in reversed(list(enumerate(self.levels(event)))):
                own = self.weight(n, bucket) * ratio / p
                here[n][bucket] += reach * own
                everything[n][bucket] += reach
                reach *= 1 - own
        for n in range(3):
            for bucket, total in everything[n].items():
                self.weights[n][bucket] = (here[n][bucket] + 1) / (total + 2)

    def loss(self, batches):
        events = slow_events(batches, self.vocab)
        return -sum(math.log(self.levels(event)[-1][2]) for event in events) / len(events)


@pytest.mark.parametrize("seed", [0, 1])
def test_equals_the_dictionary_implementation(seed):
    train, val = random_batches(seed), random_batches(seed + 10, 1)
    fast, slow = ngram.fit(train, VOCAB), SlowTrigram(train, VOCAB)
    assert ngram.loss(fast, val) == pytest.approx(slow.loss(val), rel=1e-12)
    assert ngram.loss(fast, train) == pytest.approx(slow.loss(train), rel=1e-12)


def test_probabilities_sum_to_one_for_seen_and_unseen_contexts():
    model = ngram.fit(random_batches(0, 1), VOCAB)
    for u in range(VOCAB + 1):
        for v in range(VOCAB):
            events = np.array([(u, v, w) for w in range(VOCAB)]).T
            assert model.probabilities(events).sum() == pytest.approx(1, abs=1e-12)


def test_learns_what_two_tokens_tell():
    """0.7 of the targets are the sum of the two before: 1.03 nats; one alone tells nothing."""
    p = 0.7 + 0.3 / VOCAB
    entropy = -p * math.log(p) - (1 - p) * math.log(0.3 / VOCAB)
    model = ngram.fit(random_batches(0, 40, 16, 100), VOCAB)
    val = random_batches(1, 10, 16, 100)
    for one in val:  # whole rows, and only targets with two tokens before them
        one["segment_ids"][:] = 1
        one["targets"][:, 0] = -1
    assert entropy - 0.02 < ngram.loss(model, val) < entropy + 0.05


def test_sees_nothing_of_another_segment():
    train = random_batches(0)
    row = ([1, 2, 3, 4], [-1, -1, -1, 5], [1, 1, 2, 2])
    other = ([6, 0, 3, 4], [-1, -1, -1, 5], [1, 1, 2, 2])
    start = ([6, 0, 3, 4], [-1, -1, 5, -1], [1, 1, 2, 2])
    start_other = ([1, 2, 3, 4], [-1, -1, 5, -1], [1, 1, 2, 2])
    model = ngram.fit(train, VOCAB)
    assert ngram.loss(model, [batch([row])]) == ngram.loss(model, [batch([other])])
    assert ngram.loss(model, [batch([start])]) == ngram.loss(model, [batch([start_other])])


def test_errors():
    empty = batch([([1, 2], [-1, -1], [1, 1])])
    with pytest.raises(ValueError, match="at least 2 targets"):
        ngram.fit([empty], VOCAB)
    with pytest.raises(ValueError, match="token 6 does not fit a trigram model of vocabulary 6"):
        ngram.fit(random_batches(0), 6)
    with pytest.raises(ValueError, match="no targets to measure"):
        ngram.loss(ngram.fit(random_batches(0), VOCAB), [empty])
