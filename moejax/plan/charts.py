"""Drawings of a plan as SVG text: memory up to the GPU's limit, a layer's lanes, where time goes.

Colours are CSS variables of the page, so that one drawing serves light and dark.
"""

from collections.abc import Sequence
from html import escape

from moejax.plan.estimate import KINDS
from moejax.plan.operations import ATTENTION, COLLECTIVE, GEMM, GROUPED, HOST, IDLE, MEMORY
from moejax.plan.plans import Plan, exposed, label
from moejax.plan.timeline import LANES, Span, Timeline
from moejax.train.report.charts import nice_ticks, svg_open

GIB = 2.0**30
COLORS = {
    GEMM: "var(--a)", GROUPED: "var(--deep)", ATTENTION: "var(--d)", MEMORY: "var(--shallow)",
    COLLECTIVE: "var(--b)", HOST: "var(--c)", IDLE: "var(--rule)",
}  # fmt: skip
MEMORY_COLORS = dict(
    zip(
        KINDS,
        ("--deep", "--a", "--shallow", "--d", "--c", "--e", "--f", "--b", "--g", "--h", "--i")
        + ("--axis", "--soft"),
        strict=True,
    )
)
LABEL, WIDTH, RIGHT = 168, 1064, 84
"""Pixels for names at the left, of the whole drawing, for values at the right."""


def waterfall(plan: Plan) -> str:
    """Returns the drawing of a plan's memory: a bar a kind, each begun where the last one ended."""
    memory, limit = plan.memory, float(plan.cluster.gpu.memory_bytes)
    rows = [*memory.kinds, ("in all", memory.total)]
    high = max(limit * 1.06, memory.total * 1.02)
    box, line, top = WIDTH - LABEL - RIGHT, 26, 26
    height = top + line * len(rows) + 28
    at = lambda size: LABEL + size / high * box  # noqa: E731
    parts = [svg_open(WIDTH, height, f"memory of {plan.name} by kind")]
    bottom = top + line * len(rows)
    for tick in nice_ticks(0, high / GIB, 8):
        x = at(tick * GIB)
        parts.append(f'<path class="grid" d="M{x:.1f} {top - 4}V{bottom}"/>')
        parts.append(_text(x, bottom + 18, f"{tick:g} GiB", "tick", "middle"))
    begin = 0.0
    for i, (kind, size) in enumerate(rows):
        y = top + i * line
        whole = kind == "in all"
        start, color = (0.0, "--ink") if whole else (begin, MEMORY_COLORS[kind])
        over = whole and size > plan.room
        color = "--b" if over else color
        width = max(at(start + size) - at(start), 1.0)
        parts.append(_text(LABEL - 12, y + 16, kind, "name", "end"))
        parts.append(
            f'<rect x="{at(start):.1f}" y="{y + 4}" width="{width:.1f}" height="{line - 9}" '
            f'rx="2" style="fill:var({color})"><title>{escape(kind)}: {size / GIB:.2f} GiB'
            "</title></rect>"
        )
        parts.append(_text(at(start + size) + 8, y + 16, f"{size / GIB:.2f}", "value", "start"))
        begin += size
    for size, name, anchor in ((plan.room, "usable", "end"), (limit, "GPU", "start")):
        x = at(size)
        parts.append(f'<path class="baseline" d="M{x:.1f} {top - 8}V{bottom}"/>')
        shown = f"{name} {size / GIB:.1f} GiB"
        parts.append(_text(x + (4 if anchor == "start" else -4), top - 12, shown, "tick", anchor))
    return "".join([*parts, "</svg>"])


def _text(x: float, y: float, text: str, style: str, anchor: str) -> str:
    return (
        f'<text class="{style}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">'
        f"{escape(text)}</text>"
    )


def layer_pair(timeline: Timeline) -> list[tuple[str, tuple[Span, ...]]]:
    """Returns (name, spans) of the loop bodies that are one layer forward and one layer backward:
    the shortest that hold experts, or, of a model without them, attention."""
    best: dict[str, tuple[float, tuple[Span, ...]]] = {}
    experts = any(s.work.kind == GROUPED for spans in timeline.spans.values() for s in spans)
    for path, spans in timeline.spans.items():
        names = {s.work.name.partition(" ")[0] for s in spans}
        kinds = {s.work.kind for s in spans}
        if not path or "attend" not in names or (experts and GROUPED not in kinds):
            continue
        if not experts and len(names - {"copy"}) < 3:  # attention's own loops
            continue
        side = "backward" if "backward" in {s.work.phase for s in spans} else "forward"
        if side not in best or _end(spans) < best[side][0]:
            best[side] = (_end(spans), spans)
    return [(f"{side} layer", best[side][1]) for side in ("forward", "backward") if side in best]


def _end(spans: Sequence[Span]) -> float:
    return max(span.end for span in spans) - min(0.0, min(span.start for span in spans))


def lanes(name: str, spans: Sequence[Span], longest: float) -> str:
    """Returns the drawing of one turn of a loop's body: compute, communication, host. `longest` is
    the time that the width stands for, the same for drawings that are to be compared."""
    used = [lane for lane in LANES if lane != "host" or any(s.lane == lane for s in spans)]
    line, top = 40, 6
    left, box = 120, WIDTH - 120 - 14
    bottom = top + line * len(used)
    scale, unit = (1e6, "µs") if longest < 2e-3 else (1e3, "ms")
    parts = [svg_open(WIDTH, bottom + 24, f"{name}: one turn in steady state")]
    for tick in nice_ticks(0, longest * scale, 10):
        x = left + tick / scale / longest * box
        parts.append(f'<path class="grid" d="M{x:.1f} {top}V{bottom}"/>')
        parts.append(_text(x, bottom + 16, f"{tick:g} {unit}", "tick", "middle"))
    for row, lane in enumerate(used):
        y = top + row * line
        parts.append(_text(left - 12, y + line / 2 + 4, lane, "name", "end"))
        parts += [_bar(s, y, line, left, box, longest) for s in spans if s.lane == lane]
    return "".join([*parts, "</svg>"])


