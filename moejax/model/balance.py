"""What keeps experts evenly loaded: load-balancing losses, the z-loss, biases on the choice.

With P_te the scores normalised over all E experts, and n_e the slots of some tokens that are on
expert e, the loss over a set of T tokens is

    E / (K T^2) * sum_e n_e * sum_t P_te            (1 in perfect balance)

    batch       the set is the global microbatch; the loss of a step is the mean over its tokens
    sequence    the set is a packed document; the mean over the documents of the step
    global      n_e and its T^2 / sum_t count, beside this microbatch, the step's earlier ones:
                E sum_e (n_e so far / K T so far) * sum_t P_te / tokens of the step

n_e counts the *plain* top-K of the logits: no bias, no groups, no capacity, as DeepSeek-V3 and
Megatron Core define it. So each loss is a function of the logits alone. Counting the choice that a
bias made, a loss would be flat once the bias has evened the load, however skewed the scores. n_e
counts all devices' tokens and has no gradient; the sum over t is this device's share: the psum of
the returned values over the token axes, added up over microbatches, is the loss of the step.

What can be equal: every loss is the same on every fold. "sequence" and z are also the same for any
number of microbatches; "batch" is defined by them; "global" is, of one microbatch, "batch", and
approaches the loss over the whole step as more microbatches have been seen: the first knows its
own load alone (Megatron Core's running mean, here weighted by tokens).

Two biases steer the choice without a loss, once an optimizer step, and one excludes the other:

    sign        b_e += rate * sign(mean(n) - n_e), on scores, n_e the choice that was made
    quantile    b = mean(beta) - beta, on logits: beta_e is where exactly K/E of the tokens would
                choose e, were each token's (K+1)-th best (logit - beta) where it is now

Padding counts nowhere. Sources: Switch Transformer; ST-MoE; Wang et al. 2024 (bias); DeepSeek-V3;
Megatron Core (global, quantile).
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, UInt

import pallas_kernels
from moejax.core import collectives
from moejax.core.mesh import Fold
from moejax.core.precision import at_least_float32
from moejax.model.router import Routing
from moejax.model.stream import Stream
from pallas_kernels import RouterOptions

LOAD_LOSSES = ("batch_loss", "sequence_loss", "global_loss")
LOSSES = (*LOAD_LOSSES, "z_loss")
EVENERS = ("batch_coeff", "sequence_coeff", "global_coeff", "bias_rate", "quantile_rate")
"""What of the configuration evens the load."""


@dataclasses.dataclass(frozen=True)
class BalanceConfig:
    """What keeps experts evenly loaded. Several losses may act at once; 0 turns one off."""

    batch_coeff: float = 0.01
    """Weight, in the training loss, of the load-balancing loss over each global microbatch (1 in
    perfect balance)."""
    sequence_coeff: float = 0.0
    """The same over each packed document (the mean over documents)."""
    global_coeff: float = 0.0
    """The same with the load of the step's earlier microbatches added to each one's own."""
    z_coeff: float = 0.0
    """Weight of the router z-loss, mean(logsumexp(logits)^2) (ST-MoE)."""
    bias_rate: float = 0.0
    """Step of the aux-loss-free expert bias (Wang et al., 2024), moved once an optimizer step
    against the sign of each expert's excess load; 0: no bias."""
    frozen_bias: bool = False
    """With bias_rate 0, still add the bias that the weights came with (a converted DeepSeek-V3)."""
    quantile_rate: float = 0.0
    """Quantile balancing: how far each optimizer step moves the experts' thresholds to those that
    would have evened its load; 1: all the way (Megatron Core's ema is 1 less this); 0: off."""

    def __post_init__(self):
        for name, value in dataclasses.asdict(self).items():
            if not 0 <= value < float("inf"):
                raise ValueError(f"balance.{name}={value} must be finite and not negative")
        if self.frozen_bias and (self.bias_rate or self.quantile_rate):
            raise ValueError(
                "balance.frozen_bias=True is a bias that does not move: set balance.bias_rate and "
                "quantile_rate to 0"
            )
        if self.quantile_rate > 1:
            raise ValueError(f"balance.quantile_rate={self.quantile_rate} is not in 0..1")
        for name in EVENERS if self.quantile_rate else ():
            if name != "quantile_rate" and getattr(self, name):
                raise ValueError(
                    f"balance.quantile_rate={self.quantile_rate} evens the load alone: set "
                    f"balance.{name}={getattr(self, name)} to 0"
                )

    def check(self, num_experts: int, top_k: int) -> None:
        """Raises ValueError for what cannot balance K of E experts."""
        if self.quantile_rate and top_k >= num_experts:
            raise ValueError(
                f"balance.quantile_rate={self.quantile_rate} with moe.top_k={top_k} of "
                f"num_experts={num_experts}: no expert is left out to be a threshold; set it to 0"
            )

    @property
    def biased(self) -> bool:
        """Whether a bias steers the choice."""
        return bool(self.bias_rate or self.quantile_rate or self.frozen_bias)

    @property
    def bias_on(self) -> str:
        """What the bias is added to (`RouterOptions.bias_on`)."""
        return "logits" if self.quantile_rate else "scores"


