"""A heat map of expert load over time, as SVG text, for a run's report.

Each layer is one small palette PNG inside the drawing, in two palettes: one for a light page, one
for a dark one. Both are evenly spaced in OKLab, a perceptually uniform colour space.
"""

import base64
import math
import struct
import zlib
from collections.abc import Sequence

import numpy as np

from moejax.train.report.charts import (
    MARGIN_BOTTOM,
    MARGIN_LEFT,
    MARGIN_RIGHT,
    MARGIN_TOP,
    svg_open,
    x_axis,
)

MAX_ROWS = 512
MAX_COLUMNS = 240
NUM_SHADES = 33
# Ends and middle of the two diverging palettes, in OKLab (lightness, green-red, blue-yellow): the
# middle is the page's own card, so that balance is calm and imbalance stands out.
LIGHT = ((0.42, -0.03, -0.16), (0.985, 0.0, 0.003), (0.56, 0.15, 0.11))
DARK = ((0.74, -0.05, -0.12), (0.26, 0.0, -0.005), (0.76, 0.10, 0.12))


def heat_map(steps_C: np.ndarray, load_CLE: np.ndarray, *, width: int = 1064) -> str:
    """An SVG heat map of expert load: rows are experts, grouped by layer; columns are time.

    Colour is the load over its even share, on a logarithmic scale with the even share in the
    middle: blue below, orange above. Neighbouring records are averaged where there are too many;
    of neighbouring experts that must share a row, the one furthest from its even share is shown.
    """
    _, num_layers, num_experts = load_CLE.shape
    octaves_LEC = _octaves(load_CLE)
    span = math.ceil(num_layers * num_experts / MAX_ROWS)
    octaves_LEC = _furthest(octaves_LEC, span)
    # The smallest of three fixed scales that shows 99 % of the cells, so that runs compare.
    reach = float(np.quantile(np.abs(octaves_LEC), 0.99))
    limit = next((k for k in (1, 2, 3) if reach <= k), 3)
    shades_LEC = np.rint((np.clip(octaves_LEC / limit, -1, 1) + 1) / 2 * (NUM_SHADES - 1))
    shades_LEC = shades_LEC.astype(np.uint8)

    num_rows = shades_LEC.shape[1]
    gap = 5 if num_layers <= 16 else 3
    layer_h = num_rows * min(10.0, max(2.0, 500 / (num_layers * num_rows)))
    box_w = width - MARGIN_LEFT - MARGIN_RIGHT
    height = MARGIN_TOP + num_layers * (layer_h + gap) + MARGIN_BOTTOM + 34
    parts = [svg_open(width, height, "Load of each expert over time, by layer")]
    every = max(1, math.ceil(14 / (layer_h + gap)))
    for layer in range(num_layers):
        y = MARGIN_TOP + layer * (layer_h + gap)
        for palette, css in ((LIGHT, "on-light"), (DARK, "on-dark")):
            parts.append(_image(shades_LEC[layer], palette, css, MARGIN_LEFT, y, box_w, layer_h))
        if layer % every == 0:
            middle = y + layer_h / 2 + 3.5
            parts.append(
                f'<text class="tick" x="{MARGIN_LEFT - 8}" y="{middle:.1f}" text-anchor="end">'
                f"layer {layer}</text>"
            )
    first, last = float(steps_C[0]), float(steps_C[-1])
    to_x = None
    if len(steps_C) > 1:  # a column is a record, not a step: place the ticks among the records
        records = np.arange(len(steps_C)) / (len(steps_C) - 1)

        def to_x(step: float) -> float:
            return float(np.interp(step, steps_C, records)) * box_w

    parts.append(x_axis(first, last, width, height - 34, to_x))
    parts.append(_color_key(limit, width, height))
    if span > 1:
        parts.append(
            f'<text class="tick" x="{MARGIN_LEFT}" y="{height - 8:.0f}">a row is the one of '
            f"{span} neighbouring experts that is furthest from its even share</text>"
        )
    return "".join([*parts, "</svg>"])


def _octaves(load_CLE: np.ndarray) -> np.ndarray:
    """float64[L, E, columns]: log2 of load over even share, records averaged into columns."""
    num_records, _, num_experts = load_CLE.shape
    filled_CLE = np.nan_to_num(load_CLE, nan=1 / num_experts)
    groups = np.array_split(np.arange(num_records), min(num_records, MAX_COLUMNS))
    ratio_LEC = np.stack([filled_CLE[g].mean(axis=0) * num_experts for g in groups], axis=-1)
    return np.log2(np.maximum(ratio_LEC, 1e-6))


