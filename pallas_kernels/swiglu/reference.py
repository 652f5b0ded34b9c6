"""The definition of the weighted SwiGLU, in obvious jnp."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

ALPHA = 1.702  # of the clamped one: x sigmoid(1.702 x) is close to gelu(x)


def activate(gate, up, limit: float = 0.0):
    """Returns silu(gate) * up, or the clamped one, element by element."""
    if not limit:
        return jax.nn.silu(gate) * up
    gate, up = _clamped(gate, up, limit)
    return (up + 1) * gate * jax.nn.sigmoid(ALPHA * gate)


def _clamped(gate, up, limit: float):
    """Selects, not min and max, whose gradient at the limit itself would be half."""
    up = jnp.where(up < -limit, -limit, jnp.where(up > limit, limit, up))
    return jnp.where(gate > limit, limit, gate), up


def slopes(gate, up, limit: float = 0.0):
    """Returns the derivatives of `activate` in gate and in up, and its value.

    With s = sigmoid(a g), d(g s) / dg = s (1 + a g (1 - s)).
    """
    if not limit:
        s = jax.nn.sigmoid(gate)
        return up * s * (1 + gate * (1 - s)), gate * s, gate * s * up
    free_gate, free_up = gate <= limit, jnp.abs(up) <= limit
    gate, up = _clamped(gate, up, limit)
    s = jax.nn.sigmoid(ALPHA * gate)
    by_gate = jnp.where(free_gate, (up + 1) * s * (1 + ALPHA * gate * (1 - s)), 0)
    return by_gate, jnp.where(free_up, gate * s, 0), gate * s * (up + 1)


def swiglu(
    h_MF2: Float[Array, "... F2"], weights_M: Float[Array, "..."] | None, limit: float = 0.0
) -> Float[Array, "... F"]:
    """Returns silu(gate) * up * weights, or the clamped one, computed in float32 or wider."""
    wide = jnp.float64 if h_MF2.dtype == jnp.float64 else jnp.float32
    gate, up = jnp.split(h_MF2.astype(wide), 2, axis=-1)
    y = activate(gate, up, limit)
    y = y if weights_M is None else y * weights_M.astype(wide)[..., None]
    return y.astype(h_MF2.dtype)
