"""Fused attention for Hopper GPUs (sm_90a)."""

from pallas_kernels.attention import fused

OLDEST_JAX = (0, 12)


def refusal(q_BLNH, k_BSGH, v_BSGV, scale) -> str | None:
    """Returns why these kernels cannot serve this call; None if they can."""
    return fused.refusal(q_BLNH, k_BSGH, v_BSGV, scale, "hopper", OLDEST_JAX) or "it is not built"


def attention(q_BLNH, k_BSGH, v_BSGV, segment_ids, window, sinks, scale):
    """See the package; called only where `refusal` is None."""
    raise NotImplementedError
