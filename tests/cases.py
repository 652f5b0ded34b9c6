"""Two programs in which the figures of a routing case are exact, on any fold, layers scanned over.

Both read logits from a table: a token is a one-hot row, so row i of a router's weights is what
token id i gets, in each of two MoE layers. `Steps` is the real train step of a model whose other
weights are 0: every layer sees the embeddings and no experts' output, the cross-entropy is log V
and has no gradient at the routers. `layer_program` scans over two MoE layers alone, and shows what
they choose and return, and their gradients.
"""

from dataclasses import dataclass, replace
from functools import lru_cache
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from moejax.core import collectives, params
from moejax.core.mesh import ParallelConfig, fold, make_mesh
from moejax.core.precision import PrecisionConfig
from moejax.core.sharding import COMPUTE, is_dims, specs, to_compute
from moejax.data.context import order_tokens
from moejax.model import balance
from moejax.model.attention.gqa import AttentionConfig
from moejax.model.moe import MoE, MoEConfig
from moejax.model.stack import scan_layers
from moejax.model.stream import count_batch, make_stream, my_tokens, one_microbatch
from moejax.train import step as train_step
from moejax.train.state import TrainState
from tests.train.folds import Case, make_trainer

D = IDS = 16  # width, and token ids that have a row of logits
FFN, LAYERS = 8, 2
BIAS_RATE, COEFF = 1e-3, 0.01

# Where experts are split, ep is 4 for 4 and 8 of them, and 2 for 2 and 6.
PLACES = {
    "alone": (dict(zero=0), "all_gather"),
    "dp8-ep": (dict(dp=8, ep=0, zero=3), "ragged"),
    "dp4tp2-ep-etp2": (dict(dp=4, tp=2, ep=0, etp=2, zero=1), "all_to_all"),
    "dp2tp4-ep": (dict(dp=2, tp=4, ep=0, zero=3), "all_to_all"),
    "tp8-etp8": (dict(tp=8, etp=8, zero=0), "all_gather"),
}
EVERYWHERE = [(name, remat) for name in PLACES for remat in ("none", "full")]
# Rows split over cp, for cases of its own.
SPLIT = {
    "dp4cp2-ep": (dict(dp=4, cp=2, ep=0, zero=3), "ragged"),
    "cp4tp2-ep": (dict(cp=4, tp=2, ep=0, zero=1), "all_to_all"),
}
SPLIT_AT = [("dp4cp2-ep", "none"), ("cp4tp2-ep", "full")]
# For what needs a program of its own.
ONCE = [("alone", "none"), ("alone", "full"), ("dp8-ep", "none"), ("dp4tp2-ep-etp2", "full"),
        ("dp2tp4-ep", "none"), ("tp8-etp8", "full")]  # fmt: skip


def at_each(ats):
    """Returns the mark that runs a test with `at`, each of these pairs (place, remat).

    All tests of a file at one place run before those at the next: then its programs, each of which
    takes some hundred of the memory maps that a process may have, are forgotten.
    """
    return pytest.mark.parametrize("at", ats, ids=list(map("-".join, ats)), scope="module")


everywhere, once = at_each(EVERYWHERE), at_each(ONCE)


@dataclass(frozen=True)
class Place:
    """A fold and a dispatcher."""

    parallel: ParallelConfig
    dispatch: str

    @property
    def grid(self):
        return fold(*self.parallel.readings(self.parallel.num_devices()))

    @property
    def copies(self) -> int:
        """How often a case's rows are repeated so that each group of devices has some."""
        return self.parallel.dp


def place(name: str, num_experts: int) -> Place:
    """Returns the place of that name for so many experts."""
    degrees, dispatch = (PLACES | SPLIT)[name]
    if "ep" in degrees:
        degrees = degrees | {"ep": 4 if num_experts % 4 == 0 else 2}
    return Place(ParallelConfig(**degrees), dispatch)


def mirrored(values_E) -> np.ndarray:
    """Returns [2, E]: the values of each layer's experts, in reverse order in the second."""
    values_E = np.asarray(values_E, np.float64)
    return np.stack([values_E, values_E[::-1]])


def table(*rows_E) -> np.ndarray:
    """Returns logits [layers, ids, E] of the first token ids."""
    return np.stack([mirrored(row) for row in rows_E], axis=1)


