"""The loop, in this process: the host waits for no value, memory does not grow, files appear."""

import json
import threading
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.array import ArrayImpl  # float(), tolist() and device_get read its `_value`

from moejax.train import loop, setup
from moejax.train.metrics import IdleExperts
from tests.train.test_resume import write_text
from tests.train.tiny_recipe import tiny


class Reads:
    """Counts reads, by the main thread, of arrays that were still being computed."""

    def __init__(self, patch: pytest.MonkeyPatch):
        self.early = self.all = 0
        original = ArrayImpl._value.fget

        def counted(read):
            def wrapper(array, *args, **options):
                main = threading.current_thread() is threading.main_thread()
                if main and isinstance(array, ArrayImpl):
                    self.all += 1
                    self.early += not array.is_ready()
                return read(array, *args, **options)

            return wrapper

        patch.setattr(ArrayImpl, "_value", property(counted(original)))
        patch.setattr(ArrayImpl, "item", counted(ArrayImpl.item))
        for name in ("asarray", "array"):  # numpy reads through the buffer protocol
            patch.setattr(np, name, counted(getattr(np, name)))


class Wrapped:
    """A train step that does something more after each dispatch."""

    def __init__(self, step, after):
        self._step, self._after = step, after

    def lower(self, state, batch):
        self._compiled = self._step.lower(state, batch).compile()
        return self

    def compile(self):
        return self

    def memory_analysis(self):
        return self._compiled.memory_analysis()

    def __call__(self, state, batch):
        state, metrics = self._compiled(state, batch)
        self._after(metrics)
        return state, metrics


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder for runs; the compilation cache of the other tests is put back afterwards."""
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = {name: getattr(jax.config, name) for name in names}
    folder = tmp_path_factory.mktemp("loop")
    write_text(folder / "text")
    yield folder
    for name, value in before.items():
        jax.config.update(name, value)


def config(folder: Path, name: str, **train):
    base = tiny()
    return replace(
        base, name=name, runs_dir=str(folder / "runs"),
        data=replace(base.data, train=(str(folder / "text"),), eval=()),
        train=replace(base.train, **train),
        checkpoint=replace(base.checkpoint, save_every=20),
    )  # fmt: skip


@pytest.mark.parametrize(
    "read",
    [float, lambda a: np.asarray(a), jax.device_get, lambda a: a.item(), lambda a: a.tolist()],
    ids=["float", "asarray", "device_get", "item", "tolist"],
)
def test_every_way_to_read_an_array_is_counted(read, monkeypatch):
    slow = jax.jit(lambda x: jax.lax.fori_loop(0, 300, lambda _, y: y @ x / 512.0, x)[0, 0])
    x = jnp.ones((512, 512))
    slow(x).block_until_ready()
    reads = Reads(monkeypatch)
    read(slow(x))
    assert reads.early >= 1


def test_no_step_waits_for_a_value_and_memory_does_not_grow(folder, monkeypatch):
    run, resident = setup.prepare(config(folder, "clean", steps=80)), []
    run.train_step = Wrapped(run.train_step, lambda _: resident.append(resident_bytes()))
    reads = Reads(monkeypatch)
    assert loop.train(run) == 80
    assert reads.early == 0
    assert reads.all >= 80, "the metrics of every step are read, one step late"
    assert resident[79] - resident[39] < 32 * 2**20


def test_a_blocking_read_is_found(folder, monkeypatch):
    run = setup.prepare(config(folder, "planted", steps=10))
    run.train_step = Wrapped(run.train_step, lambda metrics: float(metrics["loss"]))
    reads = Reads(monkeypatch)
    loop.train(run)
    assert reads.early > 0


def test_a_run_leaves_metrics_facts_report_and_sample(folder):
    made = config(folder, "evaluated", steps=6, eval_every=3, sample_tokens=6)
    made = replace(made, data=replace(made.data, eval=("val=heldout",)))
    loop.train(setup.prepare(made))
    lines = (made.run_dir / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    evaluations = [r for r in records if "val_loss" in r]
    assert [r["step"] for r in evaluations] == [0, 3, 6]
    assert evaluations[-1]["val_loss"] < evaluations[0]["val_loss"]
    steps = [r for r in records if "loss" in r]
    assert [r["step"] for r in steps] == [1, 2, 3, 4, 5, 6]
    needed = {"loss", "grad_norm", "lr", "tokens_per_second", "matmul_share", "imbalance",
              "aux_loss", "z_loss", "batch_loss", "entropy", "busiest_rank", "imbalance_p50",
              "imbalance_p90", "imbalance_p100", "dead", "idle", "dropped", "skipped",
              "num_tokens"}  # fmt: skip
    assert all(needed <= set(r) for r in steps) and not any(r["dropped"] for r in steps)
    facts = json.loads((made.run_dir / "facts.json").read_text())
    for name in (
        "num_params", "active_params", "device", "num_devices", "fold_table", "step_memory_bytes",
        "peak_rss_bytes", "trigram_val_loss", "dense_matmul_flops_per_second",
        "model_flops_per_token", "tokenizer_vocab", "wall_seconds", "train_tokens",
    ):  # fmt: skip
        assert facts[name], name
    assert (made.run_dir / "sample.txt").read_text().startswith(loop.PROMPT)
    assert "<svg" in (made.run_dir / "report.html").read_text()
    assert json.loads((made.run_dir / "config.json").read_text())["train"]["steps"] == 6


def test_another_run_gives_weights_and_router_biases_to_a_new_one(folder):
    """And a frozen bias stays as it came, and steers the choice."""
    first = setup.prepare(config(folder, "gives", steps=6))
    loop.train(first)
    right = jax.tree.map(np.asarray, (first.state.params, first.state.buffers))
    assert right[1]["stack_0"]["block_0"]["moe"]["bias"].any()
    made = config(folder, "takes", steps=6)
    frozen = replace(made.model.moe.balance, bias_rate=0.0, frozen_bias=True)
    model = replace(made.model, moe=replace(made.model.moe, balance=frozen))
    source = str(first.config.run_dir)
    made = replace(made, model=model, init=replace(made.init, from_run=source))
    run = setup.prepare(made)
    got = jax.tree.map(np.asarray, (run.state.params, run.state.buffers))
    jax.tree.map(np.testing.assert_array_equal, got, right)
    buffers = jax.tree.map(np.array, got[1])
    buffers["stack_0"]["block_0"]["moe"]["bias"][1, 6] = -100.0
    run.state = jax.device_put(replace(run.state, buffers=buffers), run.layout.shardings)
    loop.train(run)
    jax.tree.map(np.testing.assert_array_equal, run.state.buffers, buffers)
    records = map(json.loads, (made.run_dir / "metrics.jsonl").read_text().splitlines())
    assert [r["dead"] for r in records if "loss" in r] == [1] * 6


def test_both_steps_are_told_what_the_loss_is(folder, monkeypatch):
    told, real = [], setup.make_train_step

    def noted(*args, **options):
        told.append((options["loss_mean"], options["mtp_coeff"], options["worst_case"]))
        return real(*args, **options)

    monkeypatch.setattr(setup, "make_train_step", noted)
    run = setup.prepare(config(folder, "told", steps=6, loss_mean="document", mtp_coeff=0.3))
    run.batches.close()
    assert told == [("document", 0.3, False), ("document", 0.3, True)]


def test_an_expert_that_no_token_reaches_is_told_of(folder, monkeypatch, capsys):
    monkeypatch.setattr(loop, "IdleExperts", lambda: IdleExperts(after=3))
    run = setup.prepare(config(folder, "idle", steps=5))
    buffers = jax.tree.map(np.array, run.state.buffers)
    buffers["stack_0"]["block_0"]["moe"]["bias"][1, 6] = -100.0
    state = replace(run.state, buffers=buffers)
    run.state = jax.device_put(state, run.layout.shardings)
    loop.train(run)
    line = "step 3: warning: experts without a token for 3 steps: layer 1: 6"
    assert capsys.readouterr().out.count(line) == 1
    records = (run.config.run_dir / "metrics.jsonl").read_text().splitlines()
    steps = [r for r in map(json.loads, records) if "loss" in r]
    assert [r["idle"] for r in steps] == [0, 0, 1, 1, 1]
    assert [r["dead"] for r in steps] == [1] * 5
    assert "idle for 100 steps" in (run.config.run_dir / "report.html").read_text()
