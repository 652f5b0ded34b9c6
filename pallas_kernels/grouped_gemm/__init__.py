"""Grouped GEMM: rows sorted by group, each group with a matrix of its own.

    y_MN = grouped_gemm(x_MK, w_GKN, group_sizes_G)

Group sizes are read on the device. `hopper.py` and `blackwell.py` are the kernels for NVIDIA GPUs
of these generations, `triton.py` those for others (the extra `triton`), `xla.py` is the portable
implementation.
"""

from importlib.util import find_spec
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from pallas_kernels.deviceless import refusal_for, target_gpu
from pallas_kernels.grouped_gemm import blackwell, hopper, reference, xla
from pallas_kernels.grouped_gemm.tiles import choose_all
from pallas_kernels.pick import Choice, pick, target


def grouped_gemm(
    x_MK: Float[Array, "M K"],
    w_GKN: Float[Array, "G K N"],
    group_sizes_G: Int[Array, " G"],
    *,
    impl: str | None = None,
) -> Float[Array, "M N"]:
    """Returns y[m] = x[m] @ w[g] for the rows of each group g, in the dtype of x.

    The first group_sizes[0] rows are group 0, and so on. Products are summed in float32 (float64
    for float64). Rows past the sum give zeros and get zero gradients, whatever they hold; an empty
    group's weight gradient is exactly zero. Differentiable in x and w; 2*M*K*N FLOPs each for the
    product and its two gradients.

    Raises ValueError for shapes that do not fit, an unknown `impl`, and sizes that add up to more
    than M where they are known; where they are traced, rows beyond M do not exist and
    `overflow_rows` counts them.
    """
    _check(x_MK, w_GKN, group_sizes_G)
    return pick("grouped_gemm", impl, _choices(x_MK, w_GKN))(x_MK, w_GKN, group_sizes_G)


def overflow_rows(group_sizes_G: Int[Array, " G"], num_rows: int) -> Int[Array, ""]:
    """Returns by how much the group sizes exceed the rows: 0, unless the caller has lost rows."""
    return jnp.maximum(group_sizes_G.sum(dtype=jnp.int32) - num_rows, 0)


def _choices(x_MK, w_GKN) -> list[Choice]:
    on_triton, portable = _triton_choice(x_MK, w_GKN), Choice("xla", xla.grouped_gemm)
    # A GPU that deviceless.py does not know may be too old for Triton: there it has to be named.
    rest = [portable, on_triton] if target_gpu() is None else [on_triton, portable]
    return [*_gpu_choices(x_MK, w_GKN), *rest, Choice("reference", reference.grouped_gemm)]


def _gpu_choices(x_MK, w_GKN) -> list[Choice]:
    gpu: Any = target_gpu()  # None only where these are refused

    def on_hopper(x_MK, w_GKN, group_sizes_G):
        return hopper.grouped_gemm(x_MK, w_GKN, group_sizes_G, gpu)

    def on_blackwell(x_MK, w_GKN, group_sizes_G):
        (M, K), (G, _, N) = x_MK.shape, w_GKN.shape
        tiles = choose_all(gpu, M, K, N, G)
        return blackwell.grouped_gemm(x_MK, w_GKN, group_sizes_G, tiles)

    choices, kernels = [], (("hopper", on_hopper, hopper), ("blackwell", on_blackwell, blackwell))
    for name, run, module in kernels:
        why = refusal_for(name, oldest_jax=module.OLDEST_JAX) or module.refusal(x_MK, w_GKN)
        choices.append(Choice(name, run, why))
    return choices


def _triton_choice(x_MK, w_GKN) -> Choice:
    missing = [name for name in ("jax_triton", "triton") if not find_spec(name)]
    device, sizes, why = target(), (*x_MK.shape, *w_GKN.shape), None
    if device.platform != "gpu" or "NVIDIA" not in device.kind.upper():
        why = f"it runs on NVIDIA GPUs, and this program is for {device.kind}"
    elif missing:
        why = f"it needs {' and '.join(missing)}, not installed here (the extra `triton` has them)"
    elif x_MK.dtype not in (jnp.bfloat16, jnp.float16, jnp.float32):
        why = f"it takes bfloat16, float16 and float32, not {x_MK.dtype}"
    elif 0 in sizes:
        why = f"it has nothing to multiply: x {x_MK.shape}, w {w_GKN.shape}"

    def run(x_MK, w_GKN, group_sizes_G):
        from pallas_kernels.grouped_gemm import triton  # imports what may not be installed

        return triton.grouped_gemm(x_MK, w_GKN, group_sizes_G, target_gpu())

    return Choice("triton", run, why)


def _check(x_MK, w_GKN, group_sizes_G) -> None:
    shapes = f"x {x_MK.shape}, w {w_GKN.shape}, group_sizes {group_sizes_G.shape}"
    if x_MK.ndim != 2 or w_GKN.ndim != 3 or group_sizes_G.shape != w_GKN.shape[:1]:
        raise ValueError(f"grouped_gemm takes [M, K], [G, K, N], [G]; got {shapes}")
    if x_MK.shape[1] != w_GKN.shape[1] or x_MK.dtype != w_GKN.dtype:
        raise ValueError(
            f"grouped_gemm: K and dtype of x and w must agree; got {shapes}, "
            f"{x_MK.dtype} and {w_GKN.dtype}"
        )
    if isinstance(group_sizes_G, jax.core.Tracer):
        return
    total = int(np.asarray(group_sizes_G).sum())
    if total > x_MK.shape[0]:
        raise ValueError(f"group sizes add up to {total}, more than the {x_MK.shape[0]} rows of x")


__all__ = ["grouped_gemm", "overflow_rows"]
