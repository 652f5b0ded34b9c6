"""The watchdog speaks once for each stall, says where every thread stands, and is silent else."""

import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from moejax.train.watchdog import Heartbeat, Watchdog


def dumps(run_dir: Path) -> list[Path]:
    return sorted(run_dir.glob("stacks-*.txt"))


def wait_until(condition: Callable[[], bool], seconds: float = 10.0) -> bool:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True


def stand_still_here(stop: threading.Event) -> None:
    stop.wait()


def test_a_stall_is_dumped_once_with_every_thread(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stop = threading.Event()
    stuck = threading.Thread(target=stand_still_here, args=(stop,))
    stuck.start()
    try:
        with Watchdog(tmp_path, 0.1, process_index=3) as watchdog:
            watchdog.beat(41)
            assert wait_until(lambda: bool(dumps(tmp_path)))
            time.sleep(0.4)
            (path,) = dumps(tmp_path)
            watchdog.beat(42)
            assert wait_until(lambda: len(dumps(tmp_path)) == 2)
    finally:
        stop.set()
        stuck.join()
    text = path.read_text()
    assert "stand_still_here" in text and "test_a_stall_is_dumped_once" in text
    assert "last: step 41" in text.splitlines()[0]
    assert "last: step 42" in dumps(tmp_path)[1].read_text().splitlines()[0]
    assert path.stem.endswith("process3")
    lines = [line for line in capsys.readouterr().err.splitlines() if "watchdog" in line]
    assert len(lines) == 2 and str(path) in lines[0]


def test_progress_keeps_it_silent(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Watchdog(tmp_path, 2.0) as watchdog:
        for step in range(60):
            time.sleep(0.05)
            watchdog.beat(step)
    assert not dumps(tmp_path) and capsys.readouterr().err == ""


def test_zero_watches_nothing_and_exit_ends_the_thread(tmp_path: Path) -> None:
    def watching() -> bool:
        return any(thread.name == "watchdog" for thread in threading.enumerate())

    with Watchdog(tmp_path, 0):
        assert not watching()
    with Watchdog(tmp_path, 100.0):
        assert watching()
    assert not watching()


def test_a_folder_that_cannot_be_written_does_not_end_the_watch(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    said = []
    with Watchdog(tmp_path / "file", 0.1) as watchdog:
        for _ in range(2):
            watchdog.beat()
            assert wait_until(lambda: (said.append(capsys.readouterr().err), said[-1])[1] != "")
    assert len([text for text in said if "cannot be written" in text]) == 2


def test_heartbeat_ages_between_beats() -> None:
    heart = Heartbeat()
    time.sleep(0.05)
    assert heart.age_s() >= 0.05
    heart.beat(7)
    heart.beat()
    assert heart.step == 7 and heart.count == 2 and heart.age_s() < 5


def test_it_works_without_the_accelerator_library() -> None:
    code = "import sys, moejax.train.watchdog; assert 'jax' not in sys.modules"
    root = Path(__file__).parents[2]
    subprocess.run([sys.executable, "-c", code], cwd=root, check=True)
