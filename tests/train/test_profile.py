"""A trace covers the steps it was asked for, and only a run that reaches them takes one."""

from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from moejax.train.profile import TraceAtStep


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    made: list[str] = []
    monkeypatch.setattr(jax.profiler, "start_trace", lambda path: made.append(f"start {path}"))
    monkeypatch.setattr(jax.profiler, "stop_trace", lambda: made.append("stop"))
    return made


def run_steps(trace: TraceAtStep, first: int, last: int, calls: list[str]) -> None:
    for step in range(first, last + 1):
        trace.before_step(step)
        calls.append(f"step {step}")
        trace.after_step(step)


def test_the_trace_covers_its_steps(calls: list[str]) -> None:
    with TraceAtStep(Path("run"), 3, 2) as trace:
        run_steps(trace, 2, 6, calls)
    assert calls == ["step 2", "start run/profile", "step 3", "step 4", "stop", "step 5", "step 6"]


def test_an_early_end_stops_it(calls: list[str]) -> None:
    with TraceAtStep(Path("run"), 3, 20) as trace:
        run_steps(trace, 3, 4, calls)
    assert calls == ["start run/profile", "step 3", "step 4", "stop"]


@pytest.mark.parametrize("step", [0, 5])
def test_no_trace_when_off_or_resumed_after_it(calls: list[str], step: int) -> None:
    with TraceAtStep(Path("run"), step, 3) as trace:
        run_steps(trace, 6, 9, calls)
    assert calls == ["step 6", "step 7", "step 8", "step 9"]


def test_a_real_trace_lands_in_the_run_folder(tmp_path: Path) -> None:
    with TraceAtStep(tmp_path, 1, 1) as trace:
        trace.before_step(1)
        trace.after_step(1, jnp.ones(4) + 1)
    assert [path for path in tmp_path.rglob("*.xplane.pb") if path.stat().st_size > 0]
