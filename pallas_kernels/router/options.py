"""What a router can be asked for, what it answers, and the scores as logarithms."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

SCORES = ("softmax", "sigmoid", "sqrt_softplus")


@dataclasses.dataclass(frozen=True)
class RouterOptions:
    """How a token's K of E experts are chosen and weighted; all static."""

    top_k: int
    """K, the experts of a token."""
    score: str = "softmax"
    """"softmax" (over all experts), "sigmoid" or "sqrt_softplus" (each expert alone)."""
    renormalize: bool = True
    """Make the K weights of a token sum to 1 (before `scale`). With "softmax" this is "top-k, then
    softmax"; without, it is "softmax, then top-k"."""
    scale: float = 1.0
    """Factor on the weights (DeepSeek-V3: 2.5)."""
    num_groups: int = 1
    """Groups of E / num_groups neighbouring experts, ranked before their experts are; 1: none."""
    topk_groups: int = 1
    """Groups that a token's experts may come from."""
    num_group_score: int = 1
    """A group's rank is by the sum of its this many best scores, bias added (DeepSeek-V3: 2)."""
    bias_on: str = "scores"
    """What the bias is added to: "scores" (DeepSeek-V3) or "logits" (quantile balancing)."""

    def __post_init__(self):
        if self.score not in SCORES:
            raise ValueError(f"score={self.score!r}: choose from {', '.join(SCORES)}")
        if self.bias_on not in ("scores", "logits"):
            raise ValueError(f"bias_on={self.bias_on!r}: choose from scores, logits")
        if min(self.top_k, self.num_groups, self.num_group_score) < 1:
            raise ValueError("top_k, num_groups and num_group_score must be at least 1")
        if not 1 <= self.topk_groups <= self.num_groups:
            raise ValueError(
                f"topk_groups={self.topk_groups} is not in 1..num_groups={self.num_groups}"
            )
        if self.bias_on == "logits" and self.limited:
            raise ValueError(
                f"a bias on logits cannot rank groups (topk_groups={self.topk_groups} of "
                f"{self.num_groups}): quantile balancing needs num_groups=1"
            )

    @property
    def limited(self) -> bool:
        """Whether some group's experts are out of reach."""
        return self.topk_groups < self.num_groups

    def check(self, num_experts: int) -> None:
        """Raises ValueError where E experts cannot be routed so."""
        if num_experts % self.num_groups:
            raise ValueError(f"num_groups={self.num_groups} does not divide E={num_experts}")
        size = num_experts // self.num_groups
        if self.top_k > self.topk_groups * size:
            raise ValueError(
                f"top_k={self.top_k} experts do not fit in topk_groups={self.topk_groups} groups "
                f"of {size}"
            )
        if self.num_group_score > size:
            raise ValueError(f"num_group_score={self.num_group_score} of groups of {size} experts")


class Routes(NamedTuple):
    """Where tokens go."""

    experts_TK: Int[Array, "T K"]
    """int32, the first choice first; E (no expert) for every slot of a padding token."""
    weights_TK: Float[Array, "T K"]
    """Combine weights, float32 (float64 for float64); 0 for padding."""
    load_E: Int[Array, " E"]
    """int32, the slots that chose each expert; padding counts nowhere."""


def log_scores(logits: Float[Array, "... E"], score: str) -> Float[Array, "... E"]:
    """Returns the logarithm of the scores, exact to rounding where a score itself underflows."""
    if score == "softmax":
        return jax.nn.log_softmax(logits, axis=-1)
    if score == "sigmoid":
        return jax.nn.log_sigmoid(logits)
    # log(log(1 + y)) = logit - y / 2 + 5 y^2 / 24 - .. with y = exp(logit), for small y.
    small = jnp.minimum(logits, -15.0)
    y = jnp.exp(small)
    large = jnp.log(jax.nn.softplus(jnp.maximum(logits, -15.0)))
    return 0.5 * jnp.where(logits < -15.0, small - y * (0.5 - y * (5 / 24)), large)
