"""Switches for every test, set before JAX starts a backend.

Sixteen CPU devices, rank promotion raises, dtype promotion is strict (warnings are errors:
pyproject.toml). Compiled programs are kept in `.cache/jax`, so a second run skips most of XLA's
work; and XLA optimizes them little, since compiling takes most of the time here (`make parity`
compares programs that it optimizes as those of a run). The closing summary names what was skipped
or left out: silence never reads as "passed".

`JAX_PLATFORMS`, where it is set, is obeyed: a machine with a GPU can run its own tests.
"""

import gc
from collections import Counter
from collections.abc import Generator
from pathlib import Path
from typing import Any

import hypothesis
import jax
import pytest

NUM_DEVICES = 16
# How to run what `make test` leaves out, by marker.
HOW_TO_RUN = {"deviceless": "make test-deviceless", "large": "make test-large"}

jax.config.update("jax_platforms", jax.config.jax_platforms or "cpu")
jax.config.update("jax_num_cpu_devices", NUM_DEVICES)
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_disable_most_optimizations", True)
jax.config.update("jax_compilation_cache_dir", str(Path(__file__).parent.parent / ".cache" / "jax"))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.3)
jax.config.update("jax_compilation_cache_max_size", 2 * 1024**3)  # bytes; the oldest go first

# The same examples in every run, and no time limit on one: the first call of each compiles.
hypothesis.settings.register_profile("house", deadline=None, derandomize=True)
hypothesis.settings.load_profile("house")

# Linux lets a process map 65,530 pieces of memory; a compiled train step takes about a thousand.
MAPS, MOST_MAPS = Path("/proc/self/maps"), 25_000

# Files that take minutes, the longest first: begun last, one would leave the other cores idle.
LONG = (
    "train/test_parity.py", "train/test_processes.py", "train/test_resume.py",
    "train/test_parity_64.py", "parallel/test_pipeline.py",
)  # fmt: skip

_deselected: dict[str, str] = {}  # test -> the group it was left out with


@pytest.fixture(autouse=True)
def few_programs() -> Generator[None]:
    """Forgets compiled programs, after a test, before there are too many of them for a process."""
    yield
    if MAPS.exists() and MAPS.read_bytes().count(b"\n") > MOST_MAPS:
        jax.clear_caches()
        gc.collect()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts the files that take minutes first."""
    place = {Path(__file__).parent / name: number for number, name in enumerate(LONG)}
    items.sort(key=lambda item: place.get(item.path, len(place)))


def pytest_deselected(items: list[pytest.Item]) -> None:
    """Remembers what -m or -k left out."""
    _deselected.update({item.nodeid: _group(item) for item in items})


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Sends it on, where this is one of several processes that share the tests."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["deselected"] = _deselected


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Takes it from a process that has ended; every one of them collects all tests."""
    _deselected.update(getattr(node, "workeroutput", {}).get("deselected", {}))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Names every group and every test that did not run."""
    by_group = Counter(_deselected.values())
    if not by_group and not terminalreporter.stats.get("skipped"):
        return
    terminalreporter.section("not run here")
    for group, count in sorted(by_group.items()):
        how = f" ({HOW_TO_RUN[group]})" if group in HOW_TO_RUN else ""
        terminalreporter.write_line(f"not run here: {group}: {count} test(s){how}")
    for name, group in sorted(_deselected.items()):
        if group in HOW_TO_RUN:
            terminalreporter.write_line(f"  {name}")
    for report in terminalreporter.stats.get("skipped", []):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
        terminalreporter.write_line(f"skipped: {report.nodeid}: {reason}")


def _group(item: pytest.Item) -> str:
    """Returns the marker that `make test` leaves out, or the reason that is left."""
    return next((name for name in HOW_TO_RUN if item.get_closest_marker(name)), "others (-m, -k)")
