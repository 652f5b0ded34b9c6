"""The training loop: all side effects of a run, around a pure step.

Of a run of many processes each does its part of every step; the first writes and speaks.

The host runs one step ahead of the device: it dispatches step n, then waits for step n-1 to be
*done* (the only wait, while the device is busy with n), and reads the metrics of n-1, which are
ready by then. No value that is still being computed is ever read inside a step. If n-1 overflowed
its budget, then n, too, has changed nothing: both batches are run again, n-1 with room for the
worst case.
"""

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from itertools import islice
from typing import Any

import jax
import numpy as np
from rich.console import Console

from moejax.core import cluster, params
from moejax.core.mesh import fold_table
from moejax.data import ngram
from moejax.model.balance import LOSSES
from moejax.model.flops import flops_per_token, inactive_params
from moejax.train import replay
from moejax.train.display import Display
from moejax.train.metrics import IdleExperts, MetricsWriter, Throughput, peak_rss_bytes
from moejax.train.profile import TraceAtStep
from moejax.train.report import write_report
from moejax.train.sample import make_next_logits, sample
from moejax.train.setup import Run, device_line, load_data, write_json
from moejax.train.signals import GracefulStop
from moejax.train.watchdog import Watchdog

PROMPT = "def "


def train(
    run: Run, compile_step: Callable[[Any], Any] = lambda lowered: lowered.compile()
) -> int:
    """Trains to the end, or until SIGTERM; returns the step it stopped after. `compile_step` makes
    a compiled step of the lowered one.

    Writes metrics, checkpoints, and at the end the sample, `facts.json` and the report.
    """
    started, config = time.monotonic(), run.config
    folder, steps = config.run_dir, config.train.steps
    first, agree = cluster.is_first(), cluster.Agreement() if jax.process_count() > 1 else None
    compiled = compile_step(run.train_step.lower(run.state, run.abstract_batch()))
    cluster.meet("compiled")
    facts = _facts(run, compiled.memory_analysis())
    console = Console(highlight=False, quiet=not first)
    display = Display(steps, config.log, start_step=run.start_step, console=console)
    display.header(facts)
    resume_step = run.start_step or None
    if first:
        write_json(folder / "config.json", run.position()["config"])
        run.tokenizer.save(folder / "tokenizer.json")
    with (
        MetricsWriter(folder, config.log, resume_step=resume_step) if first else nullcontext()
        as writer,
        display,
        Watchdog(folder, config.log.watchdog_s, process_index=jax.process_index()) as watchdog,
        TraceAtStep(folder, config.log.profile_step, config.log.profile_steps) as trace,
        GracefulStop(agree) as stop,
        ThreadPoolExecutor(1) as background,
    ):
        again = background.submit(_compile_again, run) if config.model.moe.budget else None
        reporter = _Reporter(run, writer, display, facts)
        step = _steps(run, compiled, again, facts, reporter, watchdog, trace, stop)
        run.save(step)
        run.checkpointer.close()
        stopped = stop.should_stop()
        if stopped:
            display.note(f"{stop.reason or 'stopped'}: saved step {step}; run again to go on")
    if step >= steps and not stopped:
        if config.train.sample_tokens and _staged(run):
            display.note(f"no text sample with pp: python -m moejax.generate --from={folder}")
        facts |= _closing_facts(run, step)
    facts |= {"wall_seconds": time.monotonic() - started, "peak_rss_bytes": peak_rss_bytes()}
    if first:
        write_json(folder / "facts.json", facts)
        display.summary(facts, write_report(folder))
    run.batches.close()
    return step


def _compile_again(run: Run) -> Any:
    """Returns the compiled step for batches that overflowed: it is ready when one does."""
    return run.again_step.lower(run.worst_case.resting, run.abstract_batch()).compile()


