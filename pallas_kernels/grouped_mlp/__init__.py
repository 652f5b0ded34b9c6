"""The experts in one operation: two grouped GEMMs with a weighted SwiGLU between them.

    a_MF = silu(x @ gate[g]) * (x @ up[g]) * weight        for the rows of each group g
    y_MD = a_MF @ w_out[g]

The routing weight multiplies before the second product, so an expert's output is never needed
again. Kernels for GPUs do the elementwise work while a tile is still on the chip; elsewhere, and
for experts with biases or a clamped activation (gpt-oss), the parts of this package are put
together.
"""

from typing import Any

from jaxtyping import Array, Float, Int

from pallas_kernels.deviceless import refusal_for, target_gpu
from pallas_kernels.grouped_mlp import biased, blackwell, hopper, parts, reference


def grouped_mlp(
    x_MD: Float[Array, "M D"],
    w_in_GDF2: Float[Array, "G D F2"],
    w_out_GFD: Float[Array, "G F D"],
    weights_M: Float[Array, " M"],
    group_sizes_G: Int[Array, " G"],
    *,
    b_in_GF2: Float[Array, "G F2"] | None = None,
    b_out_GD: Float[Array, "G D"] | None = None,
    limit: float = 0.0,
    impl: str | None = None,
) -> Float[Array, "M D"]:
    """Returns y[m] = (silu(x[m] @ gate[g]) * (x[m] @ up[g]) * weights[m]) @ w_out[g], as x's dtype.

    With biases, h = x[m] @ w_in[g] + b_in[g], and weights[m] * b_out[g] is added to y; with a limit
    that is not 0 the activation is the clamped one (`swiglu`). `impl` then names the grouped GEMM.

    w_in holds gate in its first F columns and up in the others. Groups and `impl` as in
    `grouped_gemm`: rows past the sum of the sizes give zeros and get zero gradients, whatever they
    hold. h = x @ w_in is rounded to x's dtype before the activation, which is computed in float32
    (float64 for float64). Differentiable in all but the sizes. 6*M*D*F FLOPs, and twice
    that for the gradients.

    Raises ValueError for shapes that do not fit, and as `grouped_gemm` does.
    """
    _check(x_MD, w_in_GDF2, w_out_GFD, weights_M)
    args = (x_MD, w_in_GDF2, w_out_GFD, weights_M, group_sizes_G)
    if b_in_GF2 is not None or b_out_GD is not None or limit:
        _check_biases(w_in_GDF2, w_out_GFD, b_in_GF2, b_out_GD)
        module = reference if impl == "reference" else biased
        return module.grouped_mlp(*args, b_in_GF2, b_out_GD, limit, impl)
    gpu: Any = target_gpu()  # None only where the kernels are refused
    for name, module in (("hopper", hopper), ("blackwell", blackwell)):
        why = refusal_for(name, oldest_jax=module.OLDEST_JAX) or module.refusal(*args[:3])
        if impl in (None, name) and why is None:
            return module.grouped_mlp(*args, gpu)
    if impl == "reference":
        return reference.grouped_mlp(*args)
    return parts.grouped_mlp(*args, impl=impl)  # its grouped GEMM chooses, or says why it cannot


def _check(x_MD, w_in_GDF2, w_out_GFD, weights_M) -> None:
    (M, D), (G, F, _) = x_MD.shape, w_out_GFD.shape
    if w_in_GDF2.shape != (G, D, 2 * F) or w_out_GFD.shape[2] != D or weights_M.shape != (M,):
        raise ValueError(
            "grouped_mlp takes [M, D], [G, D, 2F], [G, F, D], [M]; got "
            f"{x_MD.shape}, {w_in_GDF2.shape}, {w_out_GFD.shape}, {weights_M.shape}"
        )


def _check_biases(w_in_GDF2, w_out_GFD, b_in_GF2, b_out_GD) -> None:
    for name, w, b in (("b_in", w_in_GDF2, b_in_GF2), ("b_out", w_out_GFD, b_out_GD)):
        if b is not None and (b.shape, b.dtype) != ((w.shape[0], w.shape[2]), w.dtype):
            raise ValueError(
                f"grouped_mlp: {name} must be {w.dtype} {(w.shape[0], w.shape[2])}; got "
                f"{b.dtype} {b.shape}"
            )


__all__ = ["grouped_mlp"]