# --- the train step ---


# Of two experts, what is exact for any number of microbatches acts, and the other losses are only
# reported; of four, every loss acts.
COEFFS = {
    2: dict(batch_coeff=1e-12, global_coeff=1e-12, sequence_coeff=COEFF, z_coeff=COEFF),
    4: dict(batch_coeff=0.5, global_coeff=2.0, sequence_coeff=0.25, z_coeff=COEFF),
}


class Steps:
    """The compiled train step of a model at a place, and the states that it takes."""

    def __init__(self, at: tuple[str, str], num_experts: int, dtype: str):
        self.place, remat = place(at[0], num_experts), at[1]
        model = dict(
            num_layers=LAYERS, dim=D, vocab_size=IDS, remat=remat,
            attention=AttentionConfig(num_heads=8, num_kv_heads=8, head_dim=2),
        )  # fmt: skip
        moe = dict(num_experts=num_experts, top_k=1, shared_ffn_dim=0, ffn_dim=FFN)
        case = Case(
            "", self.place.parallel, self.place.dispatch, model=tuple(model.items()),
            router=(("renormalize", False),), moe=tuple(moe.items()),
            balance=(*COEFFS[num_experts].items(), ("bias_rate", BIAS_RATE)),
        )  # fmt: skip
        self.made = make_trainer(case, dtype)

    @property
    def copies(self) -> int:
        return self.place.copies

    def state(self, logits_LiE, bias_LE=0.0) -> TrainState:
        """Returns the state at step 0 whose router of layer L gives token id i its logits."""
        layout = self.made.layout
        zeros = jax.tree.map(
            lambda leaf: np.zeros(leaf.shape, leaf.dtype), replace(layout.abstract, key=None)
        )
        set_scales(zeros.params)
        # Of mean square 256, exactly; 1e-6 more is rounded away. Normed, 4.
        zeros.params["embedding"][...] = 64 * np.eye(IDS)
        moe = zeros.params["stack_0"]["block_0"]["moe"]
        moe["w_router"][:, : logits_LiE.shape[1]] = np.asarray(logits_LiE, np.float32) / 4
        self.buffers(zeros)["bias"][...] = bias_LE
        return jax.device_put(replace(zeros, key=jax.random.key(0)), layout.shardings)

    def buffers(self, state: TrainState) -> dict:
        """Returns {"bias", "load_before"}, [layers, E], as host arrays."""
        return jax.tree.map(np.asarray, state.buffers)["stack_0"]["block_0"]["moe"]

    def run(self, state: TrainState, made: dict) -> tuple[TrainState, dict]:
        """Returns (state, metrics as host arrays) of a step on a `batch`.

        The metrics have, beside the load as shares, the counts that these are shares of, by which
        the bias moves: moe["load_E"].
        """
        shares = train_step._moe_metrics

        def with_counts(auxes, *rest):
            return shares(auxes, *rest) | {"load_E": train_step.by_layer(auxes, "load_E")}

        if (cp := self.place.parallel.cp) > 1:
            made = made | {"order": order_tokens(made["segment_ids"], cp)}
        with mock.patch.object(train_step, "_moe_metrics", with_counts):  # read where it is traced
            state, metrics = self.made.step(state, made)
        return state, jax.tree.map(np.asarray, metrics)

    def router_gradient(self, metrics: dict) -> np.ndarray:
        """Returns the gradient of the logits' table, summed over tokens: [layers, ids, E]."""
        return metrics["grads"]["stack_0"]["block_0"]["moe"]["w_router"] / 4


def set_scales(tree: dict) -> None:
    """Sets the scales of all norms to 1."""
    for name, node in tree.items():
        if isinstance(node, dict):
            set_scales(node)
        elif name == "scale":
            node[...] = 1


@lru_cache(maxsize=3)
def steps(at: tuple[str, str], num_experts: int, dtype: str = "float32") -> Steps:
    """Returns the Steps, compiled once for each shape of a batch."""
    return Steps(at, num_experts, dtype)


@lru_cache(maxsize=len(PLACES))
def evaluation(name: str):
    """Returns the compiled evaluation of two experts; it computes nothing again."""
    return train_step.make_eval_step(steps((name, "none"), 2).made.layout)


