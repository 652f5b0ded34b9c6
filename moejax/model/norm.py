"""Root-mean-square normalisation (Zhang and Sennrich, 2019), computed in float32 or wider."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from moejax.core import collectives, params
from moejax.core.precision import PrecisionConfig, at_least_float32


def rms_norm(
    x: Float[Array, "... D"], scale_D: Float[Array, " D"], eps: float
) -> Float[Array, "... D"]:
    """Returns x / sqrt(mean(x^2) + eps) * scale, in the dtype of x."""
    wide = x.astype(at_least_float32(x.dtype))
    inverse = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    scale = scale_D.astype(wide.dtype).reshape((1,) * (x.ndim - 1) + scale_D.shape)
    return (wide * inverse * scale).astype(x.dtype)


def rms_norm_split(
    x_Td: Float[Array, "T d"], scale_d: Float[Array, " d"], eps: float, axes: tuple, degree: int
) -> Float[Array, "T d"]:
    """Returns the `rms_norm` of rows whose columns are split over `axes`, `degree` devices."""
    wide = x_Td.astype(at_least_float32(x_Td.dtype))
    squares_T1 = collectives.psum(jnp.sum(wide * wide, axis=-1, keepdims=True), axes)
    inverse_T1 = jax.lax.rsqrt(squares_T1 / (degree * x_Td.shape[1]) + eps)
    return (wide * inverse_T1 * scale_d.astype(wide.dtype)[None]).astype(x_Td.dtype)


class RMSNorm(nnx.Module):
    """A learned scale and `rms_norm`."""

    def __init__(self, dim: int, eps: float, precision: PrecisionConfig):
        self.eps = eps
        self.scale = params.constant((dim,), ("norm",), 1.0, precision)

    def __call__(self, x: Float[Array, "... D"]) -> Float[Array, "... D"]:
        return rms_norm(x, self.scale[...], self.eps)
