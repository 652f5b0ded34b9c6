"""Line charts over steps, as SVG text, for a run's report.

Written by hand rather than by a plotting library, so that colours are CSS variables of the page
(one drawing serves light and dark) and text is text. Positions are in SVG user units; the page
scales a drawing to its column. Every string from outside is escaped here.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Literal

import numpy as np

MAX_POINTS = 400
MARGIN_LEFT, MARGIN_RIGHT, MARGIN_TOP, MARGIN_BOTTOM = 58, 14, 10, 26


@dataclass(frozen=True)
class Series:
    """One curve or set of points of a chart."""

    x: np.ndarray
    """Steps."""
    y: np.ndarray
    """Values; NaN breaks the curve."""
    label: str
    """What the legend calls it; empty leaves it out of the legend."""
    color: str
    """A CSS colour, such as `var(--a)`."""
    kind: Literal["line", "faint", "points"] = "line"
    """A curve, a thin pale curve, or marked points."""


def nice_ticks(low: float, high: float, most: int) -> list[float]:
    """At most `most` + 1 round numbers within [low, high], their distance 1, 2 or 5 times 10^n."""
    span = high - low
    if not (math.isfinite(span) and span > 0):
        return [low]
    raw = span / most
    power = 10.0 ** math.floor(math.log10(raw))
    distance = next(power * m for m in (1, 2, 5, 10) if power * m >= raw * (1 - 1e-9))
    first = math.ceil(low / distance - 1e-9)
    last = math.floor(high / distance + 1e-9)
    return [round(k * distance, 12) for k in range(first, last + 1)]


def smooth(y: np.ndarray, width: int) -> np.ndarray:
    """Mean over a centred window of `width` values that shrinks at both ends; NaN are left out."""
    known = np.isfinite(y)
    totals = np.concatenate([[0.0], np.cumsum(np.where(known, y, 0.0))])
    counts = np.concatenate([[0], np.cumsum(known)])
    half = np.minimum(width // 2, np.minimum(np.arange(len(y)), np.arange(len(y))[::-1]))
    start, end = np.arange(len(y)) - half, np.arange(len(y)) + half + 1
    seen = counts[end] - counts[start]
    return np.where(seen > 0, (totals[end] - totals[start]) / np.maximum(seen, 1), np.nan)


def thin_out(x: np.ndarray, y: np.ndarray, most: int = MAX_POINTS) -> tuple[np.ndarray, np.ndarray]:
    """Fewer points that look the same: the lowest and the highest of each bucket, so spikes stay.

    A NaN stays as well: it takes its bucket's place beside the extremes.
    """
    if len(x) <= most:
        return x, y
    kept: set[int] = {0, len(x) - 1}
    for bucket in np.array_split(np.arange(len(x)), most // 2):
        values = y[bucket]
        finite = np.isfinite(values)
        if finite.any():
            kept.add(int(bucket[np.argmin(np.where(finite, values, np.inf))]))
            kept.add(int(bucket[np.argmax(np.where(finite, values, -np.inf))]))
        if not finite.all():
            kept.add(int(bucket[np.argmin(finite)]))
    index = np.array(sorted(kept))
    return x[index], y[index]


def line_chart(
    series: Sequence[Series],
    *,
    name: str,
    width: int = 520,
    height: int = 210,
    baseline: tuple[float, str] | None = None,
    log: bool = False,
    from_zero: bool = False,
    tick_text: Callable[[float], str] = "{:g}".format,
) -> str:
    """An SVG line chart over steps; `name` is what a screen reader says.

    `baseline` is a horizontal dashed line with its label. The y range covers everything but the
    wildest 0.5 % of a faint curve's values; what lies outside is clipped.
    """
    box_w = width - MARGIN_LEFT - MARGIN_RIGHT
    box_h = height - MARGIN_TOP - MARGIN_BOTTOM
    low, high = _y_range(series, baseline, log, from_zero)
    steps = np.concatenate([s.x for s in series]) if series else np.zeros(0)
    x_low, x_high = (float(steps.min()), float(steps.max())) if len(steps) else (0.0, 1.0)
    x_high = x_high if x_high > x_low else x_low + 1

    def at_x(x: np.ndarray | float) -> np.ndarray:
        return (np.asarray(x, np.float64) - x_low) / (x_high - x_low) * box_w

    def at_y(y: np.ndarray | float) -> np.ndarray:
        y = np.asarray(y, np.float64)
        y = np.log10(np.maximum(y, 1e-300)) if log else y
        return np.clip((high - y) / (high - low), -2, 3) * box_h

    parts = [svg_open(width, height, name)]
    for value in _y_ticks(low, high, log):
        y = MARGIN_TOP + float(at_y(value))
        parts.append(f'<path class="grid" d="M{MARGIN_LEFT} {y:.1f}h{box_w}"/>')
        parts.append(
            f'<text class="tick" x="{MARGIN_LEFT - 8}" y="{y + 3.5:.1f}" text-anchor="end">'
            f"{escape(tick_text(value))}</text>"
        )
    parts.append(x_axis(x_low, x_high, width, height))
    # A nested svg clips its content, with no id that could clash with another drawing's.
    parts.append(
        f'<svg x="{MARGIN_LEFT - 5}" y="{MARGIN_TOP - 5}" width="{box_w + 10}" '
        f'height="{box_h + 10}" viewBox="-5 -5 {box_w + 10} {box_h + 10}">'
    )
    parts += [_curve(s, at_x, at_y) for s in series]
    parts.append("</svg>")
    if baseline is not None:
        y = MARGIN_TOP + float(at_y(baseline[0]))
        parts.append(f'<path class="baseline" d="M{MARGIN_LEFT} {y:.1f}h{box_w}"/>')
        parts.append(
            f'<text class="note" x="{width - MARGIN_RIGHT}" y="{y - 6:.1f}" text-anchor="end">'
            f"{escape(baseline[1])}</text>"
        )
    return "".join([*parts, "</svg>"])


def svg_open(width: float, height: float, name: str) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" '
        f'role="img" aria-label="{escape(name, quote=True)}">'
    )


def _y_range(
    series: Sequence[Series],
    baseline: tuple[float, str] | None,
    log: bool,
    from_zero: bool,
) -> tuple[float, float]:
    """The y range, in decades if `log`, with a little air."""
    values = [np.array([baseline[0]])] if baseline is not None else []
    for s in series:
        y = s.y[np.isfinite(s.y) & ((s.y > 0) | (not log))]
        if s.kind == "faint" and len(y) > 20:
            y = np.quantile(y, [0.005, 0.995])
        values.append(y)
    every = np.concatenate(values) if values else np.zeros(0)
    if not len(every):
        return 0.0, 1.0
    every = np.log10(every) if log else every
    low, high = float(every.min()), float(every.max())
    low = min(low, 0.0) if from_zero and not log else low
    pad = (high - low) * 0.06 or abs(high) * 0.1 or 1.0
    return (0.0 if not log and 0 <= low < pad else low - pad), high + pad


def _y_ticks(low: float, high: float, log: bool) -> list[float]:
    if not log:
        return nice_ticks(low, high, 5)
    decades = [10.0**k for k in range(math.ceil(low), math.floor(high) + 1)]
    if len(decades) >= 2:
        return decades[:: math.ceil(len(decades) / 6)]
    around = range(math.floor(low), math.ceil(high) + 1)
    return [m * 10.0**k for k in around for m in (1, 2, 5) if low <= math.log10(m) + k <= high]


def x_axis(
    low: float,
    high: float,
    width: float,
    height: float,
    to_x: Callable[[float], float] | None = None,
) -> str:
    box_w = width - MARGIN_LEFT - MARGIN_RIGHT
    y = height - MARGIN_BOTTOM
    parts = [f'<path class="axis" d="M{MARGIN_LEFT} {y:.1f}h{box_w}"/>']
    for step in nice_ticks(low, high, 8 if width > 700 else 5):
        if step != round(step):
            continue
        x = MARGIN_LEFT + (to_x(step) if to_x else (step - low) / ((high - low) or 1) * box_w)
        anchor = "end" if x > width - MARGIN_RIGHT - 12 else "middle"
        parts.append(
            f'<text class="tick" x="{x:.1f}" y="{y + 17:.1f}" text-anchor="{anchor}">'
            f"{step:,.0f}</text>"
        )
    return "".join(parts)


def _curve(
    series: Series,
    at_x: Callable[[np.ndarray], np.ndarray],
    at_y: Callable[[np.ndarray], np.ndarray],
) -> str:
    x, y = thin_out(series.x, series.y)
    known = np.isfinite(y)
    xs, ys = at_x(x), at_y(np.where(known, y, 1.0))
    path, pen_down = [], False
    for px, py, ok in zip(xs, ys, known, strict=True):
        if ok:
            path.append(f"{'L' if pen_down else 'M'}{px:.1f} {py:.1f}")
        pen_down = bool(ok)
    style = f'style="--c:{escape(series.color, quote=True)}"'
    if series.kind != "points" and known.sum() > 1:
        return f'<path class="curve {series.kind}" {style} d="{"".join(path)}"/>'
    return "".join(
        f'<circle class="dot" {style} cx="{px:.1f}" cy="{py:.1f}" r="3.5"><title>'
        f"{escape(series.label)} {value:.4g} at step {step:,.0f}</title></circle>"
        for px, py, value, step, ok in zip(xs, ys, y, x, known, strict=True)
        if ok
    )
