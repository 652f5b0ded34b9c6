"""Rows into expert order and back.

    tokens_S, slots_TK, sizes_E = sort_slots(experts_TK, num_experts)
    x_SD = permute(x_TD, tokens_S, slots_TK)
    y_TD = unpermute(y_SD, slots_TK, tokens_S)

`tokens_S` (the token of each sorted row) and `slots_TK` (the sorted row of each slot) are each
other's inverse, so the gradient of either move is the other: a gather, never a scatter-add. Rows of
no token (-1) are zeros: those behind the last group, and those that fill groups up to a multiple.
"""

from functools import partial

from jaxtyping import Array, Float, Int

from pallas_kernels.deviceless import refusal_for, target_gpu
from pallas_kernels.permute import mosaic, reference, xla
from pallas_kernels.pick import Choice, pick


def permute(
    x_TD: Float[Array, "T D"],
    tokens_S: Int[Array, " S"],
    slots_TK: Int[Array, "T K"],
    *,
    impl: str | None = None,
) -> Float[Array, "S D"]:
    """Returns x_SD[s] = x_TD[tokens_S[s]]; a row whose token is -1 is zeros, and gets no gradient.

    Bytes: S*D written and as many read.
    """
    choices = [
        _mosaic(mosaic.permute, x_TD, tokens_S, slots_TK),
        Choice("xla", xla.permute),
        Choice("reference", reference.permute),
    ]
    return pick("permute", impl, choices)(x_TD, tokens_S, slots_TK)


def unpermute(
    y_SD: Float[Array, "S D"],
    slots_TK: Int[Array, "T K"],
    tokens_S: Int[Array, " S"],
    *,
    weights_TK: Float[Array, "T K"] | None = None,
    impl: str | None = None,
) -> Float[Array, "T D"]:
    """Returns y_TD[t] = sum_k weights[t, k] * y_SD[slots_TK[t, k]], weights 1 if None.

    Summed in float32 (float64 for float64) in the fixed order k = 0 .. K-1; a slot of -1 gives
    nothing, and its weight gets no gradient.
    """
    choices = [
        _mosaic(mosaic.unpermute, y_SD, tokens_S, slots_TK),
        Choice("xla", xla.unpermute),
        Choice("reference", reference.unpermute),
    ]
    return pick("unpermute", impl, choices)(y_SD, slots_TK, tokens_S, weights_TK)


def sort_slots(
    experts_TK: Int[Array, "T K"],
    num_experts: int,
    *,
    row_multiple: int = 1,
    impl: str | None = None,
) -> tuple[Int[Array, " S"], Int[Array, "T K"], Int[Array, " E"]]:
    """Returns (tokens_S, slots_TK, group_sizes_E) of the slots, sorted stably by expert.

    A slot of expert `num_experts` (padding, or an expert elsewhere) has no row: its slot is -1, and
    no group counts it. Every group is filled up with rows of no token (-1, so permute makes them
    zeros) to a multiple of `row_multiple`, as block-scaled number formats need; an empty group
    stays empty. group_sizes counts those rows. Rows of no token follow the last group, up to
    S = `num_rows(T * K, num_experts, row_multiple)` (`reference.py`); T*K for a multiple of 1.

    Raises ValueError for a row_multiple below 1.
    """
    if row_multiple < 1:
        raise ValueError(f"row_multiple={row_multiple} is not at least 1")
    choices = [Choice("xla", xla.sort_slots), Choice("reference", reference.sort_slots)]
    return pick("sort_slots", impl, choices)(experts_TK, num_experts, row_multiple)


def _mosaic(function, rows, tokens_S, slots_TK) -> Choice:
    most, K = max(rows.shape[0], tokens_S.size, slots_TK.size), slots_TK.shape[1]
    why = refusal_for("hopper", "blackwell", oldest_jax=(0, 11, 2))
    why = why or mosaic.refusal(
        rows.dtype, rows.shape[1], num_rows=most, num_experts_per_token=K
    )
    gpu = target_gpu()
    return Choice("mosaic", partial(function, num_sms=gpu.cores if gpu else 0), why)


__all__ = ["permute", "sort_slots", "unpermute"]
