"""What every layer reads and none changes: where each token stands, and what losses divide by."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from moejax.core import collectives
from moejax.core.mesh import Fold
from moejax.model.rope import Table


class Counts(NamedTuple):
    """Global counts by which losses are divided, so that sums over devices and microbatches are
    means over the global batch. All float scalars, the same on every device."""

    targets: Float[Array, ""]
    """Tokens of the step that have a target."""
    tokens: Float[Array, ""]
    """Tokens of the step that are not padding."""
    documents: Float[Array, ""]
    """Documents (pieces, as packed) of the step."""
    micro_tokens: Float[Array, ""]
    """Tokens of this microbatch that are not padding."""


class Stream(NamedTuple):
    """One microbatch as a layer sees it on this device. b rows, L tokens each; t = b*L/tp."""

    segment_ids_bL: Int[Array, "b L"]
    rope: Table
    valid_t: Bool[Array, " t"]
    document_t: Int[Array, " t"]
    counts: Counts


class Totals(NamedTuple):
    """Counts of a batch over all devices."""

    targets: Float[Array, ""]
    tokens: Float[Array, ""]
    documents: Float[Array, ""]


def starts_bL(segment_ids_bL: Int[Array, "b L"]) -> Bool[Array, "b L"]:
    """Returns where a document starts: a non-padding token unlike the one before it."""
    before_bL = jnp.pad(segment_ids_bL, ((0, 0), (1, 0)))[:, :-1]
    return (segment_ids_bL != before_bL) & (segment_ids_bL != 0)


def count_batch(segment_ids: Int[Array, "..."], targets: Int[Array, "..."], fold: Fold) -> Totals:
    """Returns the Totals, float32, of batch arrays [..., L]."""
    ids_bL = segment_ids.reshape(-1, segment_ids.shape[-1])
    local = (targets >= 0, segment_ids != 0, starts_bL(ids_bL))
    sums = [jnp.sum(mask, dtype=jnp.float32) for mask in local]
    return Totals(*collectives.psum(sums, fold.batch))


def one_microbatch(totals: Totals) -> Counts:
    """Returns the Counts of a step that has one microbatch."""
    return Counts(*totals, totals.tokens)


def my_tokens(x_T: Array, fold: Fold) -> Array:
    """Returns this device's slice, along tp, of an array whose dim 0 is this row group's tokens."""
    degree = fold.degree("tp")
    size = x_T.shape[0] // degree
    if size * degree != x_T.shape[0]:
        raise ValueError(
            f"{x_T.shape[0]} tokens a microbatch and data-parallel rank do not divide over "
            f"tp={degree}: change the sequence length, the batch size or tp"
        )
    start = collectives.axis_index(fold["tp"]) * size
    return x_T if degree == 1 else jax.lax.dynamic_slice_in_dim(x_T, start, size)


def make_stream(
    segment_ids_bL: Int[Array, "b L"], rope: Table, counts: Counts, fold: Fold
) -> Stream:
    """Returns the Stream of a microbatch. Documents are numbered within this device's rows."""
    b, length = segment_ids_bL.shape
    row_b1 = jnp.arange(b, dtype=jnp.int32)[:, None]
    nth_bL = jnp.cumsum(starts_bL(segment_ids_bL), axis=1, dtype=jnp.int32)
    document_bL = row_b1 * length + jnp.maximum(nth_bL - 1, 0)
    valid_t = my_tokens((segment_ids_bL != 0).reshape(-1), fold)
    return Stream(
        segment_ids_bL, rope, valid_t, my_tokens(document_bL.reshape(-1), fold), counts
    )