def counts_tE(experts_tK: Int[Array, "t K"], num_experts: int, dtype) -> Float[Array, "t E"]:
    """Returns how many slots of each token chose each expert (0 or 1; none for padding)."""
    return jax.nn.one_hot(experts_tK, num_experts, dtype=dtype).sum(axis=1)


def plain_choice(
    routing: Routing, stream: Stream
) -> tuple[Int[Array, "t K"], Float[Array, " E"]]:
    """Returns (experts, load) of the top-K of the logits: what "n" is in the losses."""
    if routing.plain:
        return routing.experts_tK, routing.load_E
    options = RouterOptions(routing.experts_tK.shape[-1])
    logits_tE = lax.stop_gradient(routing.logits_tE)
    routes = pallas_kernels.route(logits_tE, options, valid_T=stream.valid_t)
    return routes.experts_TK, routes.load_E


def load_loss(load_E, probs_tE, stream: Stream) -> Float[Array, ""]:
    """Returns this device's share of E * sum_e (share of the load) * (P summed / step's tokens).

    `load_E`: of all devices. A step of T equal microbatches gives their mean.
    """
    load_E = load_E.astype(probs_tE.dtype)
    load_E = load_E / jnp.maximum(load_E.sum(), 1.0)
    tokens = jnp.maximum(stream.counts.tokens, 1.0).astype(probs_tE.dtype)
    return probs_tE.shape[-1] * (load_E * (probs_tE.sum(axis=0) / tokens)).sum()


def sequence_loss(experts_tK, probs_tE, stream: Stream, fold: Fold) -> Float[Array, ""]:
    """Returns this device's share of the mean, over the step's documents, of their losses."""
    num_documents = stream.segment_ids_bL.size * fold.degree("cp")
    num_experts, top_k = probs_tE.shape[-1], experts_tK.shape[-1]
    chosen_tE = counts_tE(experts_tK, num_experts, probs_tE.dtype)

    def per_document(x_tE):
        return jax.ops.segment_sum(x_tE, stream.document_t, num_segments=num_documents)

    # A document may be split over tp (and cp); rows never are over dp.
    load_dE = collectives.psum(per_document(chosen_tE), fold["cp"] + fold["tp"])
    slots_d = jnp.maximum(load_dE.sum(axis=1), 1.0)
    scale_d = num_experts * top_k / slots_d**2
    share = (load_dE * per_document(probs_tE)).sum(axis=1) * scale_d
    return share.sum() / jnp.maximum(stream.counts.documents, 1.0).astype(probs_tE.dtype)


def z_loss(logits_tE, stream: Stream) -> Float[Array, ""]:
    """Returns this device's share of the mean, over the step's tokens, of logsumexp(logits)^2."""
    logits_tE = logits_tE.astype(at_least_float32(logits_tE.dtype))
    logits_tE = jnp.where(stream.valid_t[:, None], logits_tE, 0.0)
    logsumexp_t = jax.nn.logsumexp(logits_tE, axis=-1)
    z = jnp.where(stream.valid_t, logsumexp_t**2, 0.0).sum()
    return z / jnp.maximum(stream.counts.tokens, 1.0).astype(logits_tE.dtype)


