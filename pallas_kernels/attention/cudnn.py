"""cuDNN's fused attention, through JAX's public entry, where that can serve.

The log-sum-exp it returns carries no gradient.
"""

import jax
import jax.numpy as jnp


def refusal(q_BLNH, k_BSGH, v_BSGV, segment_ids, window, sinks, scale) -> str | None:
    """Returns why cuDNN cannot serve this call; None if it can."""
    if jax.default_backend() != "gpu":
        return f"it runs on NVIDIA GPUs, and the default backend is {jax.default_backend()}"
    if segment_ids is not None:
        return "JAX's public entry takes no segment ids"
    if sinks is not None:
        return "it has no attention sinks"
    if q_BLNH.dtype not in (jnp.bfloat16, jnp.float16):
        return f"it takes bfloat16 and float16, not {q_BLNH.dtype}"
    if q_BLNH.shape[-1] != v_BSGV.shape[-1] or q_BLNH.shape[-1] > 128:
        return f"head dims must be equal and at most 128; {q_BLNH.shape[-1]}, {v_BSGV.shape[-1]}"
    if q_BLNH.shape[1] != k_BSGH.shape[1]:
        return "its causal mask starts at the first key, so queries and keys must be as many"
    return None


def attention(q_BLNH, k_BSGH, v_BSGV, segment_ids, window, sinks, scale):
    """See the package; called only where `refusal` is None."""
    out, lse = jax.nn.dot_product_attention(
        q_BLNH,
        k_BSGH,
        v_BSGV,
        scale=scale,
        is_causal=True,
        local_window_size=None if window is None else (window - 1, 0),
        implementation="cudnn",
        return_residual=True,
    )
    heads_last = lse if lse.shape == q_BLNH.shape[:3] else lse.swapaxes(1, 2)
    return out, heads_last.astype(jnp.float32)
