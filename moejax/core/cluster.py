"""The processes of a run: one on a laptop, one a host (or a GPU) on a cluster.

Every process runs the same program on the same arguments. What only one may do (files, the
terminal) the first one does; what all must decide alike is agreed on here. How they find each
other: job.py; what becomes of them when one dies: liveness.py.
"""

from collections.abc import Generator
from contextlib import contextmanager
from itertools import count

import jax
import jax.numpy as jnp
import numpy as np
from jax._src import distributed
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

_LONGEST_WAIT_MS = 24 * 3600 * 1000
_MEETINGS = count()  # a barrier's name serves once; all processes meet in the same order


def is_first() -> bool:
    """Whether this is the process that writes files and speaks."""
    return jax.process_index() == 0


def meet(what: str) -> None:
    """Waits until every process is here, however long the others take; `what` names the place.

    A collective is no place to wait for a process that is still compiling or reading: those over
    TCP, between CPUs, give up after 30 s. That a process died meanwhile, liveness.py notices.
    """
    if jax.process_count() > 1:
        client = distributed.global_state.client
        assert client is not None, "many processes have joined, by job.join"
        client.wait_at_barrier(f"moejax/meet/{next(_MEETINGS)}/{what}", _LONGEST_WAIT_MS)


@contextmanager
def first_goes_first(what: str) -> Generator[None]:
    """The first process does the block alone, then the others do it, and find its files."""
    if not is_first():
        meet(what)
    yield
    if is_first():
        meet(what)


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


def text_of_first(text: str) -> str:
    """Returns the first process's text, on all."""
    if jax.process_count() == 1:
        return text
    mine = np.frombuffer(text.encode(), np.uint8)
    sent = np.zeros(of_first(len(mine)), np.uint8)
    sent[: len(mine)] = mine[: len(sent)]
    return bytes(np.asarray(multihost_utils.broadcast_one_to_all(sent))).decode()


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
