"""The processes of a run: one on a laptop, one a host (or a GPU) on a cluster.

Every process runs the same program on the same arguments. What only one may do (files, the
terminal) the first one does; what all must decide alike is agreed on here.
"""

import os
from collections.abc import Generator, Mapping
from contextlib import contextmanager

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec


def join(environ: Mapping[str, str] = os.environ) -> int:
    """Joins the other processes of this job; returns how many there are, 1 for a process alone.

    A job is told by JAX_COORDINATOR_ADDRESS (host:port of the first process), JAX_NUM_PROCESSES
    and JAX_PROCESS_ID, as a Kubernetes manifest can set them; under Slurm's srun and Open MPI's
    mpirun by what these set themselves. Comes before anything that asks JAX for devices.

    Raises ValueError for a coordinator without the other two.
    """
    if "JAX_COORDINATOR_ADDRESS" in environ:
        try:
            count, index = (int(environ[f"JAX_{name}"]) for name in ("NUM_PROCESSES", "PROCESS_ID"))
        except (KeyError, ValueError) as error:
            raise ValueError(
                "JAX_COORDINATOR_ADDRESS is set, so JAX_NUM_PROCESSES and JAX_PROCESS_ID must be "
                f"numbers: {error}"
            ) from None
        if count > 1:
            jax.distributed.initialize(environ["JAX_COORDINATOR_ADDRESS"], count, index)
        return count
    # A step's own count: a Slurm batch script runs alone, whatever the job's count says.
    count = int(environ.get("SLURM_STEP_NUM_TASKS") or environ.get("OMPI_COMM_WORLD_SIZE") or 1)
    if count > 1:
        jax.distributed.initialize()
    return count


def is_first() -> bool:
    """Whether this is the process that writes files and speaks."""
    return jax.process_index() == 0


@contextmanager
def first_goes_first(what: str) -> Generator[None]:
    """The first process does the block alone, then the others do it, and find its files."""
    if not is_first():
        multihost_utils.sync_global_devices(what)
    yield
    if is_first() and jax.process_count() > 1:
        multihost_utils.sync_global_devices(what)


def whole(x: jax.Array) -> np.ndarray:
    """Returns all of a global array, to every process; all have to ask."""
    if jax.process_count() == 1:
        return np.asarray(x)
    return np.asarray(multihost_utils.process_allgather(x, tiled=True))


def of_first(value: int) -> int:
    """Returns the first process's value, on all."""
    if jax.process_count() == 1:
        return value
    return int(multihost_utils.broadcast_one_to_all(np.int32(value)))


def share_of(sharding: NamedSharding, num_rows: int) -> tuple[int, int]:
    """Returns (index, count): this process holds part `index` of `count` equal parts of dim 0.

    Processes that hold the same rows (they are split over tp) have the same index. Raises
    ValueError when the devices of a process do not hold rows that lie together.
    """
    held = sharding.addressable_devices_indices_map((num_rows,)).values()
    parts = sorted({part[0].indices(num_rows)[:2] for part in held if part})
    size, start = sum(stop - start for start, stop in parts), parts[0][0]
    if parts[-1][1] - start != size or start % size or num_rows % size:
        raise ValueError(
            f"process {jax.process_index()} holds rows {parts} of {num_rows}, which are no equal "
            "part: let dp (or tp) be a multiple of the devices of a process, or divide them"
        )
    return start // size, num_rows // size


class Agreement:
    """A flag that any process may raise, answered alike on all: the answer of the call before.

    Every process calls it as often. A call starts a small reduction over all devices, and returns
    the last call's, which is done by then: no step waits for it.
    """

    def __init__(self) -> None:
        mesh = Mesh(np.asarray(jax.devices()), "all")
        self._split = NamedSharding(mesh, PartitionSpec("all"))
        self._any = jax.jit(jnp.max, out_shardings=NamedSharding(mesh, PartitionSpec()))
        self._last: jax.Array | None = None

    def __call__(self, flag: bool) -> bool:
        mine = np.full(jax.local_device_count(), flag, np.int32)
        before, flags = self._last, jax.make_array_from_process_local_data(self._split, mine)
        self._last = self._any(flags)
        return before is not None and bool(before.addressable_data(0))
