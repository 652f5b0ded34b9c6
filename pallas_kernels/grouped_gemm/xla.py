"""Grouped GEMM in portable XLA: loops over groups and over row blocks whose number is read on the
device, so the cost follows the rows that are there, not M, and not G times M.

    forward   y[m]   = x[m] @ w[g]          for rows m of group g
    input     dx[m]  = dy[m] @ w[g]^T
    weight    dw[g]  = sum over rows m of g   x[m]^T dy[m]

Rows of a group are taken in large blocks and the rest in smaller ones; each block is one dense
product, and a select keeps rows of other groups (and whatever lies past the sum) as they were.

For XLA:CPU, where it is meant to be fast, three things were found by measurement:
- bfloat16 products run natively (900 GFLOP/s on two Zen 5 cores) only where the compiler sees plain
  row-major operands; a product over rows (x^T dy) is converted to float32 first (360). The weight
  gradient therefore transposes a block once and multiplies it in column tiles inside a loop, whose
  body sees the transposed block as a plain array (570).
- Unrolling the blocks is slower than the loop (0.75 of it, forward).
- A freshly allocated output costs page faults, about a tenth of the product's own time.
"""

import jax
import jax.numpy as jnp
from jax import lax

ROWS = (512, 128)  # rows of a block: forward and input gradient
DEEP_ROWS = (1024, 256)  # the same for the weight gradient, which sums over the rows
_TILES = 2


def _wide(dtype):
    return jnp.float64 if dtype == jnp.float64 else jnp.float32


def _varying_zeros(shape, dtype, *like):
    """Zeros as varying over mesh axes as the arrays `like` are: a loop carry may not change that."""
    seed = sum((a.ravel()[:1].astype(jnp.float32) for a in like), jnp.zeros((1,), jnp.float32))
    return jnp.zeros(shape, dtype) + jnp.where(seed == seed, 0, 0).astype(dtype).reshape(
        (1,) * len(shape)
    )


def _bounds(group_sizes_G, num_rows):
    """(starts, ends) of the groups, clipped to the rows that exist."""
    ends_G = jnp.minimum(jnp.cumsum(group_sizes_G, dtype=jnp.int32), num_rows)
    starts_G = jnp.minimum(ends_G, jnp.concatenate([ends_G[:1] * 0, ends_G[:-1]]))
    return starts_G, ends_G


def _over_blocks(visit, carry, start, end, num_rows, sizes):
    """Returns carry after visit(carry, at, block, mine) for every block of the rows start .. end.

    Full blocks of each size come first, largest size first, then one last block of the smallest.
    Full blocks hold rows of this group alone, and mine is None. The last one may reach beyond
    `end` and, at the end of the array, before its first row: mine [block, 1] is where it may act.
    """
    for size in sizes:
        block = min(size, num_rows)
        count = (end - start) // block

        def full(i, carry, start=start, block=block):
            return visit(carry, start + i * block, block, None)

        carry = lax.fori_loop(0, count, full, carry)
        start = start + count * block

    def last(_, carry, start=start, block=block):
        at = jnp.minimum(start, num_rows - block)
        row_b1 = at + jnp.arange(block, dtype=jnp.int32)[:, None]
        return visit(carry, at, block, (row_b1 >= start) & (row_b1 < end))

    return lax.fori_loop(0, (end > start).astype(jnp.int32), last, carry)


def _product(x_MK, w_GKN, group_sizes_G, contract_w: int):
    """y[m] = x[m] @ w[g] (contract_w=1), or x[m] @ w[g]^T (contract_w=2); zeros past the sum."""
    num_rows = x_MK.shape[0]
    out = w_GKN.shape[3 - contract_w]
    starts_G, ends_G = _bounds(group_sizes_G, num_rows)
    y_MN = _varying_zeros((num_rows, out), x_MK.dtype, x_MK, w_GKN, group_sizes_G)

    def group(y_MN, of_group):
        w, start, end = of_group

        def visit(y_MN, at, block, mine):
            x = lax.dynamic_slice_in_dim(x_MK, at, block)
            dims = (((1,), (contract_w - 1,)), ((), ()))
            y = lax.dot_general(x, w, dims, preferred_element_type=_wide(x.dtype))
            y = y.astype(y_MN.dtype)
            if mine is not None:
                y = jnp.where(mine, y, lax.dynamic_slice_in_dim(y_MN, at, block))
            return lax.dynamic_update_slice_in_dim(y_MN, y, at, 0)

        return _over_blocks(visit, y_MN, start, end, num_rows, ROWS), None

    return lax.scan(group, y_MN, (w_GKN, starts_G, ends_G))[0]


def _add_at_once(x_Kb, dy_bN, total_KN):
    x_Kb = lax.optimization_barrier(x_Kb)
    dims = (((1,), (0,)), ((), ()))
    return total_KN + lax.dot_general(x_Kb, dy_bN, dims, preferred_element_type=total_KN.dtype)


def _add_in_tiles(x_Kb, dy_bN, total_KN):
    width = total_KN.shape[1] // _TILES

    def tile(j, total_KN):
        part = _add_at_once(
            x_Kb,
            lax.dynamic_slice_in_dim(dy_bN, j * width, width, axis=1),
            lax.dynamic_slice_in_dim(total_KN, j * width, width, axis=1),
        )
        return lax.dynamic_update_slice_in_dim(total_KN, part, j * width, 1)

    return lax.fori_loop(0, _TILES, tile, total_KN)


def _weight_gradient(x_MK, dy_MN, group_sizes_G, dtype):
    """dw[g] = x[rows of g]^T dy[rows of g], summed in float32 or wider; exactly 0 where empty."""
    (num_rows, K), N = x_MK.shape, dy_MN.shape[1]
    wide = _wide(x_MK.dtype)
    add_product = _add_in_tiles if x_MK.dtype == jnp.bfloat16 and N % _TILES == 0 else _add_at_once
    starts_G, ends_G = _bounds(group_sizes_G, num_rows)
    zeros_KN = _varying_zeros((K, N), wide, x_MK, dy_MN, group_sizes_G)

    def group(_, of_group):
        start, end = of_group

        def visit(total_KN, at, block, mine):
            x = lax.dynamic_slice_in_dim(x_MK, at, block)
            dy = lax.dynamic_slice_in_dim(dy_MN, at, block)
            if mine is not None:  # both sides by select: a NaN times a zero is a NaN
                x, dy = jnp.where(mine, x, 0), jnp.where(mine, dy, 0)
            return add_product(x.T, dy, total_KN)

        total_KN = _over_blocks(visit, zeros_KN, start, end, num_rows, DEEP_ROWS)
        return None, total_KN.astype(dtype)

    return lax.scan(group, None, (starts_G, ends_G))[1]


@jax.custom_vjp
def grouped_gemm(x_MK, w_GKN, group_sizes_G):
    """See the package."""
    return _product(x_MK, w_GKN, group_sizes_G, contract_w=1)


def _forward(x_MK, w_GKN, group_sizes_G):
    return grouped_gemm(x_MK, w_GKN, group_sizes_G), (x_MK, w_GKN, group_sizes_G)


def _backward(residuals, dy_MN):
    x_MK, w_GKN, group_sizes_G = residuals
    dx_MK = _product(dy_MN, w_GKN, group_sizes_G, contract_w=2)
    return dx_MK, _weight_gradient(x_MK, dy_MN, group_sizes_G, w_GKN.dtype), None


grouped_gemm.defvjp(_forward, _backward)
