"""Plan a run for a GPU cluster that is not there.

    python -m moejax.plan --config=FILE.py[:RECIPE] [--gpus=h100x256] [--config.LEAF=VALUE ...]

Compiles the train step of `python launch/train.py` with the same arguments, and says what it needs
of each GPU's memory, how long it takes, and which communication it waits for. Several --config are
compared. Of a recipe the end of its name does.

  --gpus=GPUxNUMBER   the cluster; without it, the end of the recipe's name says it (.._h100x1024)
  --analytic          no compiler: memory and time from the config alone, in a second
  --search            weighs every fold, confirms the best few with the compiler, writes a recipe
  --worst-case        also the step that runs a batch again that overflowed its budget
  --top=3             how many the search confirms
  --out=plan          folder for report.html, plan.json and the recipe

Exit status: 0 it fits, 1 it does not, 2 arguments that cannot run.
"""

import dataclasses
import json
import re
import sys
from pathlib import Path

from rich.console import Console

from moejax import config as configuration
from moejax.config import Config, load_recipe
from moejax.plan import report
from moejax.plan.advice import Way, ways
from moejax.plan.compile import CompileError
from moejax.plan.confirm import compiled_plan
from moejax.plan.estimate import estimate
from moejax.plan.hardware import CLUSTERS, Cluster, parse
from moejax.plan.page import best_of, verdict, write_page
from moejax.plan.plans import Plan
from moejax.plan.search import Found, analytic_plan, confirm, search, short
from moejax.plan.settings import flags, write_recipe

SWITCHES = ("--analytic", "--search", "--worst-case")
VALUES = {"--gpus": "", "--out": "plan", "--top": "3"}


@dataclasses.dataclass(frozen=True)
class Options:
    """The command line."""

    recipes: tuple[str, ...]
    """FILE.py[:RECIPE] of each --config."""
    leaves: tuple[str, ...]
    """The --config.LEAF=VALUE arguments."""
    gpus: str
    out: Path
    top: int
    analytic: bool
    search: bool
    worst_case: bool


def options(arguments: list[str]) -> Options:
    """Returns the options of a command line; ValueError, one line, where it is wrong."""
    values, switches, recipes, leaves = dict(VALUES), set(), [], []
    for argument in arguments:
        name, equals, value = argument.partition("=")
        if argument in SWITCHES:
            switches.add(argument)
        elif name in values and value:
            values[name] = value
        elif name == "--config" and value:
            recipes.append(value)
        elif name.startswith("--config."):
            leaves.append(argument)
        else:
            known = ", ".join((*SWITCHES, *(f"{v}=.." for v in values), "--config=..", "--help"))
            raise ValueError(f"unknown option {argument}: there are {known}")
    if not recipes:
        raise ValueError("give a --config=FILE.py[:RECIPE], such as configs/qwen3_moe.py:h100x16")
    if not values["--top"].isdigit() or not int(values["--top"]):
        raise ValueError(f"--top={values['--top']}: a number from 1 on")
    if "--search" in switches and len(recipes) > 1:
        raise ValueError("--search takes one --config; without it, several are compared")
    return Options(
        tuple(recipes), tuple(leaves), values["--gpus"], Path(values["--out"]),
        int(values["--top"]), *(name in switches for name in SWITCHES),
    )  # fmt: skip


def target(chosen: Options, recipe: str) -> tuple[Config, Cluster, int]:
    """Returns (config, cluster, GPUs) of one --config, checked against each other."""
    config = configuration.parse([f"--config={recipe}", *chosen.leaves])
    ending = re.search(r"_([a-z]+\d+x\d+)$", config.name)
    if not chosen.gpus and not ending:
        raise ValueError(
            f"{recipe} says no cluster: give --gpus=GPUxNUMBER, such as --gpus=h100x256, with one "
            f"of {', '.join(CLUSTERS)}"
        )
    cluster, num_gpus = parse(chosen.gpus or config.name)
    asked = config.parallel.num_devices()
    if chosen.search:
        config = dataclasses.replace(config, parallel=dataclasses.replace(config.parallel, dp=0))
    elif asked not in (0, num_gpus):
        raise ValueError(
            f"{config.name} is for {asked} GPUs (dp={config.parallel.dp} x tp="
            f"{config.parallel.tp}), --gpus has {num_gpus}: add --config.parallel.dp=0"
        )
    return config, cluster, num_gpus


