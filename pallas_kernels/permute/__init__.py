"""Rows into expert order and back.

    tokens_S, slots_TK, sizes_E = sort_slots(experts_TK, num_experts)
    x_SD = permute(x_TD, tokens_S, slots_TK)
    y_TD = unpermute(y_SD, slots_TK, tokens_S)

`tokens_S` (the token of each sorted row) and `slots_TK` (the sorted row of each slot) are each
other's inverse, so the gradient of either move is the other: a gather, never a scatter-add.
"""

from functools import partial

from jaxtyping import Array, Float, Int

from pallas_kernels.deviceless import target_gpu
from pallas_kernels.permute import mosaic, reference, xla
from pallas_kernels.pick import Choice, pick, target


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
    experts_TK: Int[Array, "T K"], num_experts: int, *, impl: str | None = None
) -> tuple[Int[Array, " S"], Int[Array, "T K"], Int[Array, " E"]]:
    """Returns (tokens_S, slots_TK, group_sizes_E) of the S = T*K slots, sorted stably by expert.

    A slot of expert `num_experts` (padding, or an expert elsewhere) is sorted last: its row has
    token -1, its slot is -1, and no group counts it.
    """
    choices = [Choice("xla", xla.sort_slots), Choice("reference", reference.sort_slots)]
    return pick("sort_slots", impl, choices)(experts_TK, num_experts)


def _mosaic(function, rows, tokens_S, slots_TK) -> Choice:
    gpu, most = target_gpu(), max(rows.shape[0], tokens_S.size, slots_TK.size)
    if gpu is None or gpu.capability < (9, 0):
        why = f"it runs on Hopper and Blackwell GPUs, and this program is for {target().kind}"
        return Choice("mosaic", function, why)
    K = slots_TK.shape[1]
    why = mosaic.refusal(rows.dtype, rows.shape[1], num_rows=most, num_experts_per_token=K)
    return Choice("mosaic", partial(function, num_sms=gpu.cores), why)


__all__ = ["permute", "sort_slots", "unpermute"]
