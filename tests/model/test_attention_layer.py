"""Attention layers against float64 numpy, with the options of each published family; what their
backward keeps; and what is refused."""

import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from moejax.core import collectives, params, sharding
from moejax.core.mesh import Fold, ParallelConfig, fold, make_mesh
from moejax.core.precision import PrecisionConfig
from moejax.model.attention import ATTENTIONS, AttentionConfig, MLAConfig
from moejax.model.rope import RopeConfig, rope_table
from moejax.model.stream import Counts, make_stream
from moejax.model.transformer import ModelConfig
from tests.model.attention_oracle import attend
from tests.model.families import DEEPSEEK_V2_LITE, DEEPSEEK_V3, FAMILIES, GPT_OSS, OLMOE, shrunken
from tests.oracle import max_relative_error

DIM, EPS = 20, 1e-3
THREE = Fold((("tp", 3),), (("tp", ("tp",)),))
SEGMENTS = np.array([[1, 1, 1, 2, 2, 2, 2, 2], [1, 2, 2, 2, 2, 0, 0, 0]])
PLACES = np.array([[0, 1, 2, 0, 1, 2, 3, 4], [0, 0, 1, 2, 3, 0, 0, 0]])


def layer(cfg: AttentionConfig, dtype: str, fold: Fold = Fold()):  # noqa: B008 - frozen
    made = ATTENTIONS[cfg.kind](
        cfg, DIM, window=cfg.window, std=0.5, out_std=0.5, eps=EPS, fold=fold,
        precision=PrecisionConfig(*[dtype] * 4), rngs=nnx.Rngs(0),
    )  # fmt: skip
    rng, state = np.random.default_rng(1), nnx.state(made, nnx.Param)
    noisy = lambda a: a + jnp.asarray(rng.normal(0, 0.3, a.shape), a.dtype)  # noqa: E731
    nnx.update(made, jax.tree.map(noisy, state))  # biases, scales and sinks that act
    return made


def stream_of(cfg: AttentionConfig, dtype: str):
    places, segments = (jnp.asarray(a, jnp.int32) for a in (PLACES, SEGMENTS))
    table = rope_table(places, cfg.rope_dim, cfg.rope, jnp.dtype(dtype))
    return make_stream(segments, table, Counts(*[jnp.ones((), jnp.float32)] * 4), Fold())


def inputs(dtype: str):
    return jnp.asarray(np.random.default_rng(2).normal(size=(SEGMENTS.size, DIM)), dtype)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_layer_is_what_its_definition_says(name):
    cfg = shrunken(FAMILIES[name])
    with jax.enable_x64(True):
        made, x = layer(cfg, "float64"), inputs("float64")
        mine = np.asarray(made(x, stream_of(cfg, "float64"))[0])
        weights = nnx.to_pure_dict(nnx.state(made, nnx.Param))
        weights = jax.tree.map(lambda a: np.asarray(a, np.float64), weights)
    rows = np.asarray(x).reshape(*SEGMENTS.shape, DIM)
    right = attend(weights, cfg, cfg.window, rows, SEGMENTS, PLACES, EPS)
    assert max_relative_error(mine.reshape(right.shape), right) < 1e-10


