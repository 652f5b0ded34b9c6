"""The decoder: embed -> layers (attend, then MLP or MoE) -> norm -> unembed.

One class, any fold: built with global shapes, it runs on local shards inside `shard_map` and,
with no mesh, alone:

    model = Transformer(ModelConfig(), rngs=nnx.Rngs(0))
    logits_BLV = model(tokens_BL)
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from moejax.core import collectives, params
from moejax.core.mesh import Fold
from moejax.core.precision import PrecisionConfig, at_least_float32
from moejax.core.sharding import gathered_as, is_dims, to_compute
from moejax.model.attention import Cache
from moejax.model.attention.memory import last
from moejax.model.block import Inputs, Unit
from moejax.model.config import ModelConfig
from moejax.model.context import my_tokens
from moejax.model.mtp import MTP
from moejax.model.norm import RMSNorm
from moejax.model.prefetch import scan_prefetched
from moejax.model.rope import rope_table
from moejax.model.stack import scan_layers
from moejax.model.stream import (
    Counts,
    Draw,
    Stream,
    count_batch,
    make_stream,
    one_microbatch,
)


def _inputs(kinds: str, count: int, first: int, given_NtK, probe_N) -> Inputs:
    """Returns what differs between `count` units of these kinds, behind `first` MoE layers."""
    moes = kinds.upper().count("M")
    numbers = first + moes * jnp.arange(count, dtype=jnp.int32)
    given, probe = (
        None if a is None else a[first : first + count * moes].reshape(count, moes, *a.shape[1:])
        for a in (given_NtK, probe_N)
    )
    return Inputs(numbers, given, probe)


class Transformer(nnx.Module):
    """A decoder-only language model.

    `embedding` [V', D] and `head` [D, V'] have the padded vocabulary V' (`cfg.padded_vocab`): rows
    of the V tokens, drawn as if there were no padding, then zeros, which nothing reads and no
    gradient reaches.

    With pipeline stages (pp), a device's weights of a stack are those of its own stages' layers:
    `places` has, for each stack, which unit is in each slot of all ranks, -1 for a slot that one
    with fewer layers leaves empty. `moejax.parallel` then calls `embed`, the stacks' units
    (`unit`) and `final_norm` where their time comes.
    """

    def __init__(
        self,
        cfg: ModelConfig,
        *,
        fold: Fold = Fold(),  # noqa: B008 - frozen
        precision: PrecisionConfig = PrecisionConfig(),  # noqa: B008 - frozen
        zero: int = 0,
        places: tuple[tuple[int, ...], ...] = (),
        rngs: nnx.Rngs,
    ):
        self.cfg, self.fold, self.precision, self.zero = cfg, fold, precision, zero
        ranks = fold.degree("vocab")
        if cfg.padded_vocab % ranks:
            raise ValueError(
                f"model.vocab_size={cfg.vocab_size}, stored with {cfg.padded_vocab} rows, does not "
                f"divide over pp * tp = {ranks}: set model.vocab_multiple={ranks}, or a multiple"
            )
        self.embedding = self._vocab_weight(("vocab", "embed"), rngs)
        for i, (kinds, count) in enumerate(cfg.stacks()):
            make = lambda rngs, kinds=kinds: Unit(cfg, kinds, fold, precision, rngs)  # noqa: E731
            placed = places[i] if places else ()
            setattr(self, f"stack_{i}", params.stack(make, count, rngs, placed))
        self.final_norm = RMSNorm(cfg.dim, cfg.norm_eps, precision)
        if not cfg.tied:
            self.head = self._vocab_weight(("embed", "vocab"), rngs)
        for depth in range(cfg.mtp_depth):
            setattr(self, f"mtp_{depth}", MTP(cfg, fold, precision, rngs))

    def _vocab_weight(self, dims: tuple[str, ...], rngs: nnx.Rngs) -> nnx.Param:
        cfg, sizes = self.cfg, {"vocab": self.cfg.vocab_size, "embed": self.cfg.dim}
        shape = tuple(sizes[dim] for dim in dims)
        drawn = params.normal(rngs, shape, dims, cfg.init_std, self.precision)
        return params.padded(drawn, "vocab", cfg.padded_vocab)

    def _weight(self, variable: nnx.Param) -> Array:
        """A weight outside the layers, gathered (ZeRO-3) and in the compute dtype."""
        zero, dtype = self.zero if self.zero == 3 else 0, self.precision.dtype("compute")
        return gathered_as(variable[...], dtype, variable.get_metadata()["dims"], self.fold, zero)

    @jax.named_scope("embed")
    def embed(self, tokens_bL: Int[Array, "b L"]) -> Float[Array, "t D"]:
        """Returns the embeddings of this device's tokens; each rank of pp and tp looks up its
        vocabulary.

        Where the table rests in columns (ZeRO-3) and has more rows than there are tokens, tokens
        travel to the columns instead: every rank looks up all ranks' tokens in its own. Rows are
        cast when they have been found, so that the gradients of a frequent token add up unrounded.
        """
        tp, dp, id_T = self.fold["tp"], self.fold["dp"], tokens_bL.reshape(-1)
        scattered = self.zero == 3 and len(id_T) < self.embedding.shape[0]
        gathered = self.zero == 3 and not scattered
        w_vD = self._weight(self.embedding) if gathered else jnp.asarray(self.embedding[...])
        id_T = collectives.all_gather(id_T, dp) if scattered else id_T
        id_T = id_T - collectives.axis_index(self.fold["vocab"]) * w_vD.shape[0]
        mine_T = (id_T >= 0) & (id_T < w_vD.shape[0])
        x_TD = jnp.where(mine_T[:, None], w_vD[jnp.where(mine_T, id_T, 0)], 0)
        x_TD = x_TD.astype(self.precision.dtype("compute"))
        if scattered:
            x_nTd = collectives.all_to_all(x_TD, dp).reshape(-1, tokens_bL.size, x_TD.shape[1])
            x_TD = jnp.moveaxis(x_nTd, 0, 1).reshape(tokens_bL.size, -1)
        return collectives.psum(collectives.psum_scatter(x_TD, tp), self.fold["pp"])

    def scanned(self) -> tuple[str, ...]:
        """Returns the names of the stacks and the further modules: what `Draw.sums` is of."""
        stacks = (f"stack_{i}" for i in range(len(self.cfg.stacks())))
        return (*stacks, *(f"mtp_{depth}" for depth in range(self.cfg.mtp_depth)))

    def head_weight(self) -> Float[Array, "D v"]:
        """Returns the head of this device's slice of the padded vocabulary."""
        return self._weight(self.embedding).T if self.cfg.tied else self._weight(self.head)

    def tokens_here(self) -> Int[Array, ""] | None:
        """Returns how many columns, the first ones, of this device's `head_weight` are tokens and
        no padding; None: all."""
        cfg = self.cfg
        if cfg.padded_vocab == cfg.vocab_size:
            return None
        columns = cfg.padded_vocab // self.fold.degree("vocab")
        first = collectives.axis_index(self.fold["vocab"]) * columns
        return jnp.clip(cfg.vocab_size - first, 0, columns)

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

    def predict_ahead(
        self,
        depth: int,
        h_tD: Float[Array, "t D"],
        tokens_bL: Int[Array, "b L"],
        segment_ids_bL: Int[Array, "b L"],
        positions_bL: Int[Array, "b L"],
        counts: Counts,
        draw: Draw = Draw(),  # noqa: B008 - immutable
    ) -> tuple[Float[Array, "t D"], dict]:
        """Returns (normed states of the further module `depth`, {"block": aux}, {} if it is dense).

        `h_tD` are the states that `hidden`, or the module before, gave. Tokens, segments and counts
        are those of `mtp.ahead(batch, depth + 1)`.
        """
        batch = (tokens_bL, segment_ids_bL, positions_bL)
        next_tD, stream, given_NtK = self._prepare(*batch, counts, draw)
        kind, module = self.cfg.mtp_kind, getattr(self, f"mtp_{depth}")
        first = self.cfg.kinds().count("M") + depth * kind.upper().count("M")
        inputs = _inputs(kind, 1, first, given_NtK, draw.probe_N)._replace(next_tD=next_tD[None])
        definition, *arrays = params.partition(module)
        weights, buffers = jax.tree.map(lambda a: a[None], arrays)  # as a stack of one
        dims = params.dims_of(module)[0]
        sums = None if draw.sums is None else draw.sums[f"mtp_{depth}"]
        sums = jax.tree.map(lambda a: a[None], sums)
        pieces = (definition, weights, buffers, dims)
        x_tD, auxes, _ = self._scan(*pieces, h_tD, inputs, stream, sums)
        return x_tD, jax.tree.map(lambda a: a[0], auxes)

    def stream(
        self,
        tokens_bL: Int[Array, "b L"],
        segment_ids_bL: Int[Array, "b L"],
        positions_bL: Int[Array, "b L"],
        counts: Counts,
        draw: Draw,
    ) -> tuple[Stream, Int[Array, "N t K"] | None]:
        """Returns (what every layer reads, the experts given to all MoE layers or None)."""
        cfg, dtype = self.cfg, at_least_float32(self.precision.dtype("accum"))  # angles to 1e6
        rope = rope_table(positions_bL, cfg.attention.rope_dim, cfg.attention.rope, dtype)
        stream = make_stream(segment_ids_bL, rope, counts, self.fold, tokens_bL, draw)
        given_NtK = None
        if draw.routing_bLNK is not None:
            given_TNK = draw.routing_bLNK.reshape(-1, *draw.routing_bLNK.shape[2:])
            given_NtK = my_tokens(given_TNK, self.fold).swapaxes(0, 1)
        return stream, given_NtK

    def _prepare(self, tokens_bL, *rest):
        """Returns (embeddings, stream, the experts given to all MoE layers or None)."""
        x_tD = collectives.vary(self.embed(tokens_bL), self.fold.all)
        return x_tD, *self.stream(tokens_bL, *rest)

    def _through(self, tokens_bL, segment_ids_bL, positions_bL, counts, draw, cache=None):
        """Returns (normed hidden states, aux, what the layers hold, where there is a cache)."""
        batch = (tokens_bL, segment_ids_bL, positions_bL)
        x_tD, stream, given_NtK = self._prepare(*batch, counts, draw)
        if cache is not None:
            stream = stream._replace(remembered_ids_bS=cache.segment_ids_bS)
        auxes, holds, first = {}, {}, 0
        for i, (kinds, count) in enumerate(self.cfg.stacks()):
            name = f"stack_{i}"
            held = None if cache is None or cache.layers is None else cache.layers[name]
            inputs = _inputs(kinds, count, first, given_NtK, draw.probe_N)._replace(held=held)
            unit = getattr(self, name)
            dims = jax.tree.map(lambda d: d[1:], params.dims_of(unit)[0], is_leaf=is_dims)
            pieces = (*params.partition(unit), dims)
            sums = None if draw.sums is None else draw.sums[name]
            x_tD, auxes[name], holds[name] = self._scan(*pieces, x_tD, inputs, stream, sums)
            first += count * kinds.upper().count("M")
        return self.final_norm(x_tD), auxes, holds

    def unit(self, name: str):
        """Returns (layer, weights_of) of a stack's units: see `stack.scan_layers`. `weights_of`
        takes one unit's (weights, (probe_M, next_tD)); its layer's buffers are (buffers, Inputs).
        """
        unit = getattr(self, name)
        dims = jax.tree.map(lambda d: d[1:], params.dims_of(unit)[0], is_leaf=is_dims)
        return self._functions(params.partition(unit)[0], dims)

    def _functions(self, definition, dims):
        zero = self.zero if self.zero == 3 else 0

        def weights_of(stored):
            return to_compute(stored[0], dims, self.fold, zero, self.precision), stored[1]

        def layer(w, kept, x, stream, choices):
            mine, (probe_M, next_tD) = params.assemble(definition, w[0], kept[0]), w[1]
            inputs = kept[1]._replace(probe_M=probe_M, next_tD=next_tD)
            return mine(x, stream, inputs, choices)

        return layer, weights_of

    def _scan(self, definition, weights, buffers, dims, x_tD, inputs: Inputs, stream, sums):
        """Returns (x_tD through stacked units, their aux, what they hold)."""
        layer, weights_of = self._functions(definition, dims)
        # What gets a gradient, beside x, is a parameter to the scan.
        stored = (weights, (inputs.probe_M, inputs.next_tD))
        kept = (buffers, inputs._replace(probe_M=None, next_tD=None))
        shards = self.fold["dp"] + self.fold["edp"]
        gathers = self.zero == 3 and shards and len(inputs.layer) > 1
        scan = scan_prefetched if gathers else scan_layers
        x_tD, (auxes, holds), made = scan(
            layer, weights_of, stored, kept, x_tD, stream, remat=self.cfg.remat, sums=sums
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
        return logits_TV[:, : self.cfg.vocab_size].reshape(batch, length, -1)
