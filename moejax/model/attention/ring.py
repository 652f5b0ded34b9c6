"""Ring attention (Liu et al., 2023): keys and values go round the ranks in blocks, queries stay.

    forward   each rank attends the block it holds while the next one comes; partial results are
              joined by their log-sum-exps
    backward  round again: each block takes the sums of its gradients along, and gets home with them

Saved are the rank's own q, k, v and its results; at any time there are two blocks beside. Every
rank attends every block: with places in zigzag half of each is seen, and XLA's loops over long rows
skip the other half. Sent are, forward, c - 1 blocks of k and v for c ranks; backward these again,
and c of their gradients in float32, so that c sums round nothing away.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from moejax.core import collectives
from moejax.model.context import Spread, take
from pallas_kernels.attention import SAVED, attention, attention_gradients, join

Axes = tuple[str, ...]


class Asked(NamedTuple):
    """What a layer asks of attention, static."""

    window: int | None
    scale: float
    impl: str | None


def ids_at(spread: Spread, places_bl: Int[Array, "b l"]) -> Int[Array, "b l"]:
    """Returns the documents of these places."""
    return take(spread.ids_bL, places_bl)


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def ring(
    arrays: tuple[Float[Array, "b l n H"], Float[Array, "b l g H"], Float[Array, "b l g V"]],
    spread: Spread,
    axes: Axes,
    asked: Asked,
) -> tuple[Float[Array, "b l n V"], Float[Array, "b l n"]]:
    """Returns (out, log-sum-exp) of this rank's q over all ranks' k and v, spread over `axes`."""
    return _forward(arrays, spread, axes, asked)[0]


def _marks(step, spread: Spread, axes: Axes) -> dict:
    """Returns the documents and places of the queries, and of the keys that are here at a step:
    those of the rank so many before."""
    count = collectives.axis_size(axes)
    order_bcl = spread.order_bL.reshape(len(spread.order_bL), count, -1)
    rank = (collectives.axis_index(axes) - step) % count
    places = (spread.place_bl, jnp.take(order_bcl, rank, axis=1))
    return dict(segment_ids=tuple(ids_at(spread, p) for p in places), positions=places)


def _forward(arrays, spread: Spread, axes: Axes, asked: Asked):
    q, *first = arrays
    count = collectives.axis_size(axes)

    def visit(step, block):
        marks = _marks(step, spread, axes)
        return attention(
            q, *block, **marks, window=asked.window, scale=asked.scale, impl=asked.impl
        )

    def step(carry, number):
        block, so_far = carry
        ahead = collectives.shift(block, axes)  # before the work, which then hides it
        return (ahead, join(so_far, visit(number, block))), None

    ahead = collectives.shift(first, axes)
    out, lse = visit(0, first)
    carry = (ahead, (out.astype(lse.dtype), lse))
    (last, so_far), _ = lax.scan(step, carry, jnp.arange(1, count - 1, dtype=jnp.int32))
    out, lse = join(so_far, visit(count - 1, last))
    out, lse = map(checkpoint_name, (out.astype(q.dtype), lse), SAVED)
    return (out, lse), (arrays, spread, (out, lse))


def _backward(axes: Axes, asked: Asked, saved, cotangents):
    (q, *first), spread, results = saved
    count, wide = collectives.axis_size(axes), results[1].dtype

    def visit(step, block):
        marks = _marks(step, spread, axes)
        found = attention_gradients(
            (q, *block), results, cotangents, **marks, window=asked.window, scale=asked.scale
        )
        return jax.tree.map(lambda d: d.astype(wide), found)

    def added(sums, d_q, found):
        d_block = jax.tree.map(jnp.add, collectives.shift(sums, axes), list(found[1:]))
        return d_q + found[0], d_block

    def step(carry, number):
        block, sums, d_q = carry
        ahead = collectives.shift(block, axes)
        d_q, sums = added(sums, d_q, visit(number, block))
        return (ahead, sums, d_q), None

    ahead = collectives.shift(first, axes)
    d_q, *sums = visit(0, first)
    steps = jnp.arange(1, count - 1, dtype=jnp.int32)
    (last, sums, d_q), _ = lax.scan(step, (ahead, sums, d_q), steps)
    d_q, sums = added(sums, d_q, visit(count - 1, last))
    home = collectives.shift(sums, axes)
    d_arrays = (x.astype(q.dtype) for x in (d_q, *home))
    return tuple(d_arrays), None


ring.defvjp(_forward, _backward)
