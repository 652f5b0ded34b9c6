"""Permutation by gathers alone, and two sorts of integers: portable, and fast on CPU.

The gradient of `permute` is `unpermute` and the reverse, so nothing scatters. Offsets are XLA's
own 64-bit ones: arrays of more than 2^31 elements are fine.
"""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.permute.reference import num_rows
from pallas_kernels.pick import target


def _take(x, index):
    """x[index], zeros where the index is -1. A select, so that nothing leaks from row 0.

    The barrier keeps XLA from computing x and the index again for every element that it gathers.
    """
    x, index = lax.optimization_barrier((x, index))
    rows = x.at[index].get(mode="clip")
    return jnp.where((index >= 0).reshape(-1, *(1,) * (x.ndim - 1)), rows, 0)


@jax.custom_vjp
def permute(x_TD, tokens_S, slots_TK):
    """See the package."""
    return _take(x_TD, tokens_S)


def _permute_forward(x_TD, tokens_S, slots_TK):
    return permute(x_TD, tokens_S, slots_TK), slots_TK


def _permute_backward(slots_TK, dx_SD):
    return _gather_sum(dx_SD, slots_TK, None), None, None


permute.defvjp(_permute_forward, _permute_backward)


def _gather_sum(y_SD, slots_TK, weights_TK):
    """One gather per k, added in that order in float32 or wider."""
    wide = jnp.float64 if y_SD.dtype == jnp.float64 else jnp.float32

    def part(k):
        rows = _take(y_SD, slots_TK[:, k]).astype(wide)
        return rows if weights_TK is None else rows * weights_TK[:, k : k + 1].astype(wide)

    total = part(0)
    for k in range(1, slots_TK.shape[1]):
        total = total + part(k)
    return total.astype(y_SD.dtype)


@jax.custom_vjp
def unpermute(y_SD, slots_TK, tokens_S, weights_TK):
    """See the package."""
    return _gather_sum(y_SD, slots_TK, weights_TK)


def _unpermute_forward(y_SD, slots_TK, tokens_S, weights_TK):
    kept = None if weights_TK is None else (y_SD, weights_TK)
    return unpermute(y_SD, slots_TK, tokens_S, weights_TK), (slots_TK, tokens_S, kept)


def _unpermute_backward(residuals, dy_TD):
    slots_TK, tokens_S, kept = residuals
    if kept is None:
        return _take(dy_TD, tokens_S), None, None, None
    y_SD, weights_TK = kept
    wide = jnp.float64 if y_SD.dtype == jnp.float64 else jnp.float32
    row_S1 = jnp.arange(tokens_S.shape[0], dtype=slots_TK.dtype)[:, None]
    mine_SK = slots_TK[jnp.maximum(tokens_S, 0)] == row_S1
    weights_SK = _take(weights_TK, tokens_S)
    weights_S1 = jnp.where(mine_SK, weights_SK, 0).sum(axis=1, keepdims=True).astype(wide)
    dy_SD = _take(dy_TD, tokens_S).astype(wide) * weights_S1
    d_weights = [
        (_take(y_SD, slots_TK[:, k]).astype(wide) * dy_TD.astype(wide)).sum(axis=1)
        for k in range(slots_TK.shape[1])
    ]
    d_weights_TK = jnp.stack(d_weights, axis=1).astype(weights_TK.dtype)
    return dy_SD.astype(y_SD.dtype), None, None, d_weights_TK


unpermute.defvjp(_unpermute_forward, _unpermute_backward)


def search() -> str:
    """Returns jnp.searchsorted's method: on a GPU, halving is a loop of tiny kernels."""
    return "compare_all" if target().platform == "gpu" else "scan"


def sort_slots(experts_TK, num_experts, row_multiple):
    """See the package. One stable sort by expert gives the order, and a second one its inverse.

    On XLA:CPU (S = 65536, two Zen 5 cores) 2.1 ms for 16 experts and 3.1 for 256; a counting sort
    takes 2.5 and 39, and a scatter for the inverse 0.6 more.
    """
    T, K = experts_TK.shape
    slot_S = lax.iota(jnp.int32, T * K)
    expert_S, order_S = lax.sort((experts_TK.reshape(-1), slot_S), num_keys=1, is_stable=True)
    _, place_S = lax.sort((order_S, slot_S), num_keys=1, is_stable=False)
    ids_E = jnp.arange(num_experts + 1, dtype=experts_TK.dtype)
    starts_E = jnp.searchsorted(expert_S, ids_E, method=search()).astype(jnp.int32)
    starts_E, sizes_E = starts_E[:-1], starts_E[1:] - starts_E[:-1]
    if row_multiple == 1:
        tokens_S = jnp.where(expert_S < num_experts, order_S // K, -1)
        slots_TK = jnp.where(experts_TK < num_experts, place_S.reshape(T, K), -1)
        return tokens_S, slots_TK, sizes_E
    full_E = (sizes_E + row_multiple - 1) // row_multiple * row_multiple
    ends_E = jnp.cumsum(full_E, dtype=jnp.int32)
    moved_E = ends_E - full_E - starts_E  # by how much padding moves a group down
    here_TK = experts_TK < num_experts
    rows_TK = place_S.reshape(T, K) + moved_E.at[experts_TK].get(mode="clip")
    row_S = lax.iota(jnp.int32, num_rows(T * K, num_experts, row_multiple))
    group_S = jnp.searchsorted(ends_E, row_S, side="right", method=search()).astype(jnp.int32)
    from_S = row_S - moved_E.at[group_S].get(mode="clip")
    # Rows past the last group are measured by it, and lie behind its end.
    inside_S = from_S < (starts_E + sizes_E).at[group_S].get(mode="clip")
    tokens_S = jnp.where(inside_S, order_S.at[from_S].get(mode="clip") // K, -1)
    return tokens_S, jnp.where(here_TK, rows_TK, -1), full_E
