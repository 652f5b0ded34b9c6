"""The golden checkpoints (`tests/golden`), opened as our models."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from flax import nnx
from safetensors.numpy import load_file

from moejax.convert import hf
from moejax.core import params
from moejax.core.mesh import Fold, fold, make_mesh
from moejax.core.precision import PrecisionConfig
from moejax.model.transformer import ModelConfig, Transformer
from moejax.train.optimizer import OptimizerConfig, decay_mask, make_optimizer
from moejax.train.state import Layout, plan_state

ROOT = Path(__file__).parent.parent / "golden"
VARIANTS = sorted(path.parent.name for path in ROOT.glob("*/config.json"))
QUIET = {f"moe.balance.{name}_coeff": 0.0 for name in ("batch", "sequence", "global", "z")}


@dataclass(frozen=True)
class Golden:
    """A variant: its family, our config of it, what the other implementation computes."""

    name: str
    family: hf.Family
    said: Mapping[str, Any]
    cfg: ModelConfig
    arrays: Mapping[str, np.ndarray]

    @property
    def folder(self) -> Path:
        """Where its files are."""
        return ROOT / self.name


@cache
def golden(name: str) -> Golden:
    """Returns a variant; its config without balance losses."""
    family, said = hf.read_config(ROOT / name)
    cfg = hf.with_leaves(hf.model_config(family, said), QUIET)
    return Golden(name, family, said, cfg, load_file(ROOT / name / "golden.safetensors"))


def layout_of(
    cfg: ModelConfig, compute: str = "float32", grid: Fold | None = None, zero: int = 0
) -> Layout:
    """Returns the layout of a model on a fold (None: one device), float32 at rest."""
    grid = fold({}, {}) if grid is None else grid
    precision = PrecisionConfig("float32", compute, "float32", "float32")
    model = nnx.eval_shape(lambda: Transformer(cfg, rngs=nnx.Rngs(0)))
    optimizer = make_optimizer(OptimizerConfig(), 1000, decay_mask(params.dims_of(model)[0]))
    return plan_state(cfg, optimizer, grid, make_mesh(grid), zero, precision)


@cache
def loaded(name: str, compute: str = "float32") -> tuple[Layout, dict, dict]:
    """Returns (layout, params, buffers) of a variant on one device."""
    made = golden(name)
    layout = layout_of(made.cfg, compute)
    target = (layout.resting.params, layout.resting.buffers)
    return layout, *hf.load(made.folder, made.cfg, target)
