"""What to change where a plan does not fit: as few settings as do, each with its bytes and time.

    for way in ways(plan):
        print(way.text, way.memory.total, way.cost)

Both are estimates; the compiler has the last word on a plan that takes one of them.
"""

import dataclasses
import itertools
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from moejax.config import Config, leaves
from moejax.plan.estimate import Memory, estimate, not_described, room
from moejax.plan.hardware import CLUSTERS, Cluster
from moejax.plan.plans import Plan
from moejax.plan.search import divisors, price, weigh
from moejax.plan.settings import changed

LARGER = ("h100", "h200", "b200", "b300", "gb200", "gb300")
"""Kinds of GPU by memory, so that one with more can be named."""


@dataclasses.dataclass(frozen=True)
class Way:
    """A change that brings a plan under a GPU's memory."""

    text: str
    """What to change, as a user would write it."""
    config: Config
    cluster: Cluster
    num_gpus: int
    memory: Memory
    """Estimated."""
    cost: float
    """GPU-seconds of a step over those of the plan, both estimated: 1.05 is 5 % dearer."""
    seconds: float
    """Of a step."""


def ways(plan: Plan) -> list[Way]:
    """Returns changes under which the plan fits by the estimate, the cheapest first.

    On the plan's own cluster single settings; where none is enough, pairs, then threes; of each
    the smallest change that is enough. Beside these, more GPUs and larger ones. The estimate is
    corrected by what the compiler found of this plan, where it was compiled. Where the plan has
    looked at the step that runs an overflowed batch again, that has to fit as well. None for a fold
    that the estimate does not know (`not_described`).
    """
    if not_described(plan.config):
        return []
    own, gpus = plan.cluster, plan.num_gpus
    fold = plan.config.fold_over(gpus)
    need = _Need(
        plan.config,
        _excess(plan.memory, estimate(plan.config, fold)),
        _excess(plan.again, estimate(plan.config, fold, worst_case=True)) if plan.again else None,
    )
    settings = list(_settings(plan.config, gpus, plan.again is not None))
    found: list[_Fit] = []
    for many in (1, 2, 3):
        sets = (_together(some) for some in itertools.combinations(settings, many))
        if found := _smallest(need.fit(values, own, gpus) for values in sets if values):
            break
    others = list(_others(plan.config, own, gpus))
    found += [fit for other in others if (fit := need.fit(*other))]
    if not found:
        found = _smallest(
            need.fit(values | more, cluster, number)
            for values, cluster, number in others
            for more in settings
            if values.keys().isdisjoint(more)
        )
    before = price(plan.config, own, gpus).seconds * gpus
    return sorted((_way(plan, fit, before) for fit in found), key=lambda way: way.cost)


class _Fit(NamedTuple):
    """A change that is enough."""

    values: dict[str, Any]
    config: Config
    cluster: Cluster
    num_gpus: int
    memory: Memory


@dataclasses.dataclass(frozen=True)
class _Need:
    """What a change has to bring down."""

    config: Config
    excess: float
    """What the compiler needs more than the estimate, as a factor."""
    excess_again: float | None
    """The same of the step that runs a batch again; None: that need not fit."""

    def fit(self, values: dict[str, Any], cluster: Cluster, num_gpus: int) -> _Fit | None:
        """Returns the change if it can run and fits."""
        try:
            config = changed(self.config, values)
            memory = weigh(config, num_gpus)
        except ValueError:
            return None
        if memory.total * self.excess > room(cluster):
            return None
        if self.excess_again is not None:
            again = estimate(config, config.fold_over(num_gpus), worst_case=True)
            if again.total * self.excess_again > room(cluster):
                return None
        return _Fit(values, config, cluster, num_gpus, memory)


def _excess(found: Memory, known: Memory) -> float:
    return max(found.total / known.total, 1.0)


