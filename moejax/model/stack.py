"""A scan over equal layers whose backward is ours: weights are prepared outside the layer.

Differentiating a layer that gathers and casts its weights would save the gathered (or bf16) copy
for every layer and microbatch. Here `weights_of` (gather and cast) runs outside the differentiated
layer, forward and again backward; `jax.vjp` gives the layer's residuals, and those that *are*
weights or shared inputs, recognised by identity, are not saved again. The same split of a layer
into `forward` (output and what it saved) and `backward` is what a pipeline schedule plays.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

Layer = Callable[..., tuple[Any, Any, Any]]
REMAT = ("none", "selective", "full")
TRAVELLED, LOGITS = "travelled", "logits"
"""Names of what "selective" saves: rows that came from other devices, with the way back, and the
router's logits, so that a layer computed again sends nothing and chooses the same experts."""


def travelled(tree):
    """Returns what came from other devices, or says the way back, named so that it is saved."""
    return jax.tree.map(partial(checkpoint_name, name=TRAVELLED), tree)


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


def _split(layer: Layer, buffers, shared, choices=None):
    """Returns (weights, x) -> ((y, aux), choices)."""

    def split(weights, x):
        y, aux, made = layer(weights, buffers, x, shared, choices)
        return (y, aux), made

    return split


def forward(layer: Layer, weights, buffers, x, shared, remat: str):
    """Returns (y, aux, choices, saved): one layer, and what its backward needs beside the known
    arrays."""
    run = _split(layer, buffers, shared)
    if remat == "full":
        (y, aux), choices = run(weights, x)
        return y, aux, choices, (x, choices)
    if remat == "selective":
        saves = jax.checkpoint_policies.save_only_these_names(TRAVELLED, LOGITS)
        run = jax.checkpoint(run, policy=saves, prevent_cse=False)
    (y, aux), vjp, choices = jax.vjp(run, weights, x, has_aux=True)
    return y, aux, choices, strip(vjp, (weights, buffers, shared))


def backward(layer: Layer, weights, buffers, saved, shared, cotangents, remat: str):
    """Returns (d_weights, d_x) from what `forward` saved and the cotangents of (y, aux)."""
    if remat == "full":
        x, choices = saved
        _, vjp, _ = jax.vjp(_split(layer, buffers, shared, choices), weights, x, has_aux=True)
    else:
        vjp = restore(saved, (weights, buffers, shared))
    return vjp(cotangents)


def scan_layers(
    layer: Layer, weights_of: Callable[[Any], Any], params, buffers, x, shared, *,
    remat: str = "none", sums=None,
):  # fmt: skip
    """Returns (y, aux, choices): x through every layer of stacked `params` and `buffers`, aux and
    choices stacked.

    `layer(weights, buffers, x, shared, choices) -> (y, aux, choices)` is pure; its choices are None
    the first time. aux is a tree of floats; x and params get gradients, buffers, shared and choices
    do not. `weights_of(params)` turns one layer's stored parameters into the weights it uses. remat
    "full" saves x and choices alone and computes the layer again, "selective" beside x what has one
    of the names above.

    `sums`: gradients of the microbatches before, of the first of a pair of `params`, which then
    gets none. The "gradient" of the sums is the sums with this one's, added in their place.
    """

    @jax.custom_vjp
    def run(params, x, buffers, shared, sums):
        def step(x, layer_state):
            y, aux, choices = layer(weights_of(layer_state[0]), layer_state[1], x, shared, None)
            return y, (aux, choices)

        y, (aux, choices) = lax.scan(step, x, (params, buffers))
        return y, aux, choices

    def run_forward(params, x, buffers, shared, sums):
        def step(x, layer_state):
            p, b = layer_state
            y, *rest = forward(layer, weights_of(p), b, x, shared, remat)
            return y, tuple(rest)

        y, (aux, choices, saved) = lax.scan(step, x, (params, buffers))
        return (y, aux, choices), (params, buffers, shared, sums, saved)

    def run_backward(kept, cotangents):
        params, buffers, shared, sums, saved = kept
        dy, daux, _ = cotangents

        def step(carry, layer_state):
            dy, sums = carry
            nth, p, b, saved_l, daux_l = layer_state
            weights, pull = jax.vjp(weights_of, p)
            d_weights, dx = backward(layer, weights, b, saved_l, shared, (dy, daux_l), remat)
            (d_params,) = pull(d_weights)
            if sums is not None:
                sums = jax.tree.map(partial(add_to, nth), sums, d_params[0])
                d_params = d_params[1]
            return (dx, sums), d_params

        nth_L = jnp.arange(len(jax.tree.leaves(params)[0]), dtype=jnp.int32)
        layers = (nth_L, params, buffers, saved, daux)
        (dx, sums), d_params = lax.scan(step, (dy, sums), layers, reverse=True)
        return d_params if sums is None else (None, d_params), dx, None, None, sums

    run.defvjp(run_forward, run_backward)
    return run(params, x, buffers, shared, sums)


def add_to(nth, sum_L, d):
    """Returns stacked sums with d added to the nth, in its place."""
    new = lax.dynamic_index_in_dim(sum_L, nth, keepdims=False) + d.astype(sum_L.dtype)
    return lax.dynamic_update_index_in_dim(sum_L, new, nth, 0)
