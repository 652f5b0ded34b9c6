"""The grouped MLP with biases and a clamped activation (gpt-oss), put together from this package's
grouped GEMM and SwiGLU; the backward keeps h alone.

    h_MF2 = x_MD @ w_in[g] + b_in[g]
    y_MD  = a_MF @ w_out[g] + weight * b_out[g]         a = swiglu(h, weight, limit)

Forward, a bias is a row gathered from a table of G rows, which XLA fuses with the sum: no array
[M, F2] of biases is ever made. Backward, the sum of the rows of a group is no scatter, which on a
GPU is slow and unordered, but the weight gradient of a grouped GEMM whose left side has the bias's
factor (1, or the routing weight) in one column; 8 columns, for 16 bytes a row are the least that
the GPU kernels copy. It is summed in float32, in one order, and reads no row past the sizes.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.grouped_gemm import grouped_gemm
from pallas_kernels.grouped_gemm.work import bounds
from pallas_kernels.swiglu import swiglu

_COLUMNS = 8


def _valid(group_sizes_G, num_rows: int):
    """Returns which rows belong to a group; the others may hold anything [M]."""
    return jnp.arange(num_rows, dtype=jnp.int32) < group_sizes_G.sum(dtype=jnp.int32)


def _bias_rows(b_GN, group_sizes_G, num_rows: int):
    """Returns the bias of each row in float32 or wider [M, N]; zeros past the sum of the sizes."""
    wide = jnp.float64 if b_GN.dtype == jnp.float64 else jnp.float32
    _, ends_G = bounds(group_sizes_G, num_rows)
    row_M1 = jnp.arange(num_rows, dtype=jnp.int32)[:, None]
    group_M = (row_M1 >= ends_G[None]).sum(axis=1, dtype=jnp.int32)
    return b_GN.at[group_M].get(mode="fill", fill_value=0).astype(wide)


def _bias_gradient(dy_MN, factor_M, group_sizes_G, impl):
    """Returns, for each group, the sum over its rows of factor * dy [G, N]."""
    left_MC = jnp.pad(factor_M.astype(dy_MN.dtype)[:, None], ((0, 0), (0, _COLUMNS - 1)))
    shape = (group_sizes_G.shape[0], _COLUMNS, dy_MN.shape[1])
    nothing_GCN = lax.full_like(dy_MN, 0, shape=shape)
    product = lambda b_GCN: grouped_gemm(left_MC, b_GCN, group_sizes_G, impl=impl)  # noqa: E731
    (sums_GCN,) = jax.vjp(product, nothing_GCN)[1](dy_MN)
    return sums_GCN[:, 0]


@partial(jax.custom_vjp, nondiff_argnums=(7, 8))
def grouped_mlp(
    x_MD, w_in_GDF2, w_out_GFD, weights_M, group_sizes_G, b_in_GF2, b_out_GD, limit, impl
):
    """See the package; either bias may be None."""
    args = (x_MD, w_in_GDF2, w_out_GFD, weights_M, group_sizes_G, b_in_GF2, b_out_GD)
    return _forward(*args, limit, impl)[0]


def _forward(
    x_MD, w_in_GDF2, w_out_GFD, weights_M, group_sizes_G, b_in_GF2, b_out_GD, limit, impl
):
    M = x_MD.shape[0]
    h_MF2 = grouped_gemm(x_MD, w_in_GDF2, group_sizes_G, impl=impl)
    if b_in_GF2 is not None:
        bias_MF2 = _bias_rows(b_in_GF2, group_sizes_G, M)
        h_MF2 = (h_MF2.astype(bias_MF2.dtype) + bias_MF2).astype(h_MF2.dtype)
        # It is kept anyway; and fused with a gather, the activation would run scalar on XLA:CPU.
        h_MF2 = lax.optimization_barrier(h_MF2)
    a_MF = swiglu(h_MF2, weights_M, limit=limit)
    y_MD = grouped_gemm(a_MF, w_out_GFD, group_sizes_G, impl=impl)
    if b_out_GD is not None:
        bias_MD = _bias_rows(b_out_GD, group_sizes_G, M)
        weight_M = jnp.where(_valid(group_sizes_G, M), weights_M.astype(bias_MD.dtype), 0)
        y_MD = (y_MD.astype(bias_MD.dtype) + bias_MD * weight_M[:, None]).astype(y_MD.dtype)
    saved = (x_MD, w_in_GDF2, w_out_GFD, weights_M, group_sizes_G, b_in_GF2, b_out_GD, h_MF2)
    return y_MD, saved


def _backward(limit, impl, saved, dy_MD):
    """The products' own forward passes, whose results nothing reads, XLA leaves out."""
    x_MD, w_in_GDF2, w_out_GFD, weights_M, group_sizes_G, b_in_GF2, b_out_GD, h_MF2 = saved
    multiply = lambda x, w: grouped_gemm(x, w, group_sizes_G, impl=impl)  # noqa: E731
    a_MF, pull_swiglu = jax.vjp(partial(swiglu, limit=limit), h_MF2, weights_M)
    da_MF, dw_out_GFD = jax.vjp(multiply, a_MF, w_out_GFD)[1](dy_MD)
    dh_MF2, dweights_M = pull_swiglu(da_MF)
    dx_MD, dw_in_GDF2 = jax.vjp(multiply, x_MD, w_in_GDF2)[1](dh_MF2)
    db_in_GF2 = db_out_GD = None
    if b_in_GF2 is not None:
        ones_M = lax.full_like(weights_M, 1)
        db_in_GF2 = _bias_gradient(dh_MF2, ones_M, group_sizes_G, impl)
    if b_out_GD is not None:
        db_out_GD = _bias_gradient(dy_MD, weights_M, group_sizes_G, impl)
        bias_MD = _bias_rows(b_out_GD, group_sizes_G, x_MD.shape[0])
        more_M = (bias_MD * dy_MD.astype(bias_MD.dtype)).sum(axis=1)
        more_M = jnp.where(_valid(group_sizes_G, more_M.shape[0]), more_M, 0)
        dweights_M = dweights_M + more_M.astype(dweights_M.dtype)
    return dx_MD, dw_in_GDF2, dw_out_GFD, dweights_M, None, db_in_GF2, db_out_GD


grouped_mlp.defvjp(_forward, _backward)
