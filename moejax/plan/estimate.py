"""Memory per GPU of the train step, from config and fold alone: what a search weighs folds by.

What rests is exact (`resting`). What a step needs beside that is counted by the buffers that the
step's code makes: it was written down beside the compiler's own buffer lists, and is held to them
in the tests. Three moments can be the largest: the head's backward, a layer's backward, and the
update. XLA packs buffers of all moments into one heap; what it cannot fill is `packing`.
"""

import dataclasses

from moejax.config import Config
from moejax.core import sharding
from moejax.core.mesh import Fold
from moejax.model.config import ModelConfig
from moejax.model.dispatch.base import rows_from_each
from moejax.model.dispatch.hierarchical import rooms
from moejax.model.pieces import num_pieces
from moejax.plan.hardware import Cluster
from moejax.plan.resting import resting, weights

USABLE = 0.92
"""Share of a GPU's memory that a program may plan with: CUDA's context, NCCL's buffers and the
kernels have the rest (NVIDIA's JAX containers set XLA_PYTHON_CLIENT_MEM_FRACTION so)."""
LOGIT_ROWS = 1024
"""Tokens whose logits are there at once (`pallas_kernels.cross_entropy.xla.CHUNK`)."""
PACKING = 0.05
"""What gaps in the compiler's heap add to the buffers that come and go (not to those that live as
long as the step); about the mean of what was read in six heaps."""

KINDS = (
    "weights", "optimizer state", "batch and buffers", "gradients", "saved activations",
    "turned weights", "gathered weights", "dispatch and experts", "attention", "dense MLP",
    "logits and loss", "other", "packing",
)  # fmt: skip


