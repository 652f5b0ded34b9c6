"""A dense projection, and the product over rows that its weight gradient is.

    y_MN  = linear(x_MK, w_KN)              x w
    dw_KN = contract_rows(x_MK, dy_MN)      x^T dy

Both leave the work to XLA. On CPUs they ask for it in the forms that XLA:CPU runs fast in bfloat16
(two Zen 5 cores, M=4096, K=N=512, of a 2048-cube's 940 GFLOP/s): a float32 result that is rounded
afterwards (812, a bfloat16 result 736), and no sum over rows, whose operands it would convert to
float32 first (360): there the left side is turned in memory, with barriers that keep it so.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

ROWS_BY_COLUMNS, ROWS_BY_ROWS, COLUMNS_BY_COLUMNS = (1, 0), (1, 1), (0, 0)


def product(a, b, contract: tuple[int, int], dtype=None):
    """Returns a b over the given dims, summed in float32 or wider, in `dtype` (that of a)."""
    dims, dtype = (((contract[0],), (contract[1],)), ((), ())), dtype or a.dtype

    def direct(a, b):
        return lax.dot_general(a, b, dims, preferred_element_type=dtype)

    def rounded(a, b):
        return lax.dot_general(a, b, dims, preferred_element_type=jnp.float32).astype(dtype)

    if dtype != jnp.bfloat16:
        return direct(a, b)
    return lax.platform_dependent(a, b, cpu=rounded, default=direct)


@jax.custom_vjp
def linear(x_MK: Float[Array, "M K"], w_KN: Float[Array, "K N"]) -> Float[Array, "M N"]:
    """Returns x w in the dtype of x, summed in float32 or wider. FLOPs: 2*M*K*N, backward twice."""
    return product(x_MK, w_KN, ROWS_BY_COLUMNS)


def contract_rows(a_MK: Float[Array, "M K"], b_MN: Float[Array, "M N"]) -> Float[Array, "K N"]:
    """Returns a^T b in float32 or wider."""
    wide = jnp.float64 if a_MK.dtype == jnp.float64 else jnp.float32

    def direct(a_MK, b_MN):
        return product(a_MK, b_MN, COLUMNS_BY_COLUMNS, wide)

    def turned(a_MK, b_MN):
        a_KM = lax.optimization_barrier(a_MK[None].swapaxes(1, 2))[0]
        return lax.optimization_barrier(product(a_KM, b_MN, ROWS_BY_COLUMNS, wide))

    if a_MK.dtype != jnp.bfloat16:
        return direct(a_MK, b_MN)
    return lax.platform_dependent(a_MK, b_MN, cpu=turned, default=direct)


def _forward(x_MK, w_KN):
    return linear(x_MK, w_KN), (x_MK, w_KN)


def _backward(saved, dy_MN):
    x_MK, w_KN = saved
    dw_KN = contract_rows(x_MK, dy_MN).astype(w_KN.dtype)
    return product(dy_MN, w_KN, ROWS_BY_ROWS), dw_KN


linear.defvjp(_forward, _backward)

__all__ = ["contract_rows", "linear", "product"]
