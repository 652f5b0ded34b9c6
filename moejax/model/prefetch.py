"""A scan over layers whose weights are gathered (ZeRO-3): each while the layer before it runs.

What `stack.scan_layers` does, with the gather of a layer's weights one layer ahead, and in the
backward the reduction of its gradients one layer behind, so that both run beside a layer's compute:

    forward    layer i, beside it the gather of i + 1
    backward   layer i, beside it the gather of i - 1 and the reduction of i + 1's gradients

Two layers' gathered weights are there at a time, and one's whole gradients. The last turn of each
scan has no next layer: it gathers its own again, which the backward begins with; the backward's
first reduces zeros.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from moejax.model.stack import Layer, add_to, backward, forward


def scan_prefetched(
    layer: Layer, weights_of: Callable[[Any], Any], params, buffers, x, shared, *,
    remat: str = "none", sums=None,
):  # fmt: skip
    """Returns what `stack.scan_layers` does, of at least two layers; arguments as there."""
    nth_L = jnp.arange(len(jax.tree.leaves(params)[0]), dtype=jnp.int32)

    def through(one, params, x, buffers, shared):
        """Returns ((y, the last layer's weights), what `one` gives of each layer beside y)."""

        def step(carry, layer_state):
            (x, weights), (nth, b) = carry, layer_state
            ahead = weights_of(_of(params, nth + 1))
            y, *rest = one(weights, b, x, shared)
            return (y, ahead), tuple(rest)

        return lax.scan(step, (x, weights_of(_of(params, 0))), (nth_L, buffers))

    @jax.custom_vjp
    def run(params, x, buffers, shared, sums):
        first = lambda *args: layer(*args, None)  # noqa: E731
        (y, _), rest = through(first, params, x, buffers, shared)
        return y, *rest

    def run_forward(params, x, buffers, shared, sums):
        one = partial(forward, layer, remat=remat)
        (y, weights), (aux, choices, saved) = through(one, params, x, buffers, shared)
        return (y, aux, choices), (params, buffers, shared, sums, saved, weights)

    run.defvjp(run_forward, partial(_run_backward, layer, weights_of, remat))
    return run(params, x, buffers, shared, sums)


def _of(params, nth):
    """Returns the parameters of layer nth, or of the nearest that there is."""
    nth = jnp.clip(nth, 0, len(jax.tree.leaves(params)[0]) - 1)
    return jax.tree.map(lambda a: lax.dynamic_index_in_dim(a, nth, keepdims=False), params)


def _run_backward(layer: Layer, weights_of: Callable[[Any], Any], remat: str, kept, cotangents):
    params, buffers, shared, sums, saved, weights = kept
    dy, daux, _ = cotangents
    nth_L = jnp.arange(len(jax.tree.leaves(params)[0]), dtype=jnp.int32)

    def reduced(sums, nth, d_weights):
        """Adds gradients of layer nth to the sums. Returns (sums, the gradients without sums)."""
        _, pull = jax.vjp(weights_of, _of(params, nth))
        (d_params,) = pull(d_weights)
        if sums is None:
            return None, d_params
        add = partial(add_to, jnp.minimum(nth, len(nth_L) - 1))
        return jax.tree.map(add, sums, d_params[0]), d_params[1]

    def step(carry, layer_state):
        dy, sums, weights, behind = carry
        nth, b, saved_l, daux_l = layer_state
        ahead = weights_of(_of(params, nth - 1))
        sums, d_params = reduced(sums, nth + 1, behind)
        d_weights, dx = backward(layer, weights, b, saved_l, shared, (dy, daux_l), remat)
        return (dx, sums, ahead, d_weights), d_params

    nothing = jax.tree.map(lambda w: w * 0, weights)
    start, layers = (dy, sums, weights, nothing), (nth_L, buffers, saved, daux)
    (dx, sums, _, behind), d_params = lax.scan(step, start, layers, reverse=True)
    sums, first = reduced(sums, 0, behind)
    # Turn i gave the gradients of layer i + 1.
    d_params = jax.tree.map(lambda d, d_L: jnp.concatenate([d[None], d_L[:-1]]), first, d_params)
    return d_params if sums is None else (None, d_params), dx, None, None, sums
