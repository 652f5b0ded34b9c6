"""metrics.jsonl is valid JSON, has each step once, and agrees with TensorBoard."""

import json
import struct
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from tensorboardX.proto import event_pb2

from moejax.train.metrics import (
    IdleExperts,
    LogConfig,
    MetricsWriter,
    Throughput,
    measure_dense_matmul,
    peak_rss_bytes,
    plain,
    read_metrics,
)

FILES_ONLY = LogConfig(tensorboard=False)
LOAD_LE = np.array([[0.5, 0.25, 0.25, 0.0], [0.25, 0.25, 0.25, 0.25]], np.float32)


def record(step: int, **changes: object) -> dict:
    """A step's record as the training loop makes it, for 2 MoE layers of 4 experts."""
    moe = {
        "load": LOAD_LE,
        "imbalance": np.array([2.0, 1.0], np.float32),
        "bias_min": np.array([-0.01, 0.0], np.float32),
        "dropped": np.array([0, 0], np.int32),
    }
    scalars = {
        "loss": np.float32(7.1),
        "grad_norm": 0.5,
        "lr": 3e-4,
        "tokens_per_second": 1000.0,
        "dropped": np.int32(0),
    }
    return {"step": step, **scalars, "moe": moe, **changes}


def strict_rows(path: Path) -> list[dict]:
    """Every line, by a parser that refuses NaN and Infinity."""

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


def events(run_dir: Path) -> list[event_pb2.Event]:
    """All TensorBoard events of a run, parsed from the record framing (length, crc, data, crc)."""
    found = []
    for path in sorted((run_dir / "tensorboard").iterdir()):
        data, at = path.read_bytes(), 0
        while at < len(data):
            (size,) = struct.unpack_from("<Q", data, at)
            found.append(event_pb2.Event.FromString(data[at + 12 : at + 12 + size]))
            at += size + 16
    return found


def test_a_row_is_on_disk_when_step_returns(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path, FILES_ONLY) as writer:
        writer.step(record(1))
        (row,) = strict_rows(tmp_path / "metrics.jsonl")
    assert row["step"] == 1 and row["lr"] == 3e-4 and row["tokens_per_second"] == 1000.0
    assert np.float32(row["loss"]) == np.float32(7.1)
    assert row["layer_imbalance"] == [2.0, 1.0] and row["dropped"] == 0


def test_the_load_of_every_expert_comes_every_so_many_steps(tmp_path: Path) -> None:
    thirds = record(1, moe={"load": np.array([[1 / 3, 2 / 3]])})
    with MetricsWriter(tmp_path, LogConfig(tensorboard=False, load_every=4)) as writer:
        writer.step(thirds)
        for step in range(2, 9):
            writer.step(record(step))
    rows = strict_rows(tmp_path / "metrics.jsonl")
    assert [row["step"] for row in rows if "load" in row] == [1, 4, 8]
    assert [row["step"] for row in rows if "layer_imbalance" in row] == list(range(2, 9))
    assert rows[0]["load"] == [[0.33333, 0.66667]]
    assert rows[3]["load"] == LOAD_LE.tolist()
    assert rows[3]["layer_bias_min"] == pytest.approx([-0.01, 0.0])
    assert "moe" not in rows[3]


def test_values_that_are_not_finite_become_null(tmp_path: Path) -> None:
    moe = {"load": np.full((1, 2), np.nan), "imbalance": np.array([np.inf])}
    with MetricsWriter(tmp_path, LogConfig(load_every=1, histogram_every=1)) as writer:
        writer.step(record(1, loss=np.float32("nan"), grad_norm=float("inf"), moe=moe))
        writer.evaluation(1, float("nan"), "val")
    row, evaluation = strict_rows(tmp_path / "metrics.jsonl")
    assert row["loss"] is None and row["grad_norm"] is None
    assert row["load"] == [[None, None]] and row["layer_imbalance"] == [None]
    assert evaluation == {"step": 1, "val_loss": None, "set": "val"}


def test_a_device_array_is_refused() -> None:
    with pytest.raises(TypeError, match="host values"):
        plain({"loss": jnp.zeros(())})


def test_resume_drops_later_rows_and_the_cut_off_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsWriter(tmp_path, FILES_ONLY) as writer:
        for step in range(1, 6):
            writer.step(record(step, loss=float(step)))
            if step % 2 == 0:
                writer.evaluation(step, 10.0 + step, "val")
    with open(path, "a") as file:
        file.write('{"step": 6, "lo')
    with MetricsWriter(tmp_path, FILES_ONLY, resume_step=3) as writer:
        assert [row["step"] for row in strict_rows(path)] == [1, 2, 2, 3]
        for step in range(4, 8):
            writer.step(record(step, loss=100.0 + step))
    steps, evaluations = read_metrics(path)
    assert [row["step"] for row in steps] == [1, 2, 3, 4, 5, 6, 7]
    assert [row["loss"] for row in steps] == [1, 2, 3, 104, 105, 106, 107]
    assert evaluations == [{"step": 2, "val_loss": 12.0, "set": "val"}]
    assert len(strict_rows(path)) == 8
    assert not list(tmp_path.glob("*.new"))


