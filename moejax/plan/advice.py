"""What to change where a plan does not fit: one setting at a time, each with its bytes and time.

    for way in ways(plan):
        print(way.text, way.memory.total, way.cost)
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

from moejax.config import Config, leaves
from moejax.plan import search
from moejax.plan.estimate import Memory, estimate, room
from moejax.plan.hardware import CLUSTERS, Cluster
from moejax.plan.plans import Plan
from moejax.plan.search import divisors, price, weigh
from moejax.plan.settings import changed

LARGER = ("h100", "h200", "b200", "b300", "gb200", "gb300")
"""Kinds of GPU by memory, so that one with more can be named."""


@dataclasses.dataclass(frozen=True)
class Way:
    """One setting that brings a plan under a GPU's memory."""

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


def ways(plan: Plan, *, worst_case: bool = False) -> list[Way]:
    """Returns the single changes under which the plan fits by the estimate, the cheapest first;
    of each setting the cheapest value. Where no single one is enough, pairs of them.

    The estimate is corrected by what the compiler found of this plan, where it was compiled.
    """
    known = estimate(plan.config, plan.config.fold_over(plan.num_gpus), worst_case=worst_case)
    measured = plan.again if worst_case and plan.again else plan.memory
    factor = max(measured.total / known.total, 1.0)
    before = price(plan.config, plan.cluster, plan.num_gpus).seconds * plan.num_gpus
    singles = list(_singles(plan.config, plan.cluster, plan.num_gpus))
    found = [w for s in singles if (w := _way(plan, *s, before, factor, worst_case))]
    if not found:
        pairs = (
            (f"{text} {more}", values | further, cluster, gpus)
            for text, values, cluster, gpus in singles
            if gpus == plan.num_gpus and cluster == plan.cluster
            for more, further, where, others in singles
            if others == gpus and where == cluster and values.keys().isdisjoint(further)
        )
        found = [w for pair in pairs if (w := _way(plan, *pair, before, factor, worst_case))]
    best: dict[tuple, Way] = {}
    for way in sorted(found, key=lambda way: way.cost):
        names = tuple(sorted(part.split("=")[0] for part in way.text.split()))
        best.setdefault(names, way)
    return list(best.values())


def _way(plan: Plan, text, values, cluster, num_gpus, before, factor, worst_case) -> Way | None:
    """The change as a Way, if it can run and fits."""
    try:
        config = changed(plan.config, values)
        memory = weigh(config, num_gpus)
        if worst_case:
            memory = estimate(config, config.fold_over(num_gpus), worst_case=True)
    except ValueError:
        return None
    if memory.total * factor > room(cluster):
        return None
    seconds = price(config, cluster, num_gpus).seconds
    return Way(text, config, cluster, num_gpus, memory, seconds * num_gpus / before, seconds)


def _singles(
    config: Config, cluster: Cluster, num_gpus: int
) -> Iterator[tuple[str, dict[str, Any], Cluster, int]]:
    """Yields (text, leaves, cluster, GPUs) of every single change."""
    for values in _settings(config, num_gpus):
        yield _typed(config, values), values, cluster, num_gpus
    for times in (2, 4, 8):
        more, values = num_gpus * times, _on_more(config, times)
        text = f"--gpus={cluster.name}x{more} {_typed(config, values)}"
        yield text.strip(), values, cluster, more
    for name in LARGER:
        if CLUSTERS[name].gpu.memory_bytes > cluster.gpu.memory_bytes:
            yield f"--gpus={name}x{num_gpus}", {}, CLUSTERS[name], num_gpus


def _typed(config: Config, values: dict[str, Any]) -> str:
    """The options that a user would type for those leaves; those that change nothing left out."""
    before = {name: value for name, value, _ in leaves(config)}
    shown = {k: str(v).lower() if isinstance(v, bool) else v for k, v in values.items()}
    return " ".join(f"--config.{k}={v}" for k, v in shown.items() if values[k] != before[k])


def _settings(config: Config, num_gpus: int) -> Iterator[dict[str, Any]]:
    """Yields the leaves of each change that keeps the cluster."""
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
    for tp in (2, 4, 8):
        if tp > parallel.tp and num_gpus % tp == 0:
            yield {"parallel.tp": tp, "parallel.dp": parallel.dp and num_gpus // tp}
    if model.moe.budget > 1.25:
        yield {"model.moe.budget": 1.25}
    if config.precision.accum_dtype == "float32":
        yield dict(search.NARROW_SUMS)


def _on_more(config: Config, times: int) -> dict[str, Any]:
    """The leaves that put a config on `times` as many GPUs, the rows of a microbatch kept on each
    where the batch has enough."""
    parallel, train = config.parallel, config.train
    values: dict[str, Any] = {"parallel.dp": parallel.dp * times, "parallel.edp": 0}
    if train.microbatches % times == 0:
        values["train.microbatches"] = train.microbatches // times
    return values
