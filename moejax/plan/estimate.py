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
from moejax.plan.hardware import Cluster
from moejax.plan.resting import Weight, resting, weights

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
    def received(self) -> int:
        """Rows s that the experts have room for."""
        moe, ep = self.config.model.moe, self.fold.degree("ep")
        etp, t = self.fold.degree("etp"), int(self.tokens)
        if moe.dispatch in ("ragged", "all_to_all"):
            return ep * etp * rows_from_each(t, moe.top_k, moe.num_experts, ep, moe.budget)
        return ep * etp * t * min(moe.top_k, moe.num_experts)

    @property
    def itemsize(self) -> int:
        """Bytes of an activation; "auto" is bfloat16 on a GPU."""
        precision = self.config.precision
        return 2 if precision.compute_dtype == "auto" else precision.dtype("compute").itemsize


def estimate(config: Config, fold: Fold, *, worst_case: bool = False) -> Memory:
    """Returns the memory of one train step on each GPU; `worst_case`: of the step that runs an
    overflowed batch again."""
    if worst_case:
        config = dataclasses.replace(config, model=config.model.worst_case())
    sizes, rest = Sizes(config, fold), resting(config, fold)
    always = _always(sizes)
    gradients, once = _gradients(sizes)
    moments = {
        "head": {"gradients": gradients} | _head(sizes),
        "layer": {"gradients": gradients + once} | _layer(sizes),
        "update": {"gradients": gradients + once},
    }
    if config.train.microbatches == 1:  # nothing is added up
        moments["head"]["gradients"] = 0.0
        moments["layer"]["gradients"] = moments["update"]["gradients"] = gradients
    totals = {name: sum(found.values()) for name, found in moments.items()}
    moment = max(totals, key=lambda name: totals[name])
    own = always | moments[moment]
    own["gathered weights"] = always["gathered weights"] + moments[moment].get(
        "gathered weights", 0.0
    )
    lasting = own["gradients"] + own["turned weights"]
    own["packing"] = PACKING * (sum(own.values()) - lasting)
    kinds = tuple((kind, (rest | own).get(kind, 0.0)) for kind in KINDS)
    return Memory(tuple(pair for pair in kinds if pair[1]), moment, sizes.received)


def _always(sizes: Sizes) -> dict[str, float]:
    """What is there through all of a microbatch: saved activations, and copies of weights that
    live as long as the loop over microbatches."""
    config, fold = sizes.config, sizes.fold
    zero, made = config.parallel.zero, weights(config)
    store, used = sharding.store_table(zero), sharding.COMPUTE
    gathered = turned = 0.0
    for weight in made:
        if zero == 1 and weight.elements(used, fold) != weight.elements(store, fold):
            gathered += weight.elements(used, fold) * weight.itemsize
        if zero == 3:
            turned += _turned(weight, fold)
    vocabulary = config.model.padded_vocab / fold.degree("tp") * config.model.dim
    gathered += sizes.itemsize * vocabulary  # the embedding, cast
    return {
        "saved activations": _saved(sizes),
        "turned weights": turned,
        "gathered weights": gathered,
    }


def _turned(weight: Weight, fold: Fold) -> float:
    """Bytes of a weight's transposed copy. A weight that is gathered along another dim than its
    first is turned for that, and XLA does so before the loop, for all layers at once."""
    dims = weight.dims[1:] if weight.stacked else weight.dims
    split = weight.gather_dim
    if split is None or split == dims[0] or fold.degree(sharding.SHARDED[split]) == 1:
        return 0.0
    return weight.elements(sharding.SHARDED, fold) * weight.itemsize


def _gradients(sizes: Sizes) -> tuple[float, float]:
    """Returns (bytes of the sum over microbatches, bytes of one microbatch's)."""
    config, fold = sizes.config, sizes.fold
    table = sharding.store_table(3) if config.parallel.zero == 3 else sharding.COMPUTE
    accum = config.precision.dtype("accum").itemsize
    held = [(w, w.elements(table, fold)) for w in weights(config)]
    return sum(accum * n for _, n in held), sum(w.itemsize * n for w, n in held)


def _head(sizes: Sizes) -> dict[str, float]:
    """Buffers while the head's gradient is summed over chunks of tokens: the float32 sum twice
    (product, and carry), the head and its cast gradient, one chunk of logits."""
    model, fold = sizes.config.model, sizes.fold
    vocabulary = model.padded_vocab / fold.degree("tp")
    whole = vocabulary * model.dim
    chunk = min(LOGIT_ROWS, sizes.row_tokens) * vocabulary
    return {
        "gathered weights": sizes.itemsize * whole,
        "logits and loss": 2 * 4 * whole + sizes.itemsize * chunk + _further_heads(sizes),
    }


def _further_heads(sizes: Sizes) -> float:
    """Bytes of the head's float32 gradients that wait to be joined: its own, and one for each
    further module."""
    model = sizes.config.model
    whole = model.padded_vocab / sizes.fold.degree("tp") * model.dim
    return 4 * whole * (1 + model.mtp_depth) if model.mtp_depth else 0.0


def _saved(sizes: Sizes) -> float:
    """Bytes that the forward pass leaves for the backward pass, of all layers."""
    model, item = sizes.config.model, sizes.itemsize
    layers = len(model.all_kinds())
    inputs = item * sizes.tokens * model.dim
    if model.remat == "full":
        choices = 4 * sizes.tokens * model.moe.top_k * model.all_kinds().count("M")
        return layers * inputs + choices
    per_kind = {"M": _saved_moe(sizes), "D": _saved_mlp(sizes, model.ffn_dim)}
    attention = _saved_attention(sizes) + 4 * 4 * sizes.tokens * model.dim  # two norms, float32
    return sum(per_kind[kind] + attention for kind in model.all_kinds())


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
    routed = item * sizes.received * (width + 2 * f)
    scores = 3 * 4 * sizes.tokens * moe.num_experts
    shared = _saved_mlp(sizes, moe.shared_ffn_dim) if moe.shared_ffn_dim else 0.0
    return routed + scores + item * sizes.tokens * model.dim + shared


def _saved_mlp(sizes: Sizes, width: int) -> float:
    """Bytes that a dense gated MLP saves: input, both halves, their product."""
    per_token = sizes.config.model.dim + 3 * width / sizes.fold.degree("tp")
    return sizes.itemsize * sizes.row_tokens * per_token


def _layer(sizes: Sizes) -> dict[str, float]:
    """Buffers of one layer's backward pass, the largest of its parts, where everything that it
    computed again is there as well; gradients of embedding and head wait to be reduced."""
    config, fold, item = sizes.config, sizes.fold, sizes.itemsize
    model, moe = config.model, config.model.moe
    whole = model.padded_vocab / fold.degree("tp") * model.dim
    found = {"logits and loss": item * whole + _further_heads(sizes)}
    found["gathered weights"] = _one_layer(sizes)
    again = model.remat == "full"
    if "M" in model.all_kinds():
        width, f = moe.latent_dim or model.dim, moe.ffn_dim / fold.degree("etp")
        sent = sizes.tokens * moe.top_k * width
        # Rows' gradients in, rows' gradients out; both halves' gradients; sent and their zeros.
        rows = sizes.received * (2 * width + 3 * f + again * (width + f))
        found["dispatch and experts"] = item * (rows + 2 * sent)
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
