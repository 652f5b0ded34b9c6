"""Choices of experts that are not a token's own top-k: given, forced, hashed, or over a whole row.

Each function returns expert ids; the weights are then the live scores at these (`router.route`).
Nothing here depends on the fold, the number of microbatches or recompute: random numbers go by a
token's place in the global batch, and what compares tokens with each other does so within a row.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from moejax.core import collectives
from moejax.core.mesh import Fold
from moejax.model.capacity import capacity_b
from moejax.model.context import of_whole_rows, whole_rows
from moejax.model.router import RouterConfig, Routing, route
from moejax.model.stream import Stream
from pallas_kernels import log_scores

SINKHORN_TOLERANCE, SINKHORN_STEPS = 1e-4, 1000


def choose(
    logits_tE: Float[Array, "t E"],
    bias_E: Float[Array, " E"] | None,
    stream: Stream,
    cfg: RouterConfig,
    top_k: int,
    fold: Fold,
    table_VK: Int[Array, "V K"] | None = None,
    bias_on: str = "scores",
) -> Int[Array, "t _"] | None:
    """Returns the experts of each token, or None where they are the token's own top-k."""
    num_experts, logits_tE = logits_tE.shape[1], lax.stop_gradient(logits_tE)
    if stream.given_tK is not None:
        return stream.given_tK
    if cfg.force == "balanced":
        return balanced(stream.number_t, num_experts, top_k)
    if cfg.force == "skewed":
        return skewed(stream.number_t, num_experts, top_k)
    if table_VK is not None:
        own = route(logits_tE, bias_E, stream.valid_t, cfg, top_k, bias_on=bias_on)
        hashed = stream.layer < jnp.asarray(cfg.hash_layers, jnp.int32)
        return jnp.where(hashed, table_VK[stream.ids_t], own.experts_tK)
    if cfg.selection == "expert_choice":
        return expert_choice(logits_tE, stream, cfg, top_k, fold)
    if cfg.selection == "sinkhorn" and stream.key is not None:
        logits_bLE, valid_bL = (rows(a, stream, fold) for a in (logits_tE, stream.valid_t))
        scores_bLE = jax.vmap(sinkhorn)(logits_bLE, valid_bL)
        _, experts_bLK = lax.top_k(scores_bLE, top_k)
        return of_whole_rows(experts_bLK, stream.spread, fold)
    return None


def recall(
    live: Routing, stream: Stream, cfg: RouterConfig, top_k: int, fold: Fold
) -> Routing:
    """Returns the routing that counts: of a layer that is computed again, with the experts of the
    first time, whatever it would choose now. How often that is the same, the probe is told."""
    made, agreed = live, live.load_E.sum()
    if stream.recalled_tK is not None:
        first_tK, num_experts = stream.recalled_tK, live.logits_tE.shape[1]
        made = route(live.logits_tE, None, stream.valid_t, cfg, top_k, first_tK)
        made = made._replace(plain=live.plain)
        agreed = ((live.experts_tK == first_tK) & (first_tK < num_experts)).sum()
    if stream.probe is None:
        return made
    agreed = collectives.vary(agreed.astype(stream.probe.dtype), fold.all)
    return made._replace(weights_tK=_tell(made.weights_tK, stream.probe, agreed))


@jax.custom_vjp
def _tell(x: Array, probe: Float[Array, ""], value: Float[Array, ""]) -> Array:
    """Returns x; the gradient of the probe is the value, so that a backward pass can report it."""
    return x


_tell.defvjp(lambda x, probe, value: (x, value), lambda value, dx: (dx, value, None))


def rows(x_t: Array, stream: Stream, fold: Fold) -> Array:
    """Returns an array [t, ...] as whole rows [b, L, ...], gathered over tp and cp."""
    return whole_rows(x_t, len(stream.segment_ids_bL), stream.spread, fold)


def jitter(x_tD: Float[Array, "t D"], stream: Stream, eps: float, dtype) -> Float[Array, "t D"]:
    """Returns x * U(1 - eps, 1 + eps) in training, x in evaluation.

    The draw goes by (the step's key, the layer, the token's number, the column). Source: Switch
    Transformer.
    """
    if not eps or stream.key is None:
        return x_tD
    key = jax.random.fold_in(stream.key, stream.layer)

    def draw(number):
        mine = jax.random.fold_in(key, number)
        return jax.random.uniform(mine, x_tD.shape[1:], dtype, 1 - eps, 1 + eps)

    return x_tD.astype(dtype) * jax.vmap(draw)(stream.number_t)


def balanced(number_t: Int[Array, " t"], num_experts: int, top_k: int) -> Int[Array, "t K"]:
    """Returns expert (n K + k) mod E for slot k of token n: any E consecutive slots meet every
    expert once."""
    k_1K = jnp.arange(top_k, dtype=jnp.int32)[None]
    # (n K) mod E of n mod E: the product does not overflow.
    return (number_t[:, None] % num_experts * top_k + k_1K) % num_experts


