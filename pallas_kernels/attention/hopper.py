"""Fused attention for Hopper GPUs: hopper_forward.py, hopper_backward.py, and their refusals."""

from pallas_kernels.attention import fused
from pallas_kernels.attention.hopper_backward import backward
from pallas_kernels.attention.hopper_forward import forward

OLDEST_JAX = (0, 12)
MOST = 2**16  # blocks along the last dim of a grid, and one more
KERNELS = fused.Kernels(forward, backward)


def refusal(q_BLNH, k_BSGH, v_BSGV, scale) -> str | None:
    """Returns why these kernels cannot serve this call; None if they can."""
    if said := fused.refusal(q_BLNH, k_BSGH, v_BSGV, scale, "hopper", OLDEST_JAX):
        return said
    B, G = q_BLNH.shape[0], k_BSGH.shape[2]
    return None if B * G < MOST else f"{B * G} rows * key heads; its grid has room for {MOST - 1}"


def attention(q_BLNH, k_BSGH, v_BSGV, segment_ids, window, sinks, scale):
    """See the package; called only where `refusal` is None."""
    return fused.attend(KERNELS, q_BLNH, k_BSGH, v_BSGV, segment_ids, window, sinks, scale)
