"""Router replay: choices written by one run, followed by another; files, and what is refused."""

import json
from dataclasses import replace

import numpy as np
import pytest

from moejax.core.mesh import ParallelConfig
from moejax.model.balance import BalanceConfig
from moejax.train import loop, replay, setup
from tests.oracle import max_relative_error
from tests.train.test_loop import config, folder
from tests.train.tiny_recipe import tiny_fold8

STEPS, ROWS, LENGTH, LAYERS, E, K = 3, 8, 32, 2, 8, 2
__all__ = ["folder"]  # a fixture


def trained(folder, name, fold=False, bias_rate=1e-3, **router):
    """The records of a short run."""
    made = config(folder, name, steps=STEPS, microbatches=2 if fold else 1)
    base, parallel = made, made.parallel
    if fold:  # rows are split over cp, and written whole
        base, parallel = tiny_fold8(), ParallelConfig(dp=2, cp=2, tp=2, ep=4, zero=3)
    # Of the losses one that does not depend on the microbatches.
    balance = BalanceConfig(batch_coeff=0, sequence_coeff=0.05, z_coeff=1e-4, bias_rate=bias_rate)
    router = replace(base.model.moe.router, **router)
    moe = replace(base.model.moe, router=router, balance=balance)
    model = replace(made.model, moe=moe, remat="full" if fold else "none")
    made = replace(
        made, model=model, parallel=parallel, log=replace(made.log, load_every=1),
        optimizer=replace(made.optimizer, warmup_steps=1),
    )  # fmt: skip
    loop.train(setup.prepare(made))
    lines = (made.run_dir / "metrics.jsonl").read_text().splitlines()
    return [r for r in map(json.loads, lines) if "loss" in r]


def test_another_fold_follows_the_choices_of_one_device(folder):
    """Loads are those that were recorded, losses those of the run that chose; with other choices
    the loads are the others', and training goes on."""
    files = folder / "routing"
    chose = trained(folder, "records", record=str(files))
    written = [replay.load(files, n, (ROWS, LENGTH, LAYERS, K), E) for n in (1, 2, 3)]
    for n, record in enumerate(chose):
        counts = [np.bincount(written[n][:, :, layer].ravel(), minlength=E)[:E] for layer in (0, 1)]
        np.testing.assert_allclose(
            record["load"], np.asarray(counts) / np.sum(counts[0]), atol=1e-5
        )
    copy = folder / "copy"
    followed = trained(folder, "replays", fold=True, replay=str(files), record=str(copy))
    for n in range(STEPS):  # a fold, with two microbatches, writes the same file
        again = replay.load(copy, n + 1, (ROWS, LENGTH, LAYERS, K), E)
        np.testing.assert_array_equal(again, written[n])
    for mine, right in zip(followed, chose, strict=True):
        np.testing.assert_array_equal(mine["load"], right["load"])
        assert max_relative_error(mine["loss"], right["loss"]) < 5e-6
    for n in range(STEPS):
        moved = np.where(written[n] < E, (written[n] + 1) % E, E)
        replay.save(folder / "moved", n + 1, moved, E)
    other = trained(folder, "other", replay=str(folder / "moved"), bias_rate=0.0)
    np.testing.assert_array_equal(other[0]["load"], np.roll(chose[0]["load"], 1, axis=1))
    assert other[0]["loss"] != chose[0]["loss"] and other[0]["grad_norm"] > 0
    with pytest.raises(FileNotFoundError, match=r"router.replay has no .*00000001.npz: record"):
        trained(folder, "nothing", replay=str(folder / "nowhere"))


def test_a_file_that_does_not_fit_is_refused(tmp_path):
    shape = (4, 3, 2, 2)
    right = np.tile(np.asarray([5, 2]), (4, 3, 2, 1))
    replay.save(tmp_path, 7, right, 8)
    np.testing.assert_array_equal(replay.load(tmp_path, 7, shape, 8), right)
    with np.load(replay.path_of(tmp_path, 7)) as arrays:
        assert arrays["experts"].dtype == np.uint8
    with pytest.raises(ValueError, match=r"this run needs .*layers, K\] = \(4, 3, 1, 2\)"):
        replay.load(tmp_path, 7, (4, 3, 1, 2), 8)
    with pytest.raises(ValueError, match="outside 0..E=4"):
        replay.load(tmp_path, 7, shape, 4)
    replay.save(tmp_path, 8, np.full(shape, 3), 8)
    with pytest.raises(ValueError, match="the same expert twice"):
        replay.load(tmp_path, 8, shape, 8)
    replay.save(tmp_path, 9, np.full(shape, 8), 8)  # no expert at all
    assert (replay.load(tmp_path, 9, shape, 8) == 8).all()


def test_a_process_gets_its_rows_of_each_microbatch():
    rows = np.arange(12)
    np.testing.assert_array_equal(replay.part_of(rows, 2, (1, 3)), [2, 3, 8, 9])
    np.testing.assert_array_equal(replay.part_of(rows, 3, (0, 1)), rows)
