"""What a process is told by its launcher, and what it makes of that."""

import os

import jax
import pytest

from moejax.core import job
from moejax.core.job import Job

SLURM = {
    "SLURM_JOB_ID": "4096", "SLURM_STEP_NODELIST": "node[007-008,011],big", "SLURM_NTASKS": "32",
    "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_TASKS_PER_NODE": "1(x4)", "SLURM_PROCID": "2",
    "SLURM_NODEID": "2", "SLURM_LOCALID": "0",
}  # fmt: skip
OMPI = {
    "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911",
    "OMPI_COMM_WORLD_SIZE": "8", "OMPI_COMM_WORLD_RANK": "5", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}  # fmt: skip
BY_HAND = {
    "JAX_COORDINATOR_ADDRESS": "host:12",
    "JAX_NUM_PROCESSES": "4",
    "JAX_PROCESS_ID": "3",
}
KUBERNETES = {
    "JAX_COORDINATOR_ADDRESS": "run-workers-0-0.run:8476",
    "JAX_NUM_PROCESSES": "16",
    "JOB_COMPLETION_INDEX": "9",
}
# Eight tasks on two nodes of eight GPUs.
SHARED = SLURM | {
    "SLURM_STEP_NUM_TASKS": "8", "SLURM_STEP_TASKS_PER_NODE": "4(x2)", "SLURM_PROCID": "6",
    "SLURM_NODEID": "1", "SLURM_LOCALID": "2", "SLURM_GPUS_ON_NODE": "8",
}  # fmt: skip


@pytest.fixture
def find(monkeypatch):
    """`job.find` in a process whose environment is the given one: JAX's own part reads that."""
    for name in list(os.environ):
        if name.startswith(("SLURM_", "OMPI_", "JAX_", "JOB_", "CUDA_")):
            monkeypatch.delenv(name)

    def inside(environ: dict[str, str]) -> Job:
        for name, value in environ.items():
            monkeypatch.setenv(name, value)
        return job.find()

    return inside


@pytest.mark.parametrize(
    ("environ", "right"),
    [
        ({}, Job()),
        ({"SLURM_NTASKS": "8", "SLURM_JOB_ID": "4", "SLURM_PROCID": "0"}, Job()),  # a batch script
        ({"JAX_NUM_PROCESSES": "1", "JOB_COMPLETION_INDEX": "0"}, Job()),
        (BY_HAND, Job(4, 3, "host:12")),
        (BY_HAND | {"JAX_LOCAL_DEVICE_IDS": "4,5"}, Job(4, 3, "host:12", (4, 5))),
        (KUBERNETES, Job(16, 9, "run-workers-0-0.run:8476")),
        (SLURM, Job(4, 2, "node007:61440")),  # one a node: all of its GPUs
        (SLURM | {"JAX_COORDINATOR_PORT": "9"}, Job(4, 2, "node007:9")),
        (SLURM | {"SLURM_STEP_NODELIST": "a,b"}, Job(4, 2, "a:61440")),
        (SHARED, Job(8, 6, "node007:61440", (4, 5))),
        (SHARED | {"CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7"}, Job(8, 6, "node007:61440", (4, 5))),
        # Tasks that Slurm shows theirs alone: --gpus-per-task.
        (SHARED | {"CUDA_VISIBLE_DEVICES": "0,1"}, Job(8, 6, "node007:61440")),
        (SHARED | {"CUDA_VISIBLE_DEVICES": "5"}, Job(8, 6, "node007:61440")),
        (SHARED | {"SLURM_STEP_TASKS_PER_NODE": "7,1"}, Job(8, 6, "node007:61440")),
        (OMPI, Job(8, 5, "10.96.0.1:62624", (1,))),
        (OMPI | {"CUDA_VISIBLE_DEVICES": "0,1,2,3"}, Job(8, 5, "10.96.0.1:62624", (2, 3))),
        (OMPI | {"JAX_COORDINATOR_ADDRESS": "a:1"}, Job(8, 5, "a:1", (1,))),
        (SLURM | OMPI, Job(8, 5, "10.96.0.1:62624", (1,))),  # mpirun inside a Slurm job
    ],
)  # fmt: skip
def test_a_process_finds_its_place(environ, right, find):
    assert find(environ) == right


def without(environ: dict[str, str], name: str) -> dict[str, str]:
    return {k: v for k, v in environ.items() if k != name}


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"JAX_COORDINATOR_ADDRESS": "a:1"}, "ADDRESS is set and JAX_NUM_PROCESSES is not"),
        ({"JOB_COMPLETION_INDEX": "0"}, "INDEX is set and JAX_NUM_PROCESSES is not; it is 1 for"),
        (without(BY_HAND, "JAX_PROCESS_ID"), "JAX_PROCESS_ID, which of the 4 processes this is"),
        (without(KUBERNETES, "JAX_COORDINATOR_ADDRESS"), "JAX_COORDINATOR_ADDRESS .* is not set"),
        (BY_HAND | {"JAX_COORDINATOR_ADDRESS": "host"}, "'host', not host:port"),
        (BY_HAND | {"JAX_NUM_PROCESSES": "four"}, "JAX_NUM_PROCESSES is 'four', not a number"),
        (BY_HAND | {"JAX_PROCESS_ID": "4"}, "JAX_PROCESS_ID is 4; of 4 it must be 0 to 3"),
        (BY_HAND | {"JAX_NUM_PROCESSES": "0"}, "JAX_NUM_PROCESSES is 0"),
        (without(SLURM, "SLURM_STEP_NODELIST"), "SLURM_STEP_NODELIST is not set"),
        (without(OMPI, "OMPI_MCA_orte_hnp_uri"), "JAX_COORDINATOR_ADDRESS .* mpi4py"),
        (SHARED | {"SLURM_GPUS_ON_NODE": "6"}, "4 processes on this host cannot share its 6 GPUs"),
    ],
)
def test_what_is_missing_is_named_in_one_line(environ, message, find):
    with pytest.raises(ValueError, match=message) as raised:
        find(environ)
    assert "\n" not in str(raised.value)


def test_joining_hands_it_all_to_jax(find, monkeypatch):
    asked = []
    monkeypatch.setattr(jax.distributed, "initialize", lambda *a, **k: asked.append((a, k)))
    find(SHARED)
    assert job.join() == 8
    ((place, rest),) = asked
    assert place == ("node007:61440", 8, 6) and rest["local_device_ids"] == [4, 5]
    assert rest["cluster_detection_method"] == "deactivate"
    assert rest["heartbeat_timeout_seconds"] <= 45  # with what JAX adds, within a minute
    monkeypatch.setattr(job, "find", Job)
    assert job.join() == 1 and len(asked) == 1
