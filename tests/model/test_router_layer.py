"""The router inside its layer, on one device; see also `test_cases.py`."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from moejax.core import params
from moejax.core.mesh import Fold
from moejax.core.precision import PrecisionConfig
from moejax.model.attention import AttentionConfig
from moejax.model.balance import BalanceConfig
from moejax.model.moe import MoE, MoEConfig
from moejax.model.router import RouterConfig
from moejax.model.stream import Counts, count_batch, make_stream, one_microbatch
from moejax.model.transformer import ModelConfig, Transformer

FLOAT32 = PrecisionConfig(compute_dtype="float32")


def a_stream(rows: int, length: int, grid: Fold = Fold()):  # noqa: B008 - frozen
    one, ids = jnp.asarray(1.0), jnp.ones((rows, length), jnp.int32)
    return make_stream(ids, None, Counts(one, one, one, one), grid)


def test_the_linear_bias_is_there_where_it_is_asked_for_and_starts_at_zero():
    cfg = MoEConfig(num_experts=4, top_k=2, ffn_dim=4, router=RouterConfig(linear_bias=True))
    layer = MoE(cfg, 4, precision=FLOAT32, rngs=nnx.Rngs(0))
    assert not np.asarray(layer.b_router[...]).any()
    plain = replace(cfg, router=RouterConfig())
    assert not hasattr(MoE(plain, 4, precision=FLOAT32, rngs=nnx.Rngs(0)), "b_router")


@pytest.mark.parametrize("name", ["float32", "float64"])
def test_the_router_dtype_is_that_of_logits_and_weights(name):
    """Two logits 1e-9 apart are told apart in float64 alone."""
    with jax.enable_x64(name == "float64"):
        precision = PrecisionConfig("float32", "float32", "float32", name)
        cfg = MoEConfig(num_experts=2, top_k=1, ffn_dim=4, router=RouterConfig(renormalize=False))
        layer = MoE(cfg, 2, precision=precision, rngs=nnx.Rngs(0))
        layer.w_router[...] = jnp.asarray([[1.0, 1.0], [0.0, 2.0**-30]], jnp.float32)
        made = layer._route(jnp.ones((1, 2), jnp.float32), a_stream(1, 1))
        assert made.logits_tE.dtype == made.weights_tK.dtype == jnp.dtype(name)
        assert int(made.experts_tK[0, 0]) == (name == "float64")


def test_each_layer_routes_by_its_own_bias():
    """Layer l has the bias .1 (l + 1) i, expert 0 a score of .85, others .5: biased [.85 .6 .7 .8]
    in the first MoE layer (0 and 3), [.85 .7 .9 1.1] in the second (3 and 2)."""
    router = RouterConfig(score="sigmoid", linear_bias=True)
    balance = BalanceConfig(bias_rate=1e-3)
    cfg = ModelConfig(
        vocab_size=16, dim=16, num_layers=3, first_k_dense=1, ffn_dim=16,
        attention=AttentionConfig(num_heads=2, num_kv_heads=2, head_dim=8),
        moe=MoEConfig(num_experts=4, top_k=2, ffn_dim=8, router=router, balance=balance),
    )  # fmt: skip
    model = Transformer(cfg, precision=FLOAT32, rngs=nnx.Rngs(0))
    moe = model.stack_1.block_0.moe
    bias = np.asarray([[0.1 * (layer + 1) * i for i in range(4)] for layer in range(2)], np.float32)
    moe.bias[...] = jnp.asarray(bias)
    moe.w_router[...] = jnp.zeros_like(moe.w_router[...])
    first = jnp.log(0.85 / 0.15)
    moe.b_router[...] = jnp.zeros_like(moe.b_router[...]).at[:, 0].set(first)
    tokens = jnp.ones((1, 8), jnp.int32)
    places = jnp.arange(8, dtype=jnp.int32)[None]
    counts = one_microbatch(count_batch(tokens, tokens, Fold()))
    for remat in ("none", "full"):
        definition, weights, buffers = params.partition(model)
        again = params.assemble(definition, weights, buffers)
        again.cfg = replace(cfg, remat=remat)
        _, aux = again.hidden(tokens, tokens, places, counts)
        load = aux["stack_1"]["block_0"]["load_E"]
        np.testing.assert_array_equal(load, [[8, 0, 0, 8], [0, 0, 8, 8]])
    kept = params.partition(model)[2]["stack_1"]["block_0"]["moe"]["bias"]
    assert kept.dtype == jnp.float32
    np.testing.assert_array_equal(kept, bias)


def test_layers_are_numbered_through_the_whole_model():
    """Two dense layers, then MM or DM twice; a mark is a MoE layer that chooses by token id."""
    router = RouterConfig(record="somewhere")
    cfg = ModelConfig(
        vocab_size=16, dim=16, num_layers=6, first_k_dense=2, pattern="MM", ffn_dim=16,
        attention=AttentionConfig(num_heads=2, num_kv_heads=2, head_dim=8),
        moe=MoEConfig(num_experts=8, top_k=2, ffn_dim=8, router=router),
    )  # fmt: skip
    marks = {
        ("MM", 3): {"block_0": [True, True], "block_1": [True, False]},
        ("DM", 1): {"block_1": [True, False]},
    }
    for (pattern, hashed), right in marks.items():
        moe = replace(cfg.moe, router=replace(router, hash_layers=hashed))
        changed = replace(cfg, pattern=pattern, moe=moe)
        model = Transformer(changed, precision=FLOAT32, rngs=nnx.Rngs(0))
        tokens = jnp.arange(16, dtype=jnp.int32)[None]
        counts = one_microbatch(count_batch(tokens + 1, tokens, Fold()))
        _, aux = model.hidden(tokens, jnp.ones_like(tokens), tokens, counts)
        assert set(aux["stack_1"]) == set(right) and not aux["stack_0"]
        for block, by_table in right.items():
            table = getattr(model.stack_1, block).moe.hash_table[...]
            assert table.shape == (2, 16, 2)
            assert not np.array_equal(table[0], table[1]), "each layer has a table of its own"
            chosen = aux["stack_1"][block]["experts"].astype(jnp.int32)
            same = [bool((chosen[u] == table[u][tokens[0]]).all()) for u in range(2)]
            assert same == by_table, (pattern, block)
