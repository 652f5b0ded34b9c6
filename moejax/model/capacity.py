"""Capacity: how many tokens of one row an expert takes, and which.

    C = ceil(n K / E * capacity_factor)        n: the row's tokens that are not padding

Counted over rows, not over a device's tokens, so that what is dropped depends neither on the fold
nor on the microbatches, and a document never on other rows. A slot beyond C goes to no expert, with
weight 0; the token keeps its others, whose weights do not change. Filled up to capacity, an expert
takes exactly C tokens of each row: those that found room, and with weight 0 as many of the others,
the first ones, as are missing. All loads are then even, known before, and within a `moe.budget` of
the capacity factor (times what rounding up C adds).
"""

from fractions import Fraction
from math import ceil
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from moejax.core.mesh import Fold
from moejax.model.context import of_whole_rows, whole_rows
from moejax.model.router import RouterConfig, Routing
from moejax.model.stream import Stream


def capacity_b(
    valid_bL: Bool[Array, "b L"], top_k: int, num_experts: int, factor: float
) -> Int[Array, " b"]:
    """Returns C of each row. Exact: in float, 25 * 2 / 5 * 1.1 would be a bit above 11, so 12."""
    share = Fraction(str(factor)) * top_k / num_experts
    table = np.asarray([ceil(n * share) for n in range(valid_bL.shape[1] + 1)], np.int32)
    return jnp.asarray(table)[valid_bL.sum(axis=1, dtype=jnp.int32)]


class Kept(NamedTuple):
    """The slots that count. A slot for each expert where all are filled up."""

    experts_tK: Int[Array, "t K"]
    """E, no expert, in a slot that finds no room."""
    weights_tK: Float[Array, "t K"]
    """0 in a slot that finds no room, and in one that fills up an expert."""
    num_filled: Int[Array, ""]
    """Slots that fill experts up."""


@jax.named_scope("drop")
def keep(
    routing: Routing, num_experts: int, cfg: RouterConfig, stream: Stream, fold: Fold
) -> Kept:
    """Returns the slots that find room.

    Of an expert's slots in a row the first C do, by weight ("probs", ties to the earlier token) or
    by place ("position"). Dropless, or where experts chose: all do.
    """
    experts_tK, weights_tK, factor = routing.experts_tK, routing.weights_tK, cfg.capacity_factor
    none = 0 * experts_tK[0, 0]
    if not factor or cfg.selection == "expert_choice":
        return Kept(experts_tK, weights_tK, none)
    (b, length), top_k = stream.row_ids_bL.shape, experts_tK.shape[1]
    by_weight = cfg.drop_policy == "probs"
    key_tK = -lax.stop_gradient(weights_tK) if by_weight else jnp.zeros_like(weights_tK)
    experts_bS, key_bS = (
        whole_rows(a, b, stream.spread, fold).reshape(b, length * top_k)
        for a in (experts_tK, key_tK)
    )
    room_b = capacity_b(stream.row_ids_bL != 0, top_k, num_experts, factor)
    kept_bS = rank_bS(experts_bS, key_bS, num_experts) < room_b[:, None]
    kept_tK = of_whole_rows(kept_bS.reshape(b, length, top_k), stream.spread, fold)
    kept = Kept(
        jnp.where(kept_tK, experts_tK, num_experts), jnp.where(kept_tK, weights_tK, 0), none
    )
    if not cfg.pad_to_capacity:
        return kept
    chosen_bSE = jax.nn.one_hot(jnp.where(kept_bS, experts_bS, -1), num_experts, dtype=jnp.int32)
    chosen_bLE = chosen_bSE.reshape(b, length, top_k, num_experts).sum(axis=2) > 0
    return _filled(kept, chosen_bLE, room_b, num_experts, stream, fold)


def _filled(kept: Kept, chosen_bLE, room_b, num_experts: int, stream: Stream, fold: Fold) -> Kept:
    """Returns a slot for each expert: those that were kept, and fillers."""
    valid_bL1 = (stream.row_ids_bL != 0)[..., None]
    missing_bE = room_b[:, None] - chosen_bLE.sum(axis=1, dtype=jnp.int32)
    free_bLE = valid_bL1 & ~chosen_bLE
    nth_bLE = jnp.cumsum(free_bLE, axis=1, dtype=jnp.int32)
    filled_bLE = free_bLE & (nth_bLE <= missing_bE[:, None])
    taken_tE, filled_tE = (
        of_whole_rows(a, stream.spread, fold) for a in (chosen_bLE | filled_bLE, filled_bLE)
    )
    ids_E = jnp.arange(num_experts, dtype=kept.experts_tK.dtype)
    here_tKE = kept.experts_tK[..., None] == ids_E[None, None]
    weights_tE = jnp.where(here_tKE, kept.weights_tK[..., None], 0).sum(axis=1)
    experts_tE = jnp.where(taken_tE, ids_E[None], num_experts)
    return Kept(experts_tE, weights_tE, filled_tE.sum(dtype=jnp.int32))


def rank_bS(
    experts_bS: Int[Array, "b S"], key_bS: Float[Array, "b S"], num_experts: int
) -> Int[Array, "b S"]:
    """Returns the place of each slot among its row's slots of the same expert, by rising key, ties
    to the earlier slot."""
    slot_bS = lax.broadcasted_iota(jnp.int32, experts_bS.shape, 1)
    sorted_bS, _, from_bS = lax.sort((experts_bS, key_bS, slot_bS), dimension=1, num_keys=3)
    ids_E = jnp.arange(num_experts + 1, dtype=experts_bS.dtype)
    first_bE = jax.vmap(lambda row: jnp.searchsorted(row, ids_E))(sorted_bS).astype(jnp.int32)
    rank = slot_bS - jnp.take_along_axis(first_bE, sorted_bS, axis=1)
    return lax.sort((from_bS, rank), dimension=1, num_keys=1)[1]  # back where the slots came from
