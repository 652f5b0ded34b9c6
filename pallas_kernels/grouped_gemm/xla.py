"""Grouped GEMM in portable XLA: one loop over blocks of rows whose number is read on the device, so
the cost follows the rows that are there, not M, and not G times M.

    forward   y[m]   = x[m] @ w[g]          for rows m of group g
    input     dx[m]  = dy[m] @ w[g]^T
    weight    dw[g]  = sum over rows m of g   x[m]^T dy[m]

A group is cut into blocks of `_MAIN_ROWS` and one last block, padded to the next size of a ladder:
1050 rows are one block of 1088, 2000 rows one of 768 and one of 1280 (1232 used). Each size is a
branch of one `switch`, which holds one dense product. The same code runs on a GPU, where it is
right and slow.

For XLA:CPU, where it is meant to be fast, this was found by measurement (two Zen 5 cores, M=16384,
G=16, K=N=1024, about 1024 +- 25 rows a group; the share is of a dense 2048-cube's rate):
- The slices of x and w that a block needs cost nothing measurable; writing its rows costs 4%, and
  12% through a select. So a block writes whole, beyond the end of its group: the next group writes
  over that. Only blocks that reach past the last group's end select.
- bfloat16 runs natively (950 GFLOP/s) where both operands are row-major. A product over rows,
  x^T dy, is converted to float32 first (360), and a transpose fused with a mask is worse (40). So x
  is transposed by hand, in two steps: see `_transpose`. float32 gains from it too (1.15x).
- Shares: forward 0.91, input gradient 0.92, weight gradient 0.85 in float32; 0.93, 0.92, 0.85 in
  bfloat16. Blocks of 512 and 128 rows without a ladder reach 0.85, 0.86, 0.76; 0.86, 0.85, 0.66.
  A branch costs 15 to 30 ms to compile; three operations of one shape take under 2 s.
"""

import math
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.grouped_gemm.work import bounds

_MAIN_ROWS = 768  # the size of all blocks of a group but the last
_MOST_ROWS = 1280  # the largest last block, and the ladder's end
_STEP_ROWS = 64  # the ladder's step: products by rows
_DEEP_STEP_ROWS = 128  # the same for the weight gradient, whose branches compile slower
_COARSE_STEP_ROWS = 512  # the same for rare blocks
_TILE_ROWS = 64


def _wide(dtype):
    return jnp.float64 if dtype == jnp.float64 else jnp.float32


def _ladder(num_rows: int, step: int) -> tuple[int, ...]:
    """The sizes of a last block, ascending, none larger than num_rows."""
    top = min(num_rows, _MOST_ROWS)
    sizes = {16, 64, *range(step, _MOST_ROWS, step)}
    return (*sorted(size for size in sizes if size < top), top)


def _rung(ladder, rows):
    """The index of the smallest size of the ladder that holds `rows`."""
    return (rows > jnp.asarray(ladder, jnp.int32)).sum(dtype=jnp.int32)


def _cut(group_sizes_G, num_rows):
    """(starts, ends, blocks): the groups' rows, clipped to those that exist, and how many blocks
    the groups up to each one, itself included, are cut into."""
    starts_G, ends_G = bounds(group_sizes_G, num_rows)
    most, main = min(num_rows, _MOST_ROWS), min(num_rows, _MAIN_ROWS)
    more_G = jnp.maximum(ends_G - starts_G - most + main - 1, 0) // main
    blocks_G = jnp.where(ends_G > starts_G, 1 + more_G, 0)
    return starts_G, ends_G, jnp.cumsum(blocks_G, dtype=jnp.int32)


def _for_blocks(visit, carry, starts_G, ends_G, blocks_G, num_rows):
    """Returns carry after carry = visit(carry, g, start, end) for every block, in order of rows."""
    main = min(num_rows, _MAIN_ROWS)

    def body(state):
        t, carry = state
        g = (t >= blocks_G).sum(dtype=jnp.int32)
        start = starts_G[g] + (t - jnp.where(g > 0, blocks_G[g - 1], 0)) * main
        end = jnp.where(t + 1 == blocks_G[g], ends_G[g], start + main)
        return t + 1, visit(carry, g, start, end)

    state = (blocks_G[-1] * 0, carry)
    return lax.while_loop(lambda state: state[0] < blocks_G[-1], body, state)[1]


def _mine(at, size, start, end):
    """Which of the rows at .. at + size are in start .. end: [size, 1]."""
    row_b1 = at + lax.broadcasted_iota(jnp.int32, (size, 1), 0)
    return (row_b1 >= start) & (row_b1 < end)


