"""The figures of a run's report: which curves each chart shows, and the table of MoE layers."""

import math
from collections.abc import Iterable, Mapping
from html import escape
from typing import Any

import numpy as np

from moejax.train import units
from moejax.train.report.charts import Series, line_chart, smooth
from moejax.train.report.heat_map import heat_map
from moejax.train.report.page import folded, legend, section
from moejax.train.report.run import Run, number

EVALUATION_COLORS = ("var(--b)", "var(--c)", "var(--d)")
LAYER_COLUMNS = (
    ("imbalance", "max / mean load", 3),
    ("entropy", "entropy", 4),
    ("dead", "experts without a token", 0),
    ("busiest_rank", "busiest rank", 3),
    ("batch_loss", "batch loss", 4),
    ("sequence_loss", "sequence loss", 4),
    ("global_loss", "global loss", 4),
    ("z_loss", "z loss", 3),
    ("aux_loss", "added to the loss", 5),
    ("bias_min", "lowest bias", 4),
    ("bias_max", "highest bias", 4),
    ("dropped", "dropped", 0),
)


def loss_chart(run: Run) -> str:
    """Training loss, each step and smoothed, held-out losses, and the trigram baseline."""
    steps, loss = run.step_numbers(), run.column("loss")
    series = []
    if len(steps):
        width = max(1, len(steps) // 40) | 1
        series.append(Series(steps, loss, "train, each step", "var(--a)", "faint"))
        if width > 1:
            label = f"train, mean of {width} steps"
            series.append(Series(steps, smooth(loss, width), label, "var(--a)"))
    sets = run.evaluation_sets()
    for k, (name, points) in enumerate(sets.items()):
        x, y = np.array(points, np.float64).T
        color = EVALUATION_COLORS[k % len(EVALUATION_COLORS)]
        series.append(Series(x, y, f"held-out ({name})", color, "points"))
    trigram = number(run.facts.get("trigram_val_loss"))
    baseline = (trigram, f"trigram baseline {trigram:.3f}") if math.isfinite(trigram) else None
    if not series:
        return ""
    chart = line_chart(series, name="Loss over steps", width=1064, height=360, baseline=baseline)
    return f'{legend(series)}<div class="wide">{chart}</div>'


def small_charts(run: Run) -> Iterable[str]:
    """A card for each scalar the run recorded: rate, norm, throughput, imbalance."""
    steps = run.step_numbers()
    charts = (
        ("lr", "Learning rate", "", "var(--a)"),
        ("grad_norm", "Gradient norm", "before clipping", "var(--a)"),
        ("tokens_per_second", "Throughput", "tokens per second", "var(--a)"),
        ("imbalance", "Expert imbalance", "busiest expert over the mean", "var(--a)"),
    )
    for column, title, note, color in charts:
        values = run.column(column)
        series = [Series(steps, values, "", color)]
        if column == "imbalance":
            note, series = _imbalance_series(run, series, note)
        if not any(np.isfinite(s.y).any() for s in series):
            continue
        positive = values[values > 0]
        wild = len(positive) > 0 and float(positive.max()) > 30 * float(np.median(positive))
        log = wild and column == "grad_norm"
        chart = line_chart(
            series,
            name=f"{title} over steps",
            log=log,
            from_zero=column in ("lr", "tokens_per_second"),
            tick_text=_axis_number,
        )
        yield section(title, note + (", logarithmic" if log else ""), chart)


def _imbalance_series(run: Run, mean: list[Series], note: str) -> tuple[str, list[Series]]:
    """A curve a layer, from light to dark with depth; the mean where layers were not recorded."""
    rows = [row for row in run.steps if row.get("layer_imbalance")]
    if not rows or len({len(row["layer_imbalance"]) for row in rows}) != 1:
        return note, mean
    steps = np.array([row["step"] for row in rows], np.float64)
    by_layer = np.array([[number(v) for v in row["layer_imbalance"]] for row in rows]).T
    width = max(1, len(steps) // 60) | 1
    series = []
    for layer, values in enumerate(by_layer):
        depth = round(100 * layer / max(1, len(by_layer) - 1))
        color = f"color-mix(in oklab, var(--deep) {depth}%, var(--shallow))"
        series.append(Series(steps, smooth(values, width), "", color))
    if len(by_layer) > 1:
        note = "busiest over mean, a curve a layer"
    return note, series


def experts(run: Run) -> str:
    """The heat map of expert load and the table of MoE layers; nothing for a dense model."""
    rows = [row for row in run.steps if row.get("load")]
    shapes = {(len(row["load"]), len(row["load"][0])) for row in rows}
    if not rows:
        return ""
    if len(shapes) > 1:  # the model changed under the same folder: only the last one's rows
        last = (len(rows[-1]["load"]), len(rows[-1]["load"][0]))
        rows = [row for row in rows if (len(row["load"]), len(row["load"][0])) == last]
    load_CLE = np.array(
        [[[number(v) for v in layer] for layer in row["load"]] for row in rows], np.float64
    )
    _, layers, experts = load_CLE.shape
    steps = np.array([row["step"] for row in rows], np.float64)
    drawing = f'<div class="wide">{heat_map(steps, load_CLE)}</div>'
    note = f"{layers} {'layer' if layers == 1 else 'layers'} of {experts} experts, over steps"
    return section("Expert load", note, drawing) + _layer_table(run, rows[-1])


def _layer_table(run: Run, row: Mapping[str, Any]) -> str:
    """The per-layer figures of the last step that recorded them."""
    columns = [
        (title, row[f"layer_{key}"], decimals)
        for key, title, decimals in LAYER_COLUMNS
        if row.get(f"layer_{key}")
    ]
    if not columns:
        return ""
    head = "".join(f"<th>{escape(title)}</th>" for title, _, _ in columns)
    body = "".join(
        f"<tr><th>{layer}</th>"
        + "".join(f"<td>{units.fixed(number(v[layer]), d)}</td>" for _, v, d in columns)
        + "</tr>"
        for layer in range(min(len(values) for _, values, _ in columns))
    )
    table = f'<table class="figures"><thead><tr><th>layer</th>{head}</tr></thead>{body}</table>'
    return folded(f"MoE layers at step {row['step']:,}", table)


def _axis_number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:g}"
