"""The report holds the numbers it was given, stands alone, and copes with whatever is missing."""

import base64
import json
import re
import struct
import subprocess
import sys
import xml.etree.ElementTree as ET
import zlib
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moejax.train.metrics import LogConfig, MetricsWriter
from moejax.train.report import write_report
from moejax.train.report.charts import Series, line_chart, nice_ticks, smooth, thin_out
from moejax.train.report.heat_map import DARK, LIGHT, NUM_SHADES, heat_map, palette_rgb, png

FACTS = {
    "num_params": 24_123_456,
    "active_params": 9_812_345,
    "device": "cpu <2 cores>",
    "num_devices": 8,
    "fold_table": "mesh & 1",
    "step_memory_bytes": 640 * 2**20,
    "peak_rss_bytes": 2 * 2**30,
    "trigram_val_loss": 3.552,
    "dense_matmul_flops_per_second": 2.35e11,
    "wall_seconds": 372,
}
VOID = {"meta", "link", "br", "img"}


class Page(HTMLParser):
    """Text of a page outside its style sheet, and every attribute; checks that tags nest."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.words: list[str] = []
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.attributes: list[tuple[str, str]] = []
        self.feed(html)
        assert not self.open, f"never closed: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1:] != ["style"]:
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


def train(run_dir: Path, num_steps: int, *, layers: int = 2, experts: int = 4) -> None:
    """A run's folder as training leaves it; `layers` 0 is a dense model."""
    rng = np.random.default_rng(0)
    with MetricsWriter(run_dir, LogConfig(tensorboard=False)) as writer:
        writer.evaluation(0, 9.0, "val")
        for step in range(1, num_steps + 1):
            record: dict[str, Any] = {
                "step": step,
                "loss": 3 + 6 / step,
                "grad_norm": 0.5,
                "lr": 3e-4,
            }
            record |= {"tokens_per_second": 12_430.0, "matmul_share": 0.61, "num_tokens": 4096}
            record |= {"dropped": 0, "skipped": 3}
            if layers:
                load = rng.dirichlet(np.full(experts, 20.0), layers)
                imbalance = load.max(1) * experts
                record["moe"] = {"load": load, "imbalance": imbalance, "bias_max": imbalance}
            writer.step(record)
        writer.evaluation(num_steps, 3.2504, "val")
    (run_dir / "config.json").write_text(json.dumps({"model": {"moe": {"top_k": 2}}, "seed": 7}))
    (run_dir / "facts.json").write_text(json.dumps(FACTS))
    (run_dir / "sample.txt").write_text("def f(x):\n    return x < 1 & <b>bold</b>\n")


def page_of(run_dir: Path) -> Page:
    return Page(write_report(run_dir).read_text())


def test_it_has_the_numbers_it_was_given(tmp_path: Path) -> None:
    train(tmp_path, 60)
    page = page_of(tmp_path)
    for part in (
        "After 60 steps, the held-out loss is 3.250 nats per token, 0.302 below",
        "Held-out loss 3.250 at step 60",
        "Trigram baseline 3.552",
        "Fall 5.750 nats, from 9.000 at step 0",
        "Tokens per second 12,430",
        "Share of matmul peak 61 % of 235 GFLOP/s",
        "Parameters 24.1 M 9.81 M active for a token",
        "Wall time 6 min 12 s 246 k tokens",
        "Peak memory 2.00 GiB",
        "Step memory 640 MiB",
        "tokens dropped 0",
        "steps skipped as not finite 3",
        "2 layers of 4 experts",
        "MoE layers at step 60",
        "model.moe.top_k 2",
        "seed 7",
        "mesh & 1",
    ):
        assert part in page.text
    for title in ("Learning rate", "Gradient norm", "Throughput", "Expert imbalance", "Sample"):
        assert title in page.text


def test_it_stands_alone_and_has_no_script(tmp_path: Path) -> None:
    train(tmp_path, 30)
    page = page_of(tmp_path)
    assert not page.tags & {"script", "link", "iframe", "img", "object"}
    names = {name for name, _ in page.attributes}
    assert not any(name.startswith("on") for name in names)
    for name, value in page.attributes:
        if name in ("src", "href", "srcset", "data"):
            assert value.startswith("data:image/png;base64,")
    html = (tmp_path / "report.html").read_text()
    assert "url(" not in html and "@import" not in html
    assert not list(tmp_path.glob("*.new"))


def test_every_string_is_escaped(tmp_path: Path) -> None:
    evil = '<script>alert("&")</script>'
    run_dir = tmp_path / "run<i>x"
    train(run_dir, 12)
    with open(run_dir / "metrics.jsonl", "a") as file:
        file.write(json.dumps({"step": 12, "val_loss": 3.0, "set": evil}) + "\n")
    (run_dir / "config.json").write_text(json.dumps({evil: {"a": evil}}))
    (run_dir / "facts.json").write_text(json.dumps({**FACTS, "device": evil, "fold_table": evil}))
    (run_dir / "sample.txt").write_text(evil)
    page = page_of(run_dir)
    assert not page.tags & {"script", "i", "b"}
    assert page.text.count(evil) >= 6 and "run<i>x" in page.text