class _Reporter:
    """Reads the metrics of a step that has ended, and tells writer and display."""

    def __init__(self, run: Run, writer: MetricsWriter | None, display: Display, facts: dict):
        self._writer, self._display = writer, display
        self._peak, self._config, self._fold = run.matmul_rate, run.config, run.layout.fold
        self._flops = facts["model_flops_per_token"]
        self._throughput, self._idle = Throughput(), IdleExperts()

    def step(self, number: int, metrics: Any, again: bool) -> bool:
        """Waits until the step is done; reports it and returns True, or False if it overflowed.

        `again`: this is the second time that its batch is run.
        """
        jax.block_until_ready(metrics)
        chosen, order = metrics.get("routing"), metrics.get("order")
        apart = ("routing", "order")
        record = jax.device_get({k: v for k, v in metrics.items() if k not in apart})
        if record.pop("overflowed"):
            return False
        rate = self._throughput.step(int(record["num_tokens"]))
        record |= {"step": number, "tokens_per_second": rate, "again": int(again)}
        record |= {"matmul_share": rate * self._flops / self._peak}
        if chosen is not None:
            self._record(number, chosen, order)
        moe = record.get("moe")
        if moe:
            means = ("imbalance", "entropy", *LOSSES, "aux_loss")
            record |= {name: float(moe[name].mean()) for name in means if name in moe}
            for percent in (50, 90, 100):
                record[f"imbalance_p{percent}"] = float(np.percentile(moe["imbalance"], percent))
            record["busiest_rank"] = float(moe["busiest_rank"].max())
            moe["dropped"] = np.rint(moe["dropped"]).astype(int)
            record["dropped"] = int(moe["dropped"].sum())
            record["dead"] = int(moe["dead"].sum())
            if "agreed" in moe:
                record["agreed"] = float(moe["agreed"].min())
            record["idle"], warning = self._idle.step(moe["load"])
            if warning:
                self._display.note(f"step {number}: {warning}")
        if self._writer:
            self._writer.step(record)
        self._display.step(record)
        return True

    def _record(self, number: int, routing: jax.Array, order: jax.Array | None) -> None:
        """Writes what the routers chose, [microbatches, rows * L, layers, K]; `order`: that of the
        tokens over cp."""
        chosen = cluster.whole(routing)
        if order is not None:
            degrees = (self._fold.degree(role) for role in ("dp", "cp"))
            chosen = replay.in_row_order(chosen, cluster.whole(order), *degrees)
        if not cluster.is_first():
            return
        moe, length = self._config.model.moe, self._config.train.sequence_length
        experts = chosen.reshape(-1, length, *chosen.shape[2:])
        replay.save(moe.router.record, number, experts, moe.num_experts)

    def evaluation(self, number: int, losses: dict[str, float]) -> None:
        """Reports an evaluation, and leaves its time out of the throughput."""
        for name, loss in losses.items():
            if self._writer:
                self._writer.evaluation(number, loss, name)
            self._display.evaluation(number, loss, name)
        self._throughput.restart()

    def restart_clock(self) -> None:
        """Leaves the time since the last step out of the throughput."""
        self._throughput.restart()


class _Ahead:
    """Dispatches steps in order, the reports of each one step behind."""

    def __init__(self, run: Run, compiled, again: Future | None, reporter: _Reporter):
        self._run, self._compiled, self._compiled_again = run, compiled, again
        self._reporter = reporter
        self._pending: tuple[int, Any, Any] | None = None

    def step(self, number: int, batch: Any) -> Any:
        """Dispatches a step, and reports the one before it; returns its metrics."""
        before, self._pending = self._pending, self._dispatch(number, batch)
        if before and not self._reporter.step(before[0], before[2], again=False):
            self._again(before)
            self._pending = self._dispatch(number, batch)
        return self._pending[2]

    def settle(self) -> None:
        """Waits until the last step is done, and reports it: `run.state` is then that step's."""
        pending, self._pending = self._pending, None
        if pending and not self._reporter.step(pending[0], pending[2], again=False):
            self._again(pending)

    def _dispatch(self, number: int, batch: Any) -> tuple[int, Any, Any]:
        self._run.state, metrics = self._compiled(self._run.state, batch)
        return number, batch, metrics

    def _again(self, overflowed: tuple[int, Any, Any]) -> None:
        number, batch, _ = overflowed
        assert self._compiled_again, "a step without a budget cannot overflow"
        self._run.state, metrics = self._compiled_again.result()(self._run.state, batch)
        if not self._reporter.step(number, metrics, again=True):
            raise RuntimeError(f"step {number} overflowed with room for the worst case")


