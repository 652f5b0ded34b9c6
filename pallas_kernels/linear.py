"""A dense projection, and the product over rows that its weight gradient is.

    y_MN  = linear(x_MK, w_KN)              x w
    dw_KN = contract_rows(x_MK, dy_MN)      x^T dy
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float


@jax.custom_vjp
def linear(x_MK: Float[Array, "M K"], w_KN: Float[Array, "K N"]) -> Float[Array, "M N"]:
    """Returns x w in the dtype of x, summed in float32 or wider. FLOPs: 2*M*K*N, backward twice."""
    return x_MK @ w_KN


def contract_rows(a_MK: Float[Array, "M K"], b_MN: Float[Array, "M N"]) -> Float[Array, "K N"]:
    """Returns a^T b in float32 or wider.

    XLA:CPU converts bfloat16 operands that are summed over rows to float32, and multiplies at a
    third of the speed: there, a is turned in memory first (the barriers keep it so).
    """
    wide = jnp.float64 if a_MK.dtype == jnp.float64 else jnp.float32

    def direct(a_MK, b_MN):
        return lax.dot_general(a_MK, b_MN, (((0,), (0,)), ((), ())), preferred_element_type=wide)

    def turned(a_MK, b_MN):
        a_KM = lax.optimization_barrier(a_MK[None].swapaxes(1, 2))[0]
        return lax.optimization_barrier(jnp.matmul(a_KM, b_MN, preferred_element_type=wide))

    if a_MK.dtype != jnp.bfloat16:
        return direct(a_MK, b_MN)
    return lax.platform_dependent(a_MK, b_MN, cpu=turned, default=direct)


def _forward(x_MK, w_KN):
    return linear(x_MK, w_KN), (x_MK, w_KN)


def _backward(saved, dy_MN):
    x_MK, w_KN = saved
    dx_MK = lax.dot_general(dy_MN, w_KN, (((1,), (1,)), ((), ())))
    return dx_MK, contract_rows(x_MK, dy_MN).astype(w_KN.dtype)


linear.defvjp(_forward, _backward)

__all__ = ["contract_rows", "linear"]
