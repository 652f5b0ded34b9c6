"""The definition of the weighted SwiGLU, in obvious jnp."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def activate(gate, up):
    """Returns silu(gate) * up, element by element."""
    return jax.nn.silu(gate) * up


def slopes(gate, up):
    """Returns the derivatives of `activate` in gate and in up, and its value.

    With s = sigmoid(g), silu(g) = g s and d silu / dg = s (1 + g (1 - s)).
    """
    s = jax.nn.sigmoid(gate)
    return up * s * (1 + gate * (1 - s)), gate * s, gate * s * up


def swiglu(
    h_MF2: Float[Array, "... F2"], weights_M: Float[Array, "..."] | None
) -> Float[Array, "... F"]:
    """Returns silu(gate) * up * weights, computed in float32 or wider."""
    wide = jnp.float64 if h_MF2.dtype == jnp.float64 else jnp.float32
    gate, up = jnp.split(h_MF2.astype(wide), 2, axis=-1)
    y = activate(gate, up)
    y = y if weights_M is None else y * weights_M.astype(wide)[..., None]
    return y.astype(h_MF2.dtype)
