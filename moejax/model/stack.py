"""A scan over equal layers whose backward is ours: weights are prepared outside the layer.

Differentiating a layer that gathers and casts its weights would save the gathered (or bf16) copy
for every layer and microbatch. Here `weights_of` (gather and cast) runs outside the differentiated
layer, forward and again backward; `jax.vjp` gives the layer's residuals, and those that *are*
weights or shared inputs, recognised by identity, are not saved again. The same split of a layer
into `forward` (output and what it saved) and `backward` is what a pipeline schedule plays.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
from jax import lax

Layer = Callable[..., tuple[Any, Any]]
REMAT = ("none", "full")


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Known:
    """Stands, in a saved tree, for the residual that is the known array of this index."""

    index: int


def strip(tree, known):
    """Returns a tree of residuals without the arrays that are in `known` (by identity)."""
    index = {id(leaf): i for i, leaf in enumerate(jax.tree.leaves(known))}
    swap = lambda leaf: _Known(index[id(leaf)]) if id(leaf) in index else leaf  # noqa: E731
    return jax.tree.map(swap, tree)


def restore(tree, known):
    """The inverse of `strip`, given the known arrays again."""
    leaves = jax.tree.leaves(known)
    is_known = lambda node: isinstance(node, _Known)  # noqa: E731
    back = lambda node: leaves[node.index] if is_known(node) else node  # noqa: E731
    return jax.tree.map(back, tree, is_leaf=is_known)


def forward(layer: Layer, weights, buffers, x, shared, remat: str):
    """Returns (y, aux, saved): one layer, and what its backward needs beside the known arrays."""
    if remat == "full":
        return *layer(weights, buffers, x, shared), x
    (y, aux), vjp = jax.vjp(lambda w, x: layer(w, buffers, x, shared), weights, x)
    return y, aux, strip(vjp, (weights, buffers, shared))


def backward(layer: Layer, weights, buffers, saved, shared, cotangents, remat: str):
    """Returns (d_weights, d_x) from what `forward` saved and the cotangents of (y, aux)."""
    if remat == "full":
        _, vjp = jax.vjp(lambda w, x: layer(w, buffers, x, shared), weights, saved)
    else:
        vjp = restore(saved, (weights, buffers, shared))
    return vjp(cotangents)


def scan_layers(
    layer: Layer,
    weights_of: Callable[[Any], Any],
    params,
    buffers,
    x,
    shared,
    *,
    remat: str = "none",
):
    """Returns (y, aux): x through every layer of stacked `params` and `buffers`, aux stacked.

    `layer(weights, buffers, x, shared) -> (y, aux)` is pure; aux is a tree of floats; x and params
    get gradients, buffers and shared do not. `weights_of(params)` turns one layer's stored
    parameters into the weights it uses. remat "full" saves x alone and computes the layer again.
    """

    @jax.custom_vjp
    def run(params, x, buffers, shared):
        step = lambda x, state: layer(weights_of(state[0]), state[1], x, shared)  # noqa: E731
        return lax.scan(step, x, (params, buffers))

    def run_forward(params, x, buffers, shared):
        def step(x, layer_state):
            p, b = layer_state
            y, aux, saved = forward(layer, weights_of(p), b, x, shared, remat)
            return y, (aux, saved)

        y, (aux, saved) = lax.scan(step, x, (params, buffers))
        return (y, aux), (params, buffers, shared, saved)

    def run_backward(kept, cotangents):
        params, buffers, shared, saved = kept
        dy, daux = cotangents

        def step(dy, layer_state):
            p, b, saved_l, daux_l = layer_state
            weights, pull = jax.vjp(weights_of, p)
            d_weights, dx = backward(layer, weights, b, saved_l, shared, (dy, daux_l), remat)
            return dx, pull(d_weights)[0]

        dx, d_params = lax.scan(step, dy, (params, buffers, saved, daux), reverse=True)
        return d_params, dx, None, None

    run.defvjp(run_forward, run_backward)
    return run(params, x, buffers, shared)
