"""A dense model as a Mixture-of-Experts that computes the same: upcycling.

With granularity G, an expert is one of the G parts into which the width F of the dense MLP is cut,
and E experts hold each part E' = E/G times: expert j G + g is copy j of part g. The router starts
with E' random columns, each standing G times, so the top K (a multiple of G) are K/G copies of
every part. Weights of a token that sum to 1 make the sum of its experts 1/G of the dense MLP; it is
scaled back by

    s = G             renormalised weights (softmax after the top-k)
    s = E' G^2 / K    weights of a softmax over all experts, exact where those are equal

"exact" puts sqrt(s) on the up projection and on the down projection, through which it is linear:
the model starts equal to the dense one. "cube_root", as published, puts s^(1/3) on all three; the
gate goes through a silu, so that the start is only near. Source: He et al. 2024, "Upcycling large
language models into mixture of experts", https://arxiv.org/abs/2410.07524.
"""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from moejax.convert import hf, output, store
from moejax.convert.arrays import flat
from moejax.convert.table import Index
from moejax.convert.to_hf import model_of
from moejax.convert.to_run import abstract, extra_of, name_of, slices, write_json
from moejax.model.config import ModelConfig

SCALINGS = ("exact", "cube_root")


@dataclasses.dataclass(frozen=True)
class Plan:
    """What becomes of each MLP."""

    num_experts: int
    top_k: int
    granularity: int = 1
    """Parts G of the dense width."""
    renormalize: bool = True
    """Make the weights of a token sum to 1."""
    scaling: str = "exact"
    seed: int = 0
    """Of the routers."""

    def __post_init__(self) -> None:
        if self.granularity < 1 or self.num_experts % self.granularity:
            raise ValueError(
                f"--experts {self.num_experts} do not divide into --granularity "
                f"{self.granularity} parts: each has as many copies as another"
            )
        if self.top_k % self.granularity:
            raise ValueError(
                f"--top-k {self.top_k} is not a multiple of --granularity {self.granularity}: "
                "a token would miss a part of its MLP"
            )
        if self.scaling not in SCALINGS:
            raise ValueError(f"--scaling {self.scaling}: choose from {', '.join(SCALINGS)}")

    @property
    def copies(self) -> int:
        """E', of each part."""
        return self.num_experts // self.granularity

    def factors(self) -> tuple[float, float, float]:
        """Returns the factors on gate, up and down."""
        whole = float(self.granularity)
        if not self.renormalize:
            whole *= self.copies * self.granularity / self.top_k
        if self.scaling == "exact":
            return 1.0, whole**0.5, whole**0.5
        return (whole ** (1 / 3),) * 3

    def model(self, cfg: ModelConfig) -> ModelConfig:
        """Returns the model made of a dense one: its pattern's layers have experts, the first
        first_k_dense stay as they are.

        Raises ValueError for one that has experts, or whose width does not divide.
        """
        if "D" not in cfg.pattern.upper() or "M" in cfg.kinds():
            raise ValueError(f"model.pattern={cfg.pattern!r} is no dense model's, which is 'D'")
        if cfg.ffn_dim % self.granularity:
            raise ValueError(
                f"model.ffn_dim={cfg.ffn_dim} does not divide by --granularity {self.granularity}"
            )
        if cfg.mtp_depth:
            raise ValueError(
                f"model.mtp_depth={cfg.mtp_depth}: modules for further tokens are not upcycled"
            )
        return hf.with_leaves(
            cfg,
            {
                "pattern": cfg.pattern.replace("D", "M").replace("d", "m"),
                "moe.num_experts": self.num_experts,
                "moe.top_k": self.top_k,
                "moe.ffn_dim": cfg.ffn_dim // self.granularity,
                "moe.shared_ffn_dim": 0,
                "moe.shared_gate": False,
                "moe.latent_dim": 0,
                "moe.router.renormalize": self.renormalize,
            },
        )


