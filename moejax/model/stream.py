"""What every layer reads and none changes: where each token stands, and what losses divide by."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from moejax.core import collectives
from moejax.core.mesh import Fold
from moejax.model.context import Spread, my_tokens, take
from moejax.model.rope import Table


class Counts(NamedTuple):
    """Global counts by which losses are divided, so that sums over devices and microbatches are
    means over the global batch. All float scalars, the same on every device."""

    targets: Float[Array, ""]
    """Of how many the loss is a mean (`train.loss_mean`): the sum of the targets' weights."""
    tokens: Float[Array, ""]
    """Tokens of the step that are not padding."""
    documents: Float[Array, ""]
    """Documents (pieces, as packed) of the step."""
    micro_tokens: Float[Array, ""]
    """Tokens of this microbatch that are not padding."""


class Draw(NamedTuple):
    """What a step, beside tokens, gives the routers of a microbatch."""

    micro: Int[Array, ""] | int = 0
    """The number of the microbatch within its step."""
    key: Array | None = None
    """Random key of a training step, the same on every device; None: this is evaluation."""
    routing_bLNK: Int[Array, "b L N K"] | None = None
    """Experts that each of N MoE layers has to choose; None: it chooses itself."""
    probe_N: Float[Array, " N"] | None = None
    """Zeros, one for each MoE layer. Their "gradient" is how many slots, computed again in the
    backward pass, would choose the same experts (of all slots, where nothing is)."""
    sums: dict | None = None
    """Of each stack, and further module, the gradients of the microbatches before. Where given,
    their "gradient" is the sum with this one's, and their weights have none (see `stack`)."""
    spread: Spread | None = None
    """Where the tokens of rows are; None: rows are whole here."""


class Stream(NamedTuple):
    """One microbatch as a layer sees it on this device. b rows, L tokens of each (where cp splits
    rows: its part of them); t = b*L/tp."""

    segment_ids_bL: Int[Array, "b L"]
    rope: Table
    valid_t: Bool[Array, " t"]
    document_t: Int[Array, " t"]
    counts: Counts
    number_t: Int[Array, " t"]
    """Each token's place in the step's whole batch, row after row: the same for every fold and
    number of microbatches."""
    ids_t: Int[Array, " t"]
    """Token ids."""
    key: Array | None = None
    """See `Draw`."""
    layer: Int[Array, ""] | int = 0
    """Which MoE layer of the model this is."""
    given_tK: Int[Array, "t K"] | None = None
    """Experts that this layer has to choose."""
    recalled_tK: Int[Array, "t _"] | None = None
    """Experts that this layer, which is computed again, chose in the forward pass."""
    probe: Float[Array, ""] | None = None
    """See `Draw.probe_N`."""
    remembered_ids_bS: Int[Array, "b S"] | None = None
    """Document ids of the tokens before these that layers remember; None: they remember none, and
    will not remember these."""
    spread: Spread | None = None
    """See `Draw`."""

    @property
    def row_ids_bL(self) -> Int[Array, "b L"]:
        """Document ids of whole rows."""
        return self.segment_ids_bL if self.spread is None else self.spread.ids_bL


class Totals(NamedTuple):
    """Counts of a batch over all devices."""

    targets: Float[Array, ""]
    tokens: Float[Array, ""]
    documents: Float[Array, ""]


def starts_bL(segment_ids_bL: Int[Array, "b L"]) -> Bool[Array, "b L"]:
    """Returns where a document starts: a non-padding token unlike the one before it."""
    before_bL = jnp.pad(segment_ids_bL, ((0, 0), (1, 0)))[:, :-1]
    return (segment_ids_bL != before_bL) & (segment_ids_bL != 0)


def number_documents(segment_ids_bL: Int[Array, "b L"]) -> Int[Array, "b L"]:
    """Returns the number, below b L, of each token's document; padding has any."""
    b, length = segment_ids_bL.shape
    nth_bL = jnp.cumsum(starts_bL(segment_ids_bL), axis=1, dtype=jnp.int32)
    return jnp.arange(b, dtype=jnp.int32)[:, None] * length + jnp.maximum(nth_bL - 1, 0)


def count_batch(segment_ids: Int[Array, "..."], targets: Int[Array, "..."], fold: Fold) -> Totals:
    """Returns the Totals, float32, of batch arrays [..., L] of whole rows."""
    ids_bL = segment_ids.reshape(-1, segment_ids.shape[-1])
    local = (targets >= 0, segment_ids != 0, starts_bL(ids_bL))
    sums = [jnp.sum(mask, dtype=jnp.float32) for mask in local]
    return Totals(*collectives.psum(sums, fold["dp"]))


def one_microbatch(totals: Totals) -> Counts:
    """Returns the Counts of a step that has one microbatch."""
    return Counts(*totals, totals.tokens)


def make_stream(
    segment_ids_bL: Int[Array, "b L"],
    rope: Table,
    counts: Counts,
    fold: Fold,
    tokens_bL: Int[Array, "b L"] | None = None,
    draw: Draw = Draw(),  # noqa: B008 - immutable
) -> Stream:
    """Returns the Stream of a microbatch. Documents are numbered within this device's rows, all of
    whose tokens the numbers are below.

    `tokens_bL` (default: all 0) matter to hash routing alone.
    """
    spread = draw.spread
    if spread is None:
        (b, length), document_bL = segment_ids_bL.shape, number_documents(segment_ids_bL)
        place_bL = jnp.arange(length, dtype=jnp.int32)[None]
    else:
        (b, length), place_bL = spread.ids_bL.shape, spread.place_bl
        document_bL = take(number_documents(spread.ids_bL), place_bL)
    row_b1 = jnp.arange(b, dtype=jnp.int32)[:, None]
    first = (draw.micro * fold.degree("dp") + collectives.axis_index(fold["dp"])) * b
    number_bL = (first + row_b1) * length + place_bL
    ids_bL = jnp.zeros_like(segment_ids_bL) if tokens_bL is None else tokens_bL
    valid_t = my_tokens((segment_ids_bL != 0).reshape(-1), fold)
    document_t, number_t, ids_t = (
        my_tokens(a.reshape(-1), fold) for a in (document_bL, number_bL, ids_bL)
    )
    return Stream(
        segment_ids_bL, rope, valid_t, document_t, counts, number_t, ids_t, draw.key,
        spread=spread,
    )  # fmt: skip
