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


def _mine(order: Int[Array, "... L"], fold: Fold) -> Int[Array, "... l"]:
    """Returns this rank's part of the order."""
    size = order.shape[-1] // fold.degree("cp")
    start = collectives.axis_index(fold["cp"]) * size
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
    here = _mine(batch["order"], fold)
    mine = {name: take(a, here) for name, a in batch.items() if name != "order"}
    return mine | {"order": batch["order"], "row_ids": batch["segment_ids"]}


def spread_of(micro: Batch, fold: Fold) -> Spread | None:
    """Returns the Spread of a microbatch that `split_rows` made; None where rows are whole."""
    if not fold["cp"]:
        return None
    order_bL = micro["order"]
    return Spread(
        order_bL, jnp.argsort(order_bL, axis=1), micro["row_ids"], _mine(order_bL, fold)
    )


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
