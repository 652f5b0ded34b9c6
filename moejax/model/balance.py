"""What keeps experts evenly loaded: load-balancing losses, the z-loss, the expert bias.

With n_e the slots that chose expert e and P_te the normalised scores, over a set of T tokens:

    aux = E / (K T^2) * sum_e n_e * sum_t P_te        (1 in perfect balance)

The set is the global microbatch ("batch") or each packed document ("sequence"; the mean over
documents). n_e is counted over all devices and carries no gradient, the sum over t is this
device's share: the psum of the returned values over the token axes is the loss, for every fold.
Padding counts nowhere. Sources: Switch Transformer; ST-MoE; DeepSeek-V3.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from moejax.core import collectives
from moejax.core.mesh import Fold
from moejax.model.router import RouterConfig, Routing
from moejax.model.stream import Stream


def counts_tE(experts_tK: Int[Array, "t K"], num_experts: int, dtype) -> Float[Array, "t E"]:
    """Returns how many slots of each token chose each expert (0 or 1; none for padding)."""
    return jax.nn.one_hot(experts_tK, num_experts, dtype=dtype).sum(axis=1)


def batch_loss(routing, probs_tE, stream: Stream, fold: Fold) -> Float[Array, ""]:
    """Returns this device's share of the microbatch aux loss, divided by the microbatches."""
    counts, top_k = stream.counts, routing.experts_tK.shape[-1]
    tokens = jnp.maximum(counts.micro_tokens, 1.0).astype(probs_tE.dtype)
    load_E = collectives.psum(routing.load_E.astype(probs_tE.dtype), fold.tokens)
    load_E = load_E / (tokens * top_k)
    shares_E = probs_tE.sum(axis=0) / tokens
    num_experts = probs_tE.shape[-1]
    return num_experts * (load_E * shares_E).sum() / counts.microbatches.astype(probs_tE.dtype)


def sequence_loss(routing, probs_tE, stream: Stream, fold: Fold) -> Float[Array, ""]:
    """Returns this device's share of the mean, over the step's documents, of their aux losses."""
    num_documents = stream.segment_ids_bL.size
    num_experts, top_k = probs_tE.shape[-1], routing.experts_tK.shape[-1]
    chosen_tE = counts_tE(routing.experts_tK, num_experts, probs_tE.dtype)

    def per_document(x_tE):
        return jax.ops.segment_sum(x_tE, stream.document_t, num_segments=num_documents)

    # A document may be split over tp (and cp); rows never are over dp.
    load_dE = collectives.psum(per_document(chosen_tE), fold["cp"] + fold["tp"])
    slots_d = jnp.maximum(load_dE.sum(axis=1), 1.0)
    scale_d = num_experts * top_k / slots_d**2
    share = (load_dE * per_document(probs_tE)).sum(axis=1) * scale_d
    return share.sum() / jnp.maximum(stream.counts.documents, 1.0).astype(probs_tE.dtype)


def losses(
    routing: Routing, stream: Stream, cfg: RouterConfig, fold: Fold
) -> dict[str, Float[Array, "..."]]:
    """Returns this device's shares of {"aux_loss", "z_loss"} (without coefficients) and "load_E".

    "load_E" counts the slots of this device's tokens that chose each expert.
    """
    dtype = routing.probs_tE.dtype
    probs_tE = jnp.where(stream.valid_t[:, None], routing.probs_tE, 0.0)
    by_name = {"batch": batch_loss, "sequence": sequence_loss}
    aux = jnp.zeros((), dtype)
    if cfg.aux_loss != "none":
        aux = by_name[cfg.aux_loss](routing, probs_tE, stream, fold)
    logsumexp_t = jax.nn.logsumexp(routing.logits_tE, axis=-1)
    z = jnp.where(stream.valid_t, logsumexp_t**2, 0.0).sum()
    z = z / jnp.maximum(stream.counts.tokens, 1.0).astype(dtype)
    return {"aux_loss": aux, "z_loss": z, "load_E": routing.load_E.astype(jnp.float32)}


def update_bias(
    bias_E: Float[Array, "... E"], load_E: Float[Array, "... E"], rate: float
) -> Float[Array, "... E"]:
    """Returns bias + rate * sign(mean load - load); once an optimizer step, of the global load."""
    mean = load_E.mean(axis=-1, keepdims=True)
    return bias_E + rate * jnp.sign(mean - load_E).astype(bias_E.dtype)
