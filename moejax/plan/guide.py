"""A schedule by price: XLA learns what each instruction takes, and compiles a second time.

XLA's latency-hiding scheduler decides what runs beside a collective by how long it holds each
instruction to take, and of our kernels, as of the network, it knows nothing: every call costs the
same, every collective a fixed number of calls. Profile-guided scheduling is its way to be told,
with times measured on a GPU. Here they are this project's prices (`cost`), so that it needs no
profile, nor a GPU: the step is compiled once, every instruction priced, and compiled again.

    first = lowered.compile(OPTIONS)
    compiled = lowered.compile(priced(first, config, CLUSTERS["h100"], 256, folder))

The order of collectives that are in flight together is the same on all devices, for all compile
the same program by the same prices.
"""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from moejax.config import Config
from moejax.core import cluster as processes
from moejax.plan.cost import MICRO, seconds
from moejax.plan.estimate import room
from moejax.plan.hardware import CLUSTERS, Cluster
from moejax.plan.operations import Run, Start
from moejax.plan.reader.program import Program, read_step
from moejax.plan.timeline import simulate
from pallas_kernels.deviceless import gpu_of

STREAMS = 4
"""Collectives in flight at once. With XLA's own limit of one, the small ones inside attention (tp,
counts, losses) keep an all-to-all from running beside it."""
OPTIONS = {
    "xla_gpu_experimental_parallel_collective_overlap_limit": STREAMS,
    # XLA joins small collectives that are alike; of two microbatches, one then waits for the other.
    "xla_gpu_all_gather_combine_threshold_bytes": 0,
    "xla_gpu_all_reduce_combine_threshold_bytes": 0,
    "xla_gpu_reduce_scatter_combine_threshold_bytes": 0,
}
EXCHANGES = ("ep dispatch", "ep combine")
CROWDED = 1.4
"""What these take, of their price alone: two of them often share a link, which the scheduler, to
which each has a time of its own, cannot know."""
LEAST = 0.3e-3
"""Seconds that the smallest of them (ids, weights) is said to take: about a product's, so that the
scheduler lets one run beside it."""


def streams(config: Config) -> int:
    """Returns how many collectives a step has in flight; more than 1: it is compiled by price, as
    is what is there to overlap: merged microbatches, and weights gathered a layer ahead. (XLA's own
    schedule hides nothing of these: it takes any kernel for as long as any other.)"""
    parallel = config.parallel
    return STREAMS if parallel.schedule == "merged" or parallel.zero == 3 else 1


def profile(program: Program, cluster: Cluster) -> str:
    """Returns the prices of a program's instructions as XLA reads them: the text form of
    `tensorflow.profiler.ProfiledInstructionsProto`, in microseconds. The price of a start is the
    time until its done may be awaited."""
    lines = []
    for name, events in program.by_instruction.items():
        match events:
            case (Start(work, _),) if work.role in EXCHANGES:
                takes = max(CROWDED * seconds(work, cluster), LEAST)
            case (Run(work),) | (Start(work, _),):
                takes = seconds(work, cluster)
            case _:
                takes = simulate(events, cluster, STREAMS).seconds
        lines.append(f'costs {{ name: "{name}" cost_us: {takes / MICRO:.3f} }}\n')
    return "".join(lines)


def priced(
    first: jax.stages.Compiled, config: Config, cluster: Cluster, num_gpus: int, folder: Path
) -> dict[str, Any]:
    """Returns the options with which a step is compiled again, by the prices of what it was
    `first`: those of the first process, for all. They go to a file in `folder`, named by what it
    holds."""
    program = read_step(first.as_text() or "", config, cluster, num_gpus)
    processes.meet("priced")
    prices = processes.text_of_first(profile(program, cluster))
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"prices-{hashlib.sha256(prices.encode()).hexdigest()[:16]}.pbtxt"
    path.write_text(prices)
    return OPTIONS | {
        "xla_gpu_pgle_profile_file_or_directory_path": str(path),
        "xla_gpu_memory_limit_slop_factor": slop(first.memory_analysis(), cluster),
    }


def slop(memory: Any, cluster: Cluster) -> int:
    """Returns the per cent by which XLA's scheduler is to multiply what it takes for free memory.

    Above that it overlaps nothing. It takes 0.8 of the GPU less arguments and outputs, both, though
    a step's outputs lie in its arguments' place: of 80 GB that hold 25 GB of state, 14 GB free.
    """
    arguments, outputs = memory.argument_size_in_bytes, memory.output_size_in_bytes
    theirs = 0.8 * cluster.gpu.memory_bytes - arguments - outputs
    free = room(cluster) - arguments - (outputs - memory.alias_size_in_bytes)
    return max(round(100 * free / theirs), 95) if theirs > 0 else 95


def compiler(config: Config, folder: Path) -> Callable[[jax.stages.Lowered], jax.stages.Compiled]:
    """Returns what compiles the train step of a run on the devices of this job: once, and by price
    where `streams` says so. For devices that have no prices it says so."""
    kind, num_gpus = jax.devices()[0].device_kind, len(jax.devices())
    gpu, once = gpu_of(kind), lambda lowered: lowered.compile()
    if streams(config) == 1:
        return once
    if gpu is None or gpu not in CLUSTERS:
        if processes.is_first():
            print(f"note: {kind} has no prices: XLA's own schedule, with less overlap", flush=True)
        return once

    def twice(lowered: jax.stages.Lowered) -> jax.stages.Compiled:
        first = lowered.compile(OPTIONS)
        return lowered.compile(priced(first, config, CLUSTERS[gpu], num_gpus, folder))

    return twice
