"""The router by top-k and gathers: portable, and fast on CPU; and the gradient of any of them.

The gradient is written out: the choice is a constant, so it needs the chosen experts alone, and
spreads K numbers over E columns by comparison: no scatter.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.router.options import RouterOptions, Routes, log_scores


def _select(options: RouterOptions, logits_TE, bias_E, valid_T) -> Routes:
    """The forward pass."""
    choice_TE = logits_TE
    if bias_E is not None or options.limited:
        choice_TE = _choice(options, logits_TE, bias_E)
    choice_TE = jnp.where(choice_TE == 0, 0, choice_TE)  # to lax.top_k, -0 is less than 0
    # Without the barrier the gradient's columns reach into the top-k, and XLA:CPU sorts whole rows.
    experts_TK = lax.optimization_barrier(lax.top_k(choice_TE, options.top_k)[1])
    return _routes(options, logits_TE, experts_TK, valid_T)


def _routes(options: RouterOptions, logits_TE, experts_TK, valid_T) -> Routes:
    """The Routes to experts that are chosen; tokens that are not valid reach none."""
    num_experts = logits_TE.shape[-1]
    chosen_TK = jnp.take_along_axis(logits_TE, experts_TK, axis=-1, mode="clip")
    lse_T1 = None
    if options.score == "softmax" and not options.renormalize:
        lse_T1 = jax.nn.logsumexp(logits_TE, axis=-1, keepdims=True)
    weights_TK = _weights(options, chosen_TK, lse_T1)
    experts_TK = jnp.where(valid_T[:, None], experts_TK, num_experts).astype(jnp.int32)
    weights_TK = jnp.where(valid_T[:, None], weights_TK, 0)
    # Slots of expert E are out of bounds: dropped. Whole numbers, so the order is of no account.
    load_E = jnp.zeros(num_experts, jnp.int32).at[experts_TK.reshape(-1)].add(1, mode="drop")
    return Routes(experts_TK, weights_TK, load_E)


def _choice(options: RouterOptions, logits_TE, bias_E):
    """What experts are ranked by; -inf in the groups that are out of reach."""
    if bias_E is not None and options.bias_on == "logits":
        return logits_TE + bias_E[None]
    scores_TE = jnp.exp(log_scores(logits_TE, options.score))
    biased_TE = scores_TE if bias_E is None else scores_TE + bias_E[None]
    choice_TE = logits_TE if bias_E is None else biased_TE
    if not options.limited:
        return choice_TE
    T, num_experts = logits_TE.shape
    by_group = (T, options.num_groups, num_experts // options.num_groups)
    best, _ = lax.top_k(biased_TE.reshape(by_group), options.num_group_score)
    _, groups = lax.top_k(best.sum(axis=-1), options.topk_groups)
    ids_G = jnp.arange(options.num_groups, dtype=groups.dtype)[None, None]
    reached_TG = (groups[:, :, None] == ids_G).any(axis=1)
    return jnp.where(reached_TG[..., None], choice_TE.reshape(by_group), -jnp.inf).reshape(
        T, num_experts
    )


def _weights(options: RouterOptions, chosen_TK, lse_T1):
    """The weights of the chosen logits; `lse_T1` where a softmax is over all experts."""
    if options.score == "softmax":
        # A softmax over the chosen needs no sum over all.
        log_TK = chosen_TK if lse_T1 is None else chosen_TK - lse_T1
    else:
        log_TK = log_scores(chosen_TK, options.score)
    weights_TK = jax.nn.softmax(log_TK, axis=-1) if options.renormalize else jnp.exp(log_TK)
    return weights_TK * options.scale


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def differentiable(select: Callable, options: RouterOptions, logits_TE, bias_E, valid_T) -> Routes:
    """Returns select(options, logits_TE, bias_E, valid_T), whose weights have a gradient; in place
    of the bias `select` may take whatever else it goes by."""
    return select(options, logits_TE, bias_E, valid_T)


def _forward(select, options, logits_TE, bias_E, valid_T):
    routes = select(options, logits_TE, bias_E, valid_T)
    return routes, (logits_TE, routes.experts_TK, routes.weights_TK)


def _backward(_, options: RouterOptions, residuals, cotangents: Routes):
    logits_TE, experts_TK, weights_TK = residuals
    valid_T1 = experts_TK[:, :1] < logits_TE.shape[1]
    d_weights_TK = jnp.where(valid_T1, cotangents.weights_TK, 0)
    if options.score == "softmax" and not options.renormalize:
        d_chosen_TK = d_weights_TK * weights_TK
        d_all_TE = -jax.nn.softmax(logits_TE, axis=-1) * d_chosen_TK.sum(axis=-1, keepdims=True)
        d_logits_TE = jnp.where(valid_T1, d_all_TE, 0)  # padding may hold NaN
    else:
        chosen_TK = jnp.take_along_axis(logits_TE, experts_TK, axis=-1, mode="clip")
        _, pull = jax.vjp(lambda chosen: _weights(options, chosen, None), chosen_TK)
        (d_chosen_TK,) = pull(d_weights_TK)
        d_logits_TE = jnp.zeros_like(logits_TE)
    # Without the barrier XLA:CPU computes the gradient of the weights again for each of E columns.
    d_chosen_TK = lax.optimization_barrier(d_chosen_TK)
    ids_1E = jnp.arange(logits_TE.shape[1], dtype=jnp.int32)[None]
    for k in range(options.top_k):  # one pass: all K selects of an element are fused
        mine_TE = experts_TK[:, k : k + 1] == ids_1E
        d_logits_TE = d_logits_TE + jnp.where(mine_TE, d_chosen_TK[:, k : k + 1], 0)
    return d_logits_TE, None, None


differentiable.defvjp(_forward, _backward)


def route(logits_TE, bias_E, valid_T, options: RouterOptions) -> Routes:
    """See the package."""
    return differentiable(_select, options, logits_TE, bias_E, valid_T)


def _given(options: RouterOptions, logits_TE, experts_TK, valid_T) -> Routes:
    """The forward pass where the experts are given."""
    valid_T = valid_T & ((experts_TK >= 0) & (experts_TK < logits_TE.shape[1])).all(axis=1)
    return _routes(options, logits_TE, experts_TK, valid_T)


def weigh(logits_TE, experts_TK, valid_T, options: RouterOptions) -> Routes:
    """See the package."""
    return differentiable(_given, options, logits_TE, experts_TK, valid_T)
