"""Routing: which K of E experts each token goes to, and with what weight. Pure, no mesh.

    logits = x w        scores s = softmax(logits) or sigmoid(logits)
    experts = top-k of s + bias            (the bias steers the choice and nothing else;
                                            under quantile balancing: of logits + bias)
    weights = s[experts] * scale, or s[experts] / sum(s[experts]) * scale when renormalised

Renormalisation happens in log space, so that tiny scores survive: a softmax over the chosen
logits, or over the chosen log-sigmoids. With a softmax score it equals "top-k, then softmax".
Ties go to the lowest expert index. The choice is one kernel: `pallas_kernels/router`.
"""

import dataclasses
from typing import NamedTuple

import jax
from jaxtyping import Array, Bool, Float, Int

import pallas_kernels
from pallas_kernels import RouterOptions, log_scores

SCORES = ("softmax", "sigmoid")


@dataclasses.dataclass(frozen=True)
class RouterConfig:
    """How tokens choose experts (what keeps the choice balanced: `BalanceConfig`)."""

    score: str = "softmax"
    """"softmax" (over all experts) or "sigmoid" (each expert alone; DeepSeek-V3)."""
    renormalize: bool = True
    """Make the K weights of a token sum to 1 (before `scale`)."""
    scale: float = 1.0
    """Factor on the weights (DeepSeek-V3: 2.5)."""

    def __post_init__(self):
        if self.score not in SCORES:
            raise ValueError(f"router.score={self.score!r}: choose from {', '.join(SCORES)}")


class Routing(NamedTuple):
    """A token's choice, and what the balance losses need of it."""

    experts_tK: Int[Array, "t K"]
    """Chosen experts; E (no expert) for every slot of a padding token."""
    weights_tK: Float[Array, "t K"]
    """Combine weights, in the router dtype; 0 for padding."""
    logits_tE: Float[Array, "t E"]
    probs_tE: Float[Array, "t E"]
    """Scores normalised over all experts: what "P" is in the load-balancing loss."""
    load_E: Int[Array, " E"]
    """Slots that chose each expert; padding counts nowhere."""
    plain: bool = False
    """Whether the choice is known to be the top-k of the logits and nothing else (static)."""


@jax.named_scope("route")
def route(
    logits_tE: Float[Array, "t E"],
    bias_E: Float[Array, " E"] | None,
    valid_t: Bool[Array, " t"],
    cfg: RouterConfig,
    top_k: int,
    bias_on: str = "scores",
) -> Routing:
    """Returns the Routing of each token. Padding (not valid) reaches no expert and no loss."""
    options = RouterOptions(top_k, cfg.score, cfg.renormalize, cfg.scale, bias_on=bias_on)
    routes = pallas_kernels.route(logits_tE, options, bias_E=bias_E, valid_T=valid_t)
    # XLA joins these with the sums over tokens that the losses take of them.
    probs_tE = jax.nn.softmax(log_scores(logits_tE, cfg.score), axis=-1)
    weights_tK = routes.weights_TK.astype(logits_tE.dtype)
    plain = bias_E is None and not options.limited
    return Routing(routes.experts_TK, weights_tK, logits_tE, probs_tE, routes.load_E, plain)
