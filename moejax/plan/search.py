"""The best plans for a model on a cluster: every fold weighed, those that fit priced, ranked.

Model, global batch, sequence length, budget, dispatcher and number formats stay as they are. What
varies are the degrees of the fold, rows a microbatch, ZeRO stage and what is computed again: none
of it changes a result but by rounding. Memory is the estimate's, time that of the analytic list of
operations; the compiler then confirms the best few (`confirm`).
"""

import dataclasses
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from moejax.config import Config
from moejax.model.stack import REMAT
from moejax.plan.analytic.events import events
from moejax.plan.analytic.setup import Setup
from moejax.plan.estimate import Memory, estimate, refuse_unknown, room
from moejax.plan.hardware import Cluster
from moejax.plan.plans import Plan, make_plan
from moejax.plan.resting import check_divides
from moejax.plan.settings import changed
from moejax.plan.timeline import Timeline, simulate

MOST_ROWS = 64
"""Rows of a microbatch on one GPU: more fill no kernel better."""
LARGEST_TP, LARGEST_ETP = 8, 8


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A fold that fits, with what it is predicted to need."""

    config: Config
    memory: Memory
    seconds: float
    """Of a step."""
    tokens_per_second: float
    """Of one GPU."""


@dataclasses.dataclass(frozen=True)
class Found:
    """What a search found."""

    base: Config
    cluster: Cluster
    num_gpus: int
    ranked: tuple[Candidate, ...]
    """Those that fit, the fastest first."""
    smallest: tuple[Config, Memory] | None
    """Of those that do not fit the one that needs least; None where all fit."""
    counts: Counter[str]
    """How many candidates there were, by what became of them."""


def price(config: Config, cluster: Cluster, num_gpus: int) -> Timeline:
    """Returns the analytic Timeline of moejax's own step."""
    setup = Setup.of(config, num_gpus)
    return simulate(events(setup, cluster), cluster)


def analytic_plan(config: Config, cluster: Cluster, num_gpus: int) -> Plan:
    """Returns the plan of a config, without a compile. Raises ValueError where it cannot run."""
    refuse_unknown(config)
    fold = config.fold_over(num_gpus)
    check_divides(config, fold)
    setup = Setup.of(config, num_gpus)
    listed = events(setup, cluster)
    return make_plan(config, cluster, num_gpus, estimate(config, fold), listed)