def convert(run: Path | str, out: Path | str, plan: Plan) -> output.Amount:
    """Writes the run folder of a run's dense model with experts; returns what was written.

    Raises what `Plan`, `store.Reader`, `model_of` and `output.new_folder` raise, before anything
    is written.
    """
    run = Path(run).expanduser().resolve()
    reader = store.Reader(run)
    said = reader.extra
    cfg = plan.model(model_of(said))
    arrays, sources = {}, {}
    for tree, nodes in zip(("params", "buffers"), abstract(cfg), strict=True):
        for path, leaf in flat(nodes):
            name, source = name_of(tree, path), name_of(tree, _dense(path))
            sources[name] = source
            arrays[name] = _planned(leaf, path, reader.arrays.get(source))
    config = said["config"] | {"name": Path(out).name, "model": dataclasses.asdict(cfg)}
    extra = extra_of(config, said.get("compute_dtype", "auto"))
    num_bytes = sum(array.num_bytes for array in arrays.values())
    with output.new_folder(out, num_bytes) as folder:
        for place in (run, run.parent.parent):
            output.copy_companions(place, folder)
        write_json(folder / "config.json", config)
        checkpoint = folder / store.CHECKPOINTS / "0"
        with (
            store.Writer(checkpoint, arrays, extra) as writer,
            output.Bar(len(arrays), num_bytes) as bar,
        ):
            for name, array in arrays.items():
                for index, values in _values(name, array, sources[name], reader, plan, cfg):
                    values = values.astype(array.dtype, copy=False)
                    writer.write(name, index, values)
                    bar.advance(0, values.nbytes)
                bar.advance(1, 0)
    return bar.done


def _dense(path: tuple[str, ...]) -> tuple[str, ...]:
    """Returns where the dense model has what becomes an array of the experts."""
    if path[-3:-1] == ("moe", "experts"):
        return (*path[:-3], "mlp", path[-1])
    return path


def _planned(leaf: Any, path: tuple[str, ...], source: store.Array | None) -> store.Array:
    """Returns an array of the new checkpoint: experts one a chunk, others as they were."""
    if source is None:  # a router; a buffer
        return store.Array(leaf.shape, np.dtype(leaf.dtype))
    if "experts" in path:
        return store.Array(leaf.shape, source.dtype, (1, 1, *leaf.shape[2:]))
    return source


def _values(
    name: str, array: store.Array, source: str, reader: store.Reader, plan: Plan, cfg: ModelConfig
) -> Iterator[tuple[Index, np.ndarray]]:
    """Yields (slice, values) of an array of the new checkpoint."""
    whole = tuple(slice(0, size) for size in array.shape)
    if name.endswith(".moe.w_router"):
        rng = np.random.default_rng([plan.seed, *name.encode()])
        columns = rng.standard_normal((*array.shape[:-1], plan.copies)) * cfg.init_std
        yield whole, np.repeat(columns, plan.granularity, axis=-1)
    elif source not in reader.arrays:
        yield whole, np.zeros(array.shape, array.dtype)
    elif source == name:
        cut = list(slices(array.shape, array.chunk))
        yield from zip(cut, reader.stream((name, index) for index in cut), strict=True)
    else:
        gate, up, down = plan.factors()
        layers = [(source, (slice(n, n + 1),)) for n in range(array.shape[0])]
        for n, dense in enumerate(reader.stream(layers)):
            for part, values in enumerate(np.split(dense, plan.granularity, axis=_width(dense))):
                factor = [[gate], [up]] if dense.ndim == 4 else down
                scaled = (values * np.asarray(factor, np.float32)).astype(array.dtype)
                for expert in range(part, plan.num_experts, plan.granularity):
                    at = (slice(n, n + 1), slice(expert, expert + 1), *whole[2:])
                    yield at, scaled[None]


def _width(dense: np.ndarray) -> int:
    """Returns the axis of F: of w_in [1, D, 2, F] or w_out [1, F, D]."""
    return 3 if dense.ndim == 4 else 1
