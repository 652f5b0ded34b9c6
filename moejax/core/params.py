"""Parameters, declared once, by the flax (NNX) module that owns them: value and logical dims.

A module is built with global shapes. `partition` takes it apart into a static definition and two
nested dicts of arrays, *parameters* (trained) and *buffers* (kept, not trained: the router bias);
`assemble` puts arrays of any local shape back. The dims name what each array dimension is;
`sharding.py` maps them to mesh axes.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from moejax.core.precision import PrecisionConfig, at_least_float32

Tree = dict
Dims = tuple[str, ...]


class Buffer(nnx.Variable):
    """State that a module keeps but no gradient reaches, e.g. the aux-loss-free router bias."""


def normal(
    rngs: nnx.Rngs, shape: tuple[int, ...], dims: Dims, std: float, precision: PrecisionConfig
) -> nnx.Param:
    """Returns a parameter drawn from N(0, std^2), in the parameter dtype."""
    dtype = precision.dtype("param")
    value = jax.random.normal(rngs.params(), shape, at_least_float32(dtype))
    return nnx.Param((value * std).astype(dtype), dims=dims)


def constant(
    shape: tuple[int, ...], dims: Dims, value: float, precision: PrecisionConfig
) -> nnx.Param:
    """Returns a parameter filled with `value`."""
    return nnx.Param(jnp.full(shape, value, precision.dtype("param")), dims=dims)


def padded(param: nnx.Param, dim: str, size: int) -> nnx.Param:
    """Returns the parameter with zeros after its last entries along `dim`, up to `size`."""
    value, dims = param[...], param.get_metadata()["dims"]
    widths = [(0, size - n if d == dim else 0) for d, n in zip(dims, value.shape, strict=True)]
    return nnx.Param(jnp.pad(value, widths), dims=dims)


def buffer(shape: tuple[int, ...], dims: Dims, dtype: jnp.dtype) -> Buffer:
    """Returns a buffer of zeros."""
    return Buffer(jnp.zeros(shape, dtype), dims=dims)


def partition(module: nnx.Module) -> tuple[nnx.GraphDef, Tree, Tree]:
    """Returns (definition, parameters, buffers) of a module: nested dicts of its arrays."""
    definition, params, buffers = nnx.split(module, nnx.Param, Buffer)
    return definition, nnx.to_pure_dict(params), nnx.to_pure_dict(buffers)


def assemble(definition: nnx.GraphDef, params: Tree, buffers: Tree) -> nnx.Module:
    """Returns the module made of `partition`'s pieces; the arrays may be local shards."""
    return nnx.merge(definition, params, buffers)


def dims_of(module: nnx.Module) -> tuple[Tree, Tree]:
    """Returns the logical dims of (parameters, buffers): the dicts of `partition`, of tuples."""

    def dims(state):
        named = {path: var.get_metadata()["dims"] for path, var in nnx.to_flat_state(state)}
        return nnx.traversals.unflatten_mapping(named)

    _, params, buffers = nnx.split(module, nnx.Param, Buffer)
    return dims(params), dims(buffers)


def stack(make, count: int, rngs: nnx.Rngs, places: tuple[int, ...] = ()) -> nnx.Module:
    """Returns `count` modules `make(rngs)` as one whose arrays have a leading dim "layer".

    `places`: which of them is in each slot of the parameters' leading dim, -1 for zeros; empty:
    each in its own. Buffers are in order.
    """

    def draw(key):
        return nnx.state(make(nnx.Rngs(key)))

    def placed(variable):
        value = variable[...]
        if not places or not isinstance(variable, nnx.Param):
            return value
        place = jnp.asarray(places).reshape(-1, *(1,) * (value.ndim - 1))
        return jnp.where(place >= 0, value[jnp.asarray(places)], 0)

    definition = nnx.graphdef(nnx.eval_shape(lambda: make(nnx.Rngs(0))))
    state = jax.vmap(draw)(jax.random.split(rngs.params(), count))
    for _, variable in nnx.to_flat_state(state):
        variable.set_value(placed(variable))
        variable.set_metadata(dims=("layer", *variable.get_metadata()["dims"]))
    return nnx.merge(definition, state)


def merge_glu(w: Float[Array, "... D two F"], dims: Dims | None = None) -> Float[Array, "..."]:
    """Returns a gate-and-up weight [..., D, 2, F] as one matrix [..., D, 2F] (gate first).

    A weight that is merged already is returned as it is. With `dims`, other weights are too.
    """
    if dims is not None and "glu" not in dims:
        return w
    at = dims.index("glu") if dims is not None else w.ndim - 2
    return w.reshape(*w.shape[:at], w.shape[at] * w.shape[at + 1], *w.shape[at + 2 :])


def count(params: Tree) -> int:
    """Returns the number of parameters in a tree of arrays or abstract arrays."""
    return sum(leaf.size for leaf in jax.tree.leaves(params))
