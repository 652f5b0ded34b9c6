"""Everything that a run needs, made before its first step: where a user's mistakes come to light.

`prepare` raises ValueError or FileNotFoundError, one line each, before anything is compiled.
"""

import dataclasses
import json
import os
from pathlib import Path
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from moejax.convert import hf
from moejax.core import cluster, params
from moejax.core.mesh import Fold, ParallelConfig, make_mesh
from moejax.core.precision import PrecisionConfig
from moejax.data import (
    DataConfig,
    EvalBatches,
    Tokenizer,
    TrainBatches,
    eval_batches,
    load_tokenizer,
    train_batches,
)
from moejax.data.context import order_tokens
from moejax.model.transformer import ModelConfig, Transformer
from moejax.parallel.stages import pipeline_of
from moejax.train import replay
from moejax.train.checkpoint import CheckpointConfig, Checkpointer, load_weights
from moejax.train.metrics import LogConfig, measure_dense_matmul
from moejax.train.optimizer import OptimizerConfig, decay_mask, make_optimizer
from moejax.train.state import Layout, TrainState, init_state, plan_state
from moejax.train.step import TrainConfig, batch_spec, make_eval_step, make_train_step

Batch = dict[str, Any]


class Sections(Protocol):
    """What the loop reads of a configuration (`moejax.config.Config` is one)."""

    @property
    def model(self) -> ModelConfig: ...
    @property
    def parallel(self) -> ParallelConfig: ...
    @property
    def precision(self) -> PrecisionConfig: ...
    @property
    def data(self) -> DataConfig: ...
    @property
    def train(self) -> TrainConfig: ...
    @property
    def optimizer(self) -> OptimizerConfig: ...
    @property
    def init(self) -> Any: ...
    @property
    def checkpoint(self) -> CheckpointConfig: ...
    @property
    def log(self) -> LogConfig: ...
    @property
    def run_dir(self) -> Path:
        """The folder of the run."""
        ...

    def fold_over(self, num_devices: int) -> Fold:
        """The fold, the batch checked against it."""
        ...


