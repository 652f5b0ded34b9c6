"""What a cross-entropy over a large vocabulary needs of its logits, without keeping the logits.

    lse_T, target_logit_T = logit_stats(x_TD, w_DV, targets_T)
    nll_T = lse_T - target_logit_T

With the vocabulary split over devices, each calls it on its slice, and joins the two by a
log-sum-exp and a sum.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.cross_entropy import reference, xla
from pallas_kernels.pick import Choice, pick


def logit_stats(
    x_TD: Float[Array, "T D"],
    w_DV: Float[Array, "D V"],
    targets_T: Int[Array, " T"],
    *,
    valid_vocab: int | Int[Array, ""] | None = None,
    impl: str | None = None,
) -> tuple[Float[Array, " T"], Float[Array, " T"]]:
    """Returns (log sum exp of x @ w over the vocabulary, logit of the target), float32 or wider.

    A target outside 0 .. V-1 (none, or in another device's slice) gives the logit 0. Columns from
    `valid_vocab` on are padding and count nowhere, nor does w get a gradient there. How many count
    may be known on the device alone; of none the lse is -inf. Differentiable in x and w through
    both results.
    FLOPs: 2*T*D*V forward, three times that backward (the logits are computed again).
    """
    if isinstance(valid_vocab, int) and not 0 < valid_vocab <= w_DV.shape[1]:
        raise ValueError(f"valid_vocab={valid_vocab} is not in 1..{w_DV.shape[1]}, w's columns")
    valid = None if valid_vocab is None else jnp.asarray(valid_vocab, jnp.int32)
    choices = [Choice("xla", xla.logit_stats), Choice("reference", reference.logit_stats)]
    return pick("logit_stats", impl, choices)(x_TD, w_DV, targets_T, valid)


__all__ = ["logit_stats"]