def room(cluster: Cluster) -> float:
    """Returns the bytes of one GPU that a program may fill."""
    return USABLE * cluster.gpu.memory_bytes


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes per GPU at the moment that needs most, by kind."""

    kinds: tuple[tuple[str, float], ...]
    """(one of `KINDS`, bytes), those that are not 0."""
    moment: str
    """When that is: "head", "layer" or "update"."""
    rows: int = 0
    """Rows that a GPU has room to receive for its experts, in a layer."""

    @property
    def total(self) -> float:
        """All of it."""
        return sum(size for _, size in self.kinds)

    @property
    def resting(self) -> float:
        """The step's arguments."""
        return sum(size for kind, size in self.kinds if kind in KINDS[:3])

    @property
    def temporary(self) -> float:
        """What the step needs beside its arguments."""
        return self.total - self.resting


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What one device works on at once."""

    config: Config
    fold: Fold

    @property
    def row_tokens(self) -> float:
        """Tokens T of this device's rows, as attention sees them (gathered over tp)."""
        train = self.config.train
        rows = train.batch_size / train.microbatches / self.fold.degree("dp")
        return rows * train.sequence_length

    @property
    def tokens(self) -> float:
        """Tokens t of the residual stream: T split over tp."""
        return self.row_tokens / self.fold.degree("tp")

    @property
    def pieces(self) -> int:
        """Equal pieces in which a layer's tokens go to the experts (`MoEConfig.pieces`)."""
        moe, t = self.config.model.moe, int(self.tokens)
        if moe.pieces:
            return num_pieces(t, moe.pieces)
        ep = self.fold.degree("ep")
        worst = ep * rows_from_each(t, moe.top_k, moe.num_experts, ep, 0.0)
        return num_pieces(t, worst / (t * moe.top_k))

    @property
    def received(self) -> int:
        """Rows s that the experts have room for, of one piece."""
        return self._room(int(self.tokens) // self.pieces)

    @property
    def sent(self) -> float:
        """Rows that a device sends, of one piece; over two hops also what it takes in between."""
        moe, t = self.config.model.moe, self.tokens / self.pieces
        if moe.dispatch != "hierarchical":
            return t * moe.top_k
        first, second, _ = rooms(int(t), moe.top_k, moe.num_experts, self.fold, moe.budget)
        return first.sent + first.received + second.sent

    def _room(self, t: int) -> int:
        moe, ep, etp = self.config.model.moe, self.fold.degree("ep"), self.fold.degree("etp")
        if moe.dispatch in ("ragged", "hierarchical", "nvlink", "all_to_all"):
            return ep * etp * rows_from_each(t, moe.top_k, moe.num_experts, ep, moe.budget)
        return ep * etp * t * min(moe.top_k, moe.num_experts)

    @property
    def itemsize(self) -> int:
        """Bytes of an activation; "auto" is bfloat16 on a GPU."""
        precision = self.config.precision
        return 2 if precision.compute_dtype == "auto" else precision.dtype("compute").itemsize


def not_described(config: Config) -> str:
    """Returns what of a fold the analytic plan does not know, "" if it knows all: the compiler's
    plan has no such limit."""
    parallel = config.parallel
    degrees = {"pp": parallel.pp, "cp": parallel.cp}
    found = [f"{name}={degree}" for name, degree in degrees.items() if degree > 1]
    found += [f"schedule={parallel.schedule!r}"] if parallel.schedule else []
    return ", ".join(f"parallel.{each}" for each in found)


def refuse_unknown(config: Config) -> None:
    """Raises ValueError for a fold that the analytic plan does not know."""
    if unknown := not_described(config):
        raise ValueError(
            f"the analytic plan, and so the search, does not know {unknown}: leave out --analytic "
            "or --search, for the compiled plan does"
        )


def estimate(config: Config, fold: Fold, *, worst_case: bool = False) -> Memory:
    """Returns the memory of one train step on each GPU; `worst_case`: of the step that runs an
    overflowed batch again. Raises ValueError as `refuse_unknown` does."""
    refuse_unknown(config)
    if worst_case:
        config = dataclasses.replace(config, model=config.model.worst_case())
    sizes, rest = Sizes(config, fold), resting(config, fold)
    always, gradients = _always(sizes), _gradients(sizes)
    moments = {"head": _head(sizes), "layer": _layer(sizes), "update": _update(sizes)}
    totals = {name: sum(found.values()) for name, found in moments.items()}
    moment = max(totals, key=lambda name: totals[name])
    own = {
        kind: always.get(kind, 0.0) + moments[moment].get(kind, 0.0)
        for kind in always.keys() | moments[moment].keys()
    }
    own["packing"] = PACKING * sum(own.values())
    own["gradients"] = own.get("gradients", 0.0) + gradients
    kinds = tuple((kind, (rest | own).get(kind, 0.0)) for kind in KINDS)
    return Memory(tuple(pair for pair in kinds if pair[1]), moment, sizes.received)


def _always(sizes: Sizes) -> dict[str, float]:
    """What is there through all of a microbatch: saved activations, and weights that are gathered
    once a step."""
    config, fold = sizes.config, sizes.fold
    store, used = sharding.store_table(config.parallel.zero), sharding.COMPUTE
    gathered = sum(
        weight.elements(used, fold) * weight.itemsize
        for weight in weights(config)
        if config.parallel.zero == 1 and weight.elements(used, fold) != weight.elements(store, fold)
    )
    return {"saved activations": _saved(sizes), "gathered weights": gathered}


def _gradients(sizes: Sizes) -> float:
    """Bytes of the sums of gradients, to which every layer's are added in their place."""
    config, fold = sizes.config, sizes.fold
    table = sharding.store_table(3) if config.parallel.zero == 3 else sharding.COMPUTE
    accum = config.precision.dtype("accum").itemsize
    return sum(accum * w.elements(table, fold) for w in weights(config))


def _update(sizes: Sizes) -> dict[str, float]:
    """What the update needs: gradients in the parameters' dtype, where their sums are in another,
    and where these are reduced to where parameters rest."""
    config, fold = sizes.config, sizes.fold
    made, store = weights(config), sharding.store_table(config.parallel.zero)
    same = config.precision.dtype("accum") == config.precision.dtype("param")
    if same and config.parallel.zero != 1:
        return {"gradients": 0.0}
    return {"gradients": sum(w.itemsize * w.elements(store, fold) for w in made)}


def _head(sizes: Sizes) -> dict[str, float]:
    """Buffers while the head's gradient is summed in float32 over chunks of tokens: that sum, the
    head, and of one chunk the logits and their gradient."""
    model, fold = sizes.config.model, sizes.fold
    vocabulary = model.padded_vocab / fold.degree("tp")
    whole = vocabulary * model.dim
    chunk = min(LOGIT_ROWS, sizes.row_tokens) * vocabulary
    return {
        "gathered weights": sizes.itemsize * whole,
        "logits and loss": 4 * whole + (4 + sizes.itemsize) * chunk,
    }


def _saved(sizes: Sizes) -> float:
    """Bytes that the forward pass leaves for the backward pass, of all layers."""
    model, item = sizes.config.model, sizes.itemsize
    layers = len(model.all_kinds())
    inputs = item * sizes.tokens * model.dim
    if model.remat == "full":
        choices = 4 * sizes.tokens * model.moe.top_k * model.all_kinds().count("M")
        return layers * inputs + choices
    if model.remat == "selective":
        return layers * inputs + model.all_kinds().count("M") * _travelled(sizes)
    per_kind = {"M": _saved_moe(sizes), "D": _saved_mlp(sizes, model.ffn_dim)}
    attention = _saved_attention(sizes) + 4 * 4 * sizes.tokens * model.dim  # two norms, float32
    return sum(per_kind[kind] + attention for kind in model.all_kinds())


def _travelled(sizes: Sizes) -> float:
    """Bytes of what "selective" saves of one MoE layer: rows that arrived, where each came from,
    their weights, and logits."""
    moe, model = sizes.config.model.moe, sizes.config.model
    rows = sizes.received * (sizes.itemsize * (moe.latent_dim or model.dim) + 3 * 4)
    slots = sizes.tokens * moe.top_k
    return (rows if sizes.pieces == 1 else 0.0) + 4 * (3 * slots + sizes.tokens * moe.num_experts)


def _saved_attention(sizes: Sizes) -> float:
    """Bytes that one layer's attention saves: its input, queries, keys, values, what it gave,
    before and after it was laid out, and in float32 what norms of heads or latents saw."""
    model, fold, item = sizes.config.model, sizes.fold, sizes.itemsize
    cfg, T, tp = model.attention, sizes.row_tokens, fold.degree("tp")
    heads, out = cfg.num_heads / tp, cfg.num_heads / tp * cfg.value_dim
    found = item * T * (model.dim + 2 * out) + 4 * T * heads
    if cfg.kind == "mla":
        latents = cfg.mla.q_rank + cfg.mla.kv_rank
        found += 2 * 4 * sizes.tokens * latents + item * T * (latents + cfg.rope_dim)
        made = 0 if cfg.mla.recompute_up else 2 * cfg.qk_dim + cfg.value_dim
        return found + item * T * heads * made
    kv = max(cfg.num_kv_heads / tp, 1)
    normed = 2 * 4 * T * (heads + kv) * cfg.head_dim if cfg.qk_norm else 0
    return found + normed + item * T * (heads + 2 * kv) * cfg.head_dim


def _saved_moe(sizes: Sizes) -> float:
    """Bytes that one MoE layer saves: rows before and after the first product, scores."""
    moe, item, model = sizes.config.model.moe, sizes.itemsize, sizes.config.model
    width, f = moe.latent_dim or model.dim, moe.ffn_dim / sizes.fold.degree("etp")
    routed = item * sizes.received * (width + 2 * f) if sizes.pieces == 1 else 0.0
    scores = 3 * 4 * sizes.tokens * moe.num_experts
    shared = _saved_mlp(sizes, moe.shared_ffn_dim) if moe.shared_ffn_dim else 0.0
    return routed + scores + item * sizes.tokens * model.dim + shared


def _saved_mlp(sizes: Sizes, width: int) -> float:
    """Bytes that a dense gated MLP saves: input, both halves, their product."""
    per_token = sizes.config.model.dim + 3 * width / sizes.fold.degree("tp")
    return sizes.itemsize * sizes.row_tokens * per_token


def _layer(sizes: Sizes) -> dict[str, float]:
    """Buffers of one layer's backward pass, the largest of its parts, where everything that it
    computed again is there as well; the head's gradient waits to be reduced."""
    config, fold, item = sizes.config, sizes.fold, sizes.itemsize
    model, moe = config.model, config.model.moe
    whole = model.padded_vocab / fold.degree("tp") * model.dim
    found = {"gathered weights": _one_layer(sizes), "logits and loss": 4 * whole}
    again = model.remat != "none"
    if "M" in model.all_kinds():
        width, f = moe.latent_dim or model.dim, moe.ffn_dim / fold.degree("etp")
        sent = sizes.sent * width
        # Rows' gradients in, rows' gradients out; both halves' gradients; sent and their zeros.
        rows = sizes.received * (2 * width + 3 * f + again * (width + f))
        found["dispatch and experts"] = item * (rows + 2 * sent)
        if sizes.pieces > 1:  # the experts' gradients are summed over the pieces
            one = moe.num_experts / fold.degree("ep") * 3 * width * f
            found["dispatch and experts"] += 4 * one
    found["attention"] = _saved_attention(sizes)
    if "D" in model.all_kinds() or moe.shared_ffn_dim:
        width = max(model.ffn_dim * ("D" in model.all_kinds()), moe.shared_ffn_dim)
        found["dense MLP"] = _saved_mlp(sizes, width)
    return found


def _one_layer(sizes: Sizes) -> float:
    """Bytes of the largest layer's weights as its products read them, and of their gradients as
    these give them, before they are cast and reduced."""
    config, fold, item = sizes.config, sizes.fold, sizes.itemsize
    model: ModelConfig = config.model
    stacks = {f"['stack_{i}']": count for i, (_, count) in enumerate(model.stacks())}
    largest = 0.0
    for stack in stacks:
        own = [w for w in weights(config) if w.path.startswith(stack)]
        used = sum(w.elements(sharding.COMPUTE, fold) / w.shape[0] for w in own)
        largest = max(largest, 2 * item * used)
    return largest
