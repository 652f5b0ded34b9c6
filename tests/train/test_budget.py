"""Dispatch within a budget: a step that overflows changes nothing, and is run again with room."""

import json
from dataclasses import replace
from pathlib import Path

import jax
import pytest

from moejax.train import loop, setup
from tests.oracle import max_relative_error
from tests.train.test_loop import Reads, folder
from tests.train.tiny_recipe import tiny_fold8

STEPS = 7
__all__ = ["folder"]  # a fixture


def config(folder: Path, name: str, dispatch: str, budget: float):
    base = tiny_fold8()
    moe = replace(base.model.moe, dispatch=dispatch, budget=budget)
    return replace(
        base, name=name, runs_dir=str(folder / "runs"), model=replace(base.model, moe=moe),
        data=replace(base.data, train=(str(folder / "text"),), eval=()),
        train=replace(base.train, steps=STEPS, microbatches=2),
    )  # fmt: skip


def records(made) -> list[dict]:
    lines = (made.run_dir / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def trained(made):
    """(records, final state) of a run."""
    run = setup.prepare(made)
    loop.train(run)
    return records(made), run.state


# The second budget of each is one that some steps of this run exceed, and some do not.
@pytest.mark.parametrize(("dispatch", "budgets"), [("all_to_all", (1, 2)), ("ragged", (1, 1.3))])
def test_a_run_that_overflows_equals_one_that_never_does(dispatch, budgets, folder, monkeypatch):
    """The losses, and the state in the end: parameters, moments, router bias, counts.

    Bit for bit where every step was run again, so by the program of the other run; to rounding
    where buffers of another length are cut into other blocks. Nothing is dropped, every step is
    reported once, and the host waits for no value.
    """
    roomy, state = trained(config(folder, f"{dispatch}_roomy", dispatch, 0.0))
    assert not any(r["again"] for r in roomy)
    for budget in budgets:
        reads = Reads(monkeypatch)
        tight, tight_state = trained(config(folder, f"{dispatch}_{budget}", dispatch, budget))
        assert reads.early == 0
        again = [r["again"] for r in tight]
        assert all(again) if budget == 1 else 0 < sum(again) < STEPS
        assert [r["step"] for r in tight] == list(range(1, STEPS + 1))
        assert not any(r["dropped"] for r in tight)
        losses = ([r["loss"] for r in records] for records in (tight, roomy))
        assert max_relative_error(*losses) <= (0 if all(again) else 1e-6)
        for mine, right in zip(*map(jax.tree.leaves, (tight_state, state)), strict=True):
            if jax.dtypes.issubdtype(mine.dtype, jax.dtypes.prng_key):
                mine, right = map(jax.random.key_data, (mine, right))
            assert max_relative_error(mine, right) <= (0 if all(again) else 1e-5)
