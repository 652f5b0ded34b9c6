"""The definition of the router, in obvious jnp.

    scores = exp(log_scores(logits))
    choice = scores + bias, or logits + bias (`bias_on`), or the logits where there is no bias
             (every score rises with its logit, and logits neither round together nor underflow)
    groups are ranked by the sum of their best num_group_score values of scores (+ bias);
    choice is -inf outside the best topk_groups; experts = top-k of choice
    weights = scores[experts], or exp(log_scores[experts]) over its sum, times scale

Every tie, of experts and of groups, goes to the lowest index. The choice has no gradient.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.router.options import RouterOptions, Routes, log_scores


def top_k(x, k: int):
    """Returns the indices of the k largest of the last dimension, ties to the lowest index."""
    return jnp.argsort(-x, axis=-1, stable=True)[..., :k].astype(jnp.int32)


def route(logits_TE, bias_E, valid_T, options: RouterOptions) -> Routes:
    """See the package."""
    num_experts = logits_TE.shape[-1]
    logits_TE = jnp.where(valid_T[:, None], logits_TE, 0)
    log_TE = log_scores(logits_TE, options.score)
    biased_TE = jnp.exp(log_TE) if bias_E is None else jnp.exp(log_TE) + bias_E[None]
    choice_TE = logits_TE if bias_E is None else biased_TE
    if bias_E is not None and options.bias_on == "logits":
        choice_TE = logits_TE + bias_E[None]
    if options.limited:
        biased_TGN = biased_TE.reshape(biased_TE.shape[0], options.num_groups, -1)
        best = jnp.take_along_axis(biased_TGN, top_k(biased_TGN, options.num_group_score), axis=-1)
        groups = top_k(best.sum(axis=-1), options.topk_groups)
        group_E = jnp.arange(num_experts, dtype=jnp.int32) // (num_experts // options.num_groups)
        reached_TE = (groups[:, :, None] == group_E[None, None]).any(axis=1)
        choice_TE = jnp.where(reached_TE, choice_TE, -jnp.inf)
    experts_TK = top_k(jax.lax.stop_gradient(choice_TE), options.top_k)
    chosen_TK = jnp.take_along_axis(log_TE, experts_TK, axis=-1)
    weights_TK = jnp.exp(chosen_TK)
    if options.renormalize:
        weights_TK = jax.nn.softmax(chosen_TK, axis=-1)
    experts_TK = jnp.where(valid_T[:, None], experts_TK, num_experts)
    weights_TK = jnp.where(valid_T[:, None], weights_TK * options.scale, 0)
    counted_TKE = experts_TK[..., None] == jnp.arange(num_experts, dtype=jnp.int32)[None, None]
    return Routes(experts_TK, weights_TK, counted_TKE.sum((0, 1), dtype=jnp.int32))
