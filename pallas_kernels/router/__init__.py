"""The router: which K of E experts each token goes to, with what weight, and how many came.

    options = RouterOptions(top_k=8, score="sigmoid", num_groups=8, topk_groups=4, ..)
    experts_TK, weights_TK, load_E = route(logits_TE, options, bias_E=bias_E, valid_T=valid_T)

One pass over the logits. The probabilities of a load-balancing loss are not returned: only their
sums over tokens enter the loss, which XLA takes in one read of the logits and a gradient needs
anyway, while a kernel would have to write all T x E of them.
"""

from functools import partial

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.deviceless import refusal_for, target_gpu
from pallas_kernels.pick import Choice, pick
from pallas_kernels.router import mosaic, reference, xla
from pallas_kernels.router.options import RouterOptions, Routes, log_scores


def route(
    logits_TE: Float[Array, "T E"],
    options: RouterOptions,
    *,
    bias_E: Float[Array, " E"] | None = None,
    valid_T: Bool[Array, " T"] | None = None,
    impl: str | None = None,
) -> Routes:
    """Returns the Routes of each token: (experts_TK, weights_TK, load_E); see `reference.py`.

    `bias_E` steers the choice and nothing else, and gets no gradient. Tokens that are not valid
    (all are, if None) reach no expert, whatever they hold. Computed in float32, or float64 for
    float64. Differentiable in the logits through the weights. A token with a NaN gets K different
    experts all the same, which ones is not defined, and its weights may be NaN.

    Raises ValueError for shapes or options that do not fit, or an unknown `impl`. Bytes: T*E*4
    read; FLOPs: of no account.
    """
    if logits_TE.ndim != 2:
        raise ValueError(f"route takes logits [T, E]; got {logits_TE.shape}")
    T, E = logits_TE.shape
    options.check(E)
    if bias_E is not None and bias_E.shape != (E,):
        raise ValueError(f"bias {bias_E.shape} does not fit logits {logits_TE.shape}")
    if valid_T is None:
        valid_T = jnp.ones(T, bool)
    elif valid_T.shape != (T,):
        raise ValueError(f"valid {valid_T.shape} does not fit logits {logits_TE.shape}")
    wide = jnp.float64 if logits_TE.dtype == jnp.float64 else jnp.float32
    bias_E = None if bias_E is None else bias_E.astype(wide)
    logits_TE = logits_TE.astype(wide)
    choices = [
        _mosaic(logits_TE, options),
        Choice("xla", xla.route),
        Choice("reference", reference.route),
    ]
    return pick("route", impl, choices)(logits_TE, bias_E, valid_T, options)


def weigh(
    logits_TE: Float[Array, "T E"],
    experts_TK: Int[Array, "T K"],
    options: RouterOptions,
    *,
    valid_T: Bool[Array, " T"] | None = None,
) -> Routes:
    """Returns the Routes to experts that are given: the weights that `route` would give them.

    Of `options` only score, renormalize and scale count. A token whose ids are not all in 0..E-1
    reaches no expert. Differentiable in the logits through the weights; one implementation, in
    XLA, whose weights are those of `route(impl="xla")` bit for bit.
    """
    if logits_TE.ndim != 2 or experts_TK.shape != (logits_TE.shape[0], options.top_k):
        raise ValueError(
            f"weigh takes logits [T, E] and experts [T, K={options.top_k}]; got "
            f"{logits_TE.shape} and {experts_TK.shape}"
        )
    valid_T = jnp.ones(logits_TE.shape[0], bool) if valid_T is None else valid_T
    wide = jnp.float64 if logits_TE.dtype == jnp.float64 else jnp.float32
    return xla.weigh(logits_TE.astype(wide), experts_TK, valid_T, options)


def _mosaic(logits_TE, options) -> Choice:
    why = refusal_for("hopper", "blackwell", oldest_jax=(0, 12))
    T, E = logits_TE.shape
    why = why or mosaic.refusal(logits_TE.dtype, T, E, options)
    gpu = target_gpu()
    return Choice("mosaic", partial(mosaic.route, num_sms=gpu.cores if gpu else 0), why)


__all__ = ["RouterOptions", "Routes", "log_scores", "route", "weigh"]