def _furthest(octaves_LEC: np.ndarray, span: int) -> np.ndarray:
    """Of each `span` neighbouring experts, the value furthest from 0, its sign kept."""
    if span == 1:
        return octaves_LEC
    num_layers, num_experts, columns = octaves_LEC.shape
    padding = -num_experts % span
    padded = np.pad(octaves_LEC, ((0, 0), (0, padding), (0, 0)))
    grouped = padded.reshape(num_layers, -1, span, columns)
    index = np.abs(grouped).argmax(axis=2, keepdims=True)
    return np.take_along_axis(grouped, index, axis=2)[:, :, 0]


def palette_rgb(palette: Sequence[tuple[float, float, float]], num_shades: int) -> np.ndarray:
    """uint8[num_shades, 3] sRGB of a diverging palette, evenly spaced in OKLab.

    Source of the transform: B. Ottosson, "A perceptual color space for image processing", 2020.
    """
    low, middle, high = (np.array(color) for color in palette)
    t = np.linspace(-1, 1, num_shades)[:, None]
    lab = np.where(t < 0, middle + (low - middle) * -t, middle + (high - middle) * t)
    to_lms = np.array(
        [
            [1.0, 0.3963377774, 0.2158037573],
            [1.0, -0.1055613458, -0.0638541728],
            [1.0, -0.0894841775, -1.2914855480],
        ]
    )
    to_rgb = np.array(
        [
            [4.0767416621, -3.3077115913, 0.2309699292],
            [-1.2684380046, 2.6097574011, -0.3413193965],
            [-0.0041960863, -0.7034186147, 1.7076147010],
        ]
    )
    linear = np.clip((lab @ to_lms.T) ** 3 @ to_rgb.T, 0, 1)
    srgb = np.where(linear <= 0.0031308, 12.92 * linear, 1.055 * linear ** (1 / 2.4) - 0.055)
    return np.rint(srgb * 255).astype(np.uint8)


def png(indices_HW: np.ndarray, palette_rgb: np.ndarray) -> bytes:
    """A PNG file of palette indices (uint8)."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        check = zlib.crc32(kind + data)
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", check)

    height, width = indices_HW.shape
    rows = np.concatenate([np.zeros((height, 1), np.uint8), indices_HW], axis=1)
    return b"".join(
        [
            b"\x89PNG\r\n\x1a\n",
            chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 3, 0, 0, 0)),
            chunk(b"PLTE", palette_rgb.astype(np.uint8).tobytes()),
            chunk(b"IDAT", zlib.compress(rows.tobytes(), 9)),
            chunk(b"IEND", b""),
        ]
    )


def _image(
    shades: np.ndarray,
    palette: Sequence[tuple[float, float, float]],
    css: str,
    x: float,
    y: float,
    width: float,
    height: float,
) -> str:
    data = base64.b64encode(png(shades, palette_rgb(palette, NUM_SHADES))).decode()
    return (
        f'<image class="{css}" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" '
        f'preserveAspectRatio="none" href="data:image/png;base64,{data}"/>'
    )


def _color_key(limit: int, width: float, height: float) -> str:
    """The colour scale below the heat map's right end, with its meaning in words."""
    key_w, x, y = 180, width - MARGIN_RIGHT - 180, height - 30
    ramp = np.arange(NUM_SHADES, dtype=np.uint8)[None]
    parts = [
        _image(ramp, palette, css, x, y, key_w, 8)
        for palette, css in ((LIGHT, "on-light"), (DARK, "on-dark"))
    ]
    parts.append(f'<rect class="frame" x="{x}" y="{y:.0f}" width="{key_w}" height="8"/>')
    words = {1: ("½×", "2×"), 2: ("¼×", "4×"), 3: ("⅛×", "8×")}[limit]
    for text, at, anchor in (
        (words[0], x, "start"),
        ("even share", x + key_w / 2, "middle"),
        (words[1], x + key_w, "end"),
    ):
        parts.append(
            f'<text class="tick" x="{at}" y="{y + 22:.0f}" text-anchor="{anchor}">{text}</text>'
        )
    return "".join(parts)
