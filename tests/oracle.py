"""How two arrays are compared: the one definition of "error" that every parity test uses."""

import numpy as np
from jax.typing import ArrayLike


def max_relative_error(actual: ArrayLike, expected: ArrayLike) -> float:
    """Returns max|actual - expected| / max|expected|, in float64, one number for the whole array.

    0.0 for two all-zero (or two empty) arrays; infinite where either holds a value that is not
    finite, or where `expected` is all zero and `actual` is not. Raises ValueError if the shapes
    differ: nothing is broadcast.
    """
    actual, expected = np.asarray(actual), np.asarray(expected)
    if actual.shape != expected.shape:
        raise ValueError(f"shapes differ: {actual.shape} against {expected.shape}")
    if actual.size == 0:
        return 0.0
    actual, expected = actual.astype(np.float64), expected.astype(np.float64)
    if not (np.isfinite(actual).all() and np.isfinite(expected).all()):
        return float("inf")
    difference = float(np.abs(actual - expected).max())
    scale = float(np.abs(expected).max())
    if scale == 0.0:
        return 0.0 if difference == 0.0 else float("inf")
    return difference / scale