def _steps(run: Run, compiled, again, facts, reporter, watchdog, trace, stop) -> int:
    """Runs the steps; returns the number of the last one. `run.state` is then that step's."""
    train, saver, number = run.config.train, run.checkpointer, run.start_step
    ahead = _Ahead(run, compiled, again, reporter)
    if number == 0:
        reporter.evaluation(0, evaluate(run))
    while number < train.steps and not stop.should_stop():
        batch = next(run.batches) | run.replayed(number + 1)
        if number == run.start_step:
            facts["model_flops_per_token"] = flops_per_token(run.config.model, batch["segment_ids"])
            reporter.restart_clock()
        number += 1
        trace.before_step(number)
        metrics = ahead.step(number, run.put(batch))
        trace.after_step(number, metrics)
        watchdog.beat(number)
        last = number == train.steps
        if last or (train.eval_every and number % train.eval_every == 0):
            ahead.settle()
            reporter.evaluation(number, evaluate(run))
            watchdog.beat(number)
        if saver.should_save(number):
            ahead.settle()
            run.save(number)
            reporter.restart_clock()
    ahead.settle()
    return number


def evaluate(run: Run) -> dict[str, float]:
    """Returns the loss (nats per token) of each evaluation set, read once at the end."""
    losses = {}
    for name, batches in run.evals.items():
        sums = [run.eval_step(run.state, run.put(batch)) for batch in batches]
        nll, targets = np.sum(np.asarray(jax.device_get(sums), np.float64), axis=0)
        losses[name] = float(nll / max(targets, 1.0))
    return losses


def _facts(run: Run, memory: Any) -> dict[str, Any]:
    """What is known before the first step (the names: see the report)."""
    cfg, layout = run.config.model, run.layout
    num_params = params.count(layout.ordered.params)
    sample_flops = flops_per_token(cfg, np.ones((1, run.config.train.sequence_length), np.int32))
    used = memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes
    return {
        "num_params": num_params,
        "active_params": num_params - inactive_params(cfg),
        "device": device_line(layout.mesh),
        "num_devices": layout.mesh.devices.size,
        "compute_dtype": run.precision.compute_dtype,
        "fold_table": fold_table(layout.fold),
        "step_memory_bytes": used - memory.alias_size_in_bytes,
        "dense_matmul_flops_per_second": run.matmul_rate,
        "model_flops_per_token": sample_flops,
        "tokenizer_vocab": run.tokenizer.vocab_size,
        "train_tokens": run.batches.num_tokens,
    }


def _staged(run: Run) -> bool:
    """Whether the ranks of a pipeline have some layers each, so that no text is sampled."""
    return run.layout.fold.degree("pp") > 1


def _closing_facts(run: Run, steps: int) -> dict[str, Any]:
    """The text sample (of a pipeline, whose ranks have some layers each, `moejax.generate` makes
    one), and the count model that the run has to beat, fitted on what it saw."""
    train, facts = run.config.train, {}
    if train.sample_tokens and not _staged(run):
        slots = min(train.sequence_length, 256)
        next_logits = make_next_logits(run.worst_case, slots)
        ids = sample(
            next_logits, (run.state.params, run.state.buffers), run.tokenizer.encode(PROMPT),
            num_tokens=train.sample_tokens, vocab_size=run.tokenizer.vocab_size,
        )  # fmt: skip
        if cluster.is_first():
            (run.config.run_dir / "sample.txt").write_text(run.tokenizer.decode(ids))
    if run.evals and cluster.is_first():
        _, batches, evals = load_data(run.config)
        seen = min(steps, max(batches.rows_per_epoch // train.batch_size, 1))
        with batches:
            model = ngram.fit(islice(batches, seen), run.tokenizer.vocab_size)
        facts["trigram_val_loss"] = ngram.loss(model, next(iter(evals.values())))
        facts["trigram_tokens"] = seen * train.batch_size * train.sequence_length
    return facts
