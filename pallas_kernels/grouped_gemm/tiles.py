"""Tile sizes of the grouped GEMM kernels, by operation, device and shape.

Tiles measured on a device lie in `tiles/<gpu>.json` beside this file, where `pallas_kernels.tune`
writes them. None is there yet: nothing was measured, and tiles are computed from sizes.
"""

import dataclasses
import json
import math
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

from pallas_kernels.deviceless import Gpu, gpu_of

OPS = ("forward", "input", "weight")
MEASURED = Path(__file__).parent / "tiles"
"""The folder of <gpu>.json, named by the keys of `deviceless.GPUS`."""


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
    pair: bool = False
    """Blackwell's products by rows: whether two blocks share each MMA, of twice the rows. Each
    brings its own rows and half of the columns."""

    def __post_init__(self):
        if self.rows % 128 or self.cols % 64 or not 64 <= self.cols <= 256 or self.depth % 64:
            raise ValueError(f"rows by 128s, cols by 64s up to 256, depth by 64s; got {self}")
        if self.stages < 2 or self.snake < 1 or self.cores < 1:
            raise ValueError(f"at least 2 stages, 1 tile, 1 core; got {self}")


class Extent(NamedTuple):
    """The sizes of an operation's result, and of the sum for each of its elements."""

    rows: int
    cols: int
    depth: int


class Measured(NamedTuple):
    """The fastest tiles of an operation at one shape."""

    op: str
    extent: Extent
    tiles: Tiles
    tflops: float
    """10^12 FLOP/s with these tiles."""


class ByOp(NamedTuple):
    """Tiles of each operation, hashable."""

    forward: Tiles
    input: Tiles
    weight: Tiles


