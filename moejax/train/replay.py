"""The routers' choices of a run, one file a training step: written by a run that records (or by a
rollout engine), read by one that replays.

`FOLDER/00000001.npz` is step 1. Its one array "experts" holds whole numbers [rows, L, layers, K]:
the rows of the global batch in order, the model's MoE layers alone, the K experts of each token,
best first; E, the number of experts, in every slot of a token that goes nowhere (padding).
The ids are those before capacity drops any.
"""

import os
from pathlib import Path

import numpy as np


def path_of(folder: str | Path, number: int) -> Path:
    """Returns the file of a step."""
    return Path(folder).expanduser() / f"{number:08d}.npz"


def save(folder: str | Path, number: int, experts: np.ndarray, num_experts: int) -> None:
    """Writes the choices [rows, L, layers, K] of a step, in one piece, in the smallest dtype."""
    path = path_of(folder, number)
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_suffix(".new")
    with new.open("wb") as file:
        np.savez(file, experts=experts.astype(np.min_scalar_type(num_experts)))
    os.replace(new, path)


def load(
    folder: str | Path, number: int, shape: tuple[int, int, int, int], num_experts: int
) -> np.ndarray:
    """Returns the choices of a step as int32 [rows, L, layers, K].

    Raises FileNotFoundError, or ValueError for another shape, an id that is not in 0..E, or a token
    that has an expert twice.
    """
    path = path_of(folder, number)
    if not path.is_file():
        raise FileNotFoundError(
            f"router.replay has no {path}: record as many steps as are replayed (train.steps)"
        )
    with np.load(path) as arrays:
        experts = arrays["experts"].astype(np.int32)
    if experts.shape != shape:
        raise ValueError(
            f"router.replay: {path} holds {experts.shape}, this run needs [rows, L, MoE layers, K] "
            f"= {shape}: replay with the batch and the model that were recorded"
        )
    if experts.size and not (experts.min() >= 0 and experts.max() <= num_experts):
        raise ValueError(f"router.replay: {path} has ids outside 0..E={num_experts} (E: none)")
    ordered = np.sort(experts, axis=-1)
    if ((ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] < num_experts)).any():
        raise ValueError(f"router.replay: {path} gives a token the same expert twice")
    return experts


def in_row_order(chosen: np.ndarray, order: np.ndarray, dp: int, cp: int) -> np.ndarray:
    """Returns choices [microbatches, rows * L, ...] row after row, each in its order; they came as
    dp ranks' rows, of each of these cp ranks' tokens. `order` [microbatches, rows, L]: that of
    `data.context`."""
    (micro, rows, length), rest = order.shape, chosen.shape[2:]
    ranks = chosen.reshape(micro, dp, cp, rows // dp, length // cp, *rest)
    made, at = np.empty_like(chosen), order.reshape(*order.shape, *(1,) * len(rest))
    by_row = np.moveaxis(ranks, 2, 3).reshape(micro, rows, length, *rest)
    np.put_along_axis(made.reshape(by_row.shape), at, by_row, axis=2)
    return made


def part_of(experts: np.ndarray, microbatches: int, part: tuple[int, int]) -> np.ndarray:
    """Returns the rows of part `part[0]` of `part[1]` of each microbatch: a process's share.

    >>> part_of(np.arange(8), 2, (1, 2))
    array([2, 3, 6, 7])
    """
    pieces = experts.reshape(microbatches, part[1], -1, *experts.shape[1:])
    return pieces[:, part[0]].reshape(-1, *experts.shape[1:])
