"""What a training run writes down about itself, and the measurements behind it.

`MetricsWriter` appends one JSON object a step to `metrics.jsonl` and mirrors it to TensorBoard;
`read_metrics` reads the file back, also when the run was killed in the middle of a line.
`Throughput`, `measure_dense_matmul` and `peak_rss_bytes` give the figures for speed and memory.

A row of a step holds the scalars of the step record (`step`, `loss`, `grad_norm`, `lr`,
`tokens_per_second`, ...), and for a model with MoE layers `layer_imbalance`, one number a layer.
Every `load_every` steps it also holds `load` (layers x experts, the share of the slots; each row
sums to 1) and the other per-layer figures, as `layer_<name>`.
A row of an evaluation is `{"step", "val_loss", "set"}`. NaN and infinities are written as null, so
that every line is valid JSON and a column stays a column of numbers.
"""

import json
import math
import os
import resource
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from tensorboardX import SummaryWriter

METRICS_FILE = "metrics.jsonl"
PREVIOUS_FILE = "metrics.previous.jsonl"
TENSORBOARD_DIR = "tensorboard"
LOAD_DIGITS = 5
IDLE_STEPS = 100
"""Steps in a row without a token after which an expert is called idle."""


@dataclass(frozen=True)
class LogConfig:
    """What a run shows and writes down, and how often."""

    tensorboard: bool = True
    """Also write TensorBoard events, into `<run>/tensorboard`."""
    histogram_every: int = 50
    """Steps between two expert-load histograms in TensorBoard."""
    load_every: int = 10
    """Steps between two rows of `metrics.jsonl` with the load of every expert."""
    print_every_s: float = 10.0
    """Seconds between two lines of progress where stdout is not a terminal."""
    watchdog_s: float = 600.0
    """Dump the stacks of all threads when no step ends for this many seconds; 0: never."""
    profile_step: int = 0
    """First step of the profiler trace; 0: no trace."""
    profile_steps: int = 3
    """Number of steps the profiler trace covers."""

    def __post_init__(self) -> None:
        for name in ("histogram_every", "load_every", "profile_steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"log.{name} is {getattr(self, name)}; it must be at least 1.")
        for name in ("print_every_s", "watchdog_s", "profile_step"):
            if getattr(self, name) < 0:
                raise ValueError(f"log.{name} is {getattr(self, name)}; it must be 0 or more.")


def plain(value: Any, digits: int | None = None) -> Any:
    """The JSON value of a host value: numpy becomes Python, NaN and infinities become None.

    `digits` rounds floats. Raises TypeError for anything else, a device array above all: reading
    one here would make the training loop wait for the device.
    """
    if isinstance(value, np.ndarray | np.generic):
        value = value.tolist()
    if isinstance(value, Mapping):
        return {str(key): plain(item, digits) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item, digits) for item in value]
    if isinstance(value, float):
        if not math.isfinite(value):
            return None
        return value if digits is None else round(value, digits)
    if value is None or isinstance(value, str | bool | int):
        return value
    raise TypeError(
        f"a metric of type {type(value).__name__}; pass host values (numpy or Python), fetched "
        "once the step has ended."
    )


