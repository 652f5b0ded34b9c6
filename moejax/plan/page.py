"""The report of plans: one HTML file that needs nothing but a browser, no scripts in it.

    write_page([plan], Path("plan"), advice={plan.name: ways(plan)})

It wears the style of a run's report (`moejax.train.report`). Every text from outside is escaped.
"""

import os
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

from moejax.core.mesh import fold_table
from moejax.plan.advice import Way
from moejax.plan.charts import COLORS, GIB, breakdown, lanes, layer_pair, stacks, waterfall
from moejax.plan.operations import HOST, IDLE
from moejax.plan.plans import Plan, label, traffic
from moejax.plan.search import short
from moejax.train import units
from moejax.train.report.page import folded, key_values, section
from moejax.train.report.style import STYLE

PAGE_FILE = "report.html"
ADDED_STYLE = """
:root { --e: #b98a17; --f: #5b8f2b; --g: #b0466a; --h: #4d8f9e; --i: #7a6a58;
  --axis: #a9a7a0; }
@media (prefers-color-scheme: dark) {
  :root { --e: #e6c062; --f: #a5d477; --g: #f08fb0; --h: #86c9d8; --i: #c4b29c;
    --axis: #6d6f76; }
}
.name { font-size: 12.5px; fill: var(--ink); }
.value { font-size: 12px; fill: var(--soft); }
.inside { font-size: 11px; }
.lane { margin-bottom: 14px; }
.lane h3 { font-size: 13px; font-weight: 560; margin: 4px 0 6px; }
.blocks li::before { width: 11px; height: 11px; border: 0; border-radius: 2.5px;
  background: var(--c); vertical-align: -1px; }
.bad { color: var(--b); }
code { font: 12.5px/1.5 ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace; }
.figures td.words, .figures thead th.words { text-align: left; }
.figures td { white-space: nowrap; }
.plan { font-size: 26px; letter-spacing: -.015em; font-weight: 620; margin: 34px 0 2px; }
.plan + p { color: var(--soft); margin-bottom: 4px; max-width: 62em; }
.wide + .wide { margin-top: 18px; }
.figures tr.chosen td { font-weight: 620; }
"""


def render(plans: Sequence[Plan], advice: Mapping[str, Sequence[Way]]) -> str:
    """Returns the HTML text of a report on plans; `advice`: ways out by the plans' names."""
    parts = [_header(plans)]
    if len(plans) > 1:
        parts.append(section("Side by side", "the fastest that fits is in bold", comparison(plans)))
        parts += [
            section(title, note, f'<div class="wide">{stacks(plans, unit)}</div>')
            for title, note, unit in (
                ("Memory of a GPU", "by kind, as below; the mark is what is usable", "GiB"),
                ("Time for 1,000 tokens on a GPU", "orange: it waits", "ms"),
            )
        ]
    for plan in plans:
        if len(plans) > 1:
            parts.append(
                f'<div><h2 class="plan">{escape(plan.name)}</h2>'
                f"<p>{escape(verdict(plan))}</p></div>"
            )
        parts += _of_one(plan, advice.get(plan.name, ()))
    title = plans[0].name if len(plans) == 1 else f"{len(plans)} plans"
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>{escape(title)} · plan</title><style>{STYLE}{ADDED_STYLE}</style></head>"
        f"<body><main>{''.join(parts)}</main></body></html>\n"
    )