def main(arguments: list[str]) -> int:
    """Returns the exit status."""
    if {"--help", "-h"} & set(arguments):
        print(__doc__)
        return 0
    console = Console(highlight=False)
    try:
        chosen = options(arguments)
        if chosen.search:
            return _search(chosen, console)
        targets = [target(chosen, recipe) for recipe in chosen.recipes]
        plans = [_plan(chosen, *where, console) for where in targets]
        return _report(chosen, plans, plans, console)
    except (ValueError, FileNotFoundError, CompileError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _plan(
    chosen: Options, config: Config, cluster: Cluster, num_gpus: int, console: Console
) -> Plan:
    if not chosen.analytic:
        say = lambda line: console.print(f"{config.name}: {line}", style="dim")  # noqa: E731
        return compiled_plan(config, cluster, num_gpus, worst_case=chosen.worst_case, progress=say)
    plan = analytic_plan(config, cluster, num_gpus)
    if not chosen.worst_case:
        return plan
    again = estimate(config, config.fold_over(num_gpus), worst_case=True)
    return dataclasses.replace(plan, again=again)


def _ways(plan: Plan) -> list[Way]:
    """The ways out, where a plan does not fit; where none suits the step that runs an overflowed
    batch again, those of the step alone."""
    if plan.fits:
        return []
    return ways(plan) or ways(dataclasses.replace(plan, again=None))


def _report(chosen: Options, plans: list[Plan], shown: list[Plan], console: Console) -> int:
    """Prints those that are `shown` in full, compares and writes all; returns the exit status."""
    advice = {plan.name: _ways(plan) for plan in plans}
    for plan in shown:
        report.show(plan, advice[plan.name], console)
    if len(plans) > 1:
        console.print(report.compared(plans))
    path = write_page(plans, chosen.out, advice)
    records = [report.record(plan, advice[plan.name]) for plan in plans]
    (chosen.out / "plan.json").write_text(json.dumps(records, indent=1, default=str))
    console.print(f"\n{path}")
    return 0 if best_of(plans) else 1


def _search(chosen: Options, console: Console) -> int:
    config, cluster, num_gpus = target(chosen, chosen.recipes[0])
    say = lambda line: console.print(line, style="dim")  # noqa: E731
    found = search(config, cluster, num_gpus, say, worst_case=chosen.worst_case)
    if not found.ranked:
        return _nothing(dataclasses.replace(chosen, analytic=True), found, console)
    console.print(report.searched(found, 10))
    if chosen.analytic:
        plans = [_plan(chosen, found.ranked[0].config, cluster, num_gpus, console)]
    else:
        make = lambda c: compiled_plan(  # noqa: E731
            c, cluster, num_gpus, worst_case=chosen.worst_case, progress=say
        )
        plans = confirm(found, chosen.top, make, say)
    name = f"{re.sub(r'_[a-z]+[0-9]+x[0-9]+$', '', config.name)}_planned_{cluster.name}x{num_gpus}"
    plans = [
        dataclasses.replace(plan, name=f"{name}_{i}" if i > 1 else name)
        for i, plan in enumerate(plans, 1)
    ]
    if status := _report(chosen, plans, plans[:1], console):
        return status
    recipe, base = chosen.recipes[0], load_recipe(chosen.recipes[0])
    why = f"{short(plans[0].config)}.\n\n{verdict(plans[0])}"
    path = write_recipe(chosen.out, name, plans[0].config, recipe, base, why)
    console.print(f"{path}: python launch/train.py --config={path}")
    console.print(f"or --config={recipe} {flags(plans[0].config, base)}")
    return 0


def _nothing(chosen: Options, found: Found, console: Console) -> int:
    """Says how near the nearest fold came."""
    where = f"{found.num_gpus} {found.cluster.name}"
    if found.smallest is None:
        console.print(f"No fold of {where} nests and divides this model and batch.", style="red")
        return 1
    config, _ = found.smallest
    plan = _plan(chosen, config, found.cluster, found.num_gpus, console)
    console.print(f"Nothing fits on {where}. What needs least:", style="red")
    report.show(plan, _ways(plan), console)
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