def read_metrics(path: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Rows of the steps and rows of the evaluations of a `metrics.jsonl`, each in order of steps.

    Lines that are not a JSON object with a `step` (the last line of a killed run) are left out. Of
    two rows for one step, or for one step and evaluation set, the later one counts. A file that is
    not there gives two empty lists.
    """
    steps: dict[int, dict[str, Any]] = {}
    evaluations: dict[tuple[int, str], dict[str, Any]] = {}
    for row in _rows(path):
        if "val_loss" in row:
            evaluations[row["step"], str(row.get("set"))] = row
        else:
            steps[row["step"]] = row
    in_order = sorted(evaluations.items(), key=lambda item: item[0][0])
    return [steps[step] for step in sorted(steps)], [row for _, row in in_order]


def _rows(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    rows = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            continue
        if isinstance(row, dict) and isinstance(row.get("step"), int):
            rows.append(row)
    return rows


class MetricsWriter:
    """Writes the metrics of one run: `metrics.jsonl`, and TensorBoard events beside it.

    `resume_step` is the last step the restored checkpoint holds: rows after it are dropped before
    anything is written, so that a resumed run has each step once. None is a new run: a
    `metrics.jsonl` that is already there is set aside as `metrics.previous.jsonl`.
    To be used by one process of a run. A row is with the operating system when `step` returns, so
    it outlives a `kill -9`.
    """

    def __init__(
        self, run_dir: Path, config: LogConfig | None = None, *, resume_step: int | None = None
    ) -> None:
        self._config = config or LogConfig()
        run_dir.mkdir(parents=True, exist_ok=True)
        path = run_dir / METRICS_FILE
        if resume_step is not None:
            _drop_rows_after(path, resume_step)
        elif path.exists():
            os.replace(path, run_dir / PREVIOUS_FILE)
        self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115  closed in close()
        self._board: SummaryWriter | None = None
        if self._config.tensorboard:
            first = 0 if resume_step is None else resume_step + 1
            # The suffix: a file's name has only the second, and an equal name would overwrite.
            self._board = SummaryWriter(
                str(run_dir / TENSORBOARD_DIR),
                purge_step=first,
                flush_secs=30,
                filename_suffix=f".{first}",
            )

    def step(self, record: Mapping[str, Any]) -> None:
        """Writes the record of one step: scalars, and under `moe` the figures of each MoE layer."""
        step = int(record["step"])
        row = {key: plain(value) for key, value in record.items() if key != "moe"}
        moe = record.get("moe") or {}
        if "imbalance" in moe:
            row["layer_imbalance"] = plain(moe["imbalance"], LOAD_DIGITS)
        if moe and (step == 1 or step % self._config.load_every == 0):
            for name, values in moe.items():
                key = "load" if name == "load" else f"layer_{name}"
                row[key] = plain(values, LOAD_DIGITS if name in ("load", "imbalance") else None)
        self._write(row)
        if self._board is None:
            return
        self._scalars(row, "train")
        for name, values in moe.items():
            if name != "load":
                per_layer = {f"layer_{i}": value for i, value in enumerate(plain(values))}
                self._scalars({"step": step, **per_layer}, f"moe_{name}")
        if "load" in moe and (step == 1 or step % self._config.histogram_every == 0):
            self._histograms(step, np.asarray(moe["load"], np.float64))

    def evaluation(self, step: int, val_loss: float, name: str) -> None:
        """Writes the loss (nats per token) of evaluation set `name` after `step` steps."""
        self._write({"step": step, "val_loss": plain(val_loss), "set": name})
        if self._board is not None:
            self._scalars({"step": step, "val_loss": plain(val_loss)}, name)

    def close(self) -> None:
        """Flushes and closes both files. May be called twice."""
        self._file.close()
        if self._board is not None:
            self._board.close()
            self._board = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _write(self, row: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(row, allow_nan=False) + "\n")
        self._file.flush()

    def _scalars(self, row: Mapping[str, Any], group: str) -> None:
        assert self._board is not None
        for key, value in row.items():
            if key != "step" and isinstance(value, int | float):
                self._board.add_scalar(f"{group}/{key}", value, row["step"])

    def _histograms(self, step: int, load_LE: np.ndarray) -> None:
        """One histogram a layer whose buckets are the experts, its heights 1 at perfect balance."""
        assert self._board is not None
        num_experts = load_LE.shape[1]
        edges_E = np.arange(1, num_experts + 1, dtype=np.float64)
        middles_E = edges_E - 0.5
        for layer, load_E in enumerate(np.nan_to_num(load_LE)):
            counts_E = load_E * num_experts
            self._board.add_histogram_raw(
                f"expert_load/layer_{layer}",
                min=0.0,
                max=float(num_experts),
                num=float(counts_E.sum()),
                sum=float((counts_E * middles_E).sum()),
                sum_squares=float((counts_E * middles_E**2).sum()),
                bucket_limits=edges_E.tolist(),
                bucket_counts=counts_E.tolist(),
                global_step=step,
            )


def _drop_rows_after(path: Path, last_step: int) -> None:
    """Rewrites a metrics file without the rows after `last_step`: all of it, or none on a crash."""
    kept = [json.dumps(row) + "\n" for row in _rows(path) if row["step"] <= last_step]
    if not path.exists():
        return
    new = path.with_suffix(".new")
    with open(new, "w", encoding="utf-8") as file:
        file.writelines(kept)
        file.flush()
        os.fsync(file.fileno())
    os.replace(new, path)


class IdleExperts:
    """Watches for experts that no token reaches any more, since this process began."""

    def __init__(self, after: int = IDLE_STEPS) -> None:
        self.after = after
        self._steps_LE: np.ndarray | None = None

    def step(self, load_LE: np.ndarray) -> tuple[int, str]:
        """Counts a step; returns (how many experts of all layers are idle, a line about those that
        became so with this step, or "")."""
        idle_LE = np.asarray(load_LE) == 0
        before_LE = np.zeros(idle_LE.shape, int) if self._steps_LE is None else self._steps_LE
        self._steps_LE = np.where(idle_LE, before_LE + 1, 0)
        new = [
            f"layer {layer}: {', '.join(map(str, np.flatnonzero(row)))}"
            for layer, row in enumerate(self._steps_LE == self.after)
            if row.any()
        ]
        line = f"warning: experts without a token for {self.after} steps: {'; '.join(new)}"
        return int((self._steps_LE >= self.after).sum()), line if new else ""


class Throughput:
    """Tokens per second: the median over the last `window` steps, deaf to a single slow one."""

    def __init__(self, window: int = 16, clock: Callable[[], float] = time.perf_counter) -> None:
        self._rates: deque[float] = deque(maxlen=window)
        self._clock = clock
        self._last = clock()

    def restart(self) -> None:
        """Leaves the time since the last step out: after a compile, an evaluation, a pause."""
        self._last = self._clock()

    def step(self, num_tokens: int) -> float:
        """Counts a step of `num_tokens` tokens that ends now; returns tokens per second."""
        now = self._clock()
        self._rates.append(num_tokens / max(now - self._last, 1e-9))
        self._last = now
        return statistics.median(self._rates)


def measure_dense_matmul(dtype: Any, *, size: int | None = None, seconds: float = 1.0) -> float:
    """FLOP/s of a square matmul of `dtype` on the default device: the best of bursts of calls.

    The edge is 2048 on a CPU and 8192 elsewhere, where a smaller one would measure the launch. The
    bursts go on for about `seconds`, after the compile. Devices simulated on one CPU share its
    cores: the figure is then that of all of them together.
    """
    on_cpu = jax.default_backend() == "cpu"
    size = size or (2048 if on_cpu else 8192)
    burst = 1 if on_cpu else 8
    left_key, right_key = jax.random.split(jax.random.key(0))
    left = jax.random.normal(left_key, (size, size), dtype)
    right = jax.random.normal(right_key, (size, size), dtype)
    matmul = jax.jit(jnp.matmul)
    jax.block_until_ready(matmul(left, right))
    best = math.inf
    end = time.perf_counter() + seconds
    while best == math.inf or time.perf_counter() < end:
        start = time.perf_counter()
        jax.block_until_ready([matmul(left, right) for _ in range(burst)])
        best = min(best, (time.perf_counter() - start) / burst)
    return 2 * size**3 / best


def peak_rss_bytes() -> int:
    """The most memory this process has had resident so far, in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
