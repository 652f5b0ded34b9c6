"""Rotary position embedding (Su et al., 2021), half-split layout: dim i turns with dim i + H/2."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

Table = tuple[Float[Array, "B L h"], Float[Array, "B L h"]]


def rope_table(positions_BL: Int[Array, "B L"], head_dim: int, theta: float, dtype) -> Table:
    """Returns (cos, sin) of position * theta^(-2i / head_dim), i < head_dim / 2."""
    exponent_h = jnp.arange(0, head_dim, 2, dtype=dtype) / head_dim
    angle_BLh = positions_BL.astype(dtype)[..., None] * (theta**-exponent_h)[None, None]
    return jnp.cos(angle_BLh), jnp.sin(angle_BLh)


def apply_rope(x_BLNH: Float[Array, "B L N H"], table: Table) -> Float[Array, "B L N H"]:
    """Returns x with each pair (i, i + H/2) turned by its position's angle, in the dtype of x."""
    cos, sin = (t[:, :, None, :] for t in table)
    first, second = jnp.split(x_BLNH.astype(cos.dtype), 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x_BLNH.dtype)
