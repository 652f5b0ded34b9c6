"""`logit_stats` by chunks of tokens: never more than a chunk's logits at once, forward or backward.

The backward computes a chunk's logits again: d_logits = softmax * d_lse + onehot * d_target. The
gradient of w is summed in float32 (or wider) over the chunks.
"""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.cross_entropy import reference
from pallas_kernels.linear import ROWS_BY_ROWS, contract_rows, product

CHUNK = 1024  # tokens


def _chunks(a, size: int):
    count = -(-a.shape[0] // size)
    padded = jnp.pad(a, ((0, count * size - a.shape[0]), *((0, 0),) * (a.ndim - 1)))
    return padded.reshape(count, size, *a.shape[1:])


@jax.custom_vjp
def logit_stats(x_TD, w_DV, targets_T, valid_vocab):
    """See the package."""
    size, T = min(CHUNK, x_TD.shape[0]), x_TD.shape[0]

    def chunk(_, at):
        return None, reference.logit_stats(at[0], w_DV, at[1], valid_vocab)

    _, stats = lax.scan(chunk, None, (_chunks(x_TD, size), _chunks(targets_T, size)))
    return tuple(a.reshape(-1)[:T] for a in stats)


def _forward(x_TD, w_DV, targets_T, valid_vocab):
    lse_T, target_T = logit_stats(x_TD, w_DV, targets_T, valid_vocab)
    return (lse_T, target_T), (x_TD, w_DV, targets_T, valid_vocab, lse_T)


def _backward(saved, cotangents):
    x_TD, w_DV, targets_T, valid_vocab, lse_T = saved
    size, T = min(CHUNK, x_TD.shape[0]), x_TD.shape[0]
    columns_1V = jnp.arange(w_DV.shape[1], dtype=targets_T.dtype)[None]

    def chunk(dw_DV, at):
        x_cD, target_c, lse_c, d_lse_c, d_target_c = at
        logits_cV = reference.logits(x_cD, w_DV, valid_vocab)
        d_cV = jnp.exp(logits_cV - lse_c[:, None]) * d_lse_c[:, None]
        if valid_vocab is not None:  # where no column counts, that was -inf less -inf
            d_cV = jnp.where(columns_1V < valid_vocab, d_cV, 0)
        d_cV = jnp.where(columns_1V == target_c[:, None], d_cV + d_target_c[:, None], d_cV)
        d_cV = d_cV.astype(x_cD.dtype)
        dx_cD = product(d_cV, w_DV, ROWS_BY_ROWS)
        return dw_DV + contract_rows(x_cD, d_cV), dx_cD

    columns = w_DV.shape[1] if valid_vocab is None else valid_vocab
    known_T = (targets_T >= 0) & (targets_T < columns)
    rows = (x_TD, targets_T, lse_T, cotangents[0], jnp.where(known_T, cotangents[1], 0))
    dw_DV = (w_DV * 0).astype(lse_T.dtype)  # a carry starts as varying as it ends
    dw_DV, dx = lax.scan(chunk, dw_DV, tuple(_chunks(a, size) for a in rows))
    return dx.reshape(-1, x_TD.shape[1])[:T], dw_DV.astype(w_DV.dtype), None, None


logit_stats.defvjp(_forward, _backward)
