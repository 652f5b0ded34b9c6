"""The report of a run: one HTML file that needs nothing but a browser.

`write_report` reads what the run left in its folder (`metrics.jsonl`, `config.json`, `facts.json`,
`sample.txt`) and writes `report.html` beside it, without scripts or anything from outside. A run
that was killed, or has no MoE layer, no evaluation, or a single step, gives a report of what there
is. It can be made again at any time, also while the run goes on:

    python -m moejax.train.report runs/demo
"""

import json
import math
import os
from collections.abc import Iterable, Mapping
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from moejax.train import units
from moejax.train.metrics import IDLE_STEPS
from moejax.train.report.figures import experts, loss_chart, small_charts
from moejax.train.report.page import folded, key_values, section
from moejax.train.report.run import Run, number, read_run
from moejax.train.report.style import STYLE

REPORT_FILE = "report.html"
MAX_SAMPLE_CHARS = 8000


def write_report(run_dir: Path) -> Path:
    """Writes `report.html` into a run's folder, in one move, and returns its path.

    Raises FileNotFoundError where there is no such folder.
    """
    if not run_dir.is_dir():
        raise FileNotFoundError(f"no run folder at {run_dir}")
    path = run_dir / REPORT_FILE
    new = path.with_suffix(".new")
    new.write_text(render_report(read_run(run_dir)), encoding="utf-8")
    os.replace(new, path)
    return path


def render_report(run: Run) -> str:
    """The HTML text of a run's report."""
    sections = [
        _header(run),
        _tiles(run),
        section("Loss", "nats per token", loss_chart(run)),
        f'<div class="pair">{"".join(small_charts(run))}</div>',
        experts(run),
        _sample(run),
        _tables(run),
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>{escape(run.name)} · training report</title><style>{STYLE}</style></head>"
        f"<body><main>{''.join(sections)}</main></body></html>\n"
    )


def _header(run: Run) -> str:
    facts = run.facts
    machine = str(facts.get("device") or "")
    if machine and facts.get("num_devices", 1) != 1:
        machine = f"{facts['num_devices']} × {machine}"
    meta = f'<p class="meta">{escape(machine)}</p>' if machine else ""
    return (
        f'<header><p class="kicker">Training report</p><h1>{escape(run.name)}</h1>'
        f'<p class="lead">{escape(_verdict(run))}</p>{meta}</header>'
    )


def _verdict(run: Run) -> str:
    """The run in a sentence or two."""
    if not run.steps:
        return "No step has ended yet."
    last = run.steps[-1]["step"]
    text = f"After {last:,} {'step' if last == 1 else 'steps'}, "
    points = _main_points(run)
    if not points:
        return f"{text}the training loss is {units.fixed(number(run.steps[-1].get('loss')), 3)}."
    text += f"the held-out loss is {units.fixed(points[-1][1], 3)} nats per token"
    trigram = number(run.facts.get("trigram_val_loss"))
    if math.isfinite(trigram):
        side = "below" if points[-1][1] < trigram else "above"
        text += (
            f", {abs(trigram - points[-1][1]):.3f} {side} an interpolated trigram model counted "
            "on the same training text"
        )
    return text + "."


