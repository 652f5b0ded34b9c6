"""The definition of the grouped GEMM: each row times the matrix of its group, in obvious jnp."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def grouped_gemm(
    x_MK: Float[Array, "M K"], w_GKN: Float[Array, "G K N"], group_sizes_G: Int[Array, " G"]
) -> Float[Array, "M N"]:
    """Returns y[m] = x[m] @ w[group of m]; zeros (and zero gradients) past the groups' sum.

    Sums in float32, float64 for float64. Costs G dense products: an oracle, not a kernel.
    """
    wide = jnp.float64 if x_MK.dtype == jnp.float64 else jnp.float32
    ends_G = jnp.cumsum(group_sizes_G, dtype=jnp.int32)
    row_M1 = jnp.arange(x_MK.shape[0], dtype=jnp.int32)[:, None]
    mine_MG = (row_M1 < ends_G[None]) & (row_M1 >= (ends_G - group_sizes_G)[None])
    x_MK = jnp.where(mine_MG.any(axis=1, keepdims=True), x_MK, 0)  # a select: NaN must not leak
    y_MN = jnp.zeros((x_MK.shape[0], w_GKN.shape[2]), wide)
    for g in range(w_GKN.shape[0]):
        x_g = jnp.where(mine_MG[:, g : g + 1], x_MK, 0)
        y_MN += jnp.matmul(x_g, w_GKN[g], precision="highest", preferred_element_type=wide)
    return _live_rows(y_MN, mine_MG.any(axis=1, keepdims=True)).astype(x_MK.dtype)


@jax.custom_vjp
def _live_rows(y, live):
    return jnp.where(live, y, 0)


def _live_forward(y, live):
    return jnp.where(live, y, 0), live


def _live_backward(live, dy):
    return jnp.where(live, dy, 0), None


_live_rows.defvjp(_live_forward, _live_backward)
