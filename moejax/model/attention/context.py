"""Attention where rows are split over cp: what each of its kinds sends, and what it then attends.

    ulysses       all_to_all: heads are split over cp in place of tokens, and back: each rank
                  attends whole rows in their order, as with no cp, by the fused kernels. Sends q,
                  out, and k and v, these copied where there are fewer heads of them than ranks.
    ring          k and v go round in blocks, partial results are joined (`ring.py`).
    ulysses_ring  the nearest ranks exchange heads, as far as those of k and v divide; each such
                  group holds the rows that its ranks had, and the groups form the ring.
    all_gather    k and v (MLA: the latents that these are made of) of whole rows, again for the
                  backward; queries stay.
    dynamic       the same within groups of neighbouring ranks, the smallest that hold each document
                  of the microbatch whole: the host cuts documents over no more ranks than their
                  lengths ask for (`moejax.data.dynamic`). Where none is cut, nothing is sent, and
                  each rank attends what it has, by the fused kernels.

The others have queries of other places than keys: what sees what goes by place, which XLA's
attention knows, and the fused kernels do not.

In a pipeline a layer may run in a branch that other stages do not take, and there a ring's
`ppermute` would hang. Where the fold has pp, "ring" gathers the keys and values of whole rows
instead, one head after the other: as many bytes as the ring sends, in collectives of cp alone; room
for one head of whole rows; the gather of a head and the attention of the one before it overlap only
if XLA sees to it.
"""

from collections.abc import Callable
from functools import partial
from math import gcd, prod

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

from moejax.core import collectives
from moejax.core.mesh import Fold
from moejax.model.attention.ring import Asked, Axes, ids_at, ring
from moejax.model.context import Spread, permuted
from moejax.model.stream import Stream
from pallas_kernels import attention
from pallas_kernels.attention import SAVED, with_sinks

Heads = tuple[Float[Array, "b l n H"], Float[Array, "b S g H"], Float[Array, "b S g V"]]
Sinks = Float[Array, " n"] | None


def attend(
    arrays: Heads, sinks: Sinks, stream: Stream, ids_bS: Int[Array, "b S"], asked: Asked, fold: Fold
) -> Float[Array, "b l n V"]:
    """Returns what attention gives this device's queries, of (q, k, v). Where rows are split, each
    holds this device's tokens; where they are whole, `ids_bS` are the documents of the keys."""
    spread = stream.spread
    if spread is None:
        return _attend(arrays, sinks, (stream.segment_ids_bL, ids_bS), None, asked)
    if gathers(fold):

        def run(group, axes):
            if not axes:
                return _attend(arrays, sinks, (stream.segment_ids_bL, ids_bS), None, asked)
            return _gathering(arrays, sinks, group, axes, asked)

        return in_groups(run, spread, fold)
    inner, outer = split_axes(fold, arrays[1].shape[2])
    with jax.named_scope("context"):
        group = _of_groups(spread, inner, outer)
        moved = _moves(spread, inner, outer)
        arrays, sinks = _to_heads(arrays, sinks, inner, moved)
    if not outer:
        out = _attend(arrays, sinks, (spread.ids_bL,) * 2, None, asked)
    elif fold["pp"]:
        out = _by_head(arrays, sinks, group, outer, asked)
    else:
        out, lse = ring(arrays, group, outer, asked)
        out, _ = with_sinks(out, lse, sinks)
    with jax.named_scope("context"):
        return _to_length(out, inner, moved)


def gathers(fold: Fold) -> bool:
    """Whether queries stay, and what keys are made of is gathered."""
    return bool(fold["cp"]) and fold.context in ("all_gather", "dynamic")


def in_groups(
    run: Callable[[Spread | None, Axes], Array], spread: Spread | None, fold: Fold
) -> Array:
    """Returns run(how rows are spread over the ranks from which to gather, the axes of these): all
    of cp, or, with "dynamic", the smallest group that holds each document whole. Where that is one
    rank (None, ()), where nothing is gathered (spread, ()).

    All ranks of cp know the whole rows, so all of them take the same branch.
    """
    if spread is None or not gathers(fold):
        return run(spread, ())
    if not spread.groups:
        return run(spread, fold["cp"])
    branches = [lambda: run(None, ())]
    for count, group in enumerate(spread.groups, start=1):
        branches.append(partial(run, group, fold["cp"][-count:]))
    return jax.lax.switch(spread.level, branches)


def attend_whole(arrays: Heads, sinks: Sinks, spread: Spread, asked: Asked):
    """Returns what attention gives this device's queries, of keys and values of whole rows."""
    at_BL = jnp.arange(spread.ids_bL.shape[1], dtype=jnp.int32)[None]
    places = (spread.place_bl, jnp.broadcast_to(at_BL, spread.ids_bL.shape))
    ids = (ids_at(spread, spread.place_bl), spread.ids_bL)
    return _attend(arrays, sinks, ids, places, asked)


def gather_rows(x_bl: Shaped[Array, "b l ..."], spread: Spread, axes: Axes) -> Array:
    """Returns whole rows, in their order, of what is split over `axes` as the spread says."""
    x_cbl = collectives.all_gather(x_bl[None], axes)
    x_bL = jnp.moveaxis(x_cbl, 0, 1).reshape(len(x_bl), -1, *x_bl.shape[2:])
    return permuted(x_bL, spread.back_bL, spread.order_bL)