@jax.named_scope("losses")
def losses(
    routing: Routing,
    stream: Stream,
    cfg: BalanceConfig,
    fold: Fold,
    load_before_E: Float[Array, " E"],
) -> dict[str, Float[Array, "..."]]:
    """Returns this device's shares of {"batch_loss", "sequence_loss", "global_loss": without
    coefficients, those that are on; "z_loss"; "load_E"; "plain_load_E" for the global loss}.

    "load_E" counts the slots of this device's tokens that chose each expert, "plain_load_E" those
    of the plain choice, of which `load_before_E` is the sum over all devices and the step's earlier
    microbatches.
    """
    found = {"z_loss": z_loss(routing.logits_tE, stream)}
    found["load_E"] = routing.load_E.astype(jnp.float32)
    if not (cfg.batch_coeff or cfg.sequence_coeff or cfg.global_coeff):
        return found
    wide = at_least_float32(routing.probs_tE.dtype)
    probs_tE = jnp.where(stream.valid_t[:, None], routing.probs_tE.astype(wide), 0.0)
    experts_tK, plain_E = plain_choice(routing, stream)
    plain_E = plain_E.astype(jnp.float32)
    load_E = collectives.psum(plain_E, fold.tokens)
    if cfg.batch_coeff:
        found["batch_loss"] = load_loss(load_E, probs_tE, stream)
    if cfg.sequence_coeff:
        found["sequence_loss"] = sequence_loss(experts_tK, probs_tE, stream, fold)
    if cfg.global_coeff:
        found["global_loss"] = load_loss(load_before_E + load_E, probs_tE, stream)
        found["plain_load_E"] = plain_E
    return found


def weighted(aux: dict[str, Float[Array, "..."]], cfg: BalanceConfig) -> Float[Array, "..."]:
    """Returns what the losses found by `losses` add to the training loss."""
    total = cfg.z_coeff * aux["z_loss"]
    for name in LOAD_LOSSES:
        if name in aux:
            total = total + getattr(cfg, name.replace("_loss", "_coeff")) * aux[name]
    return total


def update_bias(
    bias_E: Float[Array, "... E"], load_E: Float[Array, "... E"], rate: float
) -> Float[Array, "... E"]:
    """Returns bias + rate * sign(mean load - load); once an optimizer step, of the global load."""
    mean = load_E.mean(axis=-1, keepdims=True)
    return bias_E + rate * jnp.sign(mean - load_E).astype(bias_E.dtype)


def update_quantiles(
    bias_E: Float[Array, "... E"],
    threshold_E: Float[Array, "... E"],
    load_E: Float[Array, "... E"],
    rate: float,
) -> Float[Array, "... E"]:
    """Returns (1 - rate) * bias - rate * threshold, less its mean; the bias of a step that had no
    token stays. `threshold_E`: of the whole step, see `thresholds`."""
    moved = (1 - rate) * bias_E - rate * threshold_E.astype(bias_E.dtype)
    moved = moved - moved.mean(axis=-1, keepdims=True)
    return jnp.where(load_E.sum(axis=-1, keepdims=True) > 0, moved, bias_E)


def updated(
    bias_E: Float[Array, "... E"], aux: dict[str, Float[Array, "..."]], cfg: BalanceConfig
) -> Float[Array, "... E"]:
    """Returns the bias for the next step, of the aux of a whole step, summed over devices."""
    if cfg.quantile_rate:
        return update_quantiles(bias_E, aux["threshold_E"], aux["load_E"], cfg.quantile_rate)
    return update_bias(bias_E, aux["load_E"], cfg.bias_rate) if cfg.bias_rate else bias_E


