"""The definition: the parts' definitions, one after the other."""

import jax.numpy as jnp

from pallas_kernels.grouped_gemm import reference as gemm
from pallas_kernels.swiglu import reference as swiglu


def grouped_mlp(
    x_MD, w_in_GDF2, w_out_GFD, weights_M, group_sizes_G, b_in_GF2=None, b_out_GD=None, limit=0.0,
    impl="reference",
):  # fmt: skip
    """See the package."""
    h_MF2 = gemm.grouped_gemm(x_MD, w_in_GDF2, group_sizes_G)
    if b_in_GF2 is not None:
        ones_M1 = jnp.ones_like(h_MF2[:, :1])
        h_MF2 = h_MF2 + gemm.grouped_gemm(ones_M1, b_in_GF2[:, None], group_sizes_G)
    a_MF = swiglu.swiglu(h_MF2, weights_M, limit)
    y_MD = gemm.grouped_gemm(a_MF, w_out_GFD, group_sizes_G)
    if b_out_GD is not None:
        weights_M1 = weights_M[:, None].astype(y_MD.dtype)
        y_MD = y_MD + gemm.grouped_gemm(weights_M1, b_out_GD[:, None], group_sizes_G)
    return y_MD
