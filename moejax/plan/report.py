"""Plans in the terminal."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from moejax.plan.advice import Way
from moejax.plan.charts import GIB
from moejax.plan.page import best_of, verdict
from moejax.plan.plans import Plan, exposed, label, traffic
from moejax.plan.search import Found, distinct, short

BAR = 32


def show(plan: Plan, ways: Sequence[Way], console: Console) -> None:
    """Prints one plan: verdict, memory, time, collectives, and ways out where it does not fit."""
    made = "compiled by XLA" if plan.compiled else "estimated, not compiled"
    console.print(Text.assemble(("\n" + plan.name, "bold"), (f"  {made}", "dim")))
    console.print(Text(short(plan.config), "dim"))
    console.print(Text(verdict(plan), "" if plan.fits else "red"))
    console.print(memory_table(plan))
    console.print(time_table(plan))
    if rows := traffic(plan):
        console.print(_traffic(rows))
    for name, value in plan.facts:
        console.print(Text(f"{name}: {value}", "dim"))
    if not plan.fits:
        console.print(ways_table(ways))


def memory_table(plan: Plan) -> Table:
    """Returns the table of a plan's memory by kind."""
    table = Table(title=f"Memory of a GPU ({plan.memory.moment})", box=None, title_justify="left")
    table.add_column("kind")
    table.add_column("GiB", justify="right")
    table.add_column("")
    most = max(plan.room, plan.memory.total)
    begin = 0.0
    for kind, size in plan.memory.kinds:
        bar = " " * round(BAR * begin / most) + "█" * max(round(BAR * size / most), 0)
        table.add_row(kind, f"{size / GIB:.2f}", Text(bar, "blue"))
        begin += size
    filled = round(BAR * plan.memory.total / most)
    style = "bold red" if plan.memory.total > plan.room else "bold"
    table.add_row(
        Text("in all", style), Text(f"{plan.memory.total / GIB:.2f}", style),
        Text("█" * filled + f"  of {plan.room / GIB:.1f} usable", style),
    )  # fmt: skip
    return table


def time_table(plan: Plan) -> Table:
    """Returns the table of where a step's seconds go."""
    table = Table(title="Where a step goes", box=None, title_justify="left")
    table.add_column("what")
    table.add_column("seconds", justify="right")
    table.add_column("share", justify="right")
    for name, value in exposed(plan):
        if value > 2e-3 * plan.seconds:
            style = "yellow" if name.startswith("waiting") else ""
            shown = f"{100 * value / plan.seconds:.1f} %"
            table.add_row(label(name), f"{value:.3f}", shown, style=style)
    return table


def _traffic(rows) -> Table:
    table = Table(title="Collectives of a GPU in a step", box=None, title_justify="left")
    table.add_column("role")
    table.add_column("kind")
    for name in ("GPUs", "calls", "GB sent", "seconds", "exposed"):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            row.role, row.collective, f"{row.size}", f"{row.count:,.0f}",
            f"{row.bytes / 1e9:,.2f}", f"{row.busy:.3f}", f"{row.exposed:.3f}",
        )  # fmt: skip
    return table


def ways_table(ways: Sequence[Way]) -> Table | Text:
    """Returns the table of changes under which a plan fits, or that there are none."""
    if not ways:
        return Text("No three settings bring it under that: try --search.", "red")
    table = Table(title="Ways under it, cheapest first", box=None, title_justify="left")
    table.add_column("change", overflow="fold")
    for name in ("GiB", "a step", "GPU time"):
        table.add_column(name, justify="right")
    for way in ways:
        table.add_row(
            way.text, f"{way.memory.total / GIB:.1f}", f"{way.seconds:.2f} s",
            f"{100 * (way.cost - 1):+.0f} %",
        )  # fmt: skip
    return table


def compared(plans: Sequence[Plan]) -> Table:
    """Returns the table of several plans."""
    best = best_of(plans)
    table = Table(title="Plans", box=None, title_justify="left")
    for name in ("plan", "GPUs", "fold"):
        table.add_column(name)
    for name in ("GiB", "over", "a step", "tokens/s", "TFLOP/s"):
        table.add_column(name, justify="right")
    for plan in plans:
        over = plan.over or plan.over_again
        style = "red" if not plan.fits else "bold" if plan is best else ""
        table.add_row(
            plan.name, f"{plan.num_gpus} {plan.cluster.name}", short(plan.config),
            f"{plan.memory.total / GIB:.1f}", f"{over / GIB:.1f}" if over else "",
            f"{plan.seconds:.2f} s", f"{plan.tokens_per_second:,.0f}",
            f"{plan.flops / 1e12:,.0f}", style=style,
        )  # fmt: skip
    return table


def searched(found: Found, count: int) -> Table:
    """Returns the table of the best candidates of a search."""
    where = f"{found.num_gpus} {found.cluster.name}"
    table = Table(title=f"Best folds on {where}", box=None, title_justify="left")
    table.add_column("fold", overflow="fold")
    for name in ("GiB", "a step", "tokens/s"):
        table.add_column(name, justify="right")
    for one in distinct(found.ranked, count):
        table.add_row(
            short(one.config), f"{one.memory.total / GIB:.1f}", f"{one.seconds:.2f} s",
            f"{one.tokens_per_second:,.0f}",
        )  # fmt: skip
    return table


def record(plan: Plan, ways: Sequence[Way]) -> dict[str, Any]:
    """Returns the plan as plain values, for JSON. Bytes, seconds."""
    return {
        "name": plan.name,
        "cluster": plan.cluster.name,
        "num_gpus": plan.num_gpus,
        "fold": short(plan.config),
        "compiled": plan.compiled,
        "memory": dict(plan.memory.kinds),
        "memory_total": plan.memory.total,
        "memory_again": plan.again.total if plan.again else None,
        "room": plan.room,
        "over": plan.over,
        "over_again": plan.over_again,
        "seconds": plan.seconds,
        "tokens_per_second_per_gpu": plan.tokens_per_second,
        "flops_per_gpu": plan.flops,
        "utilization": plan.utilization,
        "where": dict(exposed(plan)),
        "collectives": [dataclasses.asdict(row) for row in traffic(plan)],
        "ways": [
            {"change": way.text, "memory": way.memory.total, "seconds": way.seconds,
             "cost": way.cost}
            for way in ways
        ],
        "facts": dict(plan.facts),
        "config": dataclasses.asdict(plan.config),
    }  # fmt: skip
