"""Graceful stop, with real signals: most of it in a child process, which may die of them."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from moejax.train.signals import GracefulStop

ROOT = Path(__file__).parents[2]

LOOP = """
import time
from moejax.train.signals import GracefulStop
with GracefulStop() as stop:
    print("ready", flush=True)
    for step in range(2000):
        time.sleep(0.01)
        if stop.should_stop() and {leave}:
            break
        if stop.requested:
            print("asked", flush=True) if stop.reason else None
            stop.reason = ""
    print("left by", stop.reason, flush=True)
"""


def start(leave: bool) -> subprocess.Popen:
    child = subprocess.Popen(
        [sys.executable, "-c", LOOP.format(leave=leave)],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert child.stdout.readline() == "ready\n"
    return child


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_first_signal_ends_the_loop_cleanly(number):
    child = start(leave=True)
    os.kill(child.pid, number)
    out, err = child.communicate(timeout=20)
    assert (child.returncode, out, err) == (0, f"left by {number.name}\n", "")


def test_the_second_interrupt_does_not_wait_and_a_second_sigterm_does():
    child = start(leave=False)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGTERM):
        os.kill(child.pid, number)
    assert child.stdout.readline() == "asked\n"
    assert child.poll() is None
    os.kill(child.pid, signal.SIGINT)
    out, err = child.communicate(timeout=20)
    assert "KeyboardInterrupt" in err and "left by" not in out and child.returncode != 0


def test_handlers_are_restored_even_after_an_error():
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    stop = GracefulStop()
    with pytest.raises(ZeroDivisionError), stop:
        assert signal.getsignal(signal.SIGTERM) != before[signal.SIGTERM]
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.requested and stop.reason == "SIGTERM"
        raise ZeroDivisionError
    assert {number: signal.getsignal(number) for number in before} == before


def test_outside_the_main_thread_nothing_changes():
    seen = {}

    def body():
        with GracefulStop() as stop:
            seen.update(handler=signal.getsignal(signal.SIGTERM), stop=stop.should_stop())

    before = signal.getsignal(signal.SIGTERM)
    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    assert seen == {"handler": before, "stop": False}


def test_processes_agree():
    """Of two processes one was asked: neither stops until the shared flag says so, then both do."""
    shared = {"flag": False}

    def agree(mine: bool) -> bool:
        before = shared["flag"]
        shared["flag"] = before or mine
        return before

    asked, other = GracefulStop(agree), GracefulStop(agree)
    asked.requested = True
    assert [other.should_stop(), asked.should_stop()] == [False, False]
    assert [other.should_stop(), asked.should_stop()] == [True, True]
