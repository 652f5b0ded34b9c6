"""An interpolated trigram count model: what a trained language model has to beat.

It is fitted on training batches and measured on evaluation batches, on exactly the targets that
the trained model is measured on, and like it sees no token before its piece of a document. With
u, v the two last tokens (u = "none" at the start of a piece) and w the next one:

    p1(w)      = a          count(w) / count()          + (1 - a)          / V
    p2(w|v)    = b[v]       count(v, w) / count(v)      + (1 - b[v])       p1(w)
    p3(w|u,v)  = c[u, v]    count(u, v, w) / count(u, v) + (1 - c[u, v])   p2(w|v)

The weights are shared by contexts that were seen about as often and followed by about as many
different tokens (Chen and Goodman 1998 bucket by the average count per different token). They are
fitted by expectation maximisation on the last tenth of the training targets with the counts of the
rest (Jelinek and Mercer 1980); then all are counted. On the standard library's source it is within
0.05 nats of interpolated modified Kneser-Ney.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float64, Int64

from moejax.data.pack import Batch

_HELD_OUT = 0.1
_EM_STEPS = 50
_SEEN_BUCKETS, _VARIETY_BUCKETS = 14, 8


@dataclass(frozen=True)
class _Level:
    """Counts of one context length: sorted keys, and what was counted for each."""

    grams: Int64[np.ndarray, " grams"]
    gram_counts: Int64[np.ndarray, " grams"]
    contexts: Int64[np.ndarray, " contexts"]
    context_counts: Int64[np.ndarray, " contexts"]
    buckets: Int64[np.ndarray, " contexts"]

    def look_up(
        self, contexts: Int64[np.ndarray, " T"], grams: Int64[np.ndarray, " T"]
    ) -> tuple[Float64[np.ndarray, " T"], Int64[np.ndarray, " T"]]:
        """(count(context, w) / count(context), bucket) of each; (0, 0) for an unseen context."""
        context_counts = _count_of(self.contexts, self.context_counts, contexts)
        gram_counts = _count_of(self.grams, self.gram_counts, grams)
        buckets = _count_of(self.contexts, self.buckets, contexts)
        return gram_counts / np.maximum(context_counts, 1), buckets


@dataclass(frozen=True)
class Trigram:
    """A fitted model. Made by `fit`, measured by `loss`."""

    vocab_size: int
    levels: tuple[_Level, ...]
    """For contexts of 0, 1 and 2 tokens."""
    weights: tuple[Float64[np.ndarray, " buckets"], ...]
    """Of each level's own count, by bucket; the rest goes to the level below."""

    def probabilities(self, events: Int64[np.ndarray, "3 T"]) -> Float64[np.ndarray, " T"]:
        """p3(w|u,v) of each (u, v, w); u = vocab_size means none."""
        p = np.full(events.shape[1], 1 / self.vocab_size)
        keys = _keys(events, self.vocab_size)
        for level, weights, (contexts, grams) in zip(self.levels, self.weights, keys, strict=True):
            ratio, buckets = level.look_up(contexts, grams)
            p = weights[buckets] * ratio + (1 - weights[buckets]) * p
        return p


def fit(batches: Iterable[Batch], vocab_size: int) -> Trigram:
    """The model of these batches' targets: give those a run has trained on, of one epoch at most
    (`TrainBatches.rows_per_epoch`; a second epoch would make the held-out tenth known text).

    Takes about 1 s a million tokens. Raises ValueError if there are no targets or if a token is not
    below `vocab_size`.
    """
    events = _events(batches, vocab_size)
    split = int(events.shape[1] * (1 - _HELD_OUT))
    if split == 0:
        raise ValueError("a trigram model needs at least 2 targets; give it some batches")
    weights = _fit_weights(_count(events[:, :split], vocab_size), events[:, split:], vocab_size)
    return Trigram(vocab_size, _count(events, vocab_size), weights)


def loss(model: Trigram, batches: Iterable[Batch]) -> float:
    """Mean negative log-probability of the batches' targets, in nats per token.

    Raises ValueError if there are none or if a token is not below the model's vocab_size.
    """
    events = _events(batches, model.vocab_size)
    if events.shape[1] == 0:
        raise ValueError("no targets to measure a trigram model on; give it some batches")
    return float(-np.log(model.probabilities(events)).mean())


def _events(batches: Iterable[Batch], vocab_size: int) -> Int64[np.ndarray, "3 T"]:
    """(token before, token, target) of every target, in order."""
    parts = [np.zeros((3, 0), np.int32)]
    for batch in batches:
        tokens, segments = batch["tokens"], batch["segment_ids"]
        before = np.full_like(tokens, vocab_size)
        same = segments[:, 1:] == segments[:, :-1]
        before[:, 1:] = np.where(same, tokens[:, :-1], vocab_size)
        seen = batch["targets"] >= 0
        parts.append(np.stack([before[seen], tokens[seen], batch["targets"][seen]]))
    events = np.concatenate(parts, axis=1).astype(np.int64)
    if events[1:].size and events[1:].max() >= vocab_size:
        raise ValueError(
            f"token {events[1:].max()} does not fit a trigram model of vocabulary {vocab_size}; "
            "give the tokenizer's vocab_size"
        )
    return events