def _bar(span: Span, y: float, line: float, left: float, box: float, longest: float) -> str:
    """One piece of work; its name inside where there is room for it."""
    work = span.work
    start, end = max(span.start, 0.0), min(span.end, longest)
    x, width = left + start / longest * box, max((end - start) / longest * box, 0.6)
    name = work.role or work.name
    title = f"{name} ({work.kind}, {work.phase}): {1e6 * (span.end - span.start):,.0f} µs"
    gap = 0.7 if width > 3 else 0.0
    shown = ""
    if width > 5.9 * len(name) + 4:
        ink = "var(--ink)" if work.kind in (MEMORY, IDLE) else "var(--card)"
        shown = (
            f'<text class="inside" style="fill:{ink}" x="{x + width / 2:.1f}" '
            f'y="{y + line / 2 + 4:.1f}" text-anchor="middle">{escape(name)}</text>'
        )
    faint = ' opacity=".72"' if work.phase == "recompute" else ""
    return (
        f'<g><title>{escape(title)}</title><rect x="{x:.2f}" y="{y + 4}" '
        f'width="{width - gap:.2f}" height="{line - 8}" rx="{min(2.0, width / 3):.1f}"{faint} '
        f'style="fill:{COLORS[work.kind]}"/>{shown}</g>'
    )


def stacks(plans: Sequence[Plan], unit: str) -> str:
    """Returns the drawing of several plans as stacked bars, one below the other: their memory by
    kind ("GiB"), or where the time of 1,000 tokens on a GPU goes ("ms")."""
    bars = [_stack(plan, unit) for plan in plans]
    limits = [plan.room / GIB if unit == "GiB" else 0.0 for plan in plans]
    left, line, top, box = 290, 30, 4, WIDTH - 290 - 70
    most = max(*(sum(size for _, _, size in bar) for bar in bars), *limits) * 1.02
    bottom = top + line * len(bars)
    parts = [svg_open(WIDTH, bottom + 24, f"plans compared, {unit}")]
    for tick in nice_ticks(0, most, 8):
        x = left + tick / most * box
        parts.append(f'<path class="grid" d="M{x:.1f} {top}V{bottom}"/>')
        parts.append(_text(x, bottom + 16, f"{tick:g} {unit}", "tick", "middle"))
    for i, (plan, bar, limit) in enumerate(zip(plans, bars, limits, strict=True)):
        y, x = top + i * line, float(left)
        parts.append(_text(left - 12, y + 19, plan.name, "name", "end"))
        for name, color, size in bar:
            width = size / most * box
            parts.append(
                f'<rect x="{x:.1f}" y="{y + 5}" width="{max(width - 0.8, 0.2):.1f}" '
                f'height="{line - 11}" style="fill:{color}"><title>{escape(name)}: {size:.3g} '
                f"{unit}</title></rect>"
            )
            x += width
        parts.append(_text(x + 8, y + 19, f"{sum(s for *_, s in bar):.1f}", "value", "start"))
        if limit:
            at = left + limit / most * box
            parts.append(f'<path class="baseline" d="M{at:.1f} {y + 1}v{line - 3}"/>')
    return "".join([*parts, "</svg>"])


def _stack(plan: Plan, unit: str) -> list[tuple[str, str, float]]:
    """The pieces (name, colour, size) of a plan's bar."""
    if unit == "GiB":
        return [
            (kind, f"var({MEMORY_COLORS[kind]})", size / GIB) for kind, size in plan.memory.kinds
        ]
    each = 1e6 / (plan.tokens / plan.num_gpus)
    return [
        (name, "var(--b)" if name.startswith("waiting") else COLORS[name], value * each)
        for name, value in exposed(plan)
    ]


def breakdown(plan: Plan) -> str:
    """Returns the drawing of a step's seconds: what computes, then what compute waited for."""
    rows = [(name, value) for name, value in exposed(plan) if value > 5e-4 * plan.seconds]
    line, top, box = 24, 4, WIDTH - LABEL - 150
    most = max((value for _, value in rows), default=1.0)
    parts = [svg_open(WIDTH, top + line * len(rows) + 4, f"where a step of {plan.name} goes")]
    for i, (name, value) in enumerate(rows):
        y = top + i * line
        waited = name.startswith("waiting")
        color = "var(--b)" if waited else COLORS[name]
        shown = label(name.removeprefix("waiting: "))
        parts.append(_text(LABEL - 12, y + 15, shown, "name", "end"))
        width = max(value / most * box, 1.0)
        parts.append(
            f'<rect x="{LABEL}" y="{y + 4}" width="{width:.1f}" height="{line - 9}" rx="2" '
            f'style="fill:{color}"/>'
        )
        text = f"{value:.3f} s · {100 * value / plan.seconds:.1f} %"
        parts.append(_text(LABEL + width + 8, y + 15, text, "value", "start"))
    return "".join([*parts, "</svg>"])
