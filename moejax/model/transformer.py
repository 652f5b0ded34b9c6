"""The decoder: embed -> layers (attend, then MLP or MoE) -> norm -> unembed.

One class, any fold: built with global shapes, it runs on local shards inside `shard_map` and,
with no mesh, alone:

    model = Transformer(ModelConfig(), rngs=nnx.Rngs(0))
    logits_BLV = model(tokens_BL)
"""

import dataclasses
from math import sqrt
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from moejax.core import collectives, params
from moejax.core.mesh import Fold
from moejax.core.precision import PrecisionConfig, at_least_float32
from moejax.core.sharding import gathered_as, is_dims, to_compute
from moejax.model.attention import ATTENTIONS, AttentionConfig, Cache
from moejax.model.attention.memory import Memory, last
from moejax.model.mlp import MLP
from moejax.model.moe import MoE, MoEConfig
from moejax.model.norm import RMSNorm
from moejax.model.rope import rope_table
from moejax.model.stack import REMAT, scan_layers
from moejax.model.stream import (
    Counts,
    Draw,
    Stream,
    count_batch,
    make_stream,
    my_tokens,
    one_microbatch,
)


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Shape of the decoder."""

    vocab_size: int = 4096
    """Tokens V that the embedding knows."""
    dim: int = 256
    """Width D of the residual stream."""
    num_layers: int = 4
    """Layers in all."""
    first_k_dense: int = 0
    """Layers at the start with a dense MLP instead of experts."""
    pattern: str = "M"
    """Kinds of the layers after those, repeated: "M" a MoE layer, "D" a dense one; in lower case
    ("m", "d") with attention.window. first_k_dense layers have it where the whole pattern does."""
    ffn_dim: int = 1024
    """Width of a dense MLP."""
    attention: AttentionConfig = AttentionConfig()
    """Every layer's attention."""
    moe: MoEConfig = MoEConfig()
    """Every MoE layer."""
    norm_eps: float = 1e-6
    """Added to the mean square in RMSNorm."""
    tied: bool = False
    """The head is the embedding, transposed."""
    init_std: float = 0.02
    """Standard deviation of initial weights; projections back into the residual stream get
    init_std / sqrt(2 num_layers) (GPT-2)."""
    remat: str = "none"
    """What the backward pass computes again: "none", or "full" (whole layers)."""

    def __post_init__(self):
        if self.remat not in REMAT:
            raise ValueError(f"model.remat={self.remat!r}: choose from {', '.join(REMAT)}")
        if not self.pattern or set(self.pattern) - set("MDmd"):
            raise ValueError(
                f"model.pattern={self.pattern!r}: letters M (MoE) and D (dense) only, in lower "
                "case for layers with attention.window"
            )
        if (self.pattern != self.pattern.upper()) != bool(self.attention.window):
            raise ValueError(
                f"model.pattern={self.pattern!r} with attention.window={self.attention.window}: "
                "layers in lower case have a window, and a window needs some (gpt-oss: 'mM')"
            )
        rest = self.num_layers - self.first_k_dense
        if rest < 0 or rest % len(self.pattern):
            raise ValueError(
                f"model.num_layers={self.num_layers} less first_k_dense={self.first_k_dense} "
                f"is not a multiple of the pattern {self.pattern!r}"
            )

    def worst_case(self) -> "ModelConfig":
        """Returns the same model with room, on every device, for whatever may arrive there."""
        return dataclasses.replace(self, moe=dataclasses.replace(self.moe, budget=0.0))

    def stacks(self) -> tuple[tuple[str, int], ...]:
        """Returns (kinds of one unit, how many) of each run of equal layers."""
        dense, rest = self.first_k_dense, self.num_layers - self.first_k_dense
        first = "d" if self.pattern.islower() else "D"
        runs = ((first, dense), (self.pattern, rest // len(self.pattern)))
        return tuple((kinds, count) for kinds, count in runs if count)

    def kinds(self) -> str:
        """Returns the kind of every layer, e.g. "DMMM", windows left out."""
        return "".join(kinds * count for kinds, count in self.stacks()).upper()

    def windows(self) -> tuple[int, ...]:
        """Returns the window of every layer, 0: none."""
        kinds = "".join(kinds * count for kinds, count in self.stacks())
        return tuple(self.attention.window if kind.islower() else 0 for kind in kinds)


class Block(nnx.Module):
    """x + attention(norm(x)), then x + MLP or MoE(norm(x))."""

    def __init__(self, cfg: ModelConfig, kind: str, fold: Fold, precision, rngs: nnx.Rngs):
        std, out_std = cfg.init_std, cfg.init_std / sqrt(2 * cfg.num_layers)
        kinds = dict(std=std, out_std=out_std, fold=fold, precision=precision, rngs=rngs)
        self.attention_norm = RMSNorm(cfg.dim, cfg.norm_eps, precision)
        window = cfg.attention.window if kind.islower() else 0
        self.attention = ATTENTIONS[cfg.attention.kind](
            cfg.attention, cfg.dim, window=window, eps=cfg.norm_eps, **kinds
        )
        self.mlp_norm = RMSNorm(cfg.dim, cfg.norm_eps, precision)
        if kind.upper() == "M":
            self.moe = MoE(cfg.moe, cfg.dim, vocab_size=cfg.vocab_size, **kinds)
        else:
            self.mlp = MLP(cfg.dim, cfg.ffn_dim, **kinds)
        self.kind = kind.upper()

    def __call__(
        self, x_tD: Float[Array, "t D"], stream: Stream, held: Memory | None = None
    ) -> tuple[Array, dict, Memory | None]:
        """Returns (x_tD, the MoE's aux, {} for a dense block; what attention is to hold)."""
        y_tD, held = self.attention(self.attention_norm(x_tD), stream, held)
        x_tD = x_tD + y_tD
        normed_tD = self.mlp_norm(x_tD)
        if self.kind == "D":
            return x_tD + self.mlp(normed_tD), {}, held
        y_tD, aux = self.moe(normed_tD, stream)
        return x_tD + y_tD, aux, held


class Inputs(NamedTuple):
    """What, beside x, differs between the units of a stack, or within one."""

    layer: Int[Array, "..."]
    """Number of the first MoE layer."""
    given_MtK: Int[Array, "... M t K"] | None
    """Experts that each of the unit's M MoE layers has to choose."""
    probe_M: Float[Array, "... M"] | None
    """See `Draw.probe_N`."""
    held: dict[str, Memory] | None = None
    """What each block's attention holds of the tokens before."""


def _nth(x_M: Array | None, nth: int) -> Array | None:
    """Returns x_M[nth]; None of nothing, and for a dense block behind the last MoE layer."""
    return None if x_M is None or nth == len(x_M) else x_M[nth]


class Unit(nnx.Module):
    """The layers that one step of the scan runs."""

    def __init__(self, cfg: ModelConfig, kinds: str, fold: Fold, precision, rngs: nnx.Rngs):
        self.num_blocks = len(kinds)
        for i, kind in enumerate(kinds):
            setattr(self, f"block_{i}", Block(cfg, kind, fold, precision, rngs))

    def __call__(self, x_tD, stream: Stream, inputs: Inputs, choices: dict | None = None):
        """Returns (x_tD, ({block name: aux}, {block name: what attention is to hold}), {block name:
        choices}); aux and choices of the MoE blocks, of which `inputs.layer` numbers the first; the
        choices are given where this is computed again."""
        auxes, holds, made = {}, {}, {}
        for i in range(self.num_blocks):
            name, nth = f"block_{i}", len(auxes)
            mine = stream._replace(
                layer=inputs.layer + nth,
                given_tK=_nth(inputs.given_MtK, nth),
                probe=_nth(inputs.probe_M, nth),
                recalled_tK=None if choices is None else choices.get(name),
            )
            held = None if inputs.held is None else inputs.held[name]
            x_tD, aux, holds[name] = getattr(self, name)(x_tD, mine, held)
            if aux:
                made[name] = aux.pop("experts")
                auxes[name] = aux
        return x_tD, (auxes, holds), made


class Transformer(nnx.Module):
    """A decoder-only language model."""

    def __init__(
        self,
        cfg: ModelConfig,
        *,
        fold: Fold = Fold(),  # noqa: B008 - frozen
        precision: PrecisionConfig = PrecisionConfig(),  # noqa: B008 - frozen
        zero: int = 0,
        rngs: nnx.Rngs,
    ):
        self.cfg, self.fold, self.precision, self.zero = cfg, fold, precision, zero
        shape = (cfg.vocab_size, cfg.dim)
        if cfg.vocab_size % fold.degree("tp"):
            raise ValueError(
                f"model.vocab_size={cfg.vocab_size} does not divide over tp={fold.degree('tp')}: "
                f"pad the vocabulary"
            )
        self.embedding = params.normal(rngs, shape, ("vocab", "embed"), cfg.init_std, precision)
        for i, (kinds, count) in enumerate(cfg.stacks()):
            make = lambda rngs, kinds=kinds: Unit(cfg, kinds, fold, precision, rngs)  # noqa: E731
            setattr(self, f"stack_{i}", params.stack(make, count, rngs))
        self.final_norm = RMSNorm(cfg.dim, cfg.norm_eps, precision)
        if not cfg.tied:
            self.head = params.normal(
                rngs, shape[::-1], ("embed", "vocab"), cfg.init_std, precision
            )

    def _weight(self, variable: nnx.Param) -> Array:
        """A weight outside the layers, gathered (ZeRO-3) and in the compute dtype."""
        zero, dtype = self.zero if self.zero == 3 else 0, self.precision.dtype("compute")
        return gathered_as(variable[...], dtype, variable.get_metadata()["dims"], self.fold, zero)

    @jax.named_scope("embed")
    def embed(self, tokens_bL: Int[Array, "b L"]) -> Float[Array, "t D"]:
        """Returns the embeddings of this device's tokens; each tp rank looks up its vocabulary."""
        w_vD, tp = self._weight(self.embedding), self.fold["tp"]
        id_T = tokens_bL.reshape(-1) - collectives.axis_index(tp) * w_vD.shape[0]
        mine_T = (id_T >= 0) & (id_T < w_vD.shape[0])
        x_TD = w_vD[jnp.where(mine_T, id_T, 0)]
        return collectives.psum_scatter(jnp.where(mine_T[:, None], x_TD, 0), tp)

    def head_weight(self) -> Float[Array, "D v"]:
        """Returns the head of this device's slice of the vocabulary."""
        return self._weight(self.embedding).T if self.cfg.tied else self._weight(self.head)

    def hidden(
        self,
        tokens_bL: Int[Array, "b L"],
        segment_ids_bL: Int[Array, "b L"],
        positions_bL: Int[Array, "b L"],
        counts: Counts,
        draw: Draw = Draw(),  # noqa: B008 - immutable
    ) -> tuple[Float[Array, "t D"], dict]:
        """Returns (normed hidden states, {stack: {block: aux}} with a leading layer dim)."""
        batch = (tokens_bL, segment_ids_bL, positions_bL)
        x_tD, auxes, _ = self._through(*batch, counts, draw)
        return x_tD, auxes

    def extend(
        self,
        tokens_bL: Int[Array, "b L"],
        segment_ids_bL: Int[Array, "b L"],
        positions_bL: Int[Array, "b L"],
        cache: Cache,
    ) -> tuple[Float[Array, "t D"], Cache]:
        """Returns (normed hidden states of new tokens that follow those in the cache, the cache
        with them in it). An empty cache (`empty_cache`) and a prompt: prefill; one token: decode.
        """
        counts = one_microbatch(count_batch(segment_ids_bL, tokens_bL, self.fold))
        batch = (tokens_bL, segment_ids_bL, positions_bL)
        x_tD, _, layers = self._through(*batch, counts, Draw(), cache)
        ids_bS = jnp.concatenate([cache.segment_ids_bS, segment_ids_bL], axis=1)
        return x_tD, Cache(last(ids_bS, cache.segment_ids_bS.shape[1]), layers)

    def _through(self, tokens_bL, segment_ids_bL, positions_bL, counts, draw, cache=None):
        """Returns (normed hidden states, aux, what the layers hold, where there is a cache)."""
        cfg, dtype = self.cfg, self.precision.dtype("accum")
        rope = rope_table(positions_bL, cfg.attention.rope_dim, cfg.attention.rope, dtype)
        stream = make_stream(segment_ids_bL, rope, counts, self.fold, tokens_bL, draw)
        if cache is not None:
            stream = stream._replace(remembered_ids_bS=cache.segment_ids_bS)
        given_NtK = None
        if draw.routing_bLNK is not None:
            given_TNK = draw.routing_bLNK.reshape(-1, *draw.routing_bLNK.shape[2:])
            given_NtK = my_tokens(given_TNK, self.fold).swapaxes(0, 1)
        x_tD = collectives.vary(self.embed(tokens_bL), self.fold.all)
        auxes, holds, first = {}, {}, 0
        for i, (kinds, count) in enumerate(cfg.stacks()):
            moes, name = kinds.upper().count("M"), f"stack_{i}"
            numbers = first + moes * jnp.arange(count, dtype=jnp.int32)
            given, probe = (
                None if a is None else a[first : first + count * moes].reshape(
                    count, moes, *a.shape[1:]
                )
                for a in (given_NtK, draw.probe_N)
            )  # fmt: skip
            held = None if cache is None or cache.layers is None else cache.layers[name]
            unit, inputs = getattr(self, name), Inputs(numbers, given, probe, held)
            x_tD, auxes[name], holds[name] = self._stack(unit, x_tD, inputs, stream)
            first += count * moes
        return self.final_norm(x_tD), auxes, holds

    def _stack(self, unit: nnx.Module, x_tD, inputs: Inputs, stream: Stream):
        definition, weights, buffers = params.partition(unit)
        dims = jax.tree.map(lambda d: d[1:], params.dims_of(unit)[0], is_leaf=is_dims)
        zero = self.zero if self.zero == 3 else 0

        def weights_of(stored):
            return to_compute(stored[0], dims, self.fold, zero, self.precision), stored[1]

        def layer(w, kept, x, stream, choices):
            mine = params.assemble(definition, w[0], kept[0])
            return mine(x, stream, kept[1]._replace(probe_M=w[1]), choices)

        stored, kept = (weights, inputs.probe_M), (buffers, inputs._replace(probe_M=None))
        x_tD, (auxes, holds), made = scan_layers(
            layer, weights_of, stored, kept, x_tD, stream, remat=self.cfg.remat
        )
        auxes = {name: aux | {"experts": made[name]} for name, aux in auxes.items()}
        return x_tD, auxes, holds

    def __call__(
        self,
        tokens_BL: Int[Array, "B L"],
        segment_ids_BL: Int[Array, "B L"] | None = None,
        positions_BL: Int[Array, "B L"] | None = None,
    ) -> Float[Array, "B L V"]:
        """Returns logits (float32 or wider), for use with no mesh or with all weights gathered."""
        batch, length = tokens_BL.shape
        if segment_ids_BL is None:
            segment_ids_BL = jnp.ones_like(tokens_BL)
        if positions_BL is None:
            positions_BL = jnp.tile(jnp.arange(length, dtype=jnp.int32)[None], (batch, 1))
        counts = one_microbatch(count_batch(segment_ids_BL, tokens_BL, self.fold))
        x_TD, _ = self.hidden(tokens_BL, segment_ids_BL, positions_BL, counts)
        wide = at_least_float32(x_TD.dtype)
        logits_TV = jnp.matmul(x_TD, self.head_weight(), preferred_element_type=wide)
        return logits_TV.reshape(batch, length, -1)