def test_a_run_killed_in_the_middle(tmp_path: Path) -> None:
    train(tmp_path, 25)
    for name in ("facts.json", "config.json", "sample.txt"):
        path = tmp_path / name
        path.write_text(path.read_text()[:15])
    with open(tmp_path / "metrics.jsonl", "ab") as file:
        file.write(b'{"step": 26, "loss": 1.2')
    page = page_of(tmp_path)
    assert "steps recorded 25" in page.text and "Trigram" not in page.text


@pytest.mark.parametrize("num_steps", [1, 2, 11])
def test_a_short_run(tmp_path: Path, num_steps: int) -> None:
    train(tmp_path, num_steps)
    assert f"After {num_steps} step" in page_of(tmp_path).text


def test_a_dense_model_without_evaluation(tmp_path: Path) -> None:
    train(tmp_path, 20, layers=0)
    path = tmp_path / "metrics.jsonl"
    kept = [line for line in path.read_text().splitlines() if "val_loss" not in line]
    path.write_text("\n".join(kept) + "\n")
    page = page_of(tmp_path)
    assert "the training loss is 3.300" in page.text
    assert "Expert" not in page.text and "Held-out" not in page.text


def test_values_that_are_not_finite(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path, LogConfig(tensorboard=False, load_every=1)) as writer:
        for step in range(1, 6):
            moe = {"load": np.full((1, 2), np.nan), "imbalance": np.array([np.nan])}
            writer.step({"step": step, "loss": float("nan"), "lr": 0.0, "moe": moe})
        writer.evaluation(5, float("nan"), "val")
    html = write_report(tmp_path).read_text()
    assert "nan" not in Page(html).text.lower() and ">nan<" not in html and "Mnan" not in html


def test_an_empty_folder_and_none(tmp_path: Path) -> None:
    assert "No step has ended yet." in page_of(tmp_path).text
    with pytest.raises(FileNotFoundError, match="no run folder at"):
        write_report(tmp_path / "absent")


def test_a_missing_step_is_counted(tmp_path: Path) -> None:
    train(tmp_path, 20)
    path = tmp_path / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(line for line in lines if '"step": 7,' not in line))
    assert "steps missing from the record 1" in page_of(tmp_path).text


def test_a_long_run_of_a_large_model_stays_small(tmp_path: Path) -> None:
    train(tmp_path, 2000, layers=12, experts=64)
    assert write_report(tmp_path).stat().st_size < 1_000_000


def test_it_can_be_made_again_by_a_command(tmp_path: Path) -> None:
    train(tmp_path, 3)
    command = [sys.executable, "-m", "moejax.train.report", str(tmp_path)]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, cwd=root, check=True, capture_output=True, text=True)
    assert Path(done.stdout.strip()) == tmp_path / "report.html"
    assert (tmp_path / "report.html").stat().st_size > 5000


def curve_points(svg: str, kind: str) -> list[tuple[float, float]]:
    (path,) = re.findall(rf'class="curve {kind}"[^>]* d="([^"]*)"', svg)
    return [(float(x), float(y)) for x, y in re.findall(r"[ML]([\d.-]+) ([\d.-]+)", path)]


def test_a_chart_places_its_values() -> None:
    series = Series(np.array([0.0, 5.0, 10.0]), np.array([0.0, 10.0, 5.0]), "", "red")
    svg = line_chart([series], name='a "name"', width=172, height=136, baseline=(5.0, "b<"))
    ET.fromstring(svg)
    (x0, y0), (x1, y1), (x2, y2) = curve_points(svg, "line")
    assert (x0, x1, x2) == (0.0, 50.0, 100.0)
    assert y0 - y1 == pytest.approx(2 * (y0 - y2), abs=0.2) and y0 > y2 > y1
    (baseline,) = re.findall(r'class="baseline" d="M\d+ ([\d.]+)h', svg)
    assert float(baseline) == pytest.approx(y2 + 10, abs=0.2)  # the top margin is 10


def test_nan_breaks_a_curve_and_log_ticks_are_powers() -> None:
    y = np.array([1.0, 10.0, np.nan, 100.0, 1000.0])
    svg = line_chart([Series(np.arange(5.0), y, "", "red")], name="n", log=True)
    (path,) = re.findall(r'class="curve line"[^>]* d="([^"]*)"', svg)
    assert path.count("M") == 2 and path.count("L") == 2
    ticks = re.findall(r'text-anchor="end">([^<]*)<', svg)
    assert ticks[:4] == ["1", "10", "100", "1000"]


def test_thinning_keeps_spikes_ends_and_gaps() -> None:
    x, y = np.arange(10_000.0), np.zeros(10_000)
    y[1234], y[7777], y[5000] = 9.0, -9.0, np.nan
    thin_x, thin_y = thin_out(x, y, 400)
    assert len(thin_x) <= 402 and {0.0, 1234.0, 7777.0, 5000.0, 9999.0} <= set(thin_x)
    np.testing.assert_array_equal(y[thin_x.astype(int)], thin_y)


