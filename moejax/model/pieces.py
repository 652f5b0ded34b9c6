"""A function of many rows, computed on a few of them at a time, so that its buffers stay small.

    y_tD, counts = in_pieces(function, 32, weights, (x_tD, weights_tK), (experts_tK,), fold)

The backward computes each piece again, and adds up the gradients of the weights in float32.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from moejax.core import collectives
from moejax.core.mesh import Fold
from moejax.core.precision import at_least_float32


def num_pieces(num_rows: int, at_least: float) -> int:
    """Returns the smallest number of equal pieces of so many rows that is not below `at_least`.

    >>> num_pieces(4096, 25.6), num_pieces(12, 5), num_pieces(8, 100)
    (32, 6, 8)
    """
    return next((n for n in range(1, num_rows) if n >= at_least and num_rows % n == 0), num_rows)


def in_pieces(
    function: Callable[..., tuple[jax.Array, Any]],
    count: int,
    weights: Any,
    rows: tuple[jax.Array, ...],
    numbers: tuple[jax.Array, ...],
    fold: Fold,
) -> tuple[jax.Array, Any]:
    """Returns (y, sums) of `function(weights, rows, numbers) -> (y, tree of integer scalars)`, y
    concatenated and the integers summed over `count` equal pieces of the leading dim of rows and
    numbers. Weights and rows get gradients, numbers do not."""
    if count == 1:
        return function(weights, rows, numbers)

    def cut(tree):
        return jax.tree.map(lambda a: a.reshape(count, -1, *a.shape[1:]), tree)

    def joined(tree):
        return jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), tree)

    @jax.custom_vjp
    def run(weights, rows, numbers):
        step = lambda _, piece: (None, function(weights, *piece))  # noqa: E731
        _, (y, counted) = lax.scan(step, None, (cut(rows), cut(numbers)))
        return joined(y), jax.tree.map(lambda n: n.sum(axis=0, dtype=n.dtype), counted)

    def run_backward(kept, cotangents):
        weights, rows, numbers = kept

        def step(sums, piece):
            rows, numbers, dy = piece
            _, pull, _ = jax.vjp(lambda w, r: function(w, r, numbers), weights, rows, has_aux=True)
            d_weights, d_rows = pull(dy)
            return jax.tree.map(lambda s, d: s + d.astype(s.dtype), sums, d_weights), d_rows

        zeros = jax.tree.map(lambda w: jnp.zeros(w.shape, at_least_float32(w.dtype)), weights)
        first = collectives.vary(zeros, fold.all)
        sums, d_rows = lax.scan(step, first, (cut(rows), cut(numbers), cut(cotangents[0])))
        d_weights = jax.tree.map(lambda s, w: s.astype(w.dtype), sums, weights)
        return d_weights, joined(d_rows), None

    run.defvjp(lambda *args: (run(*args), args), run_backward)
    return run(weights, rows, numbers)
