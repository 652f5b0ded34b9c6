"""Weights that a checkpoint stores in few bits, as bfloat16: FP8 in blocks (DeepSeek), MXFP4
(gpt-oss). Both are exact but for the last rounding.

FP8: `NAME` float8_e4m3fn [M, N] with `NAME_scale_inv` float32 [ceil(M/128), ceil(N/128)]:
W[i, j] = q[i, j] * scale_inv[i // 128, j // 128] in float32. The blocks count from 0 in 128s,
whatever the last one is; their size stands in the config and is never derived from the shapes.

MXFP4 (OCP Microscaling Formats 1.0): of 32 values, 16 bytes in `NAME_blocks` [E, out, in/32, 16],
the earlier value of each pair in the low nibble, as e2m1, and one byte in `NAME_scales`: the
exponent, less 127, of their power of two. The weight is [E, in, out].
"""

from collections.abc import Callable, Mapping, Sequence

import ml_dtypes
import numpy as np

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
E2M1 = np.asarray([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
E2M1 = np.concatenate([E2M1, -E2M1])


def from_fp8(q_MN: np.ndarray, scale_mn: np.ndarray, block: tuple[int, int]) -> np.ndarray:
    """Returns the weight in bfloat16. Raises ValueError for scales of another number of blocks."""
    need = tuple(-(-size // step) for size, step in zip(q_MN.shape, block, strict=True))
    if scale_mn.shape != need:
        raise ValueError(
            f"a weight {list(q_MN.shape)} in blocks of {list(block)} has scales {list(need)}, not "
            f"{list(scale_mn.shape)}"
        )
    made = np.empty(q_MN.shape, BFLOAT16)
    for i, scale_n in enumerate(np.asarray(scale_mn, np.float32)):  # a row of blocks at a time
        rows = slice(i * block[0], (i + 1) * block[0])
        scale_N = np.repeat(scale_n, block[1])[: q_MN.shape[1]]
        made[rows] = q_MN[rows].astype(np.float32) * scale_N[None]
    return made


def from_mxfp4(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Returns the weight [..., in, out] in bfloat16, of blocks [..., out, in/32, 16] and scales
    [..., out, in/32]. Raises ValueError where they do not belong together."""
    if blocks.shape[:-1] != scales.shape or blocks.shape[-1] != 16:
        raise ValueError(f"MXFP4 blocks {list(blocks.shape)} with scales {list(scales.shape)}")
    values = np.stack([E2M1[blocks & 15], E2M1[blocks >> 4]], axis=-1)
    exponent = scales.astype(np.int32)[..., None] - 127
    wide = np.ldexp(values.reshape(*scales.shape, 32), exponent)
    return wide.reshape(*scales.shape[:-1], -1).swapaxes(-1, -2).astype(BFLOAT16)


class Lazy:
    """A stored tensor that becomes bfloat16 where it is looked at: of its first axis, what is
    asked for."""

    def __init__(self, shape: tuple[int, ...], rows: Callable[[slice], np.ndarray]):
        self.shape, self.dtype, self._rows = shape, BFLOAT16, rows

    def reshape(self, shape: Sequence[int]) -> "Lazy | np.ndarray":
        """Returns it with its axes split; all of it, made, if that splits the first."""
        if shape[0] != self.shape[0]:
            return self[:].reshape(shape)
        rest = tuple(shape[1:])
        return Lazy(tuple(shape), lambda part: self._rows(part).reshape(-1, *rest))

    def __getitem__(self, index) -> np.ndarray:
        index = index if isinstance(index, tuple) else (index,)
        return self._rows(index[0])[(slice(None), *index[1:])]


def lazy_fp8(q_MN: np.ndarray, scale_mn: np.ndarray, block: tuple[int, int]) -> Lazy:
    """Returns `from_fp8`, row blocks at a time."""

    def rows(part: slice) -> np.ndarray:
        first, stop, _ = part.indices(q_MN.shape[0])
        low, high = first // block[0], -(-stop // block[0])
        whole = from_fp8(
            q_MN[low * block[0] : high * block[0]], scale_mn[low:high], block
        )
        return whole[first - low * block[0] : stop - low * block[0]]

    if scale_mn.shape[0] != -(-q_MN.shape[0] // block[0]):
        from_fp8(q_MN, scale_mn, block)  # says what is wrong
    return Lazy(q_MN.shape, rows)


def lazy_mxfp4(blocks: np.ndarray, scales: np.ndarray) -> Lazy:
    """Returns `from_mxfp4` of [E, ...], experts at a time."""
    shape = (blocks.shape[0], blocks.shape[2] * 32, blocks.shape[1])
    return Lazy(shape, lambda part: from_mxfp4(blocks[part], scales[part]))


def names_of(name: str, held: Mapping[str, object]) -> tuple[str, ...]:
    """Returns the tensors that `name` is stored as: itself, with its scales, or blocks and scales;
    () if there is none."""
    if f"{name}_blocks" in held:
        return f"{name}_blocks", f"{name}_scales"
    if f"{name}_scale_inv" in held:
        return name, f"{name}_scale_inv"
    return (name,) if name in held else ()