def test_smoothing_is_a_centred_mean_of_what_is_known() -> None:
    y = np.array([1.0, 2.0, 6.0, np.nan, 4.0])
    np.testing.assert_allclose(smooth(y, 3), [1.0, 3.0, 4.0, 5.0, 4.0])
    assert np.isnan(smooth(np.full(3, np.nan), 3)).all()


def test_ticks_are_round_and_inside() -> None:
    assert nice_ticks(0, 10, 5) == [0, 2, 4, 6, 8, 10]
    assert nice_ticks(0.0, 6.1e-4, 5) == [0, 2e-4, 4e-4, 6e-4]
    assert nice_ticks(-3, 4, 4) == [-2, 0, 2, 4]
    assert nice_ticks(5, 5, 4) == [5]


def images(svg: str, css: str) -> list[np.ndarray]:
    """The palette indices of each PNG in a drawing, decoded by hand."""
    found = []
    for data in re.findall(rf'class="{css}"[^>]*base64,([^"]*)"', svg):
        raw = base64.b64decode(data)
        width, height = struct.unpack(">II", raw[16:24])
        at = raw.index(b"IDAT")
        (size,) = struct.unpack(">I", raw[at - 4 : at])
        rows = zlib.decompress(raw[at + 4 : at + 4 + size])
        found.append(np.frombuffer(rows, np.uint8).reshape(height, width + 1)[:, 1:])
    return found


def test_the_heat_map_shows_layers_experts_and_time() -> None:
    even = np.full((2, 4), 0.25)
    tilted = np.array([[0.5, 0.25, 0.125, 0.125], [0.25, 0.25, 0.25, 0.25]])
    svg = heat_map(np.array([10.0, 20.0]), np.stack([even, tilted]))
    ET.fromstring(svg)
    middle, top = NUM_SHADES // 2, NUM_SHADES - 1
    for css in ("on-light", "on-dark"):
        first, second, _ = images(svg, css)  # the third is the colour key
        np.testing.assert_array_equal(
            first, [[middle, top], [middle, middle], [middle, 0], [middle, 0]]
        )
        np.testing.assert_array_equal(second, np.full((4, 2), middle))
    assert "layer 0" in svg and "layer 1" in svg and "½×" in svg


def test_a_tall_heat_map_keeps_the_expert_furthest_from_even() -> None:
    load = np.full((3, 4, 512), 1 / 512)
    load[:, 2, 100] = 8 / 512
    load[:, 3, 7] = 1 / 8 / 512
    svg = heat_map(np.array([1.0, 2.0, 3.0]), load)
    drawn = images(svg, "on-light")
    assert drawn[0].shape == (128, 3)
    assert (drawn[0] == NUM_SHADES // 2).all()
    assert (drawn[2][25] > NUM_SHADES // 2).all() and (drawn[3][1] < NUM_SHADES // 2).all()
    assert "4 neighbouring experts" in svg


@pytest.mark.parametrize("palette", [LIGHT, DARK])
def test_palettes_are_neutral_in_the_middle_and_far_at_the_ends(palette: tuple) -> None:
    rgb = palette_rgb(palette, 33).astype(int)
    assert np.ptp(rgb[16]) <= 8
    steps = np.abs(np.diff(rgb, axis=0)).sum(1)
    assert steps.max() <= 4 * max(steps.min(), 6)
    assert rgb[0, 2] > rgb[0, 0] + 60 and rgb[-1, 0] > rgb[-1, 2] + 60


def test_png_is_what_was_drawn() -> None:
    """Read back by the format's own rules (RFC 2083): chunks, checksums, unfiltered rows."""
    palette = np.array([[255, 0, 0], [0, 255, 0], [1, 2, 3]], np.uint8)
    indices = np.array([[0, 1, 2], [2, 1, 0]], np.uint8)
    data, chunks = png(indices, palette), {}
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    at = 8
    while at < len(data):
        (length,) = struct.unpack_from(">I", data, at)
        kind, body = data[at + 4 : at + 8], data[at + 8 : at + 8 + length]
        (check,) = struct.unpack_from(">I", data, at + 8 + length)
        assert check == zlib.crc32(kind + body)
        chunks[kind] = body
        at += 12 + length
    assert list(chunks) == [b"IHDR", b"PLTE", b"IDAT", b"IEND"]
    assert struct.unpack(">IIBBBBB", chunks[b"IHDR"]) == (3, 2, 8, 3, 0, 0, 0)  # 8 bits, a palette
    rows = np.frombuffer(zlib.decompress(chunks[b"IDAT"]), np.uint8).reshape(2, 4)
    assert not rows[:, 0].any()  # filter 0: the bytes as they are
    colours = np.frombuffer(chunks[b"PLTE"], np.uint8).reshape(-1, 3)
    np.testing.assert_array_equal(colours[rows[:, 1:]], palette[indices])
