"""The mixture-of-experts layer: route -> dispatch -> experts -> combine (+ shared expert)."""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from moejax.core import params
from moejax.core.mesh import Fold
from moejax.core.precision import PrecisionConfig
from moejax.model import balance, capacity, choice, router
from moejax.model.balance import EVENERS, BalanceConfig
from moejax.model.dispatch import DISPATCHERS
from moejax.model.dispatch.base import rows_from_each
from moejax.model.experts import Experts
from moejax.model.mlp import MLP
from moejax.model.pieces import in_pieces, num_pieces
from moejax.model.router import RouterConfig, route
from moejax.model.stack import LOGITS, travelled
from moejax.model.stream import Stream
from pallas_kernels import linear

Aux = dict[str, Float[Array, "..."]]


@dataclasses.dataclass(frozen=True)
class MoEConfig:
    """Shape and options of a MoE layer."""

    num_experts: int = 16
    """Experts E."""
    top_k: int = 2
    """Experts K per token."""
    ffn_dim: int = 512
    """Width F of one expert."""
    shared_ffn_dim: int = 0
    """Width of the shared expert that every token passes; 0: none."""
    shared_gate: bool = False
    """Multiply the shared expert's output by sigmoid(x w), w a vector (Qwen2-MoE)."""
    bias: bool = False
    """Biases in the experts' two projections (gpt-oss)."""
    swiglu_limit: float = 0.0
    """Clamped SwiGLU in the experts: g = min(gate, limit), u = clip(up, -limit, limit), and
    (u + 1) g sigmoid(1.702 g) (gpt-oss: 7); 0: silu(gate) up."""
    latent_dim: int = 0
    """Width to which tokens are projected before dispatch, and at which experts work; results are
    projected back after combine. Router and shared expert keep the full width (latent MoE,
    Nemotron-3). 0: none."""
    dispatch: str = "all_gather"
    """How tokens reach experts: "all_gather" (also the best on one device), "all_to_all" (padded),
    "ragged" (exact sizes; emulated on CPU), "hierarchical" (the same, and a token crosses to each
    node once: set `parallel.node`), "nvlink" (as ragged, written by GPUs into each other's memory:
    the whole mesh in one NVLink domain, no pipeline), "reference" (one-hot oracle)."""
    budget: float = 0.0
    """Rows that a device has room to receive, as a multiple of a balanced load ("all_to_all",
    "ragged", "hierarchical" and "nvlink"). A step that needs more changes nothing and is run again
    with room for the worst case; 0: always room for the worst case."""
    pieces: int = 1
    """Equal pieces of a microbatch's tokens (or the next number that divides them) that go to the
    experts one after the other, each with a buffer of its own: less memory, smaller products. 0: so
    many that the worst case of a piece is a balanced load of all, as where a step is run again."""
    impl: str = ""
    """Grouped GEMM by name ("hopper", "blackwell", "xla", "reference"); empty: the best that
    serves."""
    router: RouterConfig = RouterConfig()
    """Scores and selection."""
    balance: BalanceConfig = BalanceConfig()
    """What keeps the load even."""

    def __post_init__(self):
        if not 0 < self.top_k <= self.num_experts:
            raise ValueError(f"moe.top_k={self.top_k} is not in 1..num_experts={self.num_experts}")
        if self.dispatch not in DISPATCHERS:
            raise ValueError(
                f"moe.dispatch={self.dispatch!r}: choose from {', '.join(DISPATCHERS)}"
            )
        self.balance.check(self.num_experts, self.top_k)
        if self.shared_gate and not self.shared_ffn_dim:
            raise ValueError("moe.shared_gate=True gates no shared expert: set moe.shared_ffn_dim")
        if self.swiglu_limit < 0:
            raise ValueError(f"moe.swiglu_limit={self.swiglu_limit} must be 0 (none) or more")
        if self.shared_ffn_dim and (self.bias or self.swiglu_limit):
            raise ValueError(
                "the shared expert has neither bias nor clamp: set moe.shared_ffn_dim=0, or "
                "moe.bias=False and moe.swiglu_limit=0"
            )
        if self.pieces < 0:
            raise ValueError(f"moe.pieces={self.pieces} must be 0 (as many as needed) or more")
        if self.budget and self.budget < 1:
            raise ValueError(
                f"moe.budget={self.budget} is below a balanced load, so every step would be run "
                "twice: choose 0 (the worst case) or 1 and more (1.2 is usual)"
            )
        if self.top_k == 1 and self.router.renormalize:
            raise ValueError(
                "moe.top_k=1 with router.renormalize=True makes every weight 1 and leaves the "
                "router without a gradient: set router.renormalize=False"
            )
        self.router.options(self.num_experts, self.top_k, self.balance.bias_on)
        self._check_selection()

    def _check_selection(self):
        """Raises ValueError where a choice over whole rows meets what it makes needless."""
        selection = self.router.selection
        if selection == "top_k":
            return
        on = [name for name in EVENERS if getattr(self.balance, name)]
        if on:
            raise ValueError(
                f"router.selection={selection!r} balances the experts itself: set "
                + " and ".join(f"balance.{name}=0" for name in on)
            )
        if selection == "expert_choice" and self.router.renormalize:
            raise ValueError(
                "router.selection='expert_choice' gives a token any number of experts, whose "
                "weights are not made to sum to 1: set router.renormalize=False"
            )