def saving_results(function):
    """Returns the function, of which attention's results alone are saved for the backward."""
    policy = jax.checkpoint_policies.save_only_these_names(*SAVED)
    return jax.checkpoint(function, policy=policy)


def _attend(arrays: Heads, sinks: Sinks, ids, places, asked: Asked):
    return attention(
        *arrays, segment_ids=ids, positions=places, window=asked.window, sinks=sinks,
        scale=asked.scale, impl=asked.impl,
    )[0]  # fmt: skip


def _gathering(arrays: Heads, sinks: Sinks, spread: Spread, axes: Axes, asked: Asked):
    """Returns what attention gives, of keys and values that are gathered, and not saved."""

    def run(q, k, v, sinks):
        k, v = (gather_rows(x, spread, axes) for x in (k, v))
        return attend_whole((q, k, v), sinks, spread, asked)

    return saving_results(run)(*arrays, sinks)


def _by_head(arrays: Heads, sinks: Sinks, spread: Spread, axes: Axes, asked: Asked):
    """Returns what `_gathering` does, one head of keys and values after the other."""
    kv_heads = arrays[1].shape[2]

    def cut(x, dim: int):
        shape = (*x.shape[:dim], kv_heads, -1, *x.shape[dim + 1 :])
        return jnp.moveaxis(x.reshape(shape), dim, 0)

    def one(heads):
        return _gathering(heads[:3], heads[3], spread, axes, asked)

    heads = (*(cut(x, 2) for x in arrays), None if sinks is None else cut(sinks, 0))
    out_gblnV = jax.lax.map(one, heads)
    return jnp.moveaxis(out_gblnV, 0, 2).reshape(*arrays[0].shape[:3], -1)


def split_axes(fold: Fold, kv_heads: int) -> tuple[Axes, Axes]:
    """Returns the axes of cp over which heads are split, and those of the ring."""
    axes = fold["cp"]
    if fold.context != "ulysses_ring":
        return (axes, ()) if fold.context == "ulysses" else ((), axes)
    sizes, first = dict(fold.axes), len(axes)
    while first and kv_heads % prod(sizes[axis] for axis in axes[first - 1 :]) == 0:
        first -= 1
    return axes[first:], axes[:first]


def _of_groups(spread: Spread, inner: Axes, outer: Axes) -> Spread:
    """Returns how rows are spread over groups of inner ranks, each group's tokens by rising place:
    what rows look like when heads are split over the ranks of a group."""
    if not (inner and outer):
        return spread
    rows, count = len(spread.order_bL), collectives.axis_size(outer)
    order_bol = jnp.sort(spread.order_bL.reshape(rows, count, -1), axis=-1)
    mine_bl = jnp.take(order_bol, collectives.axis_index(outer), axis=1)
    order_bL = order_bol.reshape(rows, -1)
    return Spread(order_bL, jnp.argsort(order_bL, axis=1), spread.ids_bL, mine_bl)


def _moves(spread: Spread, inner: Axes, outer: Axes) -> tuple[Array, Array]:
    """Returns the permutation that puts the tokens of inner ranks, one rank's after the other's, in
    rising order, and its inverse."""
    if not outer:
        return spread.back_bL, spread.order_bL
    rows, count = len(spread.order_bL), collectives.axis_size(outer)
    order_bol = spread.order_bL.reshape(rows, count, -1)
    at_bl = jnp.argsort(jnp.take(order_bol, collectives.axis_index(outer), axis=1), axis=1)
    return at_bl, jnp.argsort(at_bl, axis=1)


def _to_heads(arrays: Heads, sinks: Sinks, inner: Axes, moved) -> tuple[Heads, Sinks]:
    """Returns (q, k, v with some of the heads of all tokens of the inner ranks, by rising place;
    the sinks of these heads). Key/value heads are copied until they divide over the ranks."""
    if not inner:
        return arrays, sinks
    count = collectives.axis_size(inner)

    def exchange(x_blnH):
        copies = count // gcd(x_blnH.shape[2], count)
        x_blnH = jnp.repeat(x_blnH, copies, axis=2) if copies > 1 else x_blnH
        b, length, _, width = x_blnH.shape
        x_pblnH = jnp.moveaxis(x_blnH.reshape(b, length, count, -1, width), 2, 0)
        x_bpl = jnp.moveaxis(collectives.all_to_all(x_pblnH, inner), 0, 1)
        return permuted(x_bpl.reshape(b, count * length, -1, width), *moved)

    if sinks is not None:
        sinks = jnp.take(sinks.reshape(count, -1), collectives.axis_index(inner), axis=0)
    q, k, v = map(exchange, arrays)
    return (q, k, v), sinks


def _to_length(out_blnV: Float[Array, "b l n V"], inner: Axes, moved) -> Float[Array, "b l n V"]:
    """The inverse of `_to_heads`, of what attention gave."""
    if not inner:
        return out_blnV
    count, (at, back) = collectives.axis_size(inner), moved
    b, length, _, width = out_blnV.shape
    out = permuted(out_blnV, back, at).reshape(b, count, length // count, -1, width)
    out_pblnV = collectives.all_to_all(jnp.moveaxis(out, 1, 0), inner)
    return jnp.moveaxis(out_pblnV, 0, 2).reshape(b, length // count, -1, width)