def _keys(
    events: Int64[np.ndarray, "3 T"], vocab_size: int
) -> list[tuple[Int64[np.ndarray, " T"], Int64[np.ndarray, " T"]]]:
    """(key of the context, key of context and target) for contexts of 0, 1 and 2 tokens."""
    u, v, w = events
    contexts = [np.zeros_like(w), v, u * vocab_size + v]
    return [(context, context * vocab_size + w) for context in contexts]


def _count(events: Int64[np.ndarray, "3 T"], vocab_size: int) -> tuple[_Level, ...]:
    levels = []
    for contexts, grams in _keys(events, vocab_size):
        gram_keys, gram_counts = np.unique(grams, return_counts=True)
        context_keys, context_counts = np.unique(contexts, return_counts=True)
        kinds = np.unique(gram_keys // vocab_size, return_counts=True)[1]
        buckets = _buckets(context_counts, kinds)
        levels.append(_Level(gram_keys, gram_counts, context_keys, context_counts, buckets))
    return tuple(levels)


def _buckets(
    counts: Int64[np.ndarray, " contexts"], kinds: Int64[np.ndarray, " contexts"]
) -> Int64[np.ndarray, " contexts"]:
    """1 .. buckets-1 by how often a context was seen and how often each follower; 0 is unseen."""
    seen = np.minimum(np.log2(counts).astype(np.int64), _SEEN_BUCKETS - 1)
    variety = np.minimum((2 * np.log2(counts / kinds)).astype(np.int64), _VARIETY_BUCKETS - 1)
    return 1 + seen * _VARIETY_BUCKETS + variety


def _fit_weights(
    levels: tuple[_Level, ...], events: Int64[np.ndarray, "3 T"], vocab_size: int
) -> tuple[Float64[np.ndarray, " buckets"], ...]:
    """Expectation maximisation of the weights of all levels together, on `events`."""
    num_buckets = 1 + _SEEN_BUCKETS * _VARIETY_BUCKETS
    looked_up = [
        level.look_up(*keys) for level, keys in zip(levels, _keys(events, vocab_size), strict=True)
    ]
    weights = [np.full(num_buckets, 0.5) for _ in levels]
    for _ in range(_EM_STEPS):
        below = [np.full(events.shape[1], 1 / vocab_size)]
        for (ratio, buckets), weight in zip(looked_up, weights, strict=True):
            below.append(weight[buckets] * ratio + (1 - weight[buckets]) * below[-1])
        reach = np.ones(events.shape[1])  # how likely the token came from this level or below
        for n in (2, 1, 0):
            ratio, buckets = looked_up[n]
            own = weights[n][buckets] * ratio / below[n + 1]
            here = np.bincount(buckets, reach * own, num_buckets)
            all_here = np.bincount(buckets, reach, num_buckets)
            # One made-up token on each side keeps the weights of rare buckets off 0 and 1.
            weights[n] = (here + 1) / (all_here + 2)
            reach = reach * (1 - own)
    return tuple(
        _spread(weight, np.bincount(buckets, minlength=num_buckets) > 0)
        for weight, (_, buckets) in zip(weights, looked_up, strict=True)
    )


def _spread(
    weights: Float64[np.ndarray, " buckets"], fitted: Bool[np.ndarray, " buckets"]
) -> Float64[np.ndarray, " buckets"]:
    """`weights` with those of buckets that were not fitted taken from the nearest that was.

    They fill up when all targets are counted: a context of 990 may then be one of 1100.
    """
    known = np.flatnonzero(fitted[1:]) + 1
    weights = weights.copy()
    if known.size:
        seen, variety = np.divmod(np.arange(weights.size) - 1, _VARIETY_BUCKETS)
        apart = np.abs(seen[:, None] - seen[known]) + np.abs(variety[:, None] - variety[known])
        weights = weights[known[np.argmin(apart, axis=1)]]
    weights[0] = 0.0  # an unseen context says nothing
    return weights


def _count_of(
    keys: Int64[np.ndarray, " known"],
    counts: Int64[np.ndarray, " known"],
    wanted: Int64[np.ndarray, " T"],
) -> Int64[np.ndarray, " T"]:
    """The count of each wanted key, 0 for one that is not among the sorted `keys`."""
    place = np.minimum(np.searchsorted(keys, wanted), keys.size - 1)
    return np.where(keys[place] == wanted, counts[place], 0)