class MoE(nnx.Module):
    """Experts behind a router. Works alone: `MoE(MoEConfig(), 64, rngs=nnx.Rngs(0))(x, stream)`."""

    def __init__(
        self,
        cfg: MoEConfig,
        dim: int,
        *,
        std: float = 0.02,
        out_std: float = 0.02,
        vocab_size: int = 0,
        fold: Fold = Fold(),  # noqa: B008 - frozen
        precision: PrecisionConfig = PrecisionConfig(),  # noqa: B008 - frozen
        rngs: nnx.Rngs,
    ):
        self.cfg, self.fold, self.precision = cfg, fold, precision
        kinds = dict(std=std, out_std=out_std, fold=fold, precision=precision, rngs=rngs)
        self.w_router = params.normal(
            rngs, (dim, cfg.num_experts), ("embed", "router"), std, precision
        )
        if cfg.router.linear_bias:
            self.b_router = params.constant((cfg.num_experts,), ("router",), 0.0, precision)
        # Both in float32 whatever the other dtypes: small steps, and whole numbers.
        wide = jnp.dtype("float32")
        self.bias = params.buffer((cfg.num_experts,), ("router",), wide)
        self.load_before = params.buffer((cfg.num_experts,), ("router",), wide)
        if cfg.router.hash_layers:
            if not vocab_size:
                raise ValueError("router.hash_layers needs the vocab_size of the token ids")
            table_VK = choice.hash_table(rngs.params(), vocab_size, cfg.num_experts, cfg.top_k)
            self.hash_table = params.Buffer(table_VK, dims=("token_id", "slot"))
        width = cfg.latent_dim or dim
        self.experts = Experts(
            cfg.num_experts, width, cfg.ffn_dim, impl=cfg.impl, bias=cfg.bias,
            swiglu_limit=cfg.swiglu_limit, **kinds,
        )  # fmt: skip
        if cfg.latent_dim:
            self.w_down = params.normal(rngs, (dim, width), ("embed", "latent"), std, precision)
            self.w_up = params.normal(rngs, (width, dim), ("latent", "embed"), out_std, precision)
        if cfg.shared_ffn_dim:
            self.shared = MLP(dim, cfg.shared_ffn_dim, **kinds)
        if cfg.shared_gate:
            self.w_gate = params.normal(rngs, (dim, 1), ("embed", "gate"), std, precision)

    def __call__(self, x_tD: Float[Array, "t D"], stream: Stream) -> tuple[Array, Aux]:
        """Returns (y_tD, {losses of `balance`, "load_E", "dropped", "overflow": this device's
        shares; "experts": what was chosen, before capacity drops any})."""
        cfg, fold, dispatcher = self.cfg, self.fold, DISPATCHERS[self.cfg.dispatch]
        routing = self._route(x_tD, stream)
        aux = balance.losses(routing, stream, cfg.balance, fold, self.load_before[...])
        if cfg.balance.quantile_rate:
            aux |= {"threshold_E": balance.thresholds(routing, self.bias[...], stream, fold)}
        kept = capacity.keep(routing, cfg.num_experts, cfg.router, stream, fold)
        # A slot for each expert, or K: a balanced load is that of K.
        budget = cfg.budget * cfg.top_k / kept.experts_tK.shape[1]
        definition, weights, buffers = params.partition(self.experts)

        def exchange(weights, rows, numbers):
            (sent_tD, weights_tK), (experts_tK,) = rows, numbers
            experts = params.assemble(definition, weights, buffers)
            with jax.named_scope("dispatch"):
                sent = dispatcher.dispatch(
                    sent_tD, experts_tK, weights_tK, cfg.num_experts, fold, budget
                )
                rows, weights_s = travelled((sent.x_sD, sent.weights_s))
                sent = sent._replace(x_sD=rows, weights_s=weights_s)
            y_sD = experts(sent.x_sD, sent.weights_s, sent.sizes_e)
            with jax.named_scope("combine"):
                y_tD = dispatcher.combine(y_sD, sent.route, fold)
            return y_tD, (sent.num_slots, sent.overflow)

        with jax.named_scope("dispatch"):
            sent_tD = linear(x_tD, self.w_down[...]) if cfg.latent_dim else x_tD
        count = self._pieces(*kept.experts_tK.shape)
        rows = (sent_tD, kept.weights_tK)
        y_tD, counted = in_pieces(exchange, count, weights, rows, (kept.experts_tK,), fold)
        with jax.named_scope("combine"):
            y_tD = linear(y_tD, self.w_up[...]) if cfg.latent_dim else y_tD
        arrived, overflow = (n.astype(jnp.float32) / fold.degree("etp") for n in counted)
        wanted = aux["load_E"].sum() + kept.num_filled.astype(jnp.float32)
        aux |= {"dropped": wanted - arrived, "overflow": overflow}
        aux["experts"] = routing.experts_tK
        if cfg.shared_ffn_dim:
            # It depends on x alone, so XLA may run it while rows travel; but it would put the sum
            # into the last product, which then waits for them. The barrier keeps the two apart.
            y_tD, shared_tD = jax.lax.optimization_barrier((y_tD, self._shared(x_tD)))
            y_tD = y_tD + shared_tD
        return y_tD, aux

    def _pieces(self, num_tokens: int, num_choices: int) -> int:
        """Returns into how many pieces the tokens are cut; see `MoEConfig.pieces`."""
        cfg, ranks = self.cfg, self.fold.degree("ep")
        if cfg.pieces:
            return num_pieces(num_tokens, cfg.pieces)
        worst = ranks * rows_from_each(num_tokens, num_choices, cfg.num_experts, ranks, 0.0)
        return num_pieces(num_tokens, worst / (num_tokens * cfg.top_k))

    @jax.named_scope("route")
    def _route(self, x_tD, stream: Stream) -> router.Routing:
        cfg, dtype = self.cfg.router, self.precision.dtype("router")
        seen_tD = choice.jitter(x_tD, stream, cfg.jitter, dtype)
        logits_tE = router.logits(seen_tD, self.w_router[...], dtype)
        if cfg.linear_bias:
            logits_tE = logits_tE + self.b_router[...].astype(dtype)[None]
        logits_tE = checkpoint_name(logits_tE, LOGITS)
        balances = self.cfg.balance
        bias_E = self.bias[...] if balances.biased else None
        table_VK = self.hash_table[...] if cfg.hash_layers else None
        given_tK = choice.choose(
            logits_tE, bias_E, stream, cfg, self.cfg.top_k, self.fold, table_VK, balances.bias_on
        )
        routing = route(
            logits_tE, bias_E, stream.valid_t, cfg, self.cfg.top_k, given_tK, balances.bias_on
        )
        return choice.recall(routing, stream, cfg, self.cfg.top_k, self.fold)

    def _shared(self, x_tD):
        y_tD = self.shared(x_tD)
        if not self.cfg.shared_gate:
            return y_tD
        gate_t1 = jax.nn.sigmoid(linear(x_tD, self.w_gate[...]).astype(jnp.float32))
        return y_tD * gate_t1.astype(y_tD.dtype)
