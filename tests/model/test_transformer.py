"""The decoder alone, with no mesh: packing, tied head, patterns, balance by layer, FLOPs."""

from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from configs.demo import demo
from moejax.core.precision import PrecisionConfig
from moejax.model import transformer
from moejax.model.attention import AttentionConfig
from moejax.model.rope import rope_table
from moejax.model.router import RouterConfig
from moejax.model.stream import Counts
from moejax.model.transformer import ModelConfig, Transformer
from tests.model.families import DEEPSEEK_V3, shrunken
from tests.oracle import max_relative_error

FLOAT32 = PrecisionConfig(compute_dtype="float32")
VOCAB = 32


def tiny(**changes) -> ModelConfig:
    base = demo().model
    attention = replace(base.attention, num_heads=4, num_kv_heads=2, head_dim=8)
    moe = replace(base.moe, num_experts=4, ffn_dim=16)
    small = dict(vocab_size=VOCAB, dim=32, num_layers=2, attention=attention, moe=moe, ffn_dim=24)
    return replace(base, **(small | changes), init_std=0.2)


@cache
def model(cfg: ModelConfig) -> Transformer:
    return Transformer(cfg, precision=FLOAT32, rngs=nnx.Rngs(0))


@cache
def program(cfg: ModelConfig):
    definition, state = nnx.split(model(cfg))
    run = jax.jit(lambda state, *batch: nnx.merge(definition, state)(*batch))
    return lambda *batch: run(state, *(jnp.asarray(a, jnp.int32) for a in batch))


def test_the_module_works_alone():
    """As the docstrings say: default arguments, a notebook, no mesh, no jit."""
    logits = Transformer(tiny(), rngs=nnx.Rngs(0))(jnp.zeros((2, 5), jnp.int32))
    assert logits.shape == (2, 5, VOCAB) and logits.dtype == jnp.float32
    assert bool(jnp.isfinite(logits).all())


def test_the_grouped_gemm_is_the_one_named():
    """The definition gives the same logits; a kernel of another device refuses, and says why."""
    tokens = jnp.arange(10, dtype=jnp.int32).reshape(2, 5)

    def logits(impl):
        cfg = tiny(moe=replace(tiny().moe, impl=impl))
        return Transformer(cfg, rngs=nnx.Rngs(0))(tokens)

    assert max_relative_error(logits("reference"), logits("")) < 1e-5
    with pytest.raises(ValueError, match="impl='hopper' cannot serve this call: it runs on Hopper"):
        logits("hopper")


# A row of 8: document 1 has 3 tokens, document 2 has 5; another row ends in padding.
SEGMENTS = np.array([[1, 1, 1, 2, 2, 2, 2, 2], [1, 2, 2, 2, 2, 0, 0, 0]])
POSITIONS = np.array([[0, 1, 2, 0, 1, 2, 3, 4], [0, 0, 1, 2, 3, 0, 0, 0]])
TOKENS = np.array([[1, 2, 3, 10, 11, 12, 13, 14], [4, 20, 21, 22, 23, 0, 0, 0]])
CASES = {
    "plain": tiny(),
    "window, sinks, biases": tiny(
        pattern="m", attention=replace(tiny().attention, window=3, sinks=True, bias=True)
    ),
    "latents": tiny(attention=shrunken(DEEPSEEK_V3)),
    "reference": tiny(attention=replace(tiny().attention, impl="reference")),
}


@pytest.mark.parametrize("name", CASES)
def test_documents_do_not_see_each_other(name):
    run = program(CASES[name])
    logits = run(TOKENS, SEGMENTS, POSITIONS)
    other = TOKENS.copy()
    other[0, :3], other[1, 0] = [7, 8, 9], 30
    changed = run(other, SEGMENTS, POSITIONS)
    np.testing.assert_array_equal(changed[0, 3:], logits[0, 3:])
    np.testing.assert_array_equal(changed[1, 1:5], logits[1, 1:5])
    assert max_relative_error(changed[0, :3], logits[0, :3]) > 0.01
    assert bool(jnp.isfinite(logits).all()), "the padded tail too"


