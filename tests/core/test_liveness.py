"""Processes of a job that die, fail or are refused: what becomes of the others, and what they say.

Real processes, real connections; none computes anything.
"""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from moejax.core import liveness

ROOT = Path(__file__).parents[2]
COUNT = 3
CHILD = """
import os, sys, time
from moejax.core import job, liveness

job.join()
with liveness.Peers() as peers:
    peers.way_on = lambda: "go on"
    index, (what, victim) = int(os.environ["JAX_PROCESS_ID"]), sys.argv[1:]
    os.write(1, b"up" + os.linesep.encode())
    time.sleep(0.5)  # until all are
    if index == int(victim) and what == "fails":
        raise KeyError("a mistake")
    if index == int(victim) and what == "refused":
        sys.exit(peers.refuse(ValueError("no such text")))
    if index == int(victim) and what == "aborts":
        os.abort()
    if index == int(victim) or what != "leaves":
        time.sleep(1 if what == "leaves" else 100)
sys.exit(0)
"""


@pytest.fixture
def start(tmp_path):
    """Returns a function: what, victim -> the processes, all of them in the block."""
    every = []

    def started(what: str, victim: int) -> list[subprocess.Popen]:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{free.getsockname()[1]}"
        for index in range(COUNT):
            told = {"JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": str(COUNT)}
            every.append(
                subprocess.Popen(
                    [sys.executable, "-c", CHILD, what, str(victim)],
                    stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT,
                    env=os.environ | told | {"JAX_PROCESS_ID": str(index), "JAX_PLATFORMS": "cpu"},
                )
            )  # fmt: skip
        for process in every:
            assert process.stdout.readline() == "up\n", process.stderr.read()
        return every

    yield started
    for process in every:
        process.kill()
        process.communicate()


def finish(processes: list[subprocess.Popen]) -> tuple[list[int], list[str]]:
    """Returns each one's status, and the last line that it said, once all have ended."""
    end = time.monotonic() + 30
    said = [p.communicate(timeout=end - time.monotonic())[1] for p in processes]
    return [p.returncode for p in processes], [(s.splitlines() or [""])[-1] for s in said]


def test_a_killed_process_ends_the_others_which_name_it(start):
    processes = start("wait", 2)
    processes[2].send_signal(signal.SIGKILL)
    statuses, said = finish(processes)
    assert statuses == [liveness.ANOTHER_DIED] * 2 + [-signal.SIGKILL]
    pid = processes[2].pid
    for line in said[:2]:
        assert re.fullmatch(rf"ended: process 2 of 3 \(pid {pid} on \S+\) died; go on", line)


def test_the_first_process_killed_ends_the_others_which_name_it(start):
    processes = start("wait", 0)
    processes[0].send_signal(signal.SIGKILL)
    statuses, said = finish(processes)
    assert statuses == [-signal.SIGKILL] + [liveness.ANOTHER_DIED] * 2
    for line in said[1:]:
        assert line.startswith("ended: process 0 of 3 (at 127.0.0.1") and line.endswith("; go on")


@pytest.mark.parametrize("victim", [0, 1])
def test_a_mistake_in_one_ends_all(start, victim):
    statuses, said = finish(start("fails", victim))
    assert statuses.pop(victim) == liveness.FAILED
    assert said.pop(victim) == "KeyError: 'a mistake'"  # below its traceback
    assert statuses == [liveness.ANOTHER_DIED] * 2
    for line in said:
        assert line.startswith(f"ended: process {victim} of 3 (pid ")
        assert line.endswith(") failed: KeyError: 'a mistake'; go on")


def test_arguments_refused_by_one_end_all(start):
    statuses, said = finish(start("refused", 1))
    assert statuses == [liveness.REFUSED] * 3
    assert said[0].startswith("ended: process 1 of 3 (pid ") and said[0] == said[2]
    assert said[0].endswith(") refused its arguments: no such text")


def test_a_process_that_a_library_aborts_ends_all(start):
    statuses, said = finish(start("aborts", 1))
    assert statuses == [liveness.ANOTHER_DIED, 128 + signal.SIGABRT, liveness.ANOTHER_DIED]
    assert "was aborted by a library" in said[1] and "process 1 of 3" in said[0]


def test_processes_leave_one_by_one_without_a_word(start):
    statuses, said = finish(start("leaves", 1))
    assert statuses == [0, 0, 0] and said == ["", "", ""]