def _product(x_MK, w_GKN, group_sizes_G, contract_w: int):
    """y[m] = x[m] @ w[g] (contract_w=1), or x[m] @ w[g]^T (contract_w=2); zeros past the sum."""
    num_rows = x_MK.shape[0]
    y_MN = lax.full_like(x_MK, 0, shape=(num_rows, w_GKN.shape[3 - contract_w]))
    if num_rows == 0:
        return y_MN
    starts_G, ends_G, blocks_G = _cut(group_sizes_G, num_rows)
    ladder, coarse = _ladder(num_rows, _STEP_ROWS), _ladder(num_rows, _COARSE_STEP_ROWS)
    dims = (((1,), (contract_w - 1,)), ((), ()))

    def write(y_MN, g, start, end, size, whole):
        at = start if whole else jnp.minimum(start, num_rows - size)
        x = lax.dynamic_slice_in_dim(x_MK, at, size)
        w = lax.dynamic_index_in_dim(w_GKN, g, keepdims=False)
        y = lax.dot_general(x, w, dims, preferred_element_type=_wide(x.dtype)).astype(y_MN.dtype)
        if not whole:
            y = jnp.where(_mine(at, size, start, end), y, lax.dynamic_slice_in_dim(y_MN, at, size))
        return lax.dynamic_update_slice_in_dim(y_MN, y, at, 0)

    branches = [partial(write, size=size, whole=True) for size in ladder]
    branches += [partial(write, size=size, whole=False) for size in coarse]

    def visit(y_MN, g, start, end):
        rung = _rung(ladder, end - start)
        whole = start + jnp.asarray(ladder, jnp.int32)[rung] <= ends_G[-1]
        branch = jnp.where(whole, rung, len(ladder) + _rung(coarse, end - start))
        return lax.switch(branch, branches, y_MN, g, start, end)

    return _for_blocks(visit, y_MN, starts_G, ends_G, blocks_G, num_rows)


def _transpose(x_bK):
    """x^T, as the copy of a copy: within tiles of rows, then the tiles. As one step it would be
    folded into the product that reads it. Both steps move short runs, which caches like."""
    (size, dim), tile = x_bK.shape, math.gcd(x_bK.shape[0], _TILE_ROWS)
    tiles = x_bK.reshape(size // tile, tile, dim).transpose(0, 2, 1)
    return lax.optimization_barrier(tiles).transpose(1, 0, 2).reshape(dim, size)


def _weight_gradient(x_MK, dy_MN, group_sizes_G):
    """dw[g] = x[rows of g]^T dy[rows of g], summed in float32 or wider; exactly 0 where empty."""
    (num_rows, K), N = x_MK.shape, dy_MN.shape[1]
    wide = _wide(x_MK.dtype)
    dw_GKN = lax.full_like(x_MK, 0, shape=(group_sizes_G.shape[0], K, N))
    sum_KN = lax.full_like(x_MK, 0, dtype=wide, shape=(K, N))
    if num_rows == 0:
        return dw_GKN
    starts_G, ends_G, blocks_G = _cut(group_sizes_G, num_rows)
    ladder, coarse = _ladder(num_rows, _DEEP_STEP_ROWS), _ladder(num_rows, _COARSE_STEP_ROWS)

    def product(start, end, size):
        at = jnp.minimum(start, num_rows - size)
        mine = _mine(at, size, start, end)  # both sides by select: a NaN times a zero is a NaN
        x = jnp.where(mine, lax.dynamic_slice_in_dim(x_MK, at, size), 0)
        dy = jnp.where(mine, lax.dynamic_slice_in_dim(dy_MN, at, size), 0)
        dims = (((1,), (0,)), ((), ()))
        return lax.dot_general(_transpose(x), dy, dims, preferred_element_type=wide)

    def only(dw_GKN, sum_KN, g, start, end, size):
        part = product(start, end, size).astype(dw_GKN.dtype)
        return lax.dynamic_update_index_in_dim(dw_GKN, part, g, 0), sum_KN

    def one_of_many(dw_GKN, sum_KN, g, start, end, size):
        part = product(start, end, size)
        sum_KN = jnp.where(start == starts_G[g], part, sum_KN + part)
        return lax.dynamic_update_index_in_dim(dw_GKN, sum_KN.astype(dw_GKN.dtype), g, 0), sum_KN

    branches = [partial(only, size=size) for size in ladder]
    if num_rows > _MOST_ROWS:  # only then does a group ever have two blocks
        branches += [partial(one_of_many, size=size) for size in coarse]

    def visit(carry, g, start, end):
        branch = _rung(ladder, end - start)
        if num_rows > _MOST_ROWS:
            alone = end - start == ends_G[g] - starts_G[g]
            branch = jnp.where(alone, branch, len(ladder) + _rung(coarse, end - start))
        return lax.switch(branch, branches, *carry, g, start, end)

    return _for_blocks(visit, (dw_GKN, sum_KN), starts_G, ends_G, blocks_G, num_rows)[0]


@jax.custom_vjp
def grouped_gemm(x_MK, w_GKN, group_sizes_G):
    """See the package."""
    return _product(x_MK, w_GKN, group_sizes_G, contract_w=1)


def _forward(x_MK, w_GKN, group_sizes_G):
    return grouped_gemm(x_MK, w_GKN, group_sizes_G), (x_MK, w_GKN, group_sizes_G)


def _backward(residuals, dy_MN):
    x_MK, w_GKN, group_sizes_G = residuals
    dx_MK = _product(dy_MN, w_GKN, group_sizes_G, contract_w=2)
    return dx_MK, _weight_gradient(x_MK, dy_MN, group_sizes_G), None


grouped_gemm.defvjp(_forward, _backward)
