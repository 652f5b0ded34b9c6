"""What a run left in its folder, read for its report; missing and cut-off files count as empty."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from moejax.train.metrics import METRICS_FILE, read_metrics


@dataclass(frozen=True)
class Run:
    """What a run folder holds, each part empty where it is missing."""

    name: str
    """The name of the run's folder."""
    steps: Sequence[Mapping[str, Any]]
    """Rows of the steps, in order."""
    evaluations: Sequence[Mapping[str, Any]]
    """Rows of the evaluations, in order."""
    config: Mapping[str, Any]
    """The tree of `config.json`."""
    facts: Mapping[str, Any]
    """`facts.json`."""
    sample: str
    """The text the model wrote."""

    def column(self, name: str) -> np.ndarray:
        """float64[steps] of one scalar, NaN where it is missing or was not finite."""
        return np.array([number(row.get(name)) for row in self.steps], np.float64)

    def step_numbers(self) -> np.ndarray:
        """float64[steps], the number of each row."""
        return np.array([row["step"] for row in self.steps], np.float64)

    def evaluation_sets(self) -> dict[str, list[tuple[int, float]]]:
        """(step, loss) points of each evaluation set, the sets in order of first appearance."""
        sets: dict[str, list[tuple[int, float]]] = {}
        for row in self.evaluations:
            point = (row["step"], number(row["val_loss"]))
            sets.setdefault(str(row.get("set") or "val"), []).append(point)
        return sets


def read_run(run_dir: Path) -> Run:
    """Reads a run's folder; a file that is missing or cut short counts as empty."""
    steps, evaluations = read_metrics(run_dir / METRICS_FILE)
    sample = run_dir / "sample.txt"
    return Run(
        name=run_dir.resolve().name,
        steps=steps,
        evaluations=evaluations,
        config=_read_object(run_dir / "config.json"),
        facts=_read_object(run_dir / "facts.json"),
        sample=sample.read_text(encoding="utf-8", errors="replace") if sample.exists() else "",
    )


def number(value: Any) -> float:
    """The value as a float; NaN for what is no number (null stands for one that was not finite)."""
    known = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if known else math.nan


def _read_object(path: Path) -> Mapping[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}
