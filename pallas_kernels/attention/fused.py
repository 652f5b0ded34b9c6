"""What the fused kernels of all generations share: their gradient rule, sinks, and refusals.

    forward    out, lse = softmax(scale * q k^T) v, log sum exp, keys first_i <= j <= i
    backward   p = exp(scale * q k^T - lse);  ds = p * (do v^T - correction)
               dq = scale * ds k;  dk = scale * ds^T q;  dv = p^T do
               correction = sum(do * out) - dlse, by XLA

A sink is one more term of the denominator, so it can come after: with share = 1 / (1 + exp(sink -
lse)), out becomes share * out and lse becomes lse - log(share).
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from pallas_kernels.attention.reference import NOTHING
from pallas_kernels.attention.visible import first_visible
from pallas_kernels.attention.xla import SAVED
from pallas_kernels.deviceless import refusal_for

HEAD_DIMS = ((64, 64), (128, 128), (192, 128))
"""Of queries and keys, and of values."""


class Kernels(NamedTuple):
    """The two passes of one generation; L = S."""

    forward: Callable[..., Any]
    """forward(q_BLNH, k_BSGH, v_BSGV, first_BL, scale) -> out_BLNV, lse_BLN float32; where nothing
    is seen, zeros and NOTHING."""
    backward: Callable[..., Any]
    """backward(q, k, v, first_BL, lse_BLN, do_BLNV, correction_BLN, scale) -> dq, dk, dv in the
    dtype of q; lse (where nothing is seen -NOTHING, so that p is 0) and correction are float32."""


def refusal(q_BLNH, k_BSGH, v_BSGV, scale, generation: str, oldest_jax) -> str | None:
    """Returns why kernels of that generation cannot serve this call; None if they can."""
    return refusal_for(generation, oldest_jax=oldest_jax) or refusal_of(
        q_BLNH, k_BSGH, v_BSGV, scale
    )


def refusal_of(q_BLNH, k_BSGH, v_BSGV, scale) -> str | None:
    """Returns why no fused kernel can serve these arrays, whatever the GPU; None if one can."""
    if q_BLNH.dtype not in (jnp.bfloat16, jnp.float16):
        return f"it takes bfloat16 and float16, not {q_BLNH.dtype}"
    dims = q_BLNH.shape[-1], v_BSGV.shape[-1]
    if dims not in HEAD_DIMS:
        return f"head dims (of keys, of values) must be among {HEAD_DIMS}; got {dims}"
    if q_BLNH.shape[1] != k_BSGH.shape[1]:
        return (
            f"queries and keys must be as many; got {q_BLNH.shape[1]} and {k_BSGH.shape[1]} "
            "(a cache)"
        )
    if not q_BLNH.size:
        return f"it has nothing to attend: q is {q_BLNH.shape}"
    if scale <= 0:
        return f"its running maximum needs a scale above 0; got {scale}"
    return None


def attend(kernels: Kernels, q_BLNH, k_BSGH, v_BSGV, segment_ids, window, sinks, scale):
    """See the package; called only where `refusal_of` is None. Rows are padded to a multiple of 8
    tokens, the height of a tile in shared memory, which Mosaic's copies insist on."""
    (B, L), missing = q_BLNH.shape[:2], -q_BLNH.shape[1] % 8
    first_BL = first_visible(segment_ids, window, B, L, L)
    if missing:
        pad = lambda x: jnp.pad(x, ((0, 0), (0, missing), (0, 0), (0, 0)))  # noqa: E731
        q_BLNH, k_BSGH, v_BSGV = pad(q_BLNH), pad(k_BSGH), pad(v_BSGV)
        first_BL = jnp.pad(first_BL, ((0, 0), (0, missing)), constant_values=L + missing)
    out, lse = _attend(q_BLNH, k_BSGH, v_BSGV, first_BL, scale, kernels)
    return with_sinks(out[:, :L], lse[:, :L], sinks)


def with_sinks(out_BLNV, lse_BLN, sinks_N):
    """Returns (out, lse) with one more logit a head in the denominator; sinks None: as they are."""
    if sinks_N is None:
        return out_BLNV, lse_BLN
    sinks_11N = sinks_N.astype(lse_BLN.dtype)[None, None]
    share_BLN = jax.nn.sigmoid(lse_BLN - sinks_11N)
    out = (out_BLNV.astype(lse_BLN.dtype) * share_BLN[..., None]).astype(out_BLNV.dtype)
    return out, jnp.logaddexp(lse_BLN, sinks_11N)


@partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _attend(q, k, v, first_BL, scale, kernels):
    return _attend_forward(q, k, v, first_BL, scale, kernels)[0]


def _attend_forward(q, k, v, first_BL, scale, kernels):
    out, lse = map(checkpoint_name, kernels.forward(q, k, v, first_BL, scale), SAVED)
    return (out, lse), (q, k, v, first_BL, out, lse)


def _attend_backward(scale, kernels, saved, cotangents):
    q, k, v, first_BL, out, lse = saved
    do, dlse = cotangents
    correction = (do.astype(lse.dtype) * out.astype(lse.dtype)).sum(axis=-1) - dlse
    # exp(score - NOTHING) would be infinite, and so no 0 where a kernel does not mask.
    lse = jnp.where(lse == NOTHING, -NOTHING, lse)
    dq, dk, dv = kernels.backward(q, k, v, first_BL, lse, do, correction, scale)
    return dq, dk, dv, None


_attend.defvjp(_attend_forward, _attend_backward)