OPTIONS = {
    "qk_norm": (replace(OLMOE, qk_norm=""), OLMOE),
    "clip_qkv": (replace(OLMOE, clip_qkv=0.0), OLMOE),
    "sinks": (replace(GPT_OSS, sinks=False), GPT_OSS),
    "window": (replace(GPT_OSS, window=0), GPT_OSS),
    "yarn": (replace(DEEPSEEK_V3, rope=RopeConfig(dim=64, layout="interleaved")), DEEPSEEK_V3),
    "layout": (replace(DEEPSEEK_V3, rope=replace(DEEPSEEK_V3.rope, layout="half")), DEEPSEEK_V3),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_every_option_acts_on_the_shrunken_layers(name):
    without, full = (shrunken(cfg) for cfg in OPTIONS[name])
    x = inputs("float32")
    ys = [layer(cfg, "float32")(x, stream_of(cfg, "float32"))[0] for cfg in (without, full)]
    assert max_relative_error(*ys) > 0.01


def kept_shapes(cfg: AttentionConfig) -> tuple[list[tuple[int, ...]], list]:
    """The shapes that the backward of a layer keeps beside its weights, and the gradients."""
    made, stream = layer(cfg, "float32"), stream_of(cfg, "float32")
    definition, state = nnx.split(made)

    def run(state, x):
        return nnx.merge(definition, state)(x, stream)[0]

    _, pull = jax.vjp(run, state, inputs("float32"))
    held = {id(leaf) for leaf in jax.tree.leaves((state, stream))}
    shapes = [a.shape for a in jax.tree.leaves(pull) if id(a) not in held]
    y = jnp.ones((SEGMENTS.size, DIM), jnp.float32)
    return shapes, jax.tree.leaves(pull(y))


@pytest.mark.parametrize("family", [DEEPSEEK_V3, DEEPSEEK_V2_LITE])
def test_recomputing_keeps_no_queries_keys_and_values(family):
    small = shrunken(family)
    again = replace(small, mla=replace(small.mla, recompute_up=True))
    kept, right = kept_shapes(small)
    kept_again, grads = kept_shapes(again)
    N, sizes = small.num_heads, (small.qk_dim, small.head_dim + small.value_dim)
    heads = {SEGMENTS.size * N * size for size in (*sizes, small.head_dim)}
    big = lambda shapes: [s for s in shapes if np.prod(s, dtype=int) in heads]  # noqa: E731
    assert len(big(kept)) >= 2, "q and k"
    assert not big(kept_again), big(kept_again)
    out = (*SEGMENTS.shape, N, small.value_dim)
    assert kept_again.count(out) == 1, "what attention gave is not computed again"
    for mine, expected in zip(grads, right, strict=True):
        np.testing.assert_allclose(mine, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("recompute", [False, True])
def test_weights_and_tables_are_not_kept_again(recompute):
    """What a layer is given is recognised by identity: through the checkpoint too."""
    small = shrunken(DEEPSEEK_V3)
    cfg = replace(small, mla=replace(small.mla, recompute_up=recompute))
    shapes = {leaf.shape for leaf in jax.tree.leaves(nnx.state(layer(cfg, "float32")))}
    kept, _ = kept_shapes(cfg)
    assert not [s for s in kept if len(s) > 1 and s in shapes]
    assert SEGMENTS.shape not in kept


def test_attention_is_not_computed_again_with_the_up_projections():
    small = shrunken(DEEPSEEK_V3)
    cfg = replace(small, mla=replace(small.mla, recompute_up=True))
    made, stream = layer(cfg, "float32"), stream_of(cfg, "float32")
    pull = jax.vjp(lambda x: made(x, stream)[0], inputs("float32"))[1]
    text = jax.jit(pull).lower(inputs("float32")).as_text()
    assert text.count("stablehlo.exponential") == 1, "the backward's own, of scores"


def test_latents_are_gathered_over_tp_not_tokens():
    """One gather, kv_rank + rope.dim + q_rank wide, and one reduce-scatter."""
    cfg, grid = shrunken(DEEPSEEK_V3), fold(*ParallelConfig(tp=2, edp=2).readings(2))
    made, stream = layer(cfg, "float32", grid), stream_of(cfg, "float32")
    definition, weights, _ = params.partition(made)

    def run(weights, x_tD):
        weights = collectives.vary(weights, grid.all)
        return params.assemble(definition, weights, {})(x_tD, stream)[0]

    specs = sharding.specs(params.dims_of(made)[0], sharding.COMPUTE, grid)
    rows = P(grid["tp"])
    sharded = jax.shard_map(run, mesh=make_mesh(grid), in_specs=(specs, rows), out_specs=rows)
    text = jax.jit(sharded).lower(weights, inputs("float32")).as_text()
    width = cfg.mla.kv_rank + cfg.rope_dim + cfg.mla.q_rank
    gathers = re.findall(r"all_gather.*-> tensor<(\w+)x(\w+)xf32>", text)
    assert gathers == [(str(SEGMENTS.size), str(width))]
    assert text.count("stablehlo.reduce_scatter") == 1


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: AttentionConfig(kind="mqa"), "attention.kind='mqa': choose from 'gqa', 'mla'"),
        (lambda: AttentionConfig(qk_norm="all"), "qk_norm='all': choose from '', 'head', 'full'"),
        (lambda: AttentionConfig(window=-1), "attention.window=-1"),
        (lambda: AttentionConfig(kind="mla", bias=True), "kind='mla' takes no bias=True"),
        (lambda: AttentionConfig(head_dim=8, rope=RopeConfig(dim=10)), "head_dim=8, rope.dim=10"),
        (lambda: AttentionConfig(num_heads=3, num_kv_heads=2), "is no multiple of num_kv_heads=2"),
        (lambda: MLAConfig(kv_rank=0), "widths are positive"),
        (lambda: ModelConfig(pattern="m"), "pattern='m' with attention.window=0"),
        (lambda: ModelConfig(attention=AttentionConfig(window=4)), "pattern='M' with .*window=4"),
        (
            lambda: layer(shrunken(OLMOE, 12, 2), "float32", THREE),
            "num_kv_heads=2 does not divide over tp=3, nor tp over them",
        ),
        (lambda: layer(shrunken(DEEPSEEK_V3), "float32", THREE), "num_heads=4 does not divide"),
    ],
)
def test_what_cannot_be_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_windows_by_layer():
    windowed = AttentionConfig(window=4)
    cfg = ModelConfig(num_layers=5, first_k_dense=1, pattern="mM", attention=windowed)
    assert cfg.windows() == (0, 4, 0, 4, 0) and cfg.kinds() == "DMMMM"
    assert cfg.stacks() == (("D", 1), ("mM", 2))
    cfg = ModelConfig(num_layers=3, first_k_dense=1, pattern="m", attention=windowed)
    assert cfg.windows() == (4, 4, 4) and cfg.stacks() == (("d", 1), ("m", 2))
