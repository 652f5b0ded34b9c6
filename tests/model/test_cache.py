"""Decoding with a cache gives what the whole row gives: every family, windows, padding, folds."""

from dataclasses import replace
from functools import cache as once

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from configs.demo import demo
from moejax.core import collectives, params, sharding
from moejax.core.mesh import ParallelConfig, fold, make_mesh
from moejax.core.precision import PrecisionConfig
from moejax.model.attention import Cache, empty_cache
from moejax.model.transformer import ModelConfig, Transformer
from tests.model.families import DEEPSEEK_V3, FAMILIES, MIXTRAL, QWEN3_MOE, shrunken
from tests.oracle import max_relative_error

FLOAT32, VOCAB, LENGTH = PrecisionConfig(compute_dtype="float32"), 32, 9
TOKENS = np.random.default_rng(0).integers(1, VOCAB, (2, LENGTH))
# The second row has two tokens of padding in front of it, and two documents.
SEGMENTS = np.array([[1] * LENGTH, [0, 0, 1, 1, 1, 2, 2, 2, 2]])
PLACES = np.array([[*range(LENGTH)], [0, 0, 0, 1, 2, 0, 1, 2, 3]])
BATCH = tuple(a.astype(np.int32) for a in (TOKENS, SEGMENTS, PLACES))


def model_of(attention, pattern: str = "", num_layers: int = 2) -> ModelConfig:
    base = demo().model
    moe = replace(base.moe, num_experts=8, ffn_dim=8, dispatch="all_gather")
    pattern = pattern or ("dD" if attention.window else "D")  # dense: less to compile
    return replace(
        base, vocab_size=VOCAB, dim=16, num_layers=num_layers, pattern=pattern, ffn_dim=24,
        attention=attention, moe=moe, init_std=0.3,
    )  # fmt: skip


@once
def made(cfg: ModelConfig) -> Transformer:
    return Transformer(cfg, precision=FLOAT32, rngs=nnx.Rngs(0))


@once
def programs(cfg: ModelConfig):
    """(hidden states of a whole row, hidden states of tokens that follow a cache)."""
    definition, state = nnx.split(made(cfg))

    def logits(model, x_tD, shape):
        return (x_tD @ model.head_weight()).reshape(*shape, VOCAB)

    def whole(state, *batch):
        return nnx.merge(definition, state)(*batch)

    def extend(state, held, *batch):
        model = nnx.merge(definition, state)
        x_tD, held = model.extend(*batch, held)
        return logits(model, x_tD, batch[0].shape), held

    return jax.jit(whole), jax.jit(extend), state


def by_pieces(cfg: ModelConfig, slots: int, *ends: int):
    """Logits of the rows, given piece by piece: up to the first end, from there to the next, ..."""
    _, extend, state = programs(cfg)
    held, parts, start = empty_cache(2, slots), [], 0
    for end in ends:
        part, held = extend(state, held, *(a[:, start:end] for a in BATCH))
        parts.append(np.asarray(part))
        start = end
    return np.concatenate(parts, axis=1), held


@pytest.mark.parametrize("name, pattern", [
    ("DeepSeek-V3", "MD"), ("DeepSeek-V2-Lite", ""), ("gpt-oss", ""), ("OLMoE", ""), ("GLM-4.5", "")
])  # fmt: skip
def test_prefill_and_decode_give_what_the_whole_row_gives(name, pattern):
    cfg = model_of(shrunken(FAMILIES[name]), pattern)
    whole, _, state = programs(cfg)
    right = np.where(SEGMENTS[..., None] > 0, whole(state, *BATCH), 0)
    mine, held = by_pieces(cfg, LENGTH + 3, 5, 7, 8, 9)
    assert max_relative_error(np.where(SEGMENTS[..., None] > 0, mine, 0), right) < 1e-5
    np.testing.assert_array_equal(held.segment_ids_bS, np.pad(SEGMENTS, ((0, 0), (3, 0))))


def test_what_is_held():
    """Of MLA the latent and the rope key alone; of a window no more than it shows."""
    shapes = lambda cfg: jax.tree.map(lambda a: a.shape, by_pieces(cfg, 12, 5)[1].layers)  # noqa: E731
    latent = shrunken(DEEPSEEK_V3)
    rank, turned = latent.mla.kv_rank, latent.rope_dim
    held = shapes(model_of(latent))["stack_0"]["block_0"]
    assert held == ((2, 2, 12, rank), (2, 2, 12, turned))
    blocks = shapes(model_of(replace(shrunken(MIXTRAL), window=4)))["stack_0"]
    assert blocks == {"block_0": ((1, 2, 3, 2, 8),) * 2, "block_1": ((1, 2, 12, 2, 8),) * 2}


def test_the_oldest_are_forgotten():
    """Layers that hold 3 tokens see what layers with a window of 4 see."""
    attention = shrunken(QWEN3_MOE)
    cfg = model_of(attention, "D")
    windowed = model_of(replace(attention, window=4), "d")
    mine, _ = by_pieces(cfg, 3, *range(1, LENGTH + 1))
    right = programs(windowed)[0](programs(cfg)[2], *BATCH)
    assert max_relative_error(mine[0], right[0]) < 1e-5


@pytest.mark.parametrize("attention", [QWEN3_MOE, DEEPSEEK_V3], ids=["gqa", "mla"])
def test_decoding_on_a_fold(attention):
    """dp=2 x tp=4: heads over tp, of 2 key/value heads each on two devices."""
    cfg = model_of(shrunken(attention), "M", 1)
    grid = fold(*ParallelConfig(dp=2, tp=4, ep=8).readings(8))
    mesh, rows = make_mesh(grid), 8
    model = nnx.eval_shape(
        lambda: Transformer(cfg, fold=grid, precision=FLOAT32, rngs=nnx.Rngs(0))
    )
    definition = params.partition(model)[0]
    _, weights, buffers = params.partition(made(cfg))
    specs = sharding.specs(params.dims_of(model)[0], sharding.COMPUTE, grid)
    own = Cache(P(grid.tokens), P(None, grid.tokens))

    def extend(weights, held, *batch):
        weights = collectives.vary(weights, grid.all)
        model = params.assemble(definition, weights, buffers)
        held = empty_cache(rows // 2, LENGTH) if held is None else held
        x_tD, held = model.extend(*batch, held)
        return x_tD, held

    def program(held):
        return jax.jit(jax.shard_map(
            extend, mesh=mesh, in_specs=(specs, held, *(P(grid["dp"]),) * 3),
            out_specs=(P(grid.tokens), own), check_vma=True,
        ))  # fmt: skip

    tiled = tuple(np.tile(a, (4, 1)) for a in BATCH)
    x_TD, held = program(None)(weights, None, *(a[:, :8] for a in tiled))
    last_TD, _ = program(own)(weights, held, *(a[:, 8:] for a in tiled))
    x_BLD = np.concatenate([np.asarray(x).reshape(rows, -1, 16) for x in (x_TD, last_TD)], axis=1)
    logits = x_BLD @ np.asarray(made(cfg).head[...])
    right = np.asarray(programs(cfg)[0](programs(cfg)[2], *BATCH))
    valid = np.tile(SEGMENTS, (4, 1))[..., None] > 0
    right = np.where(valid, np.tile(right, (4, 1, 1)), 0)
    assert max_relative_error(np.where(valid, logits, 0), right) < 1e-5
    assert bool(jnp.isfinite(logits).all())