def skewed(number_t: Int[Array, " t"], num_experts: int, top_k: int) -> Int[Array, "t K"]:
    """Returns K different experts of each token, the first one expert e with a probability
    proportional to 1 / (e + 1) (Zipf), each next one so of those that are left.

    Expert e rings after (e + 1) * -log(u), u uniform: the K that ring first (Efraimidis and
    Spirakis, 2006). u = (h // 256 + 0.5) / 2^24, h a 32-bit hash of n E + e (murmur3's finaliser):
    the same for every step and layer.
    """
    expert_1E = jnp.arange(num_experts, dtype=jnp.uint32)[None]
    h = number_t.astype(jnp.uint32)[:, None] * jnp.uint32(num_experts) + expert_1E
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        h = (h ^ (h >> shift)) * jnp.uint32(factor)
    h = h ^ (h >> 16)
    u_tE = ((h >> 8).astype(jnp.float32) + 0.5) / 2**24
    rings_tE = (expert_1E + 1).astype(jnp.float32) * -jnp.log(u_tE)
    return lax.top_k(-rings_tE, top_k)[1]


def hash_table(key: Array, vocab_size: int, num_experts: int, top_k: int) -> Int[Array, "V K"]:
    """Returns K different experts for each token id, all sets alike likely."""
    drawn_VE = jax.random.uniform(key, (vocab_size, num_experts))
    return lax.top_k(drawn_VE, top_k)[1].astype(jnp.int32)


def expert_choice(
    logits_tE: Float[Array, "t E"], stream: Stream, cfg: RouterConfig, top_k: int, fold: Fold
) -> Int[Array, "t E"]:
    """Returns, for each token, the experts that chose it: slot e holds e, or E (did not).

    Of each row of n tokens every expert takes the best C = ceil(n K / E * capacity_factor) (factor
    1 where it is 0) by score; ties to the earlier token. A token may get none. Source: Zhou et al.
    2022, with rows in place of batches, so that nothing depends on how the batch is cut.
    """
    num_experts = logits_tE.shape[1]
    logits_bLE, valid_bL = (rows(a, stream, fold) for a in (logits_tE, stream.valid_t))
    scores_bLE = log_scores(logits_bLE, cfg.score)
    scores_bLE = jnp.where(valid_bL[..., None], scores_bLE, -jnp.inf)
    order_bLE = jnp.argsort(-scores_bLE, axis=1, stable=True)
    rank_bLE = jnp.argsort(order_bLE, axis=1).astype(jnp.int32)  # the inverse permutation
    room_b = capacity_b(valid_bL, top_k, num_experts, cfg.capacity_factor or 1.0)
    taken_bLE = (rank_bLE < room_b[:, None, None]) & valid_bL[..., None]
    taken_tE = of_whole_rows(taken_bLE, stream.spread, fold)
    return jnp.where(taken_tE, jnp.arange(num_experts, dtype=jnp.int32)[None], num_experts)


def sinkhorn(logits_LE: Float[Array, "L E"], valid_L: Bool[Array, " L"]) -> Float[Array, "L E"]:
    """Returns the logarithm of exp(logits), rows and columns scaled in turn until all n rows sum to
    1 / n and all E columns to 1 / E. Padding counts nowhere.

    d0 = 1 / (n sum_E d1 exp(logits)), d1 = 1 / (E sum_L d0 exp(logits)), until the mean of
    |d1's change| is below 1e-4; in logarithms, so that no logit is too great. Source: Clark et al.
    2022 (S-BASE).
    """
    num_tokens = jnp.maximum(valid_L.sum(), 1).astype(logits_LE.dtype)
    logits_LE = jnp.where(valid_L[:, None], logits_LE, 0)

    def scale(log1_E):
        log0_L = -jnp.log(num_tokens) - jax.nn.logsumexp(logits_LE + log1_E[None], axis=1)
        log0_L = jnp.where(valid_L, log0_L, -jnp.inf)
        sums_E = jax.nn.logsumexp(logits_LE + log0_L[:, None], axis=0)
        return log0_L, jnp.where(valid_L.any(), -jnp.log(log1_E.size) - sums_E, log1_E)

    def step(state):
        number, _, log1_E, _ = state
        log0_L, new_E = scale(log1_E)
        change = jnp.abs(jnp.exp(new_E) - jnp.exp(log1_E)).mean()
        return number + 1, log0_L, new_E, change

    def goes_on(state):
        return (state[3] > SINKHORN_TOLERANCE) & (state[0] < SINKHORN_STEPS)

    nothing = 0 * logits_LE.sum()  # as varying over the mesh as the logits are
    start = (
        jnp.zeros((), jnp.int32) + nothing.astype(jnp.int32),
        0 * logits_LE[:, 0], 0 * logits_LE[0], 1.0 + nothing,
    )  # fmt: skip
    _, log0_L, log1_E, _ = lax.while_loop(goes_on, step, start)
    scores_LE = logits_LE + log0_L[:, None] + log1_E[None]
    return jnp.where(valid_L[:, None], scores_LE, -jnp.inf)


