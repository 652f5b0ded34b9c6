"""Checkpoints of a run: saved asynchronously by orbax, restored onto any mesh.

    checkpointer = Checkpointer(run_dir, CheckpointConfig())
    state, extra = checkpointer.restore(abstract_state)     # shapes, dtypes, target shardings
    checkpointer.save(step, state, {"data": ..., "config": ...})
    params = load_weights(other_run_dir, abstract_params)   # warm start: the weights alone

A checkpoint is a folder `checkpoints/<step>/` with `state` (each leaf of the state under its path,
such as "params.layers.w_in", so no Python class is needed to read it) and `extra` (JSON). It is
written under another name and renamed when complete, so a process killed in between leaves the
last complete one as the latest. Typed PRNG keys are stored as their raw data.

Every process of a run makes the same calls at the same steps; orbax does the barriers.
"""

import json
import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from jaxtyping import PyTree
from orbax.checkpoint.checkpoint_managers import (
    AnyPreservationPolicy,
    EveryNSteps,
    LatestN,
)

type Abstract = PyTree[jax.ShapeDtypeStruct | jax.Array]

FOLDER = "checkpoints"
STACKED = re.compile(r"\bstack_\d+\.")
"""In the path of an array whose first dim is the layer."""


@dataclass(frozen=True)
class CheckpointConfig:
    """When the run is saved and which checkpoints are kept. They lie in run_dir/checkpoints."""

    save_every: int = 200
    """Steps between two checkpoints; one is also saved at the end and on SIGTERM."""
    keep_last: int = 2
    """How many of the newest checkpoints are kept."""
    keep_every: int = 0
    """Checkpoints at multiples of this step are kept for ever; 0 keeps none so."""
    asynchronous: bool = True
    """Write in the background while training goes on; False waits until it is on disk."""

    def __post_init__(self) -> None:
        for name, least in (("save_every", 1), ("keep_last", 1), ("keep_every", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} {getattr(self, name)} must be {least} or more")


class Checkpointer:
    """Saves and restores the state of one run. One per run folder: it deletes half-written ones."""

    def __init__(self, run_dir: Path | str, cfg: CheckpointConfig) -> None:
        _silence_orbax()
        self.cfg = cfg
        self.directory = Path(run_dir).resolve() / FOLDER
        keep = [LatestN(cfg.keep_last)]
        keep += [EveryNSteps(cfg.keep_every)] if cfg.keep_every else []
        options = ocp.CheckpointManagerOptions(
            preservation_policy=AnyPreservationPolicy(keep),
            enable_async_checkpointing=cfg.asynchronous,
            cleanup_tmp_directories=True,
        )
        self._manager = ocp.CheckpointManager(
            self.directory, options=options, handler_registry=_handlers()
        )

    def should_save(self, step: int) -> bool:
        """Whether `step` is one of the regular ones (step 0, the fresh state, is not)."""
        return step > 0 and step % self.cfg.save_every == 0

    def save(self, step: int, state: PyTree[jax.Array], extra: Mapping[str, Any]) -> bool:
        """Starts saving; False if this step is saved already. `extra` is JSON (data position, ...).

        On return the state may be donated: everything has been copied to the host (on CPU devices
        orbax holds a view of each buffer instead, and JAX does not reuse a buffer with a view). A
        save still running is waited for first, and raises here if it failed.
        """
        if step in self._manager.all_steps():
            return False
        extra = json.loads(json.dumps(extra))  # a copy, and what is not JSON raises in this thread
        raw = jax.tree.map(_raw, _flatten(state))
        # Layer by layer, so that an export (moejax.convert) reads one layer at a time.
        by_layer = {n: ocp.SaveArgs(shard_axes=(0,) if STACKED.search(n) else ()) for n in raw}
        return self._manager.save(
            step,
            args=ocp.args.Composite(
                state=ocp.args.PyTreeSave(raw, save_args=by_layer),
                extra=ocp.args.JsonSave(extra),
            ),
            force=True,
        )

    def restore(self, abstract_state: Abstract, step: int | None = None) -> tuple[PyTree, dict]:
        """Returns (state, extra) of `step`, by default of the latest complete one.

        `abstract_state` gives structure, shapes, dtypes and the shardings to restore onto, whatever
        mesh the checkpoint was saved from. Raises FileNotFoundError if there is no such checkpoint,
        ValueError if it holds another model, naming the first leaf that differs.
        """
        self.wait()
        steps = sorted(self._manager.all_steps())
        if not steps:
            raise FileNotFoundError(f"no checkpoint in {self.directory}")
        if step is not None and step not in steps:
            raise FileNotFoundError(
                f"no checkpoint of step {step} in {self.directory}; has {steps}"
            )
        path = self.directory / str(steps[-1] if step is None else step)
        target = _flatten(abstract_state)
        _check_same(path, target, _saved_leaves(path), exact=True)
        return _unflatten(abstract_state, _restore_leaves(path, target)), read_extra(path)

    def latest_extra(self) -> dict:
        """The JSON part of the latest complete checkpoint; {} if there is none."""
        step = self.latest_step()
        return {} if step is None else read_extra(self.directory / str(step))

    def latest_step(self) -> int | None:
        """The newest complete checkpoint's step; None if there is none."""
        self.wait()
        return self._manager.latest_step()

    def wait(self) -> None:
        """Blocks until the save in progress is complete; raises if it failed."""
        self._manager.wait_until_finished()

    def close(self) -> None:
        """Waits for the save in progress and stops the background threads."""
        self._manager.close()


def read_metadata(path: Path | str) -> dict[str, jax.ShapeDtypeStruct]:
    """Shape and dtype of each saved leaf by its path, read on any machine without the saving mesh.

    `path` is a run folder (its latest complete checkpoint) or one checkpoint. PRNG keys show as
    their raw uint32 data.
    """
    return _saved_leaves(find_checkpoint(Path(path)))


def load_weights(path: Path | str, abstract_params: Abstract, *, subtree: str = "params") -> PyTree:
    """The parameters of another run, on the target's shardings and in the target's dtypes.

    `path` is a run folder (its latest complete checkpoint) or one checkpoint; only the leaves below
    `subtree` of the saved state are read. Raises as `Checkpointer.restore` does, except that a
    differing float dtype is converted.
    """
    checkpoint = find_checkpoint(Path(path))
    target = {f"{subtree}.{name}": leaf for name, leaf in _flatten(abstract_params).items()}
    saved = _saved_leaves(checkpoint)
    saved = {name: leaf for name, leaf in saved.items() if name.startswith(f"{subtree}.")}
    _check_same(checkpoint, target, saved, exact=False)
    return _unflatten(abstract_params, _restore_leaves(checkpoint, target))


def _handlers() -> ocp.handlers.DefaultCheckpointHandlerRegistry:
    registry = ocp.handlers.DefaultCheckpointHandlerRegistry()
    state, extra = ocp.PyTreeCheckpointHandler(), ocp.JsonCheckpointHandler()
    registry.add("state", ocp.args.PyTreeSave, state)
    registry.add("state", ocp.args.PyTreeRestore, state)
    registry.add("extra", ocp.args.JsonSave, extra)
    registry.add("extra", ocp.args.JsonRestore, extra)
    return registry


def _reader() -> ocp.Checkpointer:
    """A reader that, unlike the manager, touches nothing else in the folder."""
    _silence_orbax()
    return ocp.Checkpointer(ocp.CompositeCheckpointHandler(handler_registry=_handlers()))


def read_extra(checkpoint: Path) -> dict:
    """Returns what a checkpoint holds beside the state: {"config", "compute_dtype", "data"}."""
    with _reader() as reader:
        args = ocp.args.Composite(extra=ocp.args.JsonRestore())
        return reader.restore(checkpoint, args).extra


def find_checkpoint(path: Path) -> Path:
    """Returns the latest complete checkpoint of a run folder, or `path`, where it is one itself.

    Raises FileNotFoundError for a folder that has none.
    """
    path = path.resolve()
    if (path / "state").is_dir():
        return path
    steps = ocp.utils.checkpoint_steps(path / FOLDER)
    if not steps:
        raise FileNotFoundError(f"no checkpoint in {path}; give a run folder or {FOLDER}/<step>")
    return path / FOLDER / str(max(steps))


def way_on(run_dir: Path) -> str:
    """Returns where a run that has ended goes on, as a clause of a sentence."""
    try:
        step = find_checkpoint(run_dir).name
    except FileNotFoundError:
        return "nothing was saved yet: the same command starts from the beginning"
    return f"the same command goes on from step {step}"


def _saved_leaves(checkpoint: Path) -> dict[str, jax.ShapeDtypeStruct]:
    with _reader() as reader:
        tree = reader.metadata(checkpoint).item_metadata.state.tree
    return {k: jax.ShapeDtypeStruct(v.shape, v.dtype) for k, v in tree.items()}


def _restore_leaves(checkpoint: Path, target: dict[str, Any]) -> dict[str, jax.Array]:
    raw = {name: _raw(leaf) for name, leaf in target.items()}
    restore_args = ocp.checkpoint_utils.construct_restore_args(raw)
    args = ocp.args.PyTreeRestore(raw, restore_args=restore_args, partial_restore=True)
    with _reader() as reader:
        loaded = reader.restore(checkpoint, ocp.args.Composite(state=args)).state
    return {name: _cooked(loaded[name], leaf) for name, leaf in target.items()}


def _check_same(
    checkpoint: Path, target: dict[str, Any], saved: dict[str, jax.ShapeDtypeStruct], *, exact: bool
) -> None:
    """Raises ValueError, naming the first leaf that differs, unless both hold the same leaves."""
    for name in sorted(target.keys() | saved.keys()):
        here = _raw(target[name]) if name in target else None
        there = saved.get(name)
        if here is None or there is None or not _fits(there, here, exact):
            raise ValueError(
                f"checkpoint {checkpoint} is of another model: {name!r} is {_describe(there)} "
                f"there and {_describe(here)} here"
            )


def _fits(there: jax.ShapeDtypeStruct, here: jax.ShapeDtypeStruct, exact: bool) -> bool:
    floats = all(jnp.issubdtype(leaf.dtype, jnp.floating) for leaf in (there, here))
    return there.shape == here.shape and (there.dtype == here.dtype or (floats and not exact))


def _describe(leaf: jax.ShapeDtypeStruct | None) -> str:
    return "missing" if leaf is None else f"{leaf.dtype}{list(leaf.shape)}"


def _flatten(tree: PyTree) -> dict[str, Any]:
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    flat = {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}
    if len(flat) != len(leaves):
        raise ValueError("two leaves of the state have the same path; rename a key that has a dot")
    return flat


def _unflatten(like: PyTree, flat: dict[str, Any]) -> PyTree:
    return jax.tree.unflatten(jax.tree.structure(like), list(flat.values()))


def _is_key(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _raw(leaf: Any) -> Any:
    """The leaf as stored: a typed key as its uint32 data, which has one more dim at the end."""
    if isinstance(leaf, jax.Array) and not _is_key(leaf):
        return leaf
    if isinstance(leaf, jax.Array):
        return jax.random.key_data(leaf)
    sharding = leaf.sharding or jax.sharding.SingleDeviceSharding(jax.devices()[0])
    if not _is_key(leaf):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
    data = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(leaf.shape, leaf.dtype))
    return jax.ShapeDtypeStruct(data.shape, data.dtype, sharding=sharding)


def _cooked(stored: jax.Array, leaf: Any) -> jax.Array:
    """The inverse of `_raw`, given the target leaf."""
    if not _is_key(leaf):
        return stored
    names = []  # the dtype of a key knows its implementation; only a key is allowed to tell
    jax.eval_shape(
        lambda key: names.append(jax.random.key_impl(key)),
        jax.ShapeDtypeStruct(leaf.shape, leaf.dtype),
    )
    return jax.random.wrap_key_data(stored, impl=names[0])


def _silence_orbax() -> None:
    """Keeps orbax's progress lines (it uses absl's one logger) out of a log at level INFO."""
    logger = logging.getLogger("absl")
    if _orbax_news not in logger.filters:
        logger.addFilter(_orbax_news)


def _orbax_news(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.WARNING or "orbax" not in Path(record.pathname).parts