def write_page(plans: Sequence[Plan], folder: Path, advice: Mapping[str, Sequence[Way]]) -> Path:
    """Writes `report.html` into a folder, in one move, and returns its path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / PAGE_FILE
    new = path.with_suffix(".new")
    new.write_text(render(plans, advice), encoding="utf-8")
    os.replace(new, path)
    return path


def verdict(plan: Plan) -> str:
    """Returns a plan in two sentences: whether it fits, and how fast it is."""
    fits = (
        f"exceeds what {plan.cluster.name.upper()} GPUs hold by {units.data_size(plan.over)}"
        if plan.over
        else f"fits, with {units.data_size(plan.room - plan.memory.total)} to spare on each GPU"
    )
    return (
        f"On {plan.num_gpus:,} {plan.cluster.name.upper()}s this step {fits}. Predicted: "
        f"{plan.seconds:.2f} s a step, {plan.tokens_per_second:,.0f} tokens/s and "
        f"{plan.flops / 1e12:,.0f} TFLOP/s a GPU." + _verdict_again(plan)
    )


def _verdict_again(plan: Plan) -> str:
    """A sentence on the step that runs an overflowed batch again, where that was looked at."""
    if plan.again is None:
        return ""
    needs = f" To run an overflowed batch again takes {units.data_size(plan.again.total)}"
    if plan.over_again:
        return f"{needs}, {units.data_size(plan.over_again)} too many."
    return f"{needs}, which fits."


def _header(plans: Sequence[Plan]) -> str:
    if len(plans) == 1:
        plan = plans[0]
        made = "compiled by XLA" if plan.compiled else "estimated, not compiled"
        return (
            f'<header><p class="kicker">Plan · {made}</p><h1>{escape(plan.name)}</h1>'
            f'<p class="lead">{escape(verdict(plan))}</p>'
            f'<p class="meta">{escape(short(plan.config))}</p></header>'
        )
    best = best_of(plans)
    lead = (
        f"{best.name} is the fastest that fits. {verdict(best)}" if best else "None of them fits."
    )
    return (
        f'<header><p class="kicker">Plan</p><h1>{len(plans)} plans</h1>'
        f'<p class="lead">{escape(lead)}</p></header>'
    )


def best_of(plans: Sequence[Plan]) -> Plan | None:
    """Returns the plan of most tokens a second and GPU among those that fit; None: none does."""
    fitting = [plan for plan in plans if plan.fits]
    return max(fitting, key=lambda plan: plan.tokens_per_second, default=None)


def _of_one(plan: Plan, ways: Sequence[Way]) -> list[str]:
    pair = layer_pair(plan.timeline)
    longest = max((max(s.end for s in spans) for _, spans in pair), default=1e-9)
    drawn = "".join(
        f'<div class="lane"><h3>{escape(name)}</h3><div class="wide">'
        f"{lanes(name, spans, longest)}</div></div>"
        for name, spans in pair
    )
    source = "from the compiler's buffers" if plan.compiled else "estimated"
    parts = [
        _tiles(plan),
        section(
            "Memory of a GPU", f"when it is largest ({plan.memory.moment}), {source}",
            f'<div class="wide">{waterfall(plan)}</div>',
        ),
        section("Ways under it", "the cheapest first; estimated", ways_table(ways)),
        section(
            "One layer in steady state", "forward and backward, to the same scale",
            _key(plan) + drawn if drawn else "",
        ),
        section(
            "Where a step goes",
            "orange: the GPU waits",
            f'<div class="wide">{breakdown(plan)}</div>',
        ),
        section("Collectives", "of one GPU, in a step", traffic_table(plan)),
    ]  # fmt: skip
    table = fold_table(plan.config.fold_over(plan.num_gpus))
    parts.append(folded("Devices", f"<pre>{escape(table)}</pre>"))
    if plan.live:
        parts.append(folded("Largest buffers at the peak", live_table(plan)))
    if plan.facts:
        parts.append(folded("Facts", key_values(plan.facts)))
    return parts


def _tiles(plan: Plan) -> str:
    waiting = sum(plan.timeline.exposed.values()) / plan.seconds
    tiles = [
        ("Step", f"{plan.seconds:.2f} s", f"{plan.tokens:,} tokens"),
        ("Tokens per second", f"{plan.tokens_per_second:,.0f}", "of one GPU"),
        ("Model FLOP/s", f"{plan.flops / 1e12:,.0f} T", f"{100 * plan.utilization:.1f} % of peak"),
        (
            "Memory", f"{plan.memory.total / GIB:.1f} GiB",
            f"of {plan.room / GIB:.1f} GiB usable"
            + (f", over by {units.data_size(plan.over)}" if plan.over else ""),
        ),
        ("Waiting", f"{100 * waiting:.0f} %", "of the step, for links or stages"),
        (
            "Overflowed batch", f"{plan.again.total / GIB:.1f} GiB" if plan.again else "–",
            _again_note(plan),
        ),
    ]  # fmt: skip
    cells = "".join(
        f"<div><dt>{escape(label)}</dt><dd>{escape(value)}</dd><p>{escape(note)}</p></div>"
        for label, value, note in tiles
    )
    return f'<dl class="tiles">{cells}</dl>'


def _again_note(plan: Plan) -> str:
    if plan.again is None:
        return "not looked at (--worst-case)"
    over = f", over by {units.data_size(plan.over_again)}" if plan.over_again else ""
    return f"to run it again{over}"


def _key(plan: Plan) -> str:
    used = {s.work.kind for _, spans in layer_pair(plan.timeline) for s in spans}
    items = "".join(
        f'<li style="--c:{color}">{escape(label(kind))}</li>'
        for kind, color in COLORS.items()
        if kind in used or kind not in (HOST, IDLE)
    )
    return f'<ul class="legend blocks">{items}</ul>'


def _table(
    head: Sequence[str], rows: Sequence[Sequence[str]], words: int = 1, chosen: int | None = None
) -> str:
    """A table of figures, the first `words` columns of words; cells are HTML."""
    kind = lambda at: ' class="words"' if at < words else ""  # noqa: E731
    top = "".join(f"<th{kind(at)}>{escape(name)}</th>" for at, name in enumerate(head))
    body = "".join(
        f"<tr{' class=chosen' if i == chosen else ''}>"
        + "".join(f"<td{kind(at)}>{cell}</td>" for at, cell in enumerate(row))
        + "</tr>"
        for i, row in enumerate(rows)
    )
    return (
        f'<div class="wide"><table class="figures"><thead><tr>{top}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def traffic_table(plan: Plan) -> str:
    """Returns the table of collectives as HTML; nothing where there are none."""
    rows = [
        (
            escape(row.role), escape(row.collective.replace("_", " ")), escape(row.phases),
            f"{row.size}", f"{row.count:,.0f}", f"{row.bytes / 1e9:,.2f} GB",
            f"{row.busy:.3f} s", f"{row.exposed:.3f} s",
        )
        for row in traffic(plan)
    ]  # fmt: skip
    head = ("role", "kind", "phases", "GPUs", "calls", "sent", "takes", "exposed")
    return _table(head, rows, 3) if rows else ""


def live_table(plan: Plan) -> str:
    """Returns the table of the largest buffers that are live when memory is fullest, as HTML."""
    rows = [
        (escape(kind), f"<code>{escape(what)}</code>", f"{size / GIB:.2f} GiB")
        for kind, what, size in plan.live
    ]
    return _table(("kind", "instruction, array", "size"), rows, 2)


def ways_table(ways: Sequence[Way]) -> str:
    """Returns the table of changes under which a plan fits; nothing where there are none."""
    rows = [
        (
            f"<code>{escape(way.text)}</code>", f"{way.memory.total / GIB:.1f} GiB",
            f"{way.seconds:.2f} s", f"{100 * (way.cost - 1):+.0f} %".replace("-", "−"),
        )
        for way in ways
    ]  # fmt: skip
    return _table(("change", "memory", "a step", "GPU time"), rows) if rows else ""


def comparison(plans: Sequence[Plan]) -> str:
    """Returns the table of several plans as HTML."""
    best = best_of(plans)
    rows = [
        (
            escape(plan.name), f"{plan.num_gpus:,} × {plan.cluster.name.upper()}",
            escape(short(plan.config)), f"{plan.memory.total / GIB:.1f} GiB",
            "fits" if plan.fits else '<span class="bad">over by '
            f"{units.data_size(plan.over or plan.over_again)}</span>",
            f"{plan.seconds:.2f} s", f"{plan.tokens_per_second:,.0f}",
            f"{plan.flops / 1e12:,.0f}",
        )
        for plan in plans
    ]  # fmt: skip
    head = ("plan", "GPUs", "fold", "memory", "", "a step", "tokens/s a GPU", "TFLOP/s a GPU")
    return _table(head, rows, 3, None if best is None else list(plans).index(best))
