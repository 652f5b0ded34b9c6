"""A run of four processes, as on four hosts: the same losses as one, one record, one stop; and what
becomes of it when one process is killed."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import jax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from moejax.core import cluster, liveness
from moejax.train import replay
from tests.oracle import max_relative_error
from tests.train.test_resume import CHILD, RECIPE, ROOT, finish, rows, saved, write_text

COUNT, STEPS, SAVE_EVERY = 4, 16, 3


def arguments(folder: Path, name: str) -> list[str]:
    """Returns the arguments of `tiny_fold8`."""
    return [
        f"--config={RECIPE}:tiny_fold8", f"--config.name={name}",
        f"--config.runs_dir={folder}/runs", "--config.data.eval=('val=heldout',)",
        f"--config.data.train=('{write_text(folder / 'text')}',)",
        f"--config.train.steps={STEPS}", f"--config.checkpoint.save_every={SAVE_EVERY}",
        "--config.train.microbatches=2", "--config.train.sample_tokens=3",
        f"--config.model.moe.router.record={folder}/routing_{name}",
    ]  # fmt: skip


def start_each(folder: Path, name: str) -> list[subprocess.Popen]:
    """Starts four processes of two simulated devices, as four hosts would: nobody above them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    told = {"JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": str(COUNT)}
    started = []
    for index in range(COUNT):
        with open(folder / f"{name}{index}.log", "w") as log:
            process = subprocess.Popen(
                [sys.executable, str(ROOT / "launch/train.py"), *arguments(folder, name)],
                stdout=log, stderr=subprocess.STDOUT,
                env=os.environ | CHILD | told | {"JAX_PROCESS_ID": str(index)},
            )  # fmt: skip
        started.append(process)
    return started


def start_one(folder: Path, name: str, *script: str) -> subprocess.Popen:
    """Starts a script of launch/ with the same arguments behind its own."""
    command = [sys.executable, str(ROOT / "launch" / script[0]), *script[1:]]
    command += arguments(folder, name)
    with open(folder / f"{name}.log", "a") as log:
        return subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, env=os.environ | CHILD
        )


def wait_for(step: int, folder: Path, name: str, processes: list[subprocess.Popen]) -> None:
    """Waits until a step is in the metrics."""
    end = time.monotonic() + 240
    while max(rows(folder, name), default=0) < step and time.monotonic() < end:
        assert all(p.poll() is None for p in processes), logs(folder, name)
        time.sleep(0.002)


def logs(folder: Path, name: str) -> str:
    return "\n".join(path.read_text() for path in sorted(folder.glob(f"{name}*.log")))


def test_four_processes_train_as_one_whatever_befalls_them(tmp_path):
    """One is killed, and the others end; the same run goes on, is told to stop, and goes on as two
    processes."""
    four = start_each(tmp_path, "four")
    try:
        wait_for(SAVE_EVERY + 2, tmp_path, "four", four)
        four[2].send_signal(signal.SIGKILL)
        end = time.monotonic() + 60  # within a minute
        statuses = [p.wait(timeout=max(end - time.monotonic(), 0.1)) for p in four]
    finally:
        for process in four:
            process.kill()
    assert statuses == [liveness.ANOTHER_DIED] * 2 + [-signal.SIGKILL, liveness.ANOTHER_DIED]
    kept = saved(tmp_path, "four")[-1]
    named = rf"ended: process 2 of 4 \(pid {four[2].pid} on .*the same command goes on from step "
    for index in (0, 1, 3):
        *_, last = (tmp_path / f"four{index}.log").read_text().splitlines()
        assert re.fullmatch(named + str(kept), last), last

    again = start_one(tmp_path, "four", "local.py", str(COUNT))
    wait_for(kept + SAVE_EVERY, tmp_path, "four", [again])
    again.send_signal(signal.SIGTERM)
    assert finish(again, tmp_path, "four") == 0
    stopped = max(rows(tmp_path, "four"))
    assert kept < stopped < STEPS and saved(tmp_path, "four")[-1] == stopped
    assert finish(start_one(tmp_path, "four", "local.py", str(COUNT // 2)), tmp_path, "four") == 0
    text = (tmp_path / "four.log").read_text()
    assert text.count("saved step") == 1 and "ended" not in text, text  # one process speaks

    one = start_one(tmp_path, "one", "train.py")
    assert finish(one, tmp_path, "one") == 0
    mine, right = rows(tmp_path, "four"), rows(tmp_path, "one")
    assert set(mine) == set(right) == set(range(1, STEPS + 1))
    for step in right:  # the data is shared out so that nothing is read twice, or left out
        assert mine[step]["num_tokens"] == right[step]["num_tokens"], step
        assert max_relative_error(mine[step]["loss"], right[step]["loss"]) < 1e-5, step
    for step, same in ((1, 1.0), (STEPS, 0.98)):  # rounding may turn a near choice
        routed = [
            replay.load(tmp_path / f"routing_{name}", step, (8, 32, 2, 2), 8)
            for name in ("four", "one")
        ]
        assert (routed[0] == routed[1]).mean() >= same
    folder = tmp_path / "runs/four"
    assert (folder / "sample.txt").read_text() and (folder / "report.html").exists()
    assert len(list((folder / "tensorboard").iterdir())) == 3  # of the first process: three starts


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
