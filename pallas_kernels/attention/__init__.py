"""Causal attention within documents, with the log-sum-exp that joins partial results.

    out_BLNV, lse_BLN = attention(q_BLNH, k_BSGH, v_BSGV, segment_ids=(ids_BL, ids_BS))

A part of a row's keys gives a partial result. `join` puts two of them together, `with_sinks` adds
sinks at the end, and `attention_gradients` gives each part's gradients by what all gave.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.attention import blackwell, cudnn, hopper, reference, xla
from pallas_kernels.attention.fused import with_sinks
from pallas_kernels.attention.xla import SAVED
from pallas_kernels.pick import Choice, pick


@jax.named_scope("attention")
def attention(
    q_BLNH: Float[Array, "B L N H"],
    k_BSGH: Float[Array, "B S G H"],
    v_BSGV: Float[Array, "B S G V"],
    *,
    segment_ids: tuple[Int[Array, "B L"], Int[Array, "B S"]] | None = None,
    positions: tuple[Int[Array, "B L"], Int[Array, "B S"]] | None = None,
    window: int | None = None,
    sinks: Float[Array, " N"] | None = None,
    scale: float | None = None,
    impl: str | None = None,
) -> tuple[Float[Array, "B L N V"], Float[Array, "B L N"]]:
    """Returns (out, lse): softmax(scale * q k^T) v in the dtype of q, and log sum exp of the scores
    in float32 (float64 for float64).

    Query i sees keys j <= i + S - L; with `window`, the last `window` of those; with segment ids,
    those of its own id; equal ids are neighbours in their row, of which the queries are the last L
    tokens. With `positions`, which rise along each row, "i + S - L" and "j" are those of query and
    key, and any part of the queries may meet any part of the keys. Query heads N are a multiple of
    the key/value heads G: head n reads n // (N/G). `sinks` adds a logit per query head to the
    denominator that brings no value. A row that sees nothing (id 0 is padding and sees nothing)
    gives zeros, lse -1e30 (the sink, if any), and no gradient. Scale: H**-0.5 if None. Both results
    are differentiable.

    Raises ValueError for shapes that do not fit and for an `impl` that cannot serve.
    """
    B, L, N, H = q_BLNH.shape
    (S, G), short = k_BSGH.shape[1:3], positions is None and k_BSGH.shape[1] < L
    if k_BSGH.shape != (B, S, G, H) or v_BSGV.shape[:3] != (B, S, G) or N % G or short:
        raise ValueError(
            f"attention takes q [B, L, N, H], k [B, S, G, H], v [B, S, G, V], N a multiple of G "
            f"and S >= L (or positions); got {q_BLNH.shape}, {k_BSGH.shape}, {v_BSGV.shape}"
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
    arrays = (q_BLNH, k_BSGH, v_BSGV)
    fused = [
        Choice("cudnn", cudnn.attention, cudnn.refusal(*arrays, *asked)),
        Choice("hopper", hopper.attention, hopper.refusal(*arrays, scale)),
        Choice("blackwell", blackwell.attention, blackwell.refusal(*arrays, scale)),
    ]
    if positions is not None:
        fused = [choice._replace(refusal="it takes no positions") for choice in fused]
    choices = [
        *fused,
        Choice("xla", partial(xla.attention, positions=positions)),
        Choice("reference", partial(reference.attention, positions=positions)),
    ]
    return pick("attention", impl, choices)(*arrays, *asked)


def join(
    one: tuple[Float[Array, "B L N V"], Float[Array, "B L N"]],
    other: tuple[Float[Array, "B L N V"], Float[Array, "B L N"]],
) -> tuple[Float[Array, "B L N V"], Float[Array, "B L N"]]:
    """Returns the (out, lse) of the same queries over two sets of keys together, out in the dtype
    of the log-sum-exps."""
    lse_BLN = jnp.logaddexp(one[1], other[1])
    out = [o.astype(lse_BLN.dtype) * jnp.exp(lse - lse_BLN)[..., None] for o, lse in (one, other)]
    return out[0] + out[1], lse_BLN


@jax.named_scope("attention")
def attention_gradients(
    arrays: tuple[Float[Array, "B L N H"], Float[Array, "B S G H"], Float[Array, "B S G V"]],
    results: tuple[Float[Array, "B L N V"], Float[Array, "B L N"]],
    cotangents: tuple[Float[Array, "B L N V"], Float[Array, "B L N"]],
    *,
    segment_ids: tuple[Int[Array, "B L"], Int[Array, "B S"]],
    positions: tuple[Int[Array, "B L"], Int[Array, "B S"]],
    window: int | None = None,
    scale: float,
) -> tuple[Float[Array, "B L N H"], Float[Array, "B S G H"], Float[Array, "B S G V"]]:
    """Returns what keys and values (k, v) of `arrays` (q, k, v) add to the gradients of q, and
    their own, where `results` (without sinks) are those of q over *all* keys, of which these may
    be a part; by XLA."""
    return xla.gradients(
        arrays, results, cotangents, segment_ids, window, scale, positions
    )


__all__ = ["SAVED", "attention", "attention_gradients", "join", "with_sinks"]
