"""The grouped MLP put together from this package's grouped GEMM and SwiGLU."""

from pallas_kernels.grouped_gemm import grouped_gemm
from pallas_kernels.swiglu import swiglu


def grouped_mlp(x_MD, w_in_GDF2, w_out_GFD, weights_M, group_sizes_G, *, impl: str | None):
    """See the package; `impl` names the grouped GEMM."""
    h_MF2 = grouped_gemm(x_MD, w_in_GDF2, group_sizes_G, impl=impl)
    return grouped_gemm(swiglu(h_MF2, weights_M), w_out_GFD, group_sizes_G, impl=impl)
