"""The definition: the parts' definitions, one after the other."""

from pallas_kernels.grouped_gemm import reference as gemm
from pallas_kernels.swiglu import reference as swiglu


def grouped_mlp(x_MD, w_in_GDF2, w_out_GFD, weights_M, group_sizes_G):
    """See the package."""
    h_MF2 = gemm.grouped_gemm(x_MD, w_in_GDF2, group_sizes_G)
    return gemm.grouped_gemm(swiglu.swiglu(h_MF2, weights_M), w_out_GFD, group_sizes_G)