def _tiles(run: Run) -> str:
    """The headline figures; those that are not known are left out."""
    facts, points = run.facts, _main_points(run)
    tiles: list[tuple[str, str, str]] = []
    if points:
        tiles.append(("Held-out loss", units.fixed(points[-1][1], 3), f"at step {points[-1][0]:,}"))
    if facts.get("trigram_val_loss") is not None:
        trigram = number(facts["trigram_val_loss"])
        tiles.append(("Trigram baseline", units.fixed(trigram, 3), "held-out loss to beat"))
    if len(points) > 1:
        first, last = points[0], points[-1]
        tiles.append(
            (
                "Fall",
                f"{units.fixed(first[1] - last[1], 3)}",
                f"nats, from {units.fixed(first[1], 3)} at step {first[0]:,}",
            )
        )
    speed = run.column("tokens_per_second")
    if np.isfinite(speed).any():
        tiles.append(("Tokens per second", units.whole(float(np.nanmedian(speed))), "median"))
    matmul = run.column("matmul_share")
    if np.isfinite(matmul).any():
        peak = facts.get("dense_matmul_flops_per_second")
        of = f"of {units.flop_rate(peak)}" if peak is not None else "of a dense matmul's rate"
        tiles.append(("Share of matmul peak", units.share(float(np.nanmedian(matmul))), of))
    if facts.get("num_params") is not None:
        active = facts.get("active_params")
        note = f"{units.count(active)} active for a token" if active is not None else ""
        tiles.append(("Parameters", units.count(facts["num_params"]), note))
    if facts.get("wall_seconds") is not None:
        tokens = np.nansum(run.column("num_tokens"))
        note = f"{units.count(float(tokens))} tokens" if tokens else ""
        tiles.append(("Wall time", units.duration(facts["wall_seconds"]), note))
    memory = [("peak_rss_bytes", "Peak memory", "resident, whole process")]
    memory.append(("step_memory_bytes", "Step memory", "planned by the compiler"))
    for key, label, note in memory:
        if facts.get(key) is not None:
            tiles.append((label, units.data_size(facts[key]), note))
    cells = "".join(
        f"<div><dt>{escape(label)}</dt><dd>{escape(value)}</dd><p>{escape(note)}</p></div>"
        for label, value, note in tiles
    )
    return f'<dl class="tiles">{cells}</dl>' if cells else ""


def _sample(run: Run) -> str:
    if not run.sample.strip():
        return ""
    text = run.sample.strip("\n")
    cut = text[:MAX_SAMPLE_CHARS] + ("\n…" if len(text) > MAX_SAMPLE_CHARS else "")
    return section("Sample", "written by the model at the end", f"<pre>{escape(cut)}</pre>")


def _tables(run: Run) -> str:
    parts = []
    dropped, skipped = run.column("dropped"), run.column("skipped")
    counters = [("steps recorded", units.whole(len(run.steps)))]
    if np.isfinite(dropped).any():
        counters.append(("tokens dropped", units.whole(float(np.nansum(dropped)))))
    if np.isfinite(skipped).any():
        counters.append(("steps skipped as not finite", units.whole(float(np.nanmax(skipped)))))
    idle = run.column("idle")
    if np.isfinite(idle).any():
        label = f"experts idle for {IDLE_STEPS} steps, at the end"
        counters.append((label, units.whole(float(idle[np.isfinite(idle)][-1]))))
    for key, label in (
        ("batch_loss", "last batch loss"),
        ("sequence_loss", "last sequence loss"),
        ("global_loss", "last global loss"),
        ("z_loss", "last z loss"),
        ("aux_loss", "last added to the loss, a layer"),
        ("busiest_rank", "last busiest rank"),
    ):
        known = run.column(key)[np.isfinite(run.column(key))]
        if len(known):
            counters.append((label, f"{known[-1]:.5g}"))
    gaps = _missing_steps(run)
    if gaps:
        counters.append(("steps missing from the record", units.whole(gaps)))
    parts.append(section("Counters", "over the whole run", key_values(counters)))
    if run.facts.get("fold_table"):
        parts.append(folded("Devices", f"<pre>{escape(str(run.facts['fold_table']))}</pre>"))
    facts = [(k, _text(v)) for k, v in run.facts.items() if k != "fold_table"]
    if facts:
        parts.append(folded("Facts", key_values(facts)))
    leaves = list(_leaves(run.config))
    if leaves:
        parts.append(folded("Configuration", key_values(leaves)))
    return "".join(parts)


def _missing_steps(run: Run) -> int:
    numbers = [row["step"] for row in run.steps]
    return numbers[-1] - numbers[0] + 1 - len(numbers) if numbers else 0


def _main_points(run: Run) -> list[tuple[int, float]]:
    """The finite points of the first evaluation set."""
    sets = list(run.evaluation_sets().values())
    return [point for point in sets[0] if math.isfinite(point[1])] if sets else []


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, str]]:
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", _text(value)


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= 10_000:
        return f"{value:,}"
    if isinstance(value, float) and 10_000 <= abs(value) < 1e15:
        return f"{value:,.0f}"
    return json.dumps(value, ensure_ascii=False)
