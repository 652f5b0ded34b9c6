"""Exact resume, with real processes: SIGTERM, another fold, kill -9."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import pytest

from moejax.core.mesh import ParallelConfig
from moejax.train.checkpoint import CheckpointConfig, Checkpointer
from tests.oracle import max_relative_error
from tests.train.folds import Case, batches, make_trainer

ROOT = Path(__file__).parents[2]
RECIPE = Path(__file__).with_name("tiny_recipe.py")
STEPS, SAVE_EVERY = 60, 10
# Of a process that a test starts: XLA optimizes its programs as little as those of tests.
CHILD = {"JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}


def write_text(folder: Path) -> Path:
    """Writes a few small documents; returns the folder."""
    words = ["the", "cat", "sat", "on", "a", "mat", "while", "dogs", "run", "over", "hills"]
    folder.mkdir(exist_ok=True)
    for i in range(8):
        draw = random.Random(i)
        lines = [" ".join(draw.choices(words, k=12)) for _ in range(60)]
        (folder / f"{i}.txt").write_text("\n".join(lines))
    return folder


def start(folder: Path, name: str, recipe: str = "tiny", *more: str) -> subprocess.Popen:
    """Starts a run with `more` arguments; its output goes to a file."""
    arguments = [
        f"--config={RECIPE}:{recipe}", f"--config.name={name}", f"--config.runs_dir={folder}/runs",
        f"--config.data.train=('{write_text(folder / 'text')}',)", "--config.data.eval=()",
        f"--config.train.steps={STEPS}", f"--config.checkpoint.save_every={SAVE_EVERY}",
        *more,
    ]  # fmt: skip
    with open(folder / f"{name}.log", "a") as log:
        return subprocess.Popen(
            [sys.executable, str(ROOT / "launch/train.py"), *arguments],
            stdout=log, stderr=subprocess.STDOUT, env=os.environ | CHILD,
        )  # fmt: skip


def finish(process: subprocess.Popen, folder: Path, name: str) -> int:
    try:
        return process.wait(timeout=240)
    finally:
        if process.poll() is None:
            process.kill()
            print((folder / f"{name}.log").read_text())


def rows(folder: Path, name: str) -> dict[int, dict]:
    """Returns step -> record; a line that is being written is left out."""
    path = folder / "runs" / name / "metrics.jsonl"
    if not path.exists():
        return {}
    lines = path.read_text().split("\n")[:-1]
    records = [json.loads(line) for line in lines if line]
    return {r["step"]: r for r in records if "loss" in r}


def stop_after(process: subprocess.Popen, folder: Path, name: str, step: int, number: int) -> int:
    """Sends a signal once `step` is in the metrics; returns the exit status."""
    end = time.monotonic() + 200
    while max(rows(folder, name), default=0) < step and time.monotonic() < end:
        assert process.poll() is None, (folder / f"{name}.log").read_text()
        time.sleep(0.002)
    process.send_signal(number)
    return finish(process, folder, name)


def saved(folder: Path, name: str) -> list[int]:
    checkpoints = folder / "runs" / name / "checkpoints"
    return sorted(int(path.name) for path in checkpoints.iterdir() if path.name.isdigit())


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with an uninterrupted run "whole", and "cut", stopped by SIGTERM."""
    folder = tmp_path_factory.mktemp("resume")
    assert finish(start(folder, "whole"), folder, "whole") == 0
    step = random.Random().randrange(2, STEPS // 2)
    print(f"SIGTERM after step {step}")  # shown with a failure
    assert stop_after(start(folder, "cut"), folder, "cut", step, signal.SIGTERM) == 0
    shutil.copytree(folder / "runs/cut", folder / "runs/cut_copy")
    return folder


def same(records: dict[int, dict], right: dict[int, dict]) -> None:
    """Checks every recorded number of the steps but for times, bit for bit."""
    assert set(records) == set(right) == set(range(1, STEPS + 1))
    timed = {"tokens_per_second", "matmul_share"}
    for step, record in records.items():
        for key in set(record) - timed:
            assert record[key] == right[step][key], (step, key)


def test_sigterm_saves_and_the_same_command_goes_on_exactly(folder):
    stopped = max(rows(folder, "cut"))
    assert 1 < stopped < STEPS and saved(folder, "cut")[-1] == stopped
    assert finish(start(folder, "cut"), folder, "cut") == 0
    same(rows(folder, "cut"), rows(folder, "whole"))


def test_another_fold_goes_on_from_the_same_place(folder):
    """Saved by one device, restored over 8: tp 2, ep 4, ZeRO-3."""
    stopped, right = max(rows(folder, "cut_copy")), rows(folder, "whole")
    assert finish(start(folder, "cut_copy", "tiny_fold8"), folder, "cut_copy") == 0
    record = rows(folder, "cut_copy")[stopped + 1]
    assert max_relative_error(record["loss"], right[stopped + 1]["loss"]) < 1e-6
    assert max_relative_error(record["grad_norm"], right[stopped + 1]["grad_norm"]) < 1e-5
    assert record["num_tokens"] == right[stopped + 1]["num_tokens"], "the batch"
    facts = json.loads((folder / "runs/cut_copy/facts.json").read_text())
    assert facts["num_devices"] == 8


def test_kill_goes_on_from_the_last_complete_checkpoint(folder):
    """Killed while the second checkpoint is written; what is left half-written is not used."""
    step = 2 * SAVE_EVERY + 1  # its save has begun, so the one before it is complete
    status = stop_after(start(folder, "killed"), folder, "killed", step, signal.SIGKILL)
    assert status == -signal.SIGKILL
    complete = saved(folder, "killed")
    assert complete and complete[-1] >= SAVE_EVERY
    half = folder / "runs/killed/checkpoints/50.orbax-checkpoint-tmp-1"
    half.mkdir()
    (half / "state").write_text("half of one")
    assert finish(start(folder, "killed"), folder, "killed") == 0
    same(rows(folder, "killed"), rows(folder, "whole"))
    assert not half.exists() and saved(folder, "killed")[-1] == STEPS


def test_a_checkpoint_goes_on_under_any_expert_parallelism(tmp_path):
    """Saved under ep 4 on 8 devices after a step, restored under ep 8, 2 and 1: the next loss."""
    first, second = batches(1, 2)
    saver = make_trainer(Case("ep4", ParallelConfig(dp=8, ep=4), "all_to_all"))
    state, _ = saver.step(saver.new_state(), first)
    checkpointer = Checkpointer(tmp_path, CheckpointConfig())
    checkpointer.save(1, state, {})
    checkpointer.wait()
    _, right = saver.step(state, second)
    for name, parallel, dispatch in (
        ("ep8", ParallelConfig(dp=8, ep=8, zero=3), "ragged"),
        ("ep2", ParallelConfig(dp=2, tp=4, ep=2, etp=2), "all_to_all"),
        ("ep1", ParallelConfig(zero=0), "reference"),
    ):
        trainer = make_trainer(Case(name, parallel, dispatch))
        target = jax.tree.map(
            lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s),
            trainer.layout.abstract,
            trainer.layout.shardings,
        )
        restored, _ = checkpointer.restore(target)
        state, metrics = trainer.step(restored, second)
        assert int(state.step) == 2
        assert max_relative_error(metrics["loss"], right["loss"]) < 1e-6, name
    checkpointer.close()
