"""Permutation by gathers alone, and a counting sort: portable, and fast on CPU.

The gradient of `permute` is `unpermute` and the reverse, so nothing scatters. Offsets are XLA's
own 64-bit ones: arrays of more than 2^31 elements are fine.
"""

import jax
import jax.numpy as jnp

_BLOCK = 512  # rows that one step of the counting sort ranks at once


def _take(x, index):
    """x[index], zeros where the index is -1. A select, so that nothing leaks from row 0."""
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
    total = None
    for k in range(slots_TK.shape[1]):
        part = _take(y_SD, slots_TK[:, k])
        part = part.astype(wide) if slots_TK.shape[1] > 1 or weights_TK is not None else part
        if weights_TK is not None:
            part = part * weights_TK[:, k : k + 1].astype(wide)
        total = part if total is None else total + part
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


def sort_slots(experts_TK, num_experts):
    """See the package. A counting sort: the place of a slot is the start of its expert plus the
    number of earlier slots with that expert, counted in blocks (within a block by a triangle of
    comparisons, across blocks by a running sum of block histograms); argsort is slower on CPU.
    """
    T, K = experts_TK.shape
    S = T * K
    flat_S = experts_TK.reshape(-1)
    num_blocks = max(-(-S // _BLOCK), 1)
    padded = jnp.pad(flat_S, (0, num_blocks * _BLOCK - S), constant_values=num_experts)
    block_nb = padded.reshape(num_blocks, _BLOCK)
    ids_E = jnp.arange(num_experts + 1, dtype=flat_S.dtype)
    onehot_nbE = (block_nb[:, :, None] == ids_E[None, None]).astype(jnp.int32)
    within_nbE = jnp.cumsum(onehot_nbE, axis=1, dtype=jnp.int32)
    count_nE = within_nbE[:, -1]
    before_nE = jnp.cumsum(count_nE, axis=0, dtype=jnp.int32) - count_nE
    total_E = count_nE.sum(axis=0, dtype=jnp.int32)
    start_E = jnp.cumsum(total_E, dtype=jnp.int32) - total_E
    place_nbE = within_nbE - 1 + (before_nE + start_E[None])[:, None]
    place_S = (place_nbE * onehot_nbE).sum(axis=2, dtype=jnp.int32).reshape(-1)[:S]
    here_S = flat_S < num_experts
    token_S = jnp.where(here_S, jnp.arange(S, dtype=jnp.int32) // K, -1)
    tokens_S = jnp.full((S,), -1, jnp.int32).at[place_S].set(
        token_S, unique_indices=True, mode="promise_in_bounds"
    )
    slots_TK = jnp.where(here_S, place_S, -1).reshape(T, K)
    return tokens_S, slots_TK, total_E[:num_experts]