def candidates(base: Config, cluster: Cluster, num_gpus: int) -> Iterator[dict[str, Any]]:
    """Yields the leaves of every fold and recompute setting to try, by dotted name."""
    powers = [2**i for i in range(num_gpus.bit_length()) if num_gpus % 2**i == 0]
    experts = [n for n in divisors(num_gpus) if base.model.moe.num_experts % n == 0]
    has_experts = "M" in base.model.all_kinds()
    inside = [n for n in powers if n <= cluster.domain]
    for tp, etp in itertools.product(inside, inside):
        if tp > LARGEST_TP or etp > LARGEST_ETP or (etp > 1 and not has_experts):
            continue
        dp = num_gpus // tp
        for ep in experts if has_experts else [1]:
            if num_gpus % (ep * etp) or base.train.batch_size % dp:
                continue
            fold = {
                "parallel.dp": dp, "parallel.tp": tp, "parallel.ep": ep, "parallel.etp": etp,
                "parallel.edp": 0,
            }  # fmt: skip
            for more in _further(base, base.train.batch_size // dp):
                yield fold | more


def _further(base: Config, rows: int) -> Iterator[dict[str, Any]]:
    """Yields microbatches, ZeRO stages and recompute settings for so many rows on a GPU."""
    latents = [False, True] if base.model.attention.kind == "mla" else [False]
    for each in divisors(rows):
        if each > MOST_ROWS:
            continue
        for zero, remat, up in itertools.product((0, 1, 3), REMAT, latents):
            yield {
                "train.microbatches": rows // each, "parallel.zero": zero, "model.remat": remat,
            } | ({"model.attention.mla.recompute_up": up} if len(latents) > 1 else {})  # fmt: skip


def divisors(n: int) -> list[int]:
    """Returns the divisors of n, smallest first."""
    return [d for d in range(1, n + 1) if n % d == 0]


def weigh(config: Config, num_gpus: int, *, worst_case: bool = False) -> Memory:
    """Returns the estimated memory. Raises ValueError where the fold or a shape does not fit."""
    fold = config.fold_over(num_gpus)
    check_divides(config, fold)
    return estimate(config, fold, worst_case=worst_case)


def search(
    base: Config,
    cluster: Cluster,
    num_gpus: int,
    progress: Callable[[str], None] = lambda line: None,
    *,
    worst_case: bool = False,
) -> Found:
    """Returns what there is for `base` on so many GPUs; `worst_case`: where the step that runs an
    overflowed batch again fits as well.

    Where nothing fits, `ranked` is empty and `smallest` says how near it came. Raises ValueError
    as `refuse_unknown` does.
    """
    refuse_unknown(base)
    counts: Counter[str] = Counter()
    fitting: list[tuple[Config, Memory]] = []
    smallest: tuple[Config, Memory] | None = None
    done: set[tuple] = set()
    for values in candidates(base, cluster, num_gpus):
        # What is computed again saves memory and costs time: nothing is gained beyond what fits.
        others = tuple(v for name, v in values.items() if not name.startswith("model."))
        if others in done:
            counts["compute again what need not be"] += 1
            continue
        try:
            config = changed(base, values)
            memory = weigh(config, num_gpus)
            largest = weigh(config, num_gpus, worst_case=True) if worst_case else memory
        except ValueError:
            counts["do not nest or divide"] += 1
            continue
        if max(memory.total, largest.total) <= room(cluster):
            fitting.append((config, memory))
            done.add(others)
        else:
            counts["do not fit"] += 1
            if smallest is None or largest.total < smallest[1].total:
                smallest = (config, largest)
    counts["fit and are priced"] = len(fitting)
    progress(", ".join(f"{n:,} {what}" for what, n in counts.items()))
    ranked = _in_order(_priced(*one, cluster, num_gpus) for one in fitting)
    return Found(base, cluster, num_gpus, ranked, smallest, counts)


def _priced(config: Config, memory: Memory, cluster: Cluster, num_gpus: int) -> Candidate:
    seconds = price(config, cluster, num_gpus).seconds
    tokens = config.train.batch_size * config.train.sequence_length / num_gpus
    return Candidate(config, memory, seconds, tokens / seconds)


def _in_order(ranked: Iterable[Candidate]) -> tuple[Candidate, ...]:
    """The fastest first; of equal ones that which needs less memory."""
    return tuple(sorted(ranked, key=lambda c: (round(c.seconds, 4), c.memory.total)))


def distinct(ranked: tuple[Candidate, ...], count: int) -> list[Candidate]:
    """Returns the best few of which no two have the same degrees and the same rows."""
    seen: set[tuple] = set()
    chosen: list[Candidate] = []
    for candidate in ranked:
        parallel, train = candidate.config.parallel, candidate.config.train
        key = (parallel.tp, parallel.ep, parallel.etp, train.microbatches)
        if key not in seen:
            seen.add(key)
            chosen.append(candidate)
        if len(chosen) == count:
            break
    return chosen


def confirm(
    found: Found, count: int, compiled: Callable[[Config], Plan], progress: Callable[[str], None]
) -> list[Plan]:
    """Returns the compiler's plans of the best few distinct candidates, fastest first, those that
    do not fit after all last.

    Goes on down the list until one of `count` or more fits, or 3 * count were compiled. What a
    compile needs more than was estimated is taken to be so for the rest as well.
    """
    plans: list[Plan] = []
    factor = 1.0
    for candidate in distinct(found.ranked, len(found.ranked)):
        enough = any(plan.fits for plan in plans)
        if len(plans) >= 3 * count or (len(plans) >= count and enough):
            break
        if candidate.memory.total * factor > room(found.cluster):
            continue
        progress(f"confirming {short(candidate.config)}")
        plans.append(plan := compiled(candidate.config))
        factor = max(factor, plan.memory.total / candidate.memory.total)
    return sorted(plans, key=lambda plan: (not plan.fits, plan.seconds))


def short(config: Config) -> str:
    """Returns a fold in a few words: "tp2 ep32 dp128 zero3, 16 microbatches, remat full"."""
    p = config.parallel
    degrees = [f"{k}{n}" for k, n in (("tp", p.tp), ("ep", p.ep), ("etp", p.etp)) if n > 1]
    count = config.train.microbatches
    more = ["one microbatch" if count == 1 else f"{count} microbatches"]
    more.append(f"remat {config.model.remat}")
    if config.model.attention.mla.recompute_up:
        more.append("latents up again")
    if config.precision.accum_dtype != "float32":
        more.append(f"sums in {config.precision.accum_dtype}")
    return f"{' '.join(degrees) or 'dp alone'} zero{p.zero}, {', '.join(more)}"
