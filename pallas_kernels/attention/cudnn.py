"""cuDNN's fused attention, through JAX's public entry, where that can serve.

That entry rounds the log-sum-exp to the dtype of q and gives it no gradient, so where a caller uses
it, it is computed by `xla`; where none does, the compiler drops that work.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.attention import xla
from pallas_kernels.pick import target


def refusal(q_BLNH, k_BSGH, v_BSGV, segment_ids, window, sinks, scale) -> str | None:
    """Returns why cuDNN cannot serve this call; None if it can."""
    if target().platform != "gpu":
        return f"it runs on NVIDIA GPUs, and this program is for {target().kind}"
    if segment_ids is not None:
        return "JAX's public entry takes no segment ids"
    if sinks is not None:
        return "it has no attention sinks"
    if q_BLNH.dtype not in (jnp.bfloat16, jnp.float16):
        return f"it takes bfloat16 and float16, not {q_BLNH.dtype}"
    H, V = q_BLNH.shape[-1], v_BSGV.shape[-1]
    if H != V or H > 128 or H % 8:
        return f"head dims must be equal, multiples of 8 and at most 128; got {H}, {V}"
    if q_BLNH.shape[1] != k_BSGH.shape[1]:
        return "its causal mask starts at the first key, so queries and keys must be as many"
    return None


def attention(q_BLNH, k_BSGH, v_BSGV, segment_ids, window, sinks, scale):
    """See the package; called only where `refusal` is None."""
    out = jax.nn.dot_product_attention(
        q_BLNH,
        k_BSGH,
        v_BSGV,
        scale=scale,
        is_causal=True,
        local_window_size=None if window is None else (window - 1, 0),
        implementation="cudnn",
    )
    return out, xla.attention(q_BLNH, k_BSGH, v_BSGV, None, window, None, scale)[1]