def test_a_crash_while_rewriting_keeps_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsWriter(tmp_path, FILES_ONLY) as writer:
        writer.step(record(1))
        writer.step(record(2))
    before = path.read_text()

    def crash(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("os.replace", crash)
    with pytest.raises(KeyboardInterrupt):
        MetricsWriter(tmp_path, FILES_ONLY, resume_step=1)
    assert path.read_text() == before


def test_a_new_run_sets_the_old_rows_aside(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path, FILES_ONLY) as writer:
        writer.step(record(1, loss=1.0))
    with MetricsWriter(tmp_path, FILES_ONLY) as writer:
        writer.step(record(1, loss=2.0))
    assert [row["loss"] for row in strict_rows(tmp_path / "metrics.jsonl")] == [2.0]
    assert [row["loss"] for row in strict_rows(tmp_path / "metrics.previous.jsonl")] == [1.0]


def test_reading_skips_what_is_no_row_and_keeps_the_later_of_two(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(
        b'{"step": 2, "loss": 1}\n[1]\n\xff\n{"loss": 3}\n{"step": 2, "loss": 4}\n{"st'
    )
    assert read_metrics(path) == ([{"step": 2, "loss": 4}], [])
    assert read_metrics(tmp_path / "absent") == ([], [])


def test_tensorboard_has_scalars_and_a_histogram_a_layer(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path, LogConfig(histogram_every=2)) as writer:
        for step in (1, 2, 3):
            writer.step(record(step, loss=float(step)))
        writer.evaluation(3, 2.5, "val")
    values = [(e.step, v) for e in events(tmp_path) for v in e.summary.value]
    losses = [(step, v.simple_value) for step, v in values if v.tag == "train/loss"]
    assert losses == [(1, 1.0), (2, 2.0), (3, 3.0)]
    assert [(s, v.simple_value) for s, v in values if v.tag == "val/val_loss"] == [(3, 2.5)]
    assert (2, 2.0) in [(s, v.simple_value) for s, v in values if v.tag == "moe_imbalance/layer_0"]
    loads = {(step, v.tag): v.histo for step, v in values if v.tag.startswith("expert_load")}
    assert sorted(loads) == [(s, f"expert_load/layer_{n}") for s in (1, 2) for n in (0, 1)]
    histogram = loads[2, "expert_load/layer_0"]
    assert list(histogram.bucket_limit) == [1, 2, 3, 4]
    assert list(histogram.bucket) == [2.0, 1.0, 1.0, 0.0]
    assert histogram.num == pytest.approx(4.0)


def test_tensorboard_purges_the_steps_that_a_resume_repeats(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path, LogConfig()) as writer:
        writer.step(record(1))
    with MetricsWriter(tmp_path, LogConfig(), resume_step=7) as writer:
        writer.step(record(8))
    starts = [e.step for e in events(tmp_path) if e.HasField("session_log")]
    assert sorted(starts) == [0, 8]


def test_an_idle_expert_is_told_of_once_and_counted_while_it_lasts() -> None:
    watch, even = IdleExperts(after=3), np.full((2, 4), 0.25)
    idle = even.copy()
    idle[1, [0, 2]] = 0.0
    assert [watch.step(load) for load in (idle, idle, even, idle, idle)] == [(0, "")] * 5
    count, line = watch.step(idle)
    assert count == 2 and line.endswith("without a token for 3 steps: layer 1: 0, 2")
    assert watch.step(idle) == (2, "")
    idle[1, 0] = 0.1
    assert watch.step(idle) == (1, "")
    assert watch.step(even) == (0, "")


def test_throughput_is_the_median_and_leaves_pauses_out() -> None:
    now = [0.0]
    meter = Throughput(window=3, clock=lambda: now[0])
    rates = []
    for seconds in (10.0, 1.0, 2.0, 2.0):
        now[0] += seconds
        rates.append(meter.step(100))
    assert rates == [10.0, 55.0, 50.0, 50.0]
    now[0] += 1000.0
    meter.restart()
    now[0] += 2.0
    assert meter.step(100) == 50.0


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_dense_matmul_rate_is_one_of_a_computer(dtype: type) -> None:
    assert 1e7 < measure_dense_matmul(dtype, size=128, seconds=0.02) < 1e16


def test_peak_memory_counts_what_was_touched() -> None:
    block = np.ones(100 * 2**20, np.uint8)
    assert peak_rss_bytes() > block.nbytes
    assert peak_rss_bytes() < 2**45


@pytest.mark.parametrize(
    "changes", [{"load_every": 0}, {"histogram_every": 0}, {"watchdog_s": -1}, {"profile_step": -2}]
)
def test_bad_settings_are_named(changes: dict) -> None:
    (name,) = changes
    with pytest.raises(ValueError, match=rf"log\.{name} is {changes[name]}"):
        LogConfig(**changes)
