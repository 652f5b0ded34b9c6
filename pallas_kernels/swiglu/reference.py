"""The definition of the weighted SwiGLU, in obvious jnp."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def swiglu(
    h_MF2: Float[Array, "... F2"], weights_M: Float[Array, "..."] | None
) -> Float[Array, "... F"]:
    """Returns silu(gate) * up * weights, computed in float32 or wider."""
    wide = jnp.float64 if h_MF2.dtype == jnp.float64 else jnp.float32
    gate, up = jnp.split(h_MF2.astype(wide), 2, axis=-1)
    y = jax.nn.silu(gate) * up
    y = y if weights_M is None else y * weights_M.astype(wide)[..., None]
    return y.astype(h_MF2.dtype)
