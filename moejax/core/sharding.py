"""Two tables map logical dims to roles: how a layer uses a weight, and how it rests.

`COMPUTE` is what a layer sees. `STORE` is how parameters and optimizer state rest. ZeRO is the
difference between the two: stage 0 has none; stage 1 gathers from STORE to COMPUTE once a step;
stage 3 for each layer (`model.prefetch`). The transpose of either gather is the reduce-scatter of
the gradient, and the experts have a data-parallel role of their own (`edp`).
"""

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from moejax.core import collectives
from moejax.core.mesh import Fold
from moejax.core.params import Dims, Tree, merge_glu
from moejax.core.precision import PrecisionConfig

Table = dict[str, str]

COMPUTE: Table = {
    "layer": "pp",
    "vocab": "vocab",
    "heads": "tp",
    "kv_heads": "tp",
    "ffn": "tp",
    "expert": "ep",
    "expert_ffn": "etp",
}
SHARDED: Table = COMPUTE | {"embed": "dp", "rank": "dp", "expert_embed": "edp"}


def store_table(zero: int) -> Table:
    """Returns the STORE table of a ZeRO stage."""
    return SHARDED if zero else COMPUTE


def axes_of(dims: Dims, table: Table, fold: Fold) -> tuple[tuple[str, ...], ...]:
    """Returns the mesh axes over which each dim is split."""
    return tuple(fold[table[dim]] if dim in table else () for dim in dims)


def spec(dims: Dims, table: Table, fold: Fold) -> P:
    """Returns the PartitionSpec of an array with these dims."""
    return P(*(axes or None for axes in axes_of(dims, table, fold)))


def is_dims(node) -> bool:
    """Whether a node of a dims tree is a leaf: a tuple of names."""
    return isinstance(node, tuple)


def specs(dims_tree: Tree, table: Table, fold: Fold) -> Tree:
    """Returns the PartitionSpecs of a tree of dims."""
    return jax.tree.map(lambda dims: spec(dims, table, fold), dims_tree, is_leaf=is_dims)


def shardings(spec_tree, mesh: Mesh):
    """Returns the NamedShardings of a tree of PartitionSpecs."""
    is_spec = lambda node: isinstance(node, P)  # noqa: E731
    return jax.tree.map(lambda s: NamedSharding(mesh, s), spec_tree, is_leaf=is_spec)


def check_divides(abstract: Tree, dims_tree: Tree, table: Table, fold: Fold) -> None:
    """Raises ValueError, naming parameter, dim and degree, where a dim does not divide."""

    def check(path, leaf, dims):
        if len(dims) != leaf.ndim:
            raise ValueError(f"{jax.tree_util.keystr(path)}: dims {dims} for shape {leaf.shape}")
        for dim, size in zip(dims, leaf.shape, strict=True):
            degree = fold.degree(table[dim]) if dim in table else 1
            if size % degree:
                raise ValueError(
                    f"{jax.tree_util.keystr(path)}: {dim}={size} does not divide over "
                    f"{table[dim]}={degree}; choose a degree of {table[dim]} that divides {size}"
                )

    jax.tree_util.tree_map_with_path(check, abstract, dims_tree)


def used_dtype(stored: jnp.dtype, dims: Dims, precision: PrecisionConfig) -> jnp.dtype:
    """Returns the dtype in which a layer uses a weight: that of matmuls, or, of a router and of
    what scales channels, the stored one."""
    return precision.dtype("compute") if len(dims) > 1 and "router" not in dims else stored


def to_compute(
    params: Tree, dims_tree: Tree, fold: Fold, zero: int, precision: PrecisionConfig
) -> Tree:
    """Returns the weights as a layer uses them: cast to the compute dtype, gathered from STORE,
    gate-and-up weights merged. Per-channel scales keep their dtype (norms compute in float32).

    Called outside the differentiated layer, so no gathered or cast copy is saved for it. The
    gradients are reduced in the dtype of the parameters.
    """

    def one(w, dims):
        dtype = used_dtype(w.dtype, dims, precision)
        return merge_glu(gathered_as(w, dtype, dims, fold, zero), dims)

    return jax.tree.map(one, params, dims_tree)


def gathered(w: jax.Array, dims: Dims, fold: Fold, zero: int) -> jax.Array:
    """Returns a parameter gathered from its STORE shard to its COMPUTE shard."""
    for at, (rest, used) in enumerate(
        zip(
            axes_of(dims, store_table(zero), fold),
            axes_of(dims, COMPUTE, fold),
            strict=True,
        )
    ):
        w = w if rest == used else collectives.all_gather(w, rest, dim=at)
    return w


def gathered_as(w: jax.Array, dtype, dims: Dims, fold: Fold, zero: int) -> jax.Array:
    """Returns a parameter cast to `dtype`, then gathered: few bytes travel. Its gradient is cast
    back before it is reduced, so that the sum over devices rounds nothing away."""

    @jax.custom_vjp
    def run(w):
        return gathered(w.astype(dtype), dims, fold, zero)

    def pull(w, d_gathered):
        _, reduce = jax.vjp(lambda w: gathered(w, dims, fold, zero), w)
        return reduce(d_gathered.astype(w.dtype))

    run.defvjp(lambda w: (run(w), w), pull)
    return run(w)
