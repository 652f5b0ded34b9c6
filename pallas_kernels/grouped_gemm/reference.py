"""The definition of the grouped GEMM: each row times the matrix of its group, in obvious jnp."""

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
    y_MN = jnp.zeros((x_MK.shape[0], w_GKN.shape[2]), wide)
    for g in range(w_GKN.shape[0]):
        mine_M1 = (row_M1 >= ends_G[g] - group_sizes_G[g]) & (row_M1 < ends_G[g])
        x_MK_g = jnp.where(mine_M1, x_MK, 0)  # selects on both sides of the product: a NaN in
        y_MN_g = jnp.matmul(x_MK_g, w_GKN[g], precision="highest", preferred_element_type=wide)
        y_MN += jnp.where(mine_M1, y_MN_g, 0)  # other rows, or in their gradients, must not leak
    return y_MN.astype(x_MK.dtype)
