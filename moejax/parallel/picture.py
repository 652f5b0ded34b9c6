"""Pictures of a pipeline schedule, rank x lockstep time: on the terminal, or as an image.

A forward is 1 wide, a whole backward 2, the halves of a split one 1 each; all ranks begin a tick
together. The number is the microbatch's; a letter, or the shade, says which chunk.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from rich.console import Console
from rich.text import Text

from moejax.parallel.bubble import bubble_share, ideal_time, lockstep_time
from moejax.parallel.slots import assign_slots
from moejax.parallel.table import Schedule

KINDS = ("forward", "backward", "weight")
COLORS = ("#2b5fc2", "#c8561a", "#2f8265")
DRAWN = (1, 2, 0)
"""The order within a tick: what makes room first."""


class Box(NamedTuple):
    kind: int
    rank: int
    start: int
    width: int
    chunk: int
    microbatch: int


def boxes(schedule: Schedule) -> tuple[list[Box], list[int]]:
    """Returns what is drawn, and when each tick starts and the last one ends."""
    tables = (schedule.forward, schedule.backward, schedule.weight)
    widths = (1, 1 if schedule.splits else 2, 1)
    drawn, starts = [], [0]
    for tick in range(schedule.ticks):
        ends = []
        for rank in range(schedule.pp):
            at = starts[-1]
            for kind in DRAWN:
                chunk, microbatch = tables[kind][tick, rank].tolist()
                if chunk >= 0:
                    drawn.append(Box(kind, rank, at, widths[kind], chunk, microbatch))
                    at += widths[kind]
            ends.append(at)
        starts.append(max(ends))
    return drawn, starts


def summary(schedule: Schedule) -> Iterator[str]:
    """Yields a heading and what the schedule costs, as lines."""
    s = schedule
    chunks = f" x {s.vpp} chunks" if s.vpp > 1 else ""
    ranks = "rank" if s.pp == 1 else "ranks"
    batches = "microbatch" if s.microbatches == 1 else "microbatches"
    yield f"{s.name}: {s.pp} {ranks}{chunks}, {s.microbatches} {batches}"
    slots = assign_slots(s)
    kept = [f"{slots.saved.num} saved"] if slots.saved.num else []
    kept += [f"{slots.between.num} between B and W"] if slots.between.num else []
    kept += [f"{slots.x_in.num + slots.dx_in.num} in the inboxes"]
    yield (
        f"{s.ticks} ticks; time {lockstep_time(s):g} in lockstep, {100 * bubble_share(s):.1f}% of "
        f"it idle; {ideal_time(s):g} without, "
        f"{100 * bubble_share(s, clock=ideal_time):.1f}% idle"
    )
    yield f"slots on each rank: {', '.join(kept)}"


def show(schedule: Schedule, console: Console) -> None:
    """Prints the schedule, in as many pieces as the terminal's width asks for."""
    drawn, starts = boxes(schedule)
    digits = len(str(schedule.microbatches - 1))
    unit = 1 + digits + (schedule.vpp > 1) + 1
    label = len(f"rank {schedule.pp - 1}") + 2
    heading, *costs = summary(schedule)
    console.print(Text(heading, style="bold"))
    fits = max((console.width - label) // unit, 3)
    at = 0
    while at < starts[-1]:
        # A piece ends where a tick does; no tick is wider than 3.
        end = max(start for start in starts if at < start <= at + fits)
        for rank in range(schedule.pp):
            line = Text(f"rank {rank}".ljust(label))
            here = at
            for box in drawn:  # of one rank, they are in the order of time
                if box.rank == rank and at <= box.start < end:
                    line.append(" " * unit * (box.start - here))
                    chunk = chr(ord("a") + box.chunk) if schedule.vpp > 1 else ""
                    text = f"{'FBW'[box.kind]}{chunk}{box.microbatch}"
                    fill, ink = _shade(schedule, box.kind, box.chunk)
                    line.append(text.ljust(unit * box.width - 1), style=f"{ink} on {fill}")
                    line.append(" ")
                    here = box.start + box.width
            console.print(line, no_wrap=True, overflow="crop")
        at = end
        if at < starts[-1]:
            console.print()
    for line in costs:
        console.print(Text(line, style="dim"))


def plot(schedule: Schedule, path: Path) -> None:
    """Writes the schedule as an image; matplotlib chooses the format by the name's end."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch, Rectangle

    drawn, starts = boxes(schedule)
    time, pp = starts[-1], schedule.pp
    left, right, top, bottom = 0.95, 0.35, 1.0, 0.8  # inches
    width = float(np.clip(time * 0.30 + left + right, 8, 40))
    cell = (width - left - right) / time
    tall = float(np.clip(cell * 1.5, 0.3, 0.5))
    height = pp * tall + top + bottom
    figure = Figure(figsize=(width, height), facecolor="#fcfcfa")
    FigureCanvasAgg(figure)
    axes = figure.add_axes(
        (left / width, bottom / height, cell * time / width, pp * tall / height),
        facecolor="#eeece5",
    )
    digits = len(str(schedule.microbatches - 1))
    size = min(72 * cell * 1.1 / max(digits, 2), 72 * tall * 0.42, 11)
    for box in drawn:
        fill, ink = _shade(schedule, box.kind, box.chunk)
        corner = (box.start + 0.03, box.rank + 0.06)
        axes.add_patch(Rectangle(corner, box.width - 0.06, 0.88, facecolor=fill, linewidth=0))
        if size >= 3:
            middle = (box.start + box.width / 2, box.rank + 0.52)
            axes.text(*middle, str(box.microbatch), color=ink, size=size, ha="center", va="center")
    for start in starts[1:-1]:
        axes.axvline(start, color="#fcfcfa", linewidth=0.8, zorder=0)
    axes.set(xlim=(0, time), ylim=(pp, 0), xlabel="time in forwards of a chunk, all ranks in step")
    axes.set_yticks(np.arange(pp) + 0.5, [f"rank {rank}" for rank in range(pp)])
    axes.tick_params(length=0, colors="#6a6c72", labelsize=9)
    axes.xaxis.label.set(color="#6a6c72", size=9)
    for spine in axes.spines.values():
        spine.set_visible(False)
    heading, *costs = summary(schedule)
    at = left / width
    figure.text(at, 1 - 0.36 / height, heading, size=13, weight="bold", color="#1d1e22")
    for i, line in enumerate(costs):
        figure.text(at, 1 - (0.6 + 0.19 * i) / height, line, size=9, color="#6a6c72")
    legend = [
        Patch(color=_shade(schedule, kind, chunk)[0], label=_name(schedule, kind, chunk))
        for kind in sorted({box.kind for box in drawn})
        for chunk in range(schedule.vpp)
    ]
    figure.legend(
        handles=legend,
        loc="lower left",
        bbox_to_anchor=(at, 0.06 / height),
        borderpad=0,
        borderaxespad=0,
        ncols=len(legend),
        handlelength=1.2,
        frameon=False,
        fontsize=9,
        labelcolor="#1d1e22",
    )
    figure.savefig(path, dpi=160)


def _shade(schedule: Schedule, kind: int, chunk: int) -> tuple[str, str]:
    """Returns the colours of a box and of its number: the later the chunk, the paler."""
    full = np.array([int(COLORS[kind][i : i + 2], 16) for i in (1, 3, 5)])
    pale = 0.62 * chunk / max(schedule.vpp - 1, 1)
    mixed = np.rint(full + (255 - full) * pale).astype(int)
    return "#" + "".join(f"{part:02x}" for part in mixed), "#ffffff" if pale < 0.4 else "#1d1e22"


def _name(schedule: Schedule, kind: int, chunk: int) -> str:
    """Returns the legend's words; chunks after the first say their number alone."""
    if schedule.vpp == 1:
        return KINDS[kind]
    return f"{KINDS[kind]}, chunk 0" if chunk == 0 else str(chunk)
