"""Dispatch within a budget: a step that overflows changes nothing, and is run again with room."""

import json
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest

from moejax.train import loop, setup
from tests.oracle import max_relative_error
from tests.train.test_loop import Reads, folder
from tests.train.tiny_recipe import tiny_fold8

STEPS = 7
__all__ = ["folder"]  # a fixture


def config(folder: Path, name: str, dispatch: str, budget: float, force: str = ""):
    base = tiny_fold8()
    jitter = 0.1 if force else 0.0  # the second run of a batch draws the same numbers
    router = replace(base.model.moe.router, force=force, jitter=jitter)
    # Without a budget, by the program that runs a step again: tokens in pieces.
    moe = replace(base.model.moe, dispatch=dispatch, budget=budget, router=router,
                  pieces=1 if budget else 0)  # fmt: skip
    parallel = replace(base.parallel, node=2 if dispatch == "hierarchical" else 0)
    return replace(
        base, name=name, runs_dir=str(folder / "runs"), parallel=parallel,
        model=replace(base.model, moe=moe),
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


def test_a_forced_skew_exceeds_its_budget_and_loses_no_token(folder):
    """Zipf gives the two experts of the first ep rank about twice a balanced load: 1.2 is too
    little in every step, 4 (all tokens on one rank of 4) never."""
    runs = {}
    for budget in (1.2, 4.0):
        made = config(folder, f"skewed_{budget}", "hierarchical", budget, "skewed")
        short = replace(made.train, steps=3), replace(made.optimizer, warmup_steps=1)
        made = replace(made, train=short[0], optimizer=short[1])
        made = replace(made, log=replace(made.log, load_every=1))
        runs[budget] = trained(made)
    tight, roomy = (records for records, _ in runs.values())
    assert [r["again"] for r in tight] == [1, 1, 1] and not any(r["again"] for r in roomy)
    assert [r["step"] for r in tight] == [1, 2, 3]
    assert not any(r["dropped"] for r in tight + roomy)
    losses = ([r["loss"] for r in records] for records in (tight, roomy))
    assert max_relative_error(*losses) <= 1e-6
    load = np.asarray(roomy[0]["load"])
    assert (load[:, :2].sum(axis=1) > 1.2 / 4).all()
    np.testing.assert_array_equal(load, tight[0]["load"])
    assert int(runs[1.2][1].step) == 3
