"""Routing: which K of E experts each token goes to, and with what weight. Pure, no mesh.

    logits = x w        scores s = softmax(logits) or sigmoid(logits)
    experts = top-k of s + bias            (the bias steers the choice and nothing else;
                                            under quantile balancing: of logits + bias)
    weights = s[experts] * scale, or s[experts] / sum(s[experts]) * scale when renormalised

The experts may also be given (forced, hashed, replayed, ...: `choice.py`); the weights are then the
live scores of those, so that the router learns all the same. Which slots find room in their expert
is decided after that: `capacity.py`. Renormalisation happens in log space, so that tiny scores
survive: a softmax over the chosen logits, or over the chosen log-sigmoids. With a softmax score it
equals "top-k, then softmax". Ties go to the lowest expert index. The choice is one kernel:
`pallas_kernels/router`.
"""

import dataclasses
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

import pallas_kernels
from moejax.core.precision import at_least_float32
from pallas_kernels import RouterOptions, log_scores
from pallas_kernels.router import Routes

SCORES = ("softmax", "sigmoid", "sqrt_softplus")
SELECTIONS = ("top_k", "sinkhorn", "expert_choice")
FORCES = ("", "balanced", "skewed")
DROP_POLICIES = ("probs", "position")


@dataclasses.dataclass(frozen=True)
class RouterConfig:
    """How tokens choose experts (what keeps the choice balanced: `BalanceConfig`)."""

    score: str = "softmax"
    """"softmax" (over all experts), or, each expert alone, "sigmoid" (DeepSeek-V3) or
    "sqrt_softplus"."""
    renormalize: bool = True
    """Make the K weights of a token sum to 1 (before `scale`)."""
    scale: float = 1.0
    """Factor on the weights (DeepSeek-V3: 2.5)."""
    num_groups: int = 1
    """Groups of neighbouring experts, ranked before their experts are; 1: none. Groups = ep is
    device-limited routing, groups = nodes node-limited: a token then visits `topk_groups` of them
    (DeepSeek-V3: 8, of which 4)."""
    topk_groups: int = 1
    """Groups that a token's experts may come from."""
    num_group_score: int = 0
    """A group is ranked by the sum of its this many best scores, bias added (DeepSeek-V2: 1, V3:
    2); 0: top_k // topk_groups of them (at least 1)."""
    selection: str = "top_k"
    """Who chooses: "top_k" (the token), "sinkhorn" (the token, in training by scores that are
    balanced over each row) or "expert_choice" (each expert takes its best tokens of each row, which
    looks ahead: neither training nor evaluation is causal)."""
    linear_bias: bool = False
    """Add a learned vector to the logits (gpt-oss)."""
    jitter: float = 0.0
    """In training, multiply what the router reads by U(1 - jitter, 1 + jitter), drawn for each
    element (Switch Transformer: 0.01)."""
    capacity_factor: float = 0.0
    """Room of an expert for the tokens of one row, as a multiple of a balanced load; a token that
    finds none loses that expert alone. 0: dropless. In evaluation too."""
    drop_policy: str = "probs"
    """Who finds room: "probs" (the greatest weights, which looks ahead) or "position" (who comes
    first in the row)."""
    pad_to_capacity: bool = False
    """Fill every expert up to its capacity with tokens of weight 0: even loads, known before."""
    hash_layers: int = 0
    """The first so many MoE layers choose experts by token id, from a fixed random table (hash
    layers, Roller et al. 2021); weights stay live."""
    force: str = ""
    """Replace the choice, for benchmarks: "balanced" (round robin) or "skewed" (Zipf: expert e gets
    a share of 1 / (e + 1)); weights stay live."""
    record: str = ""
    """Folder into which each training step's choice is written, one file a step."""
    replay: str = ""
    """Folder with the choice of each training step, as `record` or a rollout engine writes it;
    weights stay live."""

    def __post_init__(self):
        choices = dict(
            score=SCORES, selection=SELECTIONS, force=FORCES, drop_policy=DROP_POLICIES
        )
        for name, known in choices.items():
            if getattr(self, name) not in known:
                named = ", ".join(choice or "''" for choice in known)
                raise ValueError(f"router.{name}={getattr(self, name)!r}: choose from {named}")
        self._check_choice()

    def _check_choice(self):
        if not 0 <= self.jitter < 1:
            raise ValueError(f"router.jitter={self.jitter} is not in [0, 1): 0.01 is usual")
        if min(self.capacity_factor, self.hash_layers, self.num_group_score) < 0:
            raise ValueError(
                "router.capacity_factor, hash_layers and num_group_score must not be negative: "
                "0 turns each off"
            )
        room = self.capacity_factor and self.selection != "expert_choice"
        if self.pad_to_capacity and not room:
            raise ValueError(
                "router.pad_to_capacity=True needs a capacity_factor, and a selection that leaves "
                "room: with selection='expert_choice' all experts are full"
            )
        whole = self.selection != "top_k"
        askers = dict(force=self.force, replay=self.replay, hash_layers=self.hash_layers)
        asked = [f"{name}={value!r}" for name, value in askers.items() if value]
        if whole:
            asked.append(f"selection={self.selection!r}")
        if len(asked) > 1:
            raise ValueError(
                f"router.{' and '.join(asked)} each decide where tokens go: choose one"
            )
        if whole and self.num_groups > 1:
            raise ValueError(
                f"router.selection={self.selection!r} knows no groups: set router.num_groups=1"
            )
        if self.selection == "expert_choice" and self.record:
            raise ValueError(
                "router.record holds K experts a token, which selection='expert_choice' does not "
                "keep to: record='' or another selection"
            )

    def options(
        self, num_experts: int, top_k: int, bias_on: str = "scores"
    ) -> RouterOptions:
        """Returns what the kernel goes by. Raises ValueError where E experts do not fit it."""
        per_group = self.num_group_score or max(top_k // self.topk_groups, 1)
        if self.topk_groups == self.num_groups:  # all are in reach, and none is ranked
            per_group = 1
        try:
            made = RouterOptions(
                top_k, self.score, self.renormalize, self.scale,
                self.num_groups, self.topk_groups, per_group, bias_on,
            )  # fmt: skip
            made.check(num_experts)
        except ValueError as error:
            raise ValueError(
                f"model.moe.router: {error} (num_groups equal groups of num_experts, of which "
                "topk_groups must hold top_k experts)"
            ) from None
        return made


class Routing(NamedTuple):
    """A token's choice, and what the balance losses need of it."""

    experts_tK: Int[Array, "t K"]
    """Chosen experts; E (no expert) for every slot of a padding token. Where experts choose, a slot
    for each expert."""
    weights_tK: Float[Array, "t K"]
    """Combine weights, in the router dtype; 0 for padding."""
    logits_tE: Float[Array, "t E"]
    probs_tE: Float[Array, "t E"]
    """Scores normalised over all experts: what "P" is in the load-balancing loss."""
    load_E: Int[Array, " E"]
    """Slots that chose each expert; padding counts nowhere."""
    plain: bool = False
    """Whether the choice is known to be the top-k of the logits and nothing else (static)."""


def _product(x_tD, w_DE, dtype, precision):
    wide = at_least_float32(jnp.result_type(dtype))
    if x_tD.dtype != w_DE.dtype or wide == jnp.float64:
        x_tD, w_DE = x_tD.astype(wide), w_DE.astype(wide)
    product = jnp.matmul(x_tD, w_DE, precision=precision, preferred_element_type=wide)
    return product.astype(dtype)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def logits(x_tD: Float[Array, "t D"], w_DE: Float[Array, "D E"], dtype) -> Float[Array, "t E"]:
    """Returns x w in `dtype` (the router's), summed in float32 or wider, no input rounded.

    Two bfloat16 inputs stay so: their products are exact in float32. Others are multiplied as
    float32 at full precision, where a GPU would round them to TF32, so that experts with near
    scores are told apart; gradients are at the default precision. The backward pass casts again, so
    that no wide copy of x is saved for it.
    """
    return _product(x_tD, w_DE, dtype, jax.lax.Precision.HIGHEST)


def _logits_backward(dtype, saved, d_logits_tE):
    product = partial(_product, dtype=dtype, precision=jax.lax.Precision.DEFAULT)
    return jax.vjp(product, *saved)[1](d_logits_tE)


logits.defvjp(lambda x_tD, w_DE, dtype: (logits(x_tD, w_DE, dtype), (x_tD, w_DE)), _logits_backward)


def _all_that_chose(logits_tE, given_tE, valid_t, cfg: RouterConfig) -> Routes:
    """The Routes where slot e holds expert e or none: a weight for each that is there."""
    num_experts = logits_tE.shape[1]
    experts_tE = jnp.where(valid_t[:, None], given_tE, num_experts)
    taken_tE = experts_tE < num_experts
    scores_tE = jnp.exp(log_scores(jnp.where(valid_t[:, None], logits_tE, 0), cfg.score))
    weights_tE = jnp.where(taken_tE, scores_tE * cfg.scale, 0)
    return Routes(experts_tE, weights_tE, taken_tE.sum(axis=0, dtype=jnp.int32))


@jax.named_scope("route")
def route(
    logits_tE: Float[Array, "t E"],
    bias_E: Float[Array, " E"] | None,
    valid_t: Bool[Array, " t"],
    cfg: RouterConfig,
    top_k: int,
    given_tK: Int[Array, "t K"] | None = None,
    bias_on: str = "scores",
) -> Routing:
    """Returns the Routing of each token. Padding (not valid) reaches no expert and no loss.

    `given_tK` are experts that are chosen already.
    """
    options = cfg.options(logits_tE.shape[1], top_k, bias_on)
    if cfg.selection == "expert_choice" and given_tK is not None:
        routes = _all_that_chose(logits_tE, given_tK, valid_t, cfg)
    elif given_tK is None:
        routes = pallas_kernels.route(logits_tE, options, bias_E=bias_E, valid_T=valid_t)
    else:
        routes = pallas_kernels.weigh(logits_tE, given_tK, options, valid_T=valid_t)
    # XLA joins these with the sums over tokens that the losses take of them.
    probs_tE = jax.nn.softmax(log_scores(logits_tE, cfg.score), axis=-1)
    weights_tK = routes.weights_TK.astype(logits_tE.dtype)
    plain = bias_E is None and given_tK is None and not options.limited
    return Routing(routes.experts_TK, weights_tK, logits_tE, probs_tE, routes.load_E, plain)