def _together(some: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """The leaves of several changes; none where two want the same leaf."""
    made: dict[str, Any] = {}
    for values in some:
        if not made.keys().isdisjoint(values):
            return {}
        made |= values
    return made


def _smallest(fits: Iterable[_Fit | None]) -> list[_Fit]:
    """The first of those that change the same leaves on the same cluster."""
    kept: dict[tuple, _Fit] = {}
    for fit in fits:
        if fit is not None:
            kept.setdefault((*sorted(fit.values), fit.cluster.name, fit.num_gpus), fit)
    return list(kept.values())


def _way(plan: Plan, fit: _Fit, before: float) -> Way:
    parts = [_typed(plan.config, fit.values)]
    if (fit.cluster, fit.num_gpus) != (plan.cluster, plan.num_gpus):
        parts.insert(0, f"--gpus={fit.cluster.name}x{fit.num_gpus}")
    seconds = price(fit.config, fit.cluster, fit.num_gpus).seconds
    return Way(
        " ".join(part for part in parts if part), fit.config, fit.cluster, fit.num_gpus, fit.memory,
        seconds * fit.num_gpus / before, seconds,
    )  # fmt: skip


def _others(
    config: Config, cluster: Cluster, num_gpus: int
) -> Iterator[tuple[dict[str, Any], Cluster, int]]:
    """Yields (leaves, cluster, GPUs) of more GPUs, and of GPUs with more memory."""
    for times in (2, 4, 8):
        yield _on_more(config, times), cluster, num_gpus * times
    for name in LARGER:
        if CLUSTERS[name].gpu.memory_bytes > cluster.gpu.memory_bytes:
            yield {}, CLUSTERS[name], num_gpus


def _typed(config: Config, values: dict[str, Any]) -> str:
    """The options that a user would type for those leaves; those that change nothing left out."""
    before = {name: value for name, value, _ in leaves(config)}
    shown = {k: str(v).lower() if isinstance(v, bool) else v for k, v in values.items()}
    return " ".join(f"--config.{k}={v}" for k, v in shown.items() if values[k] != before[k])


def _settings(config: Config, num_gpus: int, again: bool) -> Iterator[dict[str, Any]]:
    """Yields the leaves of each change that keeps the cluster, of a kind the smallest first."""
    parallel, model, train = config.parallel, config.model, config.train
    if model.remat != "full":
        yield {"model.remat": "full"}
    if model.attention.kind == "mla" and not model.attention.mla.recompute_up:
        yield {"model.attention.mla.recompute_up": True}
    yield from ({"parallel.zero": zero} for zero in (1, 3) if zero > parallel.zero)
    dp = num_gpus // parallel.tp
    for each in divisors(train.batch_size // dp):
        if (count := train.batch_size // dp // each) > train.microbatches:
            yield {"train.microbatches": count}
    for ep in divisors(num_gpus):
        if ep > parallel.ep and model.moe.num_experts % ep == 0:
            yield {"parallel.ep": ep, "parallel.edp": 0}
    # The worst case has room for all rows of ep ranks: fewer ranks, fewer rows.
    for ep in divisors(num_gpus)[::-1] if again else ():
        if ep < parallel.ep:
            yield {"parallel.ep": ep, "parallel.edp": 0}
    for tp in (2, 4, 8):
        if tp > parallel.tp and num_gpus % tp == 0:
            yield {"parallel.tp": tp, "parallel.dp": parallel.dp and num_gpus // tp}
    if model.moe.budget > 1.25:
        yield {"model.moe.budget": 1.25}
    if config.precision.accum_dtype == "float32":
        yield {"precision.accum_dtype": "bfloat16"}  # rounds the sums of gradients


def _on_more(config: Config, times: int) -> dict[str, Any]:
    """The leaves that put a config on `times` as many GPUs, the rows of a microbatch kept on each
    where the batch has enough."""
    parallel, train = config.parallel, config.train
    values: dict[str, Any] = {"parallel.dp": parallel.dp * times, "parallel.edp": 0}
    if train.microbatches % times == 0:
        values["train.microbatches"] = train.microbatches // times
    return values
