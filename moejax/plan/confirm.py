"""A plan by the compiler: the train step compiled, its memory and its schedule read."""

import dataclasses
from collections.abc import Callable

from moejax.config import Config
from moejax.plan.compile import Compiled, compile_step
from moejax.plan.estimate import KINDS, Memory, Sizes
from moejax.plan.hardware import Cluster
from moejax.plan.plans import Plan, make_plan
from moejax.plan.reader import memory, program
from moejax.train import units

SHOWN = 24
"""Live buffers that a plan lists."""
# Kinds of the compiler's account -> those that the estimate has as well; the others are "other".
SAME = {
    "optimizer": "optimizer state", "batch": "batch and buffers",
    "router biases": "batch and buffers", "rest of the state": "batch and buffers",
    "outputs": "batch and buffers", "weights, copied": "turned weights",
    "dispatch buffers": "dispatch and experts", "expert activations": "dispatch and experts",
    "router": "dispatch and experts", "mlp": "dense MLP", "embedding": "logits and loss",
    "fragmentation": "packing", "gradient sums": "gradients",
} | {kind: kind for kind in KINDS}  # fmt: skip


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
    text = compiled.text
    found = program.read_step(text, config, cluster, num_gpus)
    account = memory.account(text, compiled.buffers, compiled.live)
    plan = make_plan(config, cluster, num_gpus, _memory(account, config, num_gpus), found.events)
    again = None
    if worst_case:
        other = compile_step(config, cluster, num_gpus, worst_case=True, progress=progress)
        account_again = memory.account(other.text, other.buffers, other.live)
        again = _memory(account_again, config, num_gpus)
    return dataclasses.replace(
        plan, compiled=True, again=again, facts=_facts(compiled, account, found),
        live=tuple((one.kind, one.what, float(one.bytes)) for one in account.live[:SHOWN]),
    )  # fmt: skip


def _facts(
    compiled: Compiled, account: memory.Memory, found: program.Program
) -> tuple[tuple[str, str], ...]:
    kernels = ", ".join(f"{name} {count:,.0f}" for name, count in found.kernels.items())
    host = [("host memory", units.data_size(sum(account.host.values())))] if account.host else []
    return (
        ("compiled in", units.duration(sum(compiled.seconds.values()))),
        ("the compiler's memory", units.data_size(compiled.host_bytes)),
        *host,
        ("the peak is at", f"{account.peak} ({account.where})"),
        ("our kernels, calls a step", kernels or "none"),
        *(("note", note) for note in found.notes),
    )


def _memory(account: memory.Memory, config: Config, num_gpus: int) -> Memory:
    """The compiler's account in the kinds of the estimate."""
    sizes = dict.fromkeys(KINDS, 0.0)
    for kind, size in account.kinds.items():
        sizes[SAME.get(kind, "other")] += size
    kinds = tuple((kind, size) for kind, size in sizes.items() if size)
    where = account.where.replace(", ", ": ")
    return Memory(kinds, where, Sizes(config, config.fold_over(num_gpus)).received)
