"""The definitions of permute, unpermute and sort_slots, in obvious jnp."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def permute(
    x_TD: Float[Array, "T D"], tokens_S: Int[Array, " S"], slots_TK: Int[Array, "T K"]
) -> Float[Array, "S D"]:
    """Returns x[tokens_S[s]]; zeros where tokens_S[s] is -1."""
    return jnp.where((tokens_S >= 0)[:, None], x_TD[jnp.maximum(tokens_S, 0)], 0)


def unpermute(
    y_SD: Float[Array, "S D"],
    slots_TK: Int[Array, "T K"],
    tokens_S: Int[Array, " S"],
    weights_TK: Float[Array, "T K"] | None,
) -> Float[Array, "T D"]:
    """Returns sum_k weights[t, k] * y[slots[t, k]]; a slot of -1 gives nothing."""
    wide = jnp.float64 if y_SD.dtype == jnp.float64 else jnp.float32
    rows_TKD = jnp.where((slots_TK >= 0)[..., None], y_SD[jnp.maximum(slots_TK, 0)], 0)
    rows_TKD = rows_TKD.astype(wide)
    if weights_TK is not None:
        rows_TKD = rows_TKD * weights_TK.astype(wide)[..., None]
    return rows_TKD.sum(axis=1).astype(y_SD.dtype)


def sort_slots(
    experts_TK: Int[Array, "T K"], num_experts: int
) -> tuple[Int[Array, " S"], Int[Array, "T K"], Int[Array, " E"]]:
    """Returns (tokens_S, slots_TK, group_sizes_E) of a stable sort of the slots by expert."""
    flat_S = experts_TK.reshape(-1)
    order_S = jnp.argsort(flat_S, stable=True).astype(jnp.int32)
    here_S = flat_S[order_S] < num_experts
    tokens_S = jnp.where(here_S, order_S // experts_TK.shape[1], -1)
    place_TK = jnp.argsort(order_S).astype(jnp.int32).reshape(experts_TK.shape)
    slots_TK = jnp.where(experts_TK < num_experts, place_TK, -1)
    ids_1E = jnp.arange(num_experts, dtype=jnp.int32)[None]
    sizes_E = (flat_S[:, None] == ids_1E).sum(axis=0, dtype=jnp.int32)
    return tokens_S, slots_TK, sizes_E
