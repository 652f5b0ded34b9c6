"""A plan by the compiler: the train step compiled, its memory and its schedule read."""

import dataclasses
from collections.abc import Callable

from moejax.config import Config
from moejax.plan import program
from moejax.plan.compile import Compiled, compile_step
from moejax.plan.estimate import Memory, Sizes
from moejax.plan.hardware import Cluster
from moejax.plan.plans import Plan, make_plan
from moejax.plan.resting import resting
from moejax.train import units


def compiled_plan(
    config: Config,
    cluster: Cluster,
    num_gpus: int,
    *,
    worst_case: bool = False,
    progress: Callable[[str], None] = lambda line: None,
) -> Plan:
    """Returns the plan of the step as XLA compiles it; `worst_case`: also of the step that runs an
    overflowed batch again.

    Raises ValueError and CompileError as `compile_step` does.
    """
    compiled = compile_step(config, cluster, num_gpus, progress=progress)
    found = program.read(
        compiled.text, cluster, rows=program.balanced_rows(config, num_gpus),
        window=config.model.attention.window,
    )  # fmt: skip
    memory = _memory(compiled, config, num_gpus)
    plan = make_plan(config, cluster, num_gpus, memory, found.events)
    again = None
    if worst_case:
        other = compile_step(config, cluster, num_gpus, worst_case=True, progress=progress)
        again = _memory(other, config, num_gpus)
    facts = (
        ("compiled in", units.duration(sum(compiled.seconds.values()))),
        ("the compiler's memory", units.data_size(compiled.host_bytes)),
        *(("note", note) for note in found.notes),
    )
    return dataclasses.replace(plan, compiled=True, again=again, facts=facts)


def _memory(compiled: Compiled, config: Config, num_gpus: int) -> Memory:
    """The compiler's totals: arguments by what they are, and all that is beside them."""
    fold = config.fold_over(num_gpus)
    rest = tuple(resting(config, fold).items())
    more = compiled.device_bytes - sum(size for _, size in rest)
    return Memory((*rest, ("temporary", more)), "all moments", Sizes(config, fold).received)
