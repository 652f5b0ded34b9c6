"""How the processes of a job find each other: from what their launcher tells each one.

| launcher | number, index | the first process | of one host's processes |
|---|---|---|---|
| by hand | JAX_NUM_PROCESSES, JAX_PROCESS_ID | JAX_COORDINATOR_ADDRESS | JAX_LOCAL_DEVICE_IDS |
| Kubernetes, indexed | JAX_NUM_PROCESSES, JOB_COMPLETION_INDEX | the same | one a pod |
| Slurm's srun | SLURM_STEP_NUM_TASKS, SLURM_PROCID | SLURM_STEP_NODELIST | SLURM_LOCALID |
| Open MPI's mpirun | OMPI_COMM_WORLD_SIZE, _RANK | its own address | OMPI_COMM_WORLD_LOCAL_RANK |

The first row wins over the others, variable by variable: JAX_COORDINATOR_ADDRESS alone names the
first process of an mpirun.
"""

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import jax
from jax._src.clusters import OmpiCluster, SlurmCluster

from moejax.core.liveness import HEARTBEAT_TIMEOUT_S

# The first that is set counts. An mpirun inside a Slurm job has Slurm's variables too: those of the
# step that started mpirun's own daemons.
_COUNT = dict.fromkeys(("JAX_NUM_PROCESSES", "OMPI_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS")).keys()
_INDEX = dict.fromkeys(
    ("JAX_PROCESS_ID", "JOB_COMPLETION_INDEX", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID")
).keys()


@dataclass(frozen=True)
class Job:
    """What a process is told of its job."""

    count: int = 1
    """How many processes there are."""
    index: int = 0
    """Which one this is; the first is 0."""
    address: str = ""
    """host:port on which the first one waits for the others."""
    local_devices: tuple[int, ...] | None = None
    """Of the GPUs that this process sees, those it takes; None for all."""


def join() -> int:
    """Joins the other processes of this job; returns how many there are, 1 for a process alone.

    Comes before anything that asks JAX for devices. Raises ValueError, one line, that names the
    variable which is missing or wrong; RuntimeError if the others do not come within five minutes.
    """
    job = find()
    if job.count > 1:
        jax.distributed.initialize(
            job.address,
            job.count,
            job.index,
            local_device_ids=None if job.local_devices is None else list(job.local_devices),
            cluster_detection_method="deactivate",  # it would give each process one GPU
            heartbeat_timeout_seconds=HEARTBEAT_TIMEOUT_S,
        )
    return job.count


def find(environ: Mapping[str, str] = os.environ) -> Job:
    """Returns the job that the environment tells of. Raises ValueError as `join` does."""
    if _COUNT.isdisjoint(environ):
        for name in ("JAX_COORDINATOR_ADDRESS", "JAX_PROCESS_ID", "JOB_COMPLETION_INDEX"):
            if name in environ:
                raise ValueError(
                    f"{name} is set and JAX_NUM_PROCESSES is not; it is 1 for a process alone"
                )
        return Job()
    count = _number(environ, _COUNT)
    if count < 1:
        raise ValueError(f"JAX_NUM_PROCESSES is {count}, and must be 1 or more")
    if count == 1:
        return Job()
    if _INDEX.isdisjoint(environ):
        raise ValueError(f"JAX_PROCESS_ID, which of the {count} processes this is, is not set")
    index = _number(environ, _INDEX)
    if not 0 <= index < count:
        raise ValueError(f"JAX_PROCESS_ID is {index}; of {count} it must be 0 to {count - 1}")
    return Job(count, index, _address(environ), _local_devices(environ))


def _number(environ: Mapping[str, str], names: Iterable[str]) -> int:
    """Returns the number in the first of the variables that is set."""
    name = next(name for name in names if name in environ)
    try:
        return int(environ[name])
    except ValueError:
        raise ValueError(f"{name} is {environ[name]!r}, not a number") from None


def _address(environ: Mapping[str, str]) -> str:
    """Returns where the first process waits: as told, else as JAX makes it up."""
    if "JAX_COORDINATOR_ADDRESS" in environ:
        address = environ["JAX_COORDINATOR_ADDRESS"]
        if not re.fullmatch(r".+:\d+", address):
            raise ValueError(f"JAX_COORDINATOR_ADDRESS is {address!r}, not host:port")
        return address
    if "JAX_NUM_PROCESSES" in environ or "JOB_COMPLETION_INDEX" in environ:
        raise ValueError("JAX_COORDINATOR_ADDRESS (host:port of the first process) is not set")
    port = environ.get("JAX_COORDINATOR_PORT")
    if "OMPI_COMM_WORLD_SIZE" in environ:
        try:
            return OmpiCluster.get_coordinator_address(None, port)
        except (RuntimeError, KeyError) as error:
            raise ValueError(
                "JAX_COORDINATOR_ADDRESS (host:port of the first process) is not set, and Open "
                f"MPI 5 does not tell it without mpi4py ({error})"
            ) from None
    for name in ("SLURM_JOB_ID", "SLURM_STEP_NODELIST"):
        if name not in environ:
            raise ValueError(f"{name} is not set in a Slurm step; start it with srun")
    return SlurmCluster.get_coordinator_address(None, port)


def _local_devices(environ: Mapping[str, str]) -> tuple[int, ...] | None:
    """Returns the GPUs of this process among those that it sees: its part, where it shares them.

    One process a host has them all, and so has one whose launcher shows it its own alone.
    """
    if "JAX_LOCAL_DEVICE_IDS" in environ:
        return tuple(int(i) for i in environ["JAX_LOCAL_DEVICE_IDS"].split(","))
    if "OMPI_COMM_WORLD_LOCAL_RANK" in environ:
        place = int(environ["OMPI_COMM_WORLD_LOCAL_RANK"])
        here = int(environ.get("OMPI_COMM_WORLD_LOCAL_SIZE", 1))
    elif "SLURM_LOCALID" in environ:
        place, here = int(environ["SLURM_LOCALID"]), _slurm_tasks_here(environ)
    else:
        return None
    visible = len([gpu for gpu in environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if gpu])
    on_node = int(environ.get("SLURM_GPUS_ON_NODE", visible or here))
    if here == 1 or (visible or on_node) < on_node or visible == 1:
        return None
    if on_node % here:
        raise ValueError(f"{here} processes on this host cannot share its {on_node} GPUs evenly")
    each = on_node // here
    return tuple(range(place * each, (place + 1) * each))


def _slurm_tasks_here(environ: Mapping[str, str]) -> int:
    """Returns how many tasks of the step run on this node, from e.g. "2(x3),1" and the node's
    place among the nodes."""
    each: list[int] = []
    for tasks, times in re.findall(
        r"(\d+)(?:\(x(\d+)\))?", environ.get("SLURM_STEP_TASKS_PER_NODE", "1")
    ):
        each += [int(tasks)] * int(times or 1)
    node = int(environ.get("SLURM_NODEID", 0))
    return each[min(node, len(each) - 1)]