def batch(ids_mBL, segments_mBL=None) -> dict[str, np.ndarray]:
    """Returns a batch of [microbatches, rows, L] whose tokens have themselves for targets; an id
    below 0 is padding that holds the id -1 - id. `segments_mBL`: documents, where not each row."""
    ids = np.asarray(ids_mBL, np.int32)
    segments = (ids >= 0).astype(np.int32) if segments_mBL is None else segments_mBL
    places = np.broadcast_to(np.arange(ids.shape[-1], dtype=np.int32), ids.shape)
    tokens = np.where(ids >= 0, ids, -1 - ids)
    targets = np.where(ids >= 0, ids, -1)
    return dict(tokens=tokens, targets=targets, segment_ids=segments, positions=places)


# --- layers alone ---


FLOAT32 = PrecisionConfig(compute_dtype="float32")


def stacked(cfg: MoEConfig, grid):
    """Returns two MoE layers as one module."""
    make = lambda rngs: MoE(cfg, D, std=0.5, out_std=0.5, fold=grid, precision=FLOAT32, rngs=rngs)  # noqa: E731, E501
    return params.stack(make, LAYERS, nnx.Rngs(0))


@lru_cache(maxsize=6)
def layer_program(place: Place, remat: str, cfg: MoEConfig):
    """Returns the jitted (weights, buffers, ids [B, L], x [B, L, D], pull [layers, T, D]) ->
    ({"y", "experts"} by layer and token, aux by layer, gradients of (weights, buffers, x)).

    Every layer sees x, one row a document; ids below 0 are padding. The gradients are of
    sum(y * pull) and the balance losses.
    """
    grid = place.grid
    cfg = replace(cfg, dispatch=place.dispatch)
    module = nnx.eval_shape(lambda: stacked(cfg, grid))
    definition, (dims, _) = params.partition(module)[0], params.dims_of(module)
    one = jax.tree.map(lambda d: d[1:], dims, is_leaf=is_dims)

    def weights_of(stored):
        return to_compute(stored, one, grid, 0, FLOAT32)

    def layer(w, b, x_tD, stream, chosen_tK):
        mine = stream._replace(recalled_tK=chosen_tK)
        y_tD, aux = params.assemble(definition, w, b)(x_tD, mine)
        chosen_tK = aux.pop("experts")
        return x_tD, aux | {"y": y_tD}, chosen_tK

    def device(weights, buffers, ids_bL, x_bLD, pull_LtD):
        segments_bL = (ids_bL >= 0).astype(jnp.int32)
        counts = one_microbatch(count_batch(segments_bL, ids_bL, grid))
        stream = make_stream(segments_bL, None, counts, grid)

        def loss(weights, buffers, x_bLD):
            own = collectives.vary(weights, grid.all)
            x_tD = my_tokens(collectives.vary(x_bLD, grid.all).reshape(-1, D), grid)
            _, aux, chosen = scan_layers(
                layer, weights_of, own, buffers, x_tD, stream, remat=remat
            )
            share = (aux["y"] * pull_LtD).sum() + balance.weighted(aux, cfg.balance).sum()
            return collectives.psum(share, grid.tokens), aux | {"experts": chosen}

        grads, aux = jax.grad(loss, (0, 1, 2), has_aux=True)(weights, buffers, x_bLD)
        by_token = {name: aux.pop(name) for name in ("y", "experts")}
        return by_token, collectives.psum(aux, grid.tokens), grads

    w_specs, rows, tokens = specs(dims, COMPUTE, grid), P(grid["dp"] or None), P(None, grid.tokens)
    sharded = jax.shard_map(
        device, mesh=make_mesh(grid), in_specs=(w_specs, P(), rows, rows, tokens),
        out_specs=(tokens, P(), (w_specs, P(), rows)), check_vma=True,
    )  # fmt: skip
    return jax.jit(sharded)


def new_layers(cfg: MoEConfig) -> tuple[dict, dict]:
    """Returns (weights, buffers) of two layers: normal numbers, and zeros; host arrays."""
    module = nnx.eval_shape(lambda: stacked(cfg, fold({}, {})))
    _, weights, buffers = params.partition(module)
    rng = np.random.default_rng(1)
    draw = lambda leaf: 0.5 * rng.normal(size=leaf.shape).astype(leaf.dtype)  # noqa: E731
    zeros = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), buffers)
    return jax.tree.map(draw, weights), zeros
