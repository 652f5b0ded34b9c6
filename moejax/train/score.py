"""How likely a model finds given tokens: rows of any lengths, on whatever fold it lies on."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import batched

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from moejax.model.stream import count_batch, one_microbatch
from moejax.train.gradients import stored_to_used
from moejax.train.loss import token_nll
from moejax.train.sample import Weights
from moejax.train.state import Layout

TOKENS = 4096  # that a data-parallel device works on at a time, if a row is not longer

TokenNLL = Callable[
    [Weights, Int[np.ndarray, "B L"], Int[np.ndarray, "B L"]], Float[Array, "B L"]
]


@dataclass(frozen=True)
class Row:
    """Tokens, of which those from `first` on are scored, each by all that stand before it."""

    ids: Sequence[int]
    first: int
    """At least 1, for nothing stands before the token at 0."""


def make_token_nll(layout: Layout) -> TokenNLL:
    """Returns (weights, tokens, targets) -> each target's negative log-likelihood in nats; 0 where
    the target is -1. Rows divide over dp. A token of -1 is padding, at the end of its row."""
    fold = layout.fold

    def nll(weights: Weights, tokens_bL, targets_bL):
        model = layout.model(stored_to_used(layout, weights[0]), weights[1])
        segment_ids_bL = (tokens_bL >= 0).astype(jnp.int32)
        tokens_bL = jnp.maximum(tokens_bL, 0)
        places_bL = jnp.broadcast_to(
            jnp.arange(tokens_bL.shape[1], dtype=jnp.int32)[None], tokens_bL.shape
        )
        counted = count_batch(segment_ids_bL, targets_bL, fold)
        x_tD, _ = model.hidden(tokens_bL, segment_ids_bL, places_bL, one_microbatch(counted))
        (nll_T,) = token_nll(model, [x_tD], [targets_bL])
        nll_bL = nll_T.reshape(targets_bL.shape)
        return jnp.where(targets_bL >= 0, nll_bL, 0)

    rows = P(fold["dp"] or None)
    sharded = jax.shard_map(
        nll,
        mesh=layout.mesh,
        in_specs=((layout.specs.params, layout.specs.buffers), rows, rows),
        out_specs=rows,
        check_vma=True,
    )
    return jax.jit(sharded)


def score(
    token_nll: TokenNLL, weights: Weights, rows: Iterable[Row], num_ranks: int
) -> Iterator[Float[np.ndarray, " scored"]]:
    """Yields, row by row, the negative log-likelihoods (float64) of its scored tokens.

    Rows are padded to powers of two and put together while they need the same, so that few
    programs are compiled: sort rows by length where their lengths differ. `num_ranks`: dp.
    """
    for length, group in _equal(rows):
        shape = (num_ranks * max(TOKENS // length, 1), length)
        for batch in batched(group, shape[0]):  # noqa: B911 - the last may be smaller
            tokens_BL, targets_BL = np.full(shape, -1, np.int32), np.full(shape, -1, np.int32)
            for i, row in enumerate(batch):
                end = len(row.ids) - 1
                tokens_BL[i, :end] = row.ids[:-1]
                targets_BL[i, row.first - 1 : end] = row.ids[row.first :]
            nll_BL = np.asarray(token_nll(weights, tokens_BL, targets_BL), np.float64)
            for i, row in enumerate(batch):
                yield nll_BL[i, row.first - 1 : len(row.ids) - 1]


def _equal(rows: Iterable[Row]) -> Iterator[tuple[int, list[Row]]]:
    """Yields runs of rows that are padded to the same length."""
    held: list[Row] = []
    before = 0
    for row in rows:
        length = max(1 << (len(row.ids) - 2).bit_length(), 16)
        if held and (length != before or len(held) == TOKENS):
            yield before, held
            held = []
        held.append(row)
        before = length
    if held:
        yield before, held


def windows(ids: Sequence[int], first: int, context: int, stride: int) -> Iterator[Row]:
    """Yields rows in which each token from `first` (at least 1) on is scored once: in windows of
    `context` tokens, each `stride` behind the one before, in the first that holds it. So from the
    second window on a token is scored by more than `context - stride` tokens before it.

    >>> [(row.ids, row.first) for row in windows(range(6), 1, 3, 2)]
    [(range(0, 4), 1), (range(2, 6), 2)]
    """
    start, done = 0, first
    while done < len(ids):
        end = min(start + context + 1, len(ids))
        yield Row(ids[start:end], done - start)
        start, done = start + stride, end
