"""A run of two processes, as on two hosts: the same losses as one, one record, one stop."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import jax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from moejax.core import cluster
from moejax.train import replay
from tests.oracle import max_relative_error
from tests.train.test_resume import RECIPE, ROOT, finish, rows, saved, start, write_text

STEPS = 40


def start_two(folder: Path, name: str) -> list[subprocess.Popen]:
    """Starts `tiny_fold8` as two processes of four simulated devices."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    arguments = [
        f"--config={RECIPE}:tiny_fold8", f"--config.name={name}",
        f"--config.runs_dir={folder}/runs", "--config.data.eval=('val=heldout',)",
        f"--config.data.train=('{write_text(folder / 'text')}',)",
        f"--config.train.steps={STEPS}", "--config.checkpoint.save_every=100",
        "--config.train.microbatches=2", "--config.train.sample_tokens=3",
        f"--config.model.moe.router.record={folder}/routing_{name}",
    ]  # fmt: skip
    started = []
    for index in range(2):
        told = {"JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": "2"}
        with open(folder / f"{name}.log", "a") as log:
            process = subprocess.Popen(
                [sys.executable, str(ROOT / "launch/train.py"), *arguments],
                stdout=log, stderr=subprocess.STDOUT,
                env=os.environ | {"JAX_PLATFORMS": "cpu", "JAX_PROCESS_ID": str(index)} | told,
            )  # fmt: skip
        started.append(process)
    return started


def test_two_processes_train_as_one_and_stop_together(tmp_path):
    """SIGTERM to the second alone: both save after the same step; run again, they go on."""
    both = start_two(tmp_path, "two")
    end = time.monotonic() + 200
    while max(rows(tmp_path, "two"), default=0) < 5 and time.monotonic() < end:
        assert all(p.poll() is None for p in both), (tmp_path / "two.log").read_text()
        time.sleep(0.002)
    both[1].send_signal(signal.SIGTERM)
    assert [finish(p, tmp_path, "two") for p in both] == [0, 0]
    stopped = max(rows(tmp_path, "two"))
    assert 5 <= stopped < STEPS and saved(tmp_path, "two")[-1] == stopped
    assert [finish(p, tmp_path, "two") for p in start_two(tmp_path, "two")] == [0, 0]
    text = (tmp_path / "two.log").read_text()
    assert text.count("saved step") == 1, text  # one process speaks

    one = start(tmp_path, "one", "tiny_fold8", f"--config.train.steps={STEPS}",
                "--config.train.microbatches=2", "--config.data.eval=('val=heldout',)",
                f"--config.model.moe.router.record={tmp_path}/routing_one")  # fmt: skip
    assert finish(one, tmp_path, "one") == 0
    mine, right = rows(tmp_path, "two"), rows(tmp_path, "one")
    assert set(mine) == set(right) == set(range(1, STEPS + 1))
    for step in (1, stopped, stopped + 1, STEPS):
        assert mine[step]["num_tokens"] == right[step]["num_tokens"]
        assert max_relative_error(mine[step]["loss"], right[step]["loss"]) < 1e-5, step
    for step, same in ((1, 1.0), (STEPS, 0.98)):  # rounding may turn a near choice
        two, one = (
            replay.load(tmp_path / f"routing_{name}", step, (8, 32, 2, 2), 8)
            for name in ("two", "one")
        )
        assert (two == one).mean() >= same
    folder = tmp_path / "runs/two"
    assert (folder / "sample.txt").read_text() and (folder / "report.html").exists()
    assert len(list((folder / "tensorboard").iterdir())) == 2  # of the first process, started twice


@pytest.mark.parametrize(
    ("mine", "part"),
    [((0, 1, 2, 3), (0, 2)), ((4, 5, 6, 7), (1, 2)), ((2, 3), (1, 4)), (tuple(range(8)), (0, 1))],
)
def test_a_process_holds_the_rows_of_its_devices(mine, part, monkeypatch):
    """Rows over dp=4, tp=2 beside them; as if only the devices `mine` were of this process."""
    mesh = jax.make_mesh((4, 2), ("dp", "tp"), (AxisType.Auto,) * 2, devices=jax.devices()[:8])
    sharding = NamedSharding(mesh, PartitionSpec("dp"))
    every = sharding.devices_indices_map((16,))
    held = {d: s for d, s in every.items() if d.id in mine}
    patched = lambda self, shape: held  # noqa: E731
    monkeypatch.setattr(NamedSharding, "addressable_devices_indices_map", patched)
    assert cluster.share_of(sharding, 16) == part


def test_half_a_row_group_each_is_the_same_part_and_scattered_rows_are_refused(monkeypatch):
    mesh = jax.make_mesh((4, 2), ("dp", "tp"), (AxisType.Auto,) * 2, devices=jax.devices()[:8])
    sharding = NamedSharding(mesh, PartitionSpec("dp"))
    every = sharding.devices_indices_map((16,))
    for mine in ((2,), (3,)):
        held = {d: s for d, s in every.items() if d.id in mine}
        patched = lambda self, shape, held=held: held  # noqa: E731
        monkeypatch.setattr(NamedSharding, "addressable_devices_indices_map", patched)
        assert cluster.share_of(sharding, 16) == (1, 4)
    held = {d: s for d, s in every.items() if d.id in (0, 4)}
    monkeypatch.setattr(NamedSharding, "addressable_devices_indices_map", lambda *_: held)
    with pytest.raises(ValueError, match=r"holds rows \[\(0, 4\), \(8, 12\)\] of 16"):
        cluster.share_of(sharding, 16)


def test_joining_asks_for_all_three():
    assert cluster.join({}) == cluster.join({"SLURM_NTASKS": "8"}) == 1
    with pytest.raises(ValueError, match="JAX_NUM_PROCESSES and JAX_PROCESS_ID must be"):
        cluster.join({"JAX_COORDINATOR_ADDRESS": "host:1"})
