"""How the rows of a grouped GEMM are cut up: where groups lie, and tile sizes by operation, device
and shape."""

import dataclasses

import jax.numpy as jnp

from pallas_kernels.deviceless import Gpu


def bounds(group_sizes_G, num_rows):
    """Returns (starts, ends) of the groups' rows, clipped to the rows that exist."""
    ends_G = jnp.minimum(jnp.cumsum(group_sizes_G, dtype=jnp.int32), num_rows)
    return jnp.concatenate([ends_G[:1] * 0, ends_G[:-1]]), ends_G


@dataclasses.dataclass(frozen=True)
class Tiles:
    """How one kernel is cut up. All sizes are elements of the matrices the kernel sees.

    Raises ValueError for sizes that the tensor cores or the swizzled copies cannot take.
    """

    rows: int
    """Rows of one output tile: 64 for each of the two computing warpgroups, or a multiple."""
    cols: int
    """Columns of one output tile."""
    depth: int
    """Summed elements of one pipeline stage."""
    stages: int
    """Stages in shared memory at once."""
    snake: int
    """Row tiles that are walked together before the next column, for reuse in L2."""
    cores: int
    """Thread blocks launched: one for each streaming multiprocessor."""

    def __post_init__(self):
        if self.rows % 128 or self.cols % 64 or not 64 <= self.cols <= 256 or self.depth % 64:
            raise ValueError(f"rows by 128s, cols by 64s up to 256, depth by 64s; got {self}")
        if self.stages < 2 or self.snake < 1 or self.cores < 1:
            raise ValueError(f"at least 2 stages, 1 tile, 1 core; got {self}")


# What the stages of one block may fill of its 227 KiB; the rest holds tiles on their way out.
_STAGE_BYTES = 192 * 1024
_SNAKE = {"forward": 8, "input": 8, "weight": 4}


def choose(op: str, gpu: Gpu, rows: int, cols: int) -> Tiles:
    """Returns the tiles of `op` ("forward", "input", "weight") for an output of rows x cols, which
    for "weight" is one group's K x N. Computed from sizes, not yet from measurements.

    Wide tiles read less for each product, and overhang more: 2880 columns are 15 tiles of 192 and
    11.25 of 256. The width is the one with the least columns, each tile counted 16 too wide.

    Raises KeyError for an unknown operation.
    """
    width = min((256, 192, 128, 64), key=lambda width: -(-cols // width) * (width + 16))
    return Tiles(
        rows=128,
        cols=width,
        depth=64,
        stages=_STAGE_BYTES // ((128 + width) * 64 * 2),
        snake=min(_SNAKE[op], -(-rows // 128)),
        cores=gpu.cores,
    )