@pytest.mark.parametrize("name", CASES)
def test_a_packed_document_equals_its_own_run(name):
    run = program(CASES[name])
    logits = run(TOKENS, SEGMENTS, POSITIONS)
    for row, first, last in ((0, 0, 3), (0, 3, 8), (1, 0, 1), (1, 1, 5)):
        alone = np.zeros_like(TOKENS)
        length = last - first
        alone[0, :length] = TOKENS[row, first:last]
        segments = np.zeros_like(SEGMENTS)
        segments[0, :length] = 1
        places = np.tile(np.arange(8), (2, 1))
        mine = run(alone, segments, places)[0, :length]
        assert max_relative_error(logits[row, first:last], mine) < 1e-5


def test_no_gradient_flows_between_documents():
    definition, state = nnx.split(model(CASES["plain"]))

    def second(state):
        batch = (jnp.asarray(a, jnp.int32) for a in (TOKENS, SEGMENTS, POSITIONS))
        return nnx.merge(definition, state)(*batch)[0, 3:].sum()

    grad = jax.jit(jax.grad(second, allow_int=True))(state)["embedding"][...]
    np.testing.assert_array_equal(grad[np.array([1, 2, 3])], np.zeros((3, 32)))
    assert bool((grad[np.arange(10, 14)] != 0).any())


def test_a_tied_head_is_the_embedding():
    tied = model(tiny(tied=True))
    assert not hasattr(tied, "head")
    np.testing.assert_array_equal(tied.head_weight(), tied.embedding[...].T)
    assert program(tiny(tied=True))(TOKENS).shape == (2, 8, VOCAB)


def test_patterns_and_first_dense_layers():
    cfg = tiny(num_layers=5, first_k_dense=1, pattern="DM")
    assert cfg.kinds() == "DDMDM" and cfg.stacks() == (("D", 1), ("DM", 2))
    assert program(cfg)(TOKENS).shape == (2, 8, VOCAB)
    with pytest.raises(ValueError, match="num_layers=4 less first_k_dense=1 .*'DM'"):
        tiny(num_layers=4, first_k_dense=1, pattern="DM")
    with pytest.raises(ValueError, match="model.pattern='MX': letters M .* and D"):
        tiny(pattern="MX")
    with pytest.raises(ValueError, match="num_heads=3 is no multiple of num_kv_heads=2"):
        AttentionConfig(num_heads=3, num_kv_heads=2)


def test_opposite_imbalances_of_two_layers_do_not_cancel():
    """Layer 0 sends all tokens to expert 0, layer 1 to expert 1: aux 2 and 2, scanned over."""
    router = RouterConfig(renormalize=False)
    cfg = tiny(moe=replace(tiny().moe, num_experts=2, top_k=1, router=router))
    made = Transformer(cfg, precision=FLOAT32, rngs=nnx.Rngs(0))
    made.embedding[...] = jnp.ones((VOCAB, 32))
    block = made.stack_0.block_0
    block.attention.w_o[...] = jnp.zeros_like(block.attention.w_o[...])
    block.moe.experts.w_out[...] = jnp.zeros_like(block.moe.experts.w_out[...])
    sign_LE = jnp.asarray([[10.0, -10.0], [-10.0, 10.0]])
    block.moe.w_router[...] = jnp.broadcast_to(sign_LE[:, None] / 32, (2, 32, 2))
    four = jnp.asarray(4.0)
    ids = jnp.zeros((1, 4), jnp.int32)
    counts = Counts(four, four, jnp.asarray(1.0), four)
    _, aux = made.hidden(ids, ids + 1, jnp.arange(4, dtype=jnp.int32)[None], counts)
    aux = aux["stack_0"]["block_0"]
    np.testing.assert_allclose(aux["batch_loss"], [2.0, 2.0], atol=1e-5)
    np.testing.assert_array_equal(aux["load_E"], [[4, 0], [0, 4]])
    np.testing.assert_array_equal(aux["dropped"], [0, 0])


def test_positions_are_turned_into_angles_in_float32_at_least(monkeypatch):
    """Also where sums are kept in bfloat16, in which 4095 is 4096."""
    seen = []

    def noted(positions_bL, dim, cfg, dtype):
        seen.append(jnp.dtype(dtype))
        return rope_table(positions_bL, dim, cfg, dtype)

    monkeypatch.setattr(transformer, "rope_table", noted)
    for accum in ("bfloat16", "float32"):
        precision = replace(FLOAT32, accum_dtype=accum)
        model = Transformer(tiny(), precision=precision, rngs=nnx.Rngs(0))
        model(jnp.zeros((1, 4), jnp.int32))
    assert seen == [jnp.dtype("float32")] * 2