def thresholds(
    routing: Routing, bias_E: Float[Array, " E"], stream: Stream, fold: Fold
) -> Float[Array, " E"]:
    """Returns this device's share of the thresholds beta_E of a step (its microbatches' mean,
    weighted by tokens): of m tokens, the (floor(m K / E) + 1)-th largest logit - alpha of a column,
    alpha_t the (K+1)-th best logit + bias of a token. Exact over all devices, so the same on every
    fold."""
    top_k, num_experts = routing.experts_tK.shape[-1], routing.logits_tE.shape[-1]
    logits_tE = lax.stop_gradient(routing.logits_tE)
    best, _ = lax.top_k(logits_tE + bias_E[None].astype(logits_tE.dtype), top_k + 1)
    margin_tE = (logits_tE - best[:, -1:]).astype(jnp.float32)
    tokens = stream.counts.micro_tokens
    rank = (tokens.astype(jnp.int32) * top_k) // num_experts + 1
    found_E = largest(margin_tE, stream.valid_t, rank, fold.tokens)
    # Which device says it is of no account; the share of an empty microbatch is 0.
    weight = tokens / jnp.maximum(stream.counts.tokens, 1.0)
    first = collectives.axis_index(fold.tokens) == 0
    return jnp.where(first & (tokens > 0), found_E * weight, 0.0)


def largest(
    x_tE: Float[Array, "t E"], valid_t: Bool[Array, " t"], rank: Int[Array, ""], axes
) -> Float[Array, " E"]:
    """Returns the rank-th largest (1: the largest) of each float32 column, over the valid rows of
    all devices along `axes`, exactly: digit by digit of 4 bits, by counting.

    8 psums of 15 E whole numbers, instead of a sort of columns that no device holds.
    """
    bits_tE = lax.bitcast_convert_type(x_tE, jnp.uint32)
    top = jnp.uint32(1 << 31)
    # Whole numbers in the order of the floats; 0 (below -inf) for rows that do not count.
    key_tE = jnp.where(bits_tE >= top, ~bits_tE, bits_tE | top)
    key_tE = jnp.where(valid_t[:, None], key_tE, jnp.uint32(0))
    digits_D = jnp.arange(1, 16, dtype=jnp.uint32)
    prefix_E: UInt[Array, " E"] = jnp.zeros(x_tE.shape[1], jnp.uint32)
    for shift in range(28, -1, -4):
        tried_ED = prefix_E[:, None] | (digits_D << shift)[None]
        above_ED = jnp.sum(key_tE[:, :, None] >= tried_ED[None], axis=0, dtype=jnp.int32)
        above_ED = collectives.psum(above_ED, axes)
        digit_E = jnp.sum(above_ED >= rank, axis=1, dtype=jnp.uint32)
        prefix_E = prefix_E | (digit_E << shift)
    bits_E = jnp.where(prefix_E >= top, prefix_E ^ top, ~prefix_E)
    return lax.bitcast_convert_type(bits_E, jnp.float32)


def busiest_rank(load_E: Float[Array, "... E"], fold: Fold) -> Float[Array, "..."]:
    """Returns rows of the busiest device over those of a balanced load, >= 1: what `moe.budget`
    must hold. `load_E`: slots of this device's tokens; 1 where there is no slot.

    The devices of one ep (and etp) group send to each other alone; the worst group counts.
    """
    load_E = collectives.psum(load_E, fold["ep"] + fold["etp"])
    rows_r = load_E.reshape(*load_E.shape[:-1], fold.degree("ep"), -1).sum(axis=-1)
    slots = rows_r.sum(axis=-1)
    ratio = fold.degree("ep") * rows_r.max(axis=-1) / jnp.maximum(slots, 1.0)
    return collectives.pmax(jnp.where(slots > 0, ratio, 1.0), fold.all)


def entropy(share_E: Float[Array, "... E"]) -> Float[Array, "..."]:
    """Returns the entropy of shares that sum to 1, over that of even ones: 1 even, 0 one expert."""
    if share_E.shape[-1] == 1:
        return jnp.ones(share_E.shape[:-1], share_E.dtype)
    found = -jax.scipy.special.xlogy(share_E, share_E).sum(axis=-1)
    return found / jnp.log(jnp.asarray(share_E.shape[-1], share_E.dtype))