@dataclasses.dataclass
class Run:
    """A prepared run."""

    config: Sections
    precision: PrecisionConfig
    layout: Layout
    worst_case: Layout
    """`layout` without a budget: for evaluation, and for steps that overflowed."""
    tokenizer: Tokenizer
    batches: TrainBatches
    evals: dict[str, EvalBatches]
    checkpointer: Checkpointer
    state: TrainState
    start_step: int
    part: tuple[int, int]
    """Of each microbatch's rows this process has part `part[0]` of `part[1]`."""
    train_step: jax.stages.Wrapped
    again_step: jax.stages.Wrapped
    """The step for a batch that overflowed its budget."""
    eval_step: jax.stages.Wrapped
    matmul_rate: float
    """Dense-matmul FLOP/s of the compute dtype, measured here, of all devices together."""

    def put(self, batch: Batch) -> Batch:
        """Returns this process's rows [rows, L] as global arrays [microbatches, rows, L], with the
        "order" in which cp ranks have their tokens."""
        made = {}
        if self.layout.fold["cp"]:
            fold = self.layout.fold
            order = order_tokens(batch["segment_ids"], fold.degree("cp"), fold.groups)
            batch = batch | {"order": order}
        for name, rows in self.abstract_batch().items():
            if name == "routing" and name not in batch:
                continue  # of an evaluation, where routers choose
            local = batch[name].reshape(rows.shape[0], -1, *rows.shape[2:])
            made[name] = jax.make_array_from_process_local_data(rows.sharding, local, rows.shape)
        return made

    def replayed(self, number: int) -> Batch:
        """Returns {"routing": this process's rows [rows, L, layers, K]} of a training step that is
        replayed; {} where routers choose."""
        router = self.config.model.moe.router
        if not router.replay:
            return {}
        micro, rows, *rest = self.abstract_batch()["routing"].shape
        shape = (micro * rows, *rest)
        experts = replay.load(router.replay, number, shape, self.config.model.moe.num_experts)
        return {"routing": replay.part_of(experts, micro, self.part)}

    def abstract_batch(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns the shapes of a batch, and how it lies on the mesh."""
        return abstract_batch(self.config, self.layout)

    def save(self, step: int) -> None:
        """Starts saving the state after a step."""
        self.checkpointer.save(step, self.layout.in_order(self.state), self.position())

    def position(self) -> dict:
        """Returns what a checkpoint holds beside the state."""
        return {
            "data": self.batches.state(),
            "compute_dtype": self.precision.compute_dtype,
            "config": dataclasses.asdict(self.config),  # type: ignore[bad-argument-type]
        }


@dataclasses.dataclass(frozen=True)
class Steps:
    """The programs of a run, and what they were made of; no array is made, nothing is compiled."""

    optimizer: optax.GradientTransformation
    layout: Layout
    worst_case: Layout
    """`layout` without a budget."""
    train_step: jax.stages.Wrapped
    again_step: jax.stages.Wrapped
    """The step for a batch that overflowed its budget, over `worst_case`."""


def make_steps(config: Sections, fold: Fold, mesh: Mesh, precision: PrecisionConfig) -> Steps:
    """Returns the train steps of a run on a mesh, be its devices here or only described.

    Raises ValueError when a dim does not divide over its degree.
    """
    steps, zero = config.train.steps, config.parallel.zero
    pipeline = pipeline_of(config.parallel, config.model)
    model = nnx.eval_shape(lambda: Transformer(config.model, rngs=nnx.Rngs(0)))
    mask = decay_mask(params.dims_of(model)[0])
    optimizer = make_optimizer(config.optimizer, steps, mask)
    layout, worst_case = (
        plan_state(cfg, optimizer, fold, mesh, zero, precision, pipeline)
        for cfg in (config.model, config.model.worst_case())
    )
    step, again_step = (
        make_train_step(
            config.model, config.optimizer, optimizer, plan, precision, steps,
            loss_mean=config.train.loss_mean, mtp_coeff=config.train.mtp_coeff, worst_case=again,
        )
        for plan, again in ((layout, False), (worst_case, True))
    )
    return Steps(optimizer, layout, worst_case, step, again_step)


def abstract_batch(config: Sections, layout: Layout) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the shapes of a batch, and how it lies on the mesh."""
    train, model = config.train, config.model
    shape = (train.microbatches, train.batch_size // train.microbatches, train.sequence_length)
    sharding = NamedSharding(layout.mesh, batch_spec(layout))
    rows = jax.ShapeDtypeStruct(shape, np.int32, sharding=sharding)
    made = dict.fromkeys(("tokens", "targets", "segment_ids", "positions"), rows)
    if layout.fold["cp"]:
        made["order"] = rows
    if model.moe.router.replay:
        more = (model.all_kinds().count("M"), model.moe.top_k)
        made["routing"] = jax.ShapeDtypeStruct((*shape, *more), np.int32, sharding=sharding)
    return made


def cache_dir(config: Sections) -> Path:
    """Returns the cache folder beside the run folders."""
    return config.run_dir.parent / "cache"


def resolve_precision(precision: PrecisionConfig, saved: str | None) -> PrecisionConfig:
    """Returns the precision with compute_dtype "auto" settled: what a resumed run used, else
    bfloat16 where this machine multiplies it at least 1.3 times as fast as float32."""
    if precision.compute_dtype != "auto":
        return precision
    if saved is None:
        rates = {
            name: measure_dense_matmul(jnp.dtype(name), size=1024, seconds=0.3)
            for name in ("float32", "bfloat16")
        }
        fast = cluster.of_first(rates["bfloat16"] > 1.3 * rates["float32"])
        saved = "bfloat16" if fast else "float32"
    return dataclasses.replace(precision, compute_dtype=saved)


def load_data(
    config: Sections, part: tuple[int, int] = (0, 1)
) -> tuple[Tokenizer, TrainBatches, dict[str, EvalBatches]]:
    """Returns tokenizer, training batches and evaluation sets; tokenises what is not cached.

    Of each microbatch's rows this process gets part `part[0]` of `part[1]`.
    """
    data, train, folder = config.data, config.train, cache_dir(config)
    tokenizer = load_tokenizer(data, folder)
    tokenizer.check_vocab_size(config.model.vocab_size)
    shape: dict[str, Any] = dict(
        batch_size=train.batch_size, length=train.sequence_length, cache_dir=folder,
        microbatches=train.microbatches, process_index=part[0], process_count=part[1],
    )  # fmt: skip
    batches = train_batches(data, tokenizer, seed=config.init.seed, **shape)
    evals = {
        name: eval_batches(data, tokenizer, name, max_batches=train.eval_batches, **shape)
        for name in data.eval_sources
    }
    return tokenizer, batches, evals


def prepare(config: Sections) -> Run:
    """Returns a run ready for its first, or its next, step."""
    if config.init.from_hf:
        hf.check_same(config.init.from_hf, config.model)
    fold = config.fold_over(len(jax.devices()))
    mesh = make_mesh(fold)
    rows = NamedSharding(mesh, PartitionSpec(fold["dp"] or None))
    part = cluster.share_of(rows, config.train.batch_size // config.train.microbatches)
    with cluster.first_goes_first("data"):
        tokenizer, batches, evals = load_data(config, part)
    config.run_dir.mkdir(parents=True, exist_ok=True)
    use_compilation_cache(cache_dir(config) / "xla")
    checkpointer = Checkpointer(config.run_dir, config.checkpoint)
    saved = checkpointer.latest_extra()
    precision = resolve_precision(config.precision, saved.get("compute_dtype"))
    steps = make_steps(config, fold, mesh, precision)
    layout = steps.layout
    state, start = _first_state(config, steps.optimizer, layout, precision, checkpointer)
    if saved:
        batches.restore(saved["data"])
    # Devices simulated on a CPU share its cores, so that one product takes them all.
    devices = jax.process_count() if jax.default_backend() == "cpu" else mesh.devices.size
    rate = devices * measure_dense_matmul(precision.dtype("compute"), seconds=0.5)
    run = Run(
        config, precision, layout, steps.worst_case, tokenizer, batches, evals, checkpointer, state,
        start, part, steps.train_step, steps.again_step, make_eval_step(steps.worst_case), rate,
    )  # fmt: skip
    if start < config.train.steps:
        run.replayed(start + 1)  # what is wrong with the files shows here
    return run


def _first_state(config, optimizer, layout: Layout, precision, checkpointer: Checkpointer):
    """Returns (state, step): resumed, or fresh with random or another run's weights."""
    target = layout.ordered
    if checkpointer.latest_step() is not None:
        state, _ = checkpointer.restore(target)
        return layout.at_rest(state), int(state.step)
    state = init_state(config.model, optimizer, layout, precision, config.init.seed)
    if not (config.init.from_hf or config.init.from_run):
        return state, 0
    if config.init.from_hf:
        weights, buffers = hf.load(
            config.init.from_hf, config.model, (target.params, target.buffers)
        )
    else:
        weights, buffers = (
            load_weights(config.init.from_run, getattr(target, part), subtree=part)
            for part in ("params", "buffers")
        )
    state = dataclasses.replace(layout.in_order(state), params=weights, buffers=buffers)
    return layout.at_rest(state), 0


def use_compilation_cache(folder: Path) -> None:
    """Keeps compiled programs in `folder`, so that a resumed run starts at once."""
    jax.config.update("jax_compilation_cache_dir", str(folder.resolve()))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 1.0)


def write_json(path: Path, values: dict) -> None:
    """Writes a JSON file in one piece."""
    new = path.with_suffix(".new")
    new.write_text(json.dumps(values, indent=1, default=str))
    os.replace(new, path)


def device_line(mesh: Mesh) -> str:
    """Returns what the mesh is made of, e.g. "8 x cpu"."""
    device = mesh.devices.flat[0]
    return f"{mesh.devices.size} x {device.device_kind}"
