"""The definition of `logit_stats`: all logits at once, in obvious jnp."""

import jax
import jax.numpy as jnp


def logits(x_TD, w_DV, valid_vocab):
    """Returns x @ w in float32 or wider, -inf in padding columns."""
    wide = jnp.float64 if x_TD.dtype == jnp.float64 else jnp.float32
    logits_TV = jnp.matmul(x_TD, w_DV, preferred_element_type=wide)
    if valid_vocab is None:
        return logits_TV
    column_V = jnp.arange(w_DV.shape[1], dtype=jnp.int32)
    return jnp.where((column_V < valid_vocab)[None], logits_TV, -jnp.inf)


def logit_stats(x_TD, w_DV, targets_T, valid_vocab):
    """See the package."""
    logits_TV = logits(x_TD, w_DV, valid_vocab)
    columns = w_DV.shape[1] if valid_vocab is None else valid_vocab
    known_T = (targets_T >= 0) & (targets_T < columns)
    picked_T1 = jnp.take_along_axis(logits_TV, jnp.where(known_T, targets_T, 0)[:, None], axis=1)
    target_logit_T = jnp.where(known_T, picked_T1[:, 0], 0)
    if valid_vocab is None:
        return jax.nn.logsumexp(logits_TV, axis=1), target_logit_T
    empty = valid_vocab == 0  # its gradient must not be 0 times infinity
    lse_T = jax.nn.logsumexp(jnp.where(empty, 0, logits_TV), axis=1)
    return jnp.where(empty, -jnp.inf, lse_T), target_logit_T
