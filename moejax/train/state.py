"""The state of a training run, how it is made, and how it rests on the mesh."""

import dataclasses
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from moejax.core import params as parameters
from moejax.core import sharding
from moejax.core.mesh import Fold
from moejax.core.params import Tree
from moejax.core.precision import PrecisionConfig
from moejax.model.transformer import ModelConfig, Transformer
from moejax.parallel.stages import Pipeline, in_slots, in_units
from moejax.train.optimizer import map_like_params


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """Everything that a step changes, and all that a checkpoint holds."""

    step: Any
    """int32. Batches seen, skipped ones too."""
    params: Tree
    buffers: Tree
    opt_state: Any
    num_skipped: Any
    """int32. Steps whose loss or gradients were not finite, and changed nothing."""
    overflowed: Any
    """bool. A step before this one exceeded its budget (`MoEConfig.budget`): until it has been run
    again, with room for the worst case, no step changes anything."""
    key: Any
    """The run's random key (typed)."""


@dataclasses.dataclass(frozen=True)
class Layout:
    """The model without its arrays, and where each array rests: made once, before any compile."""

    definition: nnx.GraphDef
    dims: Tree
    """Logical dims of each parameter."""
    abstract: TrainState
    """Shapes and dtypes."""
    specs: TrainState
    """PartitionSpecs of the resting state (STORE)."""
    fold: Fold
    zero: int
    mesh: Mesh
    pipeline: Pipeline | None = None
    """Stages and their schedule; None: every device has every layer."""

    def model(self, weights: Tree, buffers: Tree) -> Transformer:
        """Returns the model made of arrays that the layers use: this device's shards."""
        model = parameters.assemble(self.definition, weights, buffers)
        assert isinstance(model, Transformer)
        return model

    @property
    def shardings(self) -> TrainState:
        """NamedShardings of the resting state."""
        return sharding.shardings(self.specs, self.mesh)

    @property
    def resting(self) -> TrainState:
        """Shapes, dtypes and shardings of the resting state."""
        return jax.tree.map(
            lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s),
            self.abstract, self.shardings,
        )  # fmt: skip

    @property
    def ordered(self) -> TrainState:
        """`resting`, with the layers in order: as checkpoints and other runs' weights have them.

        They lie over pp where it divides a stack, else each of its ranks has all.
        """
        if self._stages is None:
            return self.resting
        change = partial(in_units, self._stages)
        parts = jax.eval_shape(change, (self.abstract.params, self.abstract.opt_state))
        abstract = dataclasses.replace(self.abstract, params=parts[0], opt_state=parts[1])

        def over_pp(a, s):
            split = s.spec and s.spec[0] in (self.fold["pp"], *self.fold["pp"])
            uneven = split and a.shape[0] % self.fold.degree("pp")
            spec = P(None, *s.spec[1:]) if uneven else s.spec
            sharding = jax.sharding.NamedSharding(self.mesh, spec)
            return jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding)

        return jax.tree.map(over_pp, abstract, self.shardings)

    def in_order(self, state: TrainState) -> TrainState:
        """Returns a state that rests with its layers in order: see `ordered`."""
        return self._rearranged(state, self._to_order) if self._stages else state

    def at_rest(self, state: TrainState) -> TrainState:
        """The inverse of `in_order`."""
        return self._rearranged(state, self._to_rest) if self._stages else state

    @property
    def _stages(self) -> Pipeline | None:
        """The pipeline whose ranks have some layers each; None: one alone has all, in order."""
        return self.pipeline if self.fold.degree("pp") > 1 else None

    @cached_property
    def _to_order(self) -> jax.stages.Wrapped:
        return self._rearranging(in_units, self.ordered)

    @cached_property
    def _to_rest(self) -> jax.stages.Wrapped:
        return self._rearranging(in_slots, self.resting)

    def _rearranging(self, change, target: TrainState) -> jax.stages.Wrapped:
        where = jax.tree.map(lambda a: a.sharding, (target.params, target.opt_state))
        return jax.jit(partial(change, self._stages), out_shardings=where)

    @staticmethod
    def _rearranged(state: TrainState, move: jax.stages.Wrapped) -> TrainState:
        weights, opt_state = move((state.params, state.opt_state))
        return dataclasses.replace(state, params=weights, opt_state=opt_state)

    def shard_axes(self) -> Tree:
        """Returns, for each parameter, the mesh axes over which it is split at rest."""
        table = sharding.store_table(self.zero)

        def axes(dims):
            return sum(sharding.axes_of(dims, table, self.fold), ())

        return jax.tree.map(axes, self.dims, is_leaf=sharding.is_dims)


def _build(cfg: ModelConfig, fold: Fold, zero: int, precision: PrecisionConfig, pipeline, seed):
    rngs, places = nnx.Rngs(params=seed), pipeline.slots if pipeline else ()
    return Transformer(cfg, fold=fold, precision=precision, zero=zero, places=places, rngs=rngs)


def plan_state(
    cfg: ModelConfig,
    optimizer: optax.GradientTransformation,
    fold: Fold,
    mesh: Mesh,
    zero: int,
    precision: PrecisionConfig,
    pipeline: Pipeline | None = None,
) -> Layout:
    """Returns the Layout of a model on a mesh; no array is made.

    Raises ValueError when a dim does not divide over its degree.
    """
    model = nnx.eval_shape(lambda: _build(cfg, fold, zero, precision, pipeline, 0))
    definition, params, buffers = parameters.partition(model)
    dims, buffer_dims = parameters.dims_of(model)
    table = sharding.store_table(zero)
    sharding.check_divides(params, dims, table, fold)
    abstract = TrainState(
        step=jax.ShapeDtypeStruct((), jnp.int32),
        params=params,
        buffers=buffers,
        opt_state=jax.eval_shape(optimizer.init, params),
        num_skipped=jax.ShapeDtypeStruct((), jnp.int32),
        overflowed=jax.ShapeDtypeStruct((), jnp.bool_),
        key=jax.eval_shape(lambda: jax.random.key(0)),
    )
    param_specs = sharding.specs(dims, table, fold)
    specs = TrainState(
        step=P(),
        params=param_specs,
        buffers=jax.tree.map(lambda _: P(), buffer_dims, is_leaf=sharding.is_dims),
        opt_state=map_like_params(abstract.opt_state, param_specs, P()),
        num_skipped=P(),
        overflowed=P(),
        key=P(),
    )
    return Layout(definition, dims, abstract, specs, fold, zero, mesh, pipeline)


def init_state(
    cfg: ModelConfig,
    optimizer: optax.GradientTransformation,
    layout: Layout,
    precision: PrecisionConfig,
    seed: int,
) -> TrainState:
    """Returns the state at step 0, made where it rests. The values depend on the seed alone."""

    def make(seed):
        model = _build(cfg, layout.fold, layout.zero, precision, layout.pipeline, seed)
        _, params, buffers = parameters.partition(model)
        zero, no = jnp.zeros((), jnp.int32), jnp.zeros((), jnp.bool_)
        return TrainState(
            zero, params, buffers, optimizer.init(params), zero, no, jax.random.key(seed)
        )

    return jax.jit(make, static_argnums=0, out_shardings=layout.shardings)(seed)
