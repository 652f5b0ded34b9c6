"""SwiGLU (Shazeer, 2020), times an optional weight a row: silu(gate) * up * weight.

With a limit, the clamped one of gpt-oss: (up + 1) * gate * sigmoid(1.702 * gate), gate cut above
the limit and up on both sides.

The routing weight multiplies here, before the second expert GEMM, so that an expert's output is
never needed again. The backward saves h and recomputes the activation from it.
"""

from jaxtyping import Array, Float

from pallas_kernels.pick import Choice, pick
from pallas_kernels.swiglu import reference, xla


def swiglu(
    h_MF2: Float[Array, "... F2"],
    weights_M: Float[Array, "..."] | None = None,
    *,
    limit: float = 0.0,
    impl: str | None = None,
) -> Float[Array, "... F"]:
    """Returns silu(gate) * up * weights of h = [gate, up] halves, in the dtype of h; with a limit
    that is not 0, of gate = min(gate, limit) and up = clip(up, -limit, limit),
    (up + 1) * gate * sigmoid(1.702 * gate) * weights.

    Computed in float32 (float64 for float64). `weights_M` has the shape of h without its last dim,
    in any float dtype; gradients for h and weights; what is cut has none. Bytes: h read, half of it
    written.
    """
    choices = [Choice("xla", xla.swiglu), Choice("reference", reference.swiglu)]
    return pick("swiglu", impl, choices)(h_MF2, weights_M, limit)


__all__ = ["swiglu"]
