"""launch/local.py with a stand-in for launch/train.py: who is started, what is said, who is named.

With real training: tests/train/test_processes.py.
"""

import json
import re
import signal
import time
from pathlib import Path

import pytest

from launch import local

STAND_IN = """
import json, os, pathlib, signal, sys, time

index, folder = int(os.environ["JAX_PROCESS_ID"]), pathlib.Path(os.environ["FOLDER"])
what = [a.split("=")[1] for a in sys.argv if a.startswith("--config.name=")][0]
told = {name: value for name, value in os.environ.items() if name.startswith("JAX_")}
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
(folder / f"{index}.new").write_text(json.dumps(told))
(folder / f"{index}.new").rename(folder / f"{index}.json")
print("out", index)
print("here", file=sys.stderr)
while len(list(folder.glob("*.json"))) < int(os.environ["JAX_NUM_PROCESSES"]):
    time.sleep(0.01)
if what == "well":
    sys.exit(0)
if index == 0 and what == "told":
    os.kill(os.getppid(), signal.SIGTERM)
if index == 2 and what == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
if what == "fails":
    print("ended: another one failed", file=sys.stderr)
    sys.exit(7 if index == 1 else 75)
if index == 0 and what == "refused":
    sys.exit(2)
time.sleep(100)
"""


@pytest.fixture
def run(tmp_path, monkeypatch, capfd):
    """Returns a function: what processes do, how many, more arguments -> (status, out, err)."""
    script = tmp_path / "stand_in.py"
    script.write_text(STAND_IN)
    monkeypatch.setattr(local, "TRAIN", script)
    monkeypatch.setenv("FOLDER", str(tmp_path))
    handlers = {n: signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)}

    def main(what: str, count: int, *more: str) -> tuple[int, str, str]:
        flags = (f"--config.name={what}", f"--config.runs_dir={tmp_path}/runs", *more)
        arguments = [str(count), "--config=configs/demo.py:demo_fold8", *flags]
        started = time.monotonic()
        status = local.main(arguments)
        assert time.monotonic() - started < 30
        return status, *capfd.readouterr()

    yield main
    for number, handler in handlers.items():
        signal.signal(number, handler)


def told(folder: Path) -> list[dict]:
    return [json.loads(p.read_text()) for p in sorted(folder.glob("?.json"))]


def test_each_process_is_told_its_place_and_the_first_speaks(run, tmp_path):
    status, out, err = run("well", 4)
    assert status == 0 and out == "out 0\n"
    assert sorted(err.splitlines()) == ["[1] here", "[2] here", "[3] here", "here"]
    every = told(tmp_path)
    assert [e["JAX_PROCESS_ID"] for e in every] == ["0", "1", "2", "3"]
    assert {e["JAX_NUM_PROCESSES"] for e in every} == {"4"}
    assert {e["JAX_NUM_CPU_DEVICES"] for e in every} == {"2"}  # of the fold's 8
    (address,) = {e["JAX_COORDINATOR_ADDRESS"] for e in every}
    assert re.fullmatch(r"127\.0\.0\.1:\d+", address)


def test_devices_of_a_process_may_be_given(run, tmp_path):
    assert run("well", 2, "--devices=3")[0] == 0
    assert {e["JAX_NUM_CPU_DEVICES"] for e in told(tmp_path)} == {"3"}


def test_a_killed_process_stops_the_others_and_is_named(run, tmp_path):
    checkpoint = tmp_path / "runs/killed/checkpoints/40"
    (checkpoint / "state").mkdir(parents=True)
    (checkpoint / "_CHECKPOINT_METADATA").write_text("{}")
    status, _, err = run("killed", 4)
    assert status == 128 + signal.SIGKILL
    *_, last = err.splitlines()
    assert re.fullmatch(
        r"process 2 \(pid \d+\) was killed by signal 9; the others were stopped; "
        r"the same command goes on from step 40",
        last,
    )


def test_the_first_failure_is_not_one_that_came_of_it(run):
    status, _, err = run("fails", 4)
    assert status == 7
    assert "process 1 (pid" in err and "ended with status 7; the others were stopped; " in err
    assert "another one failed" not in err


def test_refused_arguments_do_not_go_on(run):
    status, _, err = run("refused", 2)
    assert status == 2
    assert err.splitlines()[-1].endswith("ended with status 2; the others were stopped")


def test_sigterm_reaches_all(run):
    assert run("told", 4)[0] == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["four"], "number of processes, not 'four'"),
        (["0"], "number of processes, not '0'"),
        (["2", "--devices=x"], "--devices=x: give the number"),
        (["3", "--config=configs/demo.py:demo_fold8"], "8 devices cannot be shared by 3"),
        (["2", "--config=configs/demo.py", "--config.train.stepz=3"], "--config.train.steps"),
    ],
)
def test_what_cannot_run_is_said_before_anything_is_started(arguments, message, capfd):
    assert local.main(arguments) == 2
    err = capfd.readouterr().err
    assert err.startswith("error: ") and err.count("\n") == 1 and message in err
