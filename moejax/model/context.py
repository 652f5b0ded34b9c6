"""Rows whose tokens are split over cp: what a device knows of the whole, and how it gets more.

Batch arrays lie on a device as whole rows (of int32, a few bytes a token): what goes by the order
of a row, such as where documents start or which token is next, is worked out on these, and then
each rank takes its own tokens, `split_rows`. Which these are says "order", made on the host
(`moejax.data.context`): as many for each rank, any of them, by rising place.

    L tokens of a row, l = L / cp of them here
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, Shaped

from moejax.core import collectives
from moejax.core.mesh import Fold

Batch = dict[str, Array]


class Spread(NamedTuple):
    """Where the tokens of rows are that are split over cp."""

    order_bL: Int[Array, "b L"]
    """The place of each token, those of rank 0 first."""
    back_bL: Int[Array, "b L"]
    """Where in the order the token of each place is."""
    ids_bL: Int[Array, "b L"]
    """Document ids of the whole rows."""
    place_bl: Int[Array, "b l"]
    """The places of the tokens that are here: this rank's part of the order."""
    groups: "tuple[Spread, ...]" = ()
    """With "dynamic": how the rows of this rank's groups, which have the group's tokens alone, are
    spread over them; the smallest group of more than one rank first."""
    level: Int[Array, ""] | None = None
    """With "dynamic": of how many of the groups a document has more than one part, in any row."""


def _mine(order: Int[Array, "... L"], axes: tuple[str, ...]) -> Int[Array, "... l"]:
    """Returns the part of the order that is of this rank of those along `axes`."""
    size = order.shape[-1] // collectives.axis_size(axes)
    start = collectives.axis_index(axes) * size
    return jax.lax.dynamic_slice_in_dim(order, start, size, axis=-1)


def take(x: Shaped[Array, "... L _"], at: Int[Array, "... l"]) -> Shaped[Array, "... l _"]:
    """Returns the tokens of x [.., L, ..] at these places of their rows."""
    axis, more = at.ndim - 1, (1,) * (x.ndim - at.ndim)
    at = at.reshape(*at.shape, *more)
    return jnp.take_along_axis(x, at, axis=axis, mode="promise_in_bounds")


def split_rows(batch: Batch, fold: Fold) -> Batch:
    """Returns the batch [.., L] with this rank's tokens alone [.., l], and with "row_ids", the
    document ids of whole rows; without cp as it is. Raises ValueError for one without an order."""
    if not fold["cp"]:
        return batch
    if "order" not in batch:
        raise ValueError('with cp a batch needs the "order" of its tokens (data.context)')
    here = _mine(batch["order"], fold["cp"])
    mine = {name: take(a, here) for name, a in batch.items() if name != "order"}
    return mine | {"order": batch["order"], "row_ids": batch["segment_ids"]}


def spread_of(micro: Batch, fold: Fold) -> Spread | None:
    """Returns the Spread of a microbatch that `split_rows` made; None where rows are whole."""
    if not fold["cp"]:
        return None
    order_bL, ids_bL = micro["order"], micro["row_ids"]
    back_bL = jnp.argsort(order_bL, axis=1)
    spread = Spread(order_bL, back_bL, ids_bL, _mine(order_bL, fold["cp"]))
    if not fold.groups:
        return spread
    axes = fold["cp"]
    groups = tuple(_group(spread, axes[:first], axes[first:]) for first in range(len(axes))[::-1])
    return spread._replace(groups=groups, level=_level(spread, fold))


def _group(spread: Spread, outer: tuple[str, ...], inner: tuple[str, ...]) -> Spread:
    """Returns the Spread, over `inner`, of rows that have this group's tokens alone. Order and
    places are among these."""
    place_bG = _mine(spread.order_bL, outer)
    back_bG = jnp.argsort(place_bG, axis=1)
    order_bG = jnp.argsort(back_bG, axis=1).astype(place_bG.dtype)
    ids_bG = take(spread.ids_bL, take(place_bG, back_bG))
    return Spread(order_bG, back_bG, ids_bG, _mine(order_bG, inner))


def _level(spread: Spread, fold: Fold) -> Int[Array, ""]:
    """Returns how many sizes of groups, the smallest first, do not hold every document whole: those
    for which neighbouring tokens of a document are in two groups."""
    ids_bL, size = spread.ids_bL, spread.place_bl.shape[1]
    together_bL = (ids_bL[:, 1:] == ids_bL[:, :-1]) & (ids_bL[:, 1:] != 0)
    level = jnp.zeros((), jnp.int32)
    for ranks in fold.groups[:-1]:
        group_bL = spread.back_bL // (ranks * size)
        level += (together_bL & (group_bL[:, 1:] != group_bL[:, :-1])).any().astype(jnp.int32)
    return level


@jax.custom_vjp
def permuted(x_bL: Shaped[Array, "b L ..."], at_bL: Int[Array, "b L"], back_bL: Int[Array, "b L"]):
    """Returns x[at] along dim 1, `back` being the inverse permutation: the gradient is a gather,
    too, where that of `take` adds up into zeros."""
    return take(x_bL, at_bL)


permuted.defvjp(
    lambda x, at, back: (take(x, at), back), lambda back, d: (take(d, back), None, None)
)


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


def whole_rows(x_t: Shaped[Array, "t ..."], rows: int, spread: Spread | None, fold: Fold) -> Array:
    """Returns an array [t, ..] as whole rows [b, L, ..] in their order, gathered over tp and cp."""
    axes = fold["tp"] if spread is None else fold["cp"] + fold["tp"]
    x_cbl = collectives.all_gather(x_t, axes)
    if spread is None:
        return x_cbl.reshape(rows, -1, *x_t.shape[1:])
    x_cbl = x_cbl.reshape(fold.degree("cp"), rows, -1, *x_t.shape[1:])
    x_bL = jnp.moveaxis(x_cbl, 0, 1).reshape(rows, -1, *x_t.shape[1:])
    return take(x_bL, spread.back_bL)


def of_whole_rows(x_bL: Shaped[Array, "b L ..."], spread: Spread | None, fold: Fold) -> Array:
    """The inverse of `whole_rows`: this device's tokens [t, ..] of whole rows."""
    x_bl = x_bL if spread is None else take(x_bL, spread.place_bl)
    return my_tokens(x_bl.reshape(-1, *x_bL.shape[2:]), fold)