def extent(op: str, M: int, K: int, N: int, G: int) -> Extent:
    """Returns the extent of `op`; for "weight" that of one group, of an average number of rows.

    Raises KeyError for an unknown operation.
    """
    return {
        "forward": Extent(M, N, K),
        "input": Extent(M, K, N),
        "weight": Extent(K, N, max(M // max(G, 1), 1)),
    }[op]


def most_stages(rows: int, cols: int, depth: int, gpu: Gpu) -> int:
    """Returns how many stages of bfloat16 fit shared memory beside tiles on their way out.

    Those take 256 bytes a row in every kernel: Hopper's two rings of two 32-column pieces in
    bfloat16, or one in float32; Blackwell's two lines of 128 bytes. 1 KiB is for barriers.
    """
    return (gpu.shared_bytes - 1024 - 256 * rows) // ((rows + cols) * depth * 2)


_SNAKE = {"forward": 8, "input": 8, "weight": 4, "mlp_forward": 8, "mlp_gradient": 8}
_WIDTHS = (256, 192, 128, 64)
# The grouped MLP on Hopper multiplies two matrices of whole swizzled lines in its forward, and
# needs registers beside the sums in its gradient.
_MLP_WIDTHS = {"mlp_forward": (256, 128), "mlp_gradient": (192, 128)}


def _computed(op: str, gpu: Gpu, rows: int, cols: int) -> Tiles:
    """Tiles from sizes alone.

    Wide tiles read less for each product, and overhang more: 2880 columns are 15 tiles of 192 and
    11.25 of 256. The width is the one with the least columns, each tile counted 16 too wide. On
    Blackwell it is always 256: two sums of that width fill tensor memory.
    """
    if gpu.capability[0] >= 10:
        width, snake = 256, 8
    else:
        widths = _MLP_WIDTHS.get(op, _WIDTHS)
        width = min(widths, key=lambda width: -(-cols // width) * (width + 16))
        snake = min(_SNAKE[op], -(-rows // 128))
    return Tiles(128, width, 64, most_stages(128, width, 64, gpu), snake, gpu.cores)


def candidates(gpu: Gpu) -> list[Tiles]:
    """Returns the tiles worth timing on a Hopper or Blackwell GPU: as many stages as fit.

    Two spill a little on Hopper, 128 x 256 x 128 in the weight gradient and 256 x 128 x 64 in the
    input gradient (`pallas_kernels.tune --dry-run --compile`); their times decide.
    """
    hopper = gpu.capability[0] < 10
    # A warpgroup's registers hold 64 x 256 sums or 128 x 128; tensor memory two of 128 x 256.
    sizes = [(128, 128), (128, 192), (128, 256), (256, 128)] if hopper else [(128, 128), (128, 256)]
    found = []
    for rows, cols in sizes:
        for depth in (64, 128) if hopper else (64,):
            stages = most_stages(rows, cols, depth, gpu)
            if stages >= 2:
                found += [
                    Tiles(rows, cols, depth, stages, snake, gpu.cores, pair)
                    for snake in (4, 8, 16)
                    for pair in ((False,) if hopper else (False, True))
                ]
    return found


def choose(op: str, gpu: Gpu, rows: int, cols: int, depth: int = 0) -> Tiles:
    """Returns the tiles of `op` for a result of rows x cols, each a sum of `depth` products (see
    `extent`; 0: not known). Measured ones where this GPU has them of a shape like this one. Also
    those of the grouped MLP: "mlp_forward", M x 2F with a gate and its up in each tile, and
    "mlp_gradient", M x F.

    Raises KeyError for an unknown operation.
    """
    if op not in _SNAKE:
        raise KeyError(op)
    key = gpu_of(gpu.name)
    measured = nearest(_of_gpu(key), op, Extent(rows, cols, depth)) if key else None
    if measured is None:
        return _computed(op, gpu, rows, cols)
    return dataclasses.replace(measured.tiles, cores=gpu.cores)


def choose_all(gpu: Gpu, M: int, K: int, N: int, G: int) -> ByOp:
    """Returns the tiles of each operation of one grouped GEMM."""
    return ByOp(*(choose(op, gpu, *extent(op, M, K, N, G)) for op in OPS))


def of(tiles: Tiles | ByOp, op: str) -> Tiles:
    """Returns the tiles of `op`, where they may be the same for all."""
    return tiles if isinstance(tiles, Tiles) else getattr(tiles, op)


def nearest(measured: Sequence[Measured], op: str, wanted: Extent, factor: float = 2.0):
    """Returns the entry of `op` whose extent is nearest by ratios (the sum of squares of their
    logarithms), or None if none is within `factor` in each; a size of 0 fits any.

    >>> tiles = Tiles(128, 256, 64, 4, 8, 132)
    >>> near = Measured("forward", Extent(1000, 1000, 1000), tiles, 500.0)
    >>> nearest([near], "forward", Extent(1500, 600, 1000)) == near
    True
    >>> nearest([near], "forward", Extent(1500, 400, 1000)) is None
    True
    """

    def ratios(entry: Measured) -> list[float]:
        return [
            abs(math.log(have / want)) if want else 0.0
            for have, want in zip(entry.extent, wanted, strict=True)
        ]

    close = [m for m in measured if m.op == op and max(ratios(m)) <= math.log(factor)]
    return min(close, key=lambda m: sum(r * r for r in ratios(m)), default=None)


@cache
def _of_gpu(key: str) -> tuple[Measured, ...]:
    path = MEASURED / f"{key}.json"
    return tuple(load(path)) if path.exists() else ()


def load(path: Path) -> list[Measured]:
    """Returns what `save` wrote.

    Raises KeyError, TypeError or ValueError for a file of another form or impossible tiles.
    """
    return [
        Measured(m["op"], Extent(**m["extent"]), Tiles(cores=1, **m["tiles"]), m["tflops"])
        for m in json.loads(path.read_text())["measured"]
    ]


def save(path: Path, measured: Sequence[Measured], about: dict[str, str]) -> None:
    """Writes measured tiles, one a line, under what is said of the device and the software."""

    def entry(m: Measured) -> str:
        tiles = dataclasses.asdict(m.tiles)
        del tiles["cores"]  # known of the GPU that asks
        tflops = round(m.tflops, 1)
        return json.dumps(dict(op=m.op, extent=m.extent._asdict(), tiles=tiles, tflops=tflops))

    head = "".join(f"  {json.dumps(key)}: {json.dumps(value)},\n" for key, value in about.items())
    lines = ",\n".join(f"    {entry(m)}" for m in measured)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f'{{\n{head}  "measured": [\n{lines}\n  ]\n}}\n')
