"""Causal attention within documents, with the log-sum-exp that joins partial results.

    out_BLNV, lse_BLN = attention(q_BLNH, k_BSGH, v_BSGV, segment_ids=(ids_BL, ids_BS))
"""

import jax
from jaxtyping import Array, Float, Int

from pallas_kernels.attention import cudnn, reference, xla
from pallas_kernels.attention.xla import SAVED
from pallas_kernels.pick import Choice, pick


@jax.named_scope("attention")
def attention(
    q_BLNH: Float[Array, "B L N H"],
    k_BSGH: Float[Array, "B S G H"],
    v_BSGV: Float[Array, "B S G V"],
    *,
    segment_ids: tuple[Int[Array, "B L"], Int[Array, "B S"]] | None = None,
    window: int | None = None,
    sinks: Float[Array, " N"] | None = None,
    scale: float | None = None,
    impl: str | None = None,
) -> tuple[Float[Array, "B L N V"], Float[Array, "B L N"]]:
    """Returns (out, lse): softmax(scale * q k^T) v in the dtype of q, and log sum exp of the scores
    in float32 (float64 for float64).

    Query i sees keys j <= i + S - L; with `window`, the last `window` of those; with segment ids,
    those of its own id. Query heads N are a multiple of the key/value heads G: head n reads
    n // (N/G). `sinks` adds a logit per query head to the denominator that brings no value. A row
    that sees nothing (id 0 is padding and sees nothing) gives zeros, lse -1e30 (the sink, if any),
    and no gradient. Scale: H**-0.5 if None. Both results are differentiable.

    Raises ValueError for shapes that do not fit and for an `impl` that cannot serve.
    """
    B, L, N, H = q_BLNH.shape
    S, G = k_BSGH.shape[1:3]
    if k_BSGH.shape != (B, S, G, H) or v_BSGV.shape[:3] != (B, S, G) or N % G or S < L:
        raise ValueError(
            f"attention takes q [B, L, N, H], k [B, S, G, H], v [B, S, G, V], N a multiple of G "
            f"and S >= L; got {q_BLNH.shape}, {k_BSGH.shape}, {v_BSGV.shape}"
        )
    if not q_BLNH.dtype == k_BSGH.dtype == v_BSGV.dtype:
        raise ValueError(
            f"attention takes q, k and v of one dtype; got {q_BLNH.dtype}, {k_BSGH.dtype}, "
            f"{v_BSGV.dtype}: cast them"
        )
    if window is not None and window < 1:
        raise ValueError(f"attention window={window} must be at least 1 (the query itself)")
    scale = H**-0.5 if scale is None else scale
    asked = (segment_ids, window, sinks, scale)
    choices = [
        Choice("cudnn", cudnn.attention, cudnn.refusal(q_BLNH, k_BSGH, v_BSGV, *asked)),
        Choice("xla", xla.attention),
        Choice("reference", reference.attention),
    ]
    return pick("attention", impl, choices)(q_BLNH, k_BSGH, v_BSGV, *asked)


__all__ = ["SAVED", "attention"]
