"""What rests on a GPU between steps, in closed form: weights, optimizer state and batch.

The model's global shapes are made once (no array is); a fold then only divides them, so that a
search weighs thousands of folds in a second.
"""

import dataclasses
from functools import lru_cache
from math import prod

import jax
import jax.numpy as jnp
from flax import nnx

from moejax.config import Config
from moejax.core import params, sharding
from moejax.core.mesh import Fold
from moejax.core.precision import PrecisionConfig
from moejax.model.transformer import ModelConfig, Transformer

BATCH_ARRAYS = 4  # tokens, targets, segment ids, positions: int32


@dataclasses.dataclass(frozen=True)
class Weight:
    """One parameter: global shape, dims, and bytes of an element at rest."""

    path: str
    shape: tuple[int, ...]
    dims: tuple[str, ...]
    itemsize: int

    def elements(self, table: sharding.Table, fold: Fold) -> float:
        """Returns the elements that one GPU holds where dims are split as the table says."""
        return prod(self.shape) / prod(fold.degree(table[d]) for d in self.dims if d in table)

    @property
    def stacked(self) -> bool:
        """Whether it is one layer's of many."""
        return self.dims[0] == "layer"

    @property
    def gather_dim(self) -> str | None:
        """The dim over which ZeRO splits it; None: it is replicated."""
        found = [d for d in self.dims if d in sharding.SHARDED and d not in sharding.COMPUTE]
        return found[0] if found else None


@lru_cache(maxsize=64)
def _made(model: ModelConfig, precision: PrecisionConfig) -> tuple[tuple[Weight, ...], float]:
    module = nnx.eval_shape(lambda: Transformer(model, precision=precision, rngs=nnx.Rngs(0)))
    _, leaves, buffers = params.partition(module)
    dims = jax.tree.leaves(params.dims_of(module)[0], is_leaf=sharding.is_dims)
    flat, _ = jax.tree_util.tree_flatten_with_path(leaves)
    found = tuple(
        Weight(jax.tree_util.keystr(path), leaf.shape, d, leaf.dtype.itemsize)
        for (path, leaf), d in zip(flat, dims, strict=True)
    )
    held = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(buffers))
    return found, float(held)


def _plain(model: ModelConfig) -> ModelConfig:
    """The model without what changes no parameter's shape, so that folds share one entry."""
    return dataclasses.replace(model, remat="none").worst_case()


def weights(config: Config) -> tuple[Weight, ...]:
    """Returns every parameter of the model, with its global shape."""
    return _made(_plain(config.model), config.precision)[0]


def check_divides(config: Config, fold: Fold) -> None:
    """Raises ValueError, naming parameter, dim and degree, where a dim does not divide."""
    table = sharding.store_table(config.parallel.zero)
    for weight in weights(config):
        for dim, size in zip(weight.dims, weight.shape, strict=True):
            degree = fold.degree(table[dim]) if dim in table else 1
            if size % degree:
                raise ValueError(
                    f"{weight.path}: {dim}={size} does not divide over {table[dim]}={degree}"
                )


def resting(config: Config, fold: Fold) -> dict[str, float]:
    """Returns bytes per GPU of what a step is given: weights, optimizer state, and batch with the
    buffers (router bias, load). Exact, but for a few scalars.

    AdamW keeps two moments, in at least float32.
    """
    table = sharding.store_table(config.parallel.zero)
    made = weights(config)
    held = [(w, w.elements(table, fold)) for w in made]
    moment = max(4, config.precision.dtype("param").itemsize)
    train = config.train
    tokens = train.batch_size * train.sequence_length / fold.degree("dp")
    batch = BATCH_ARRAYS * jnp.dtype("int32").itemsize * tokens
    return {
        "weights": sum(n * w.itemsize for w, n in held),
        "optimizer state": sum(2 * moment * n for _, n in held),
        "batch and buffers": batch + _made(_plain(config.model), config.precision)[1],
    }
