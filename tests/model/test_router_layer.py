"""The router inside its layer, alone and on folds: exact values of public bug reports."""

from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from moejax.core import collectives, params
from moejax.core.mesh import Fold, fold, make_mesh
from moejax.core.precision import PrecisionConfig
from moejax.model.attention import AttentionConfig
from moejax.model.balance import BalanceConfig
from moejax.model.moe import MoE, MoEConfig
from moejax.model.router import RouterConfig
from moejax.model.stream import Counts, count_batch, make_stream, one_microbatch
from moejax.model.transformer import ModelConfig, Transformer
from tests.oracle import max_relative_error

FLOAT32 = PrecisionConfig(compute_dtype="float32")


def a_stream(rows: int, length: int, grid: Fold = Fold()):  # noqa: B008 - frozen
    one, ids = jnp.asarray(1.0), jnp.ones((rows, length), jnp.int32)
    return make_stream(ids, None, Counts(one, one, one, one), grid)


def test_the_linear_bias_is_added_to_the_logits():
    """x w = [2, 1, 0, -1] and a bias of 3 on expert 2: experts [2, 0], weights .731059 .268941."""
    x = jnp.asarray([[2.0, 1.0, 0.0, -1.0]])
    cfg = MoEConfig(num_experts=4, top_k=2, ffn_dim=4, router=RouterConfig(linear_bias=True))
    layer = MoE(cfg, 4, precision=FLOAT32, rngs=nnx.Rngs(0))
    assert not np.asarray(layer.b_router[...]).any()
    layer.w_router[...] = jnp.eye(4)
    layer.b_router[...] = jnp.asarray([0.0, 0, 3, 0])
    made = layer._route(x, a_stream(1, 1))
    np.testing.assert_array_equal(made.experts_tK, [[2, 0]])
    np.testing.assert_allclose(made.weights_tK, [[0.731059, 0.268941]], atol=1e-6)
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


E, K, D, EACH = 8, 2, 8, 4
FOLDS = {
    "ep4": ({"dp": 4}, {"ep": 4}),
    "dp2tp2-ep4": ({"dp": 2, "tp": 2}, {"ep": 4}),
    "dp4-ep2etp2": ({"dp": 4}, {"ep": 2, "etp": 2}),
}


@cache
def arrays():
    """(weights, x of 16 tokens) of a layer whose router has only a bias."""
    cfg = one_sided("all_gather")
    layer = MoE(cfg, D, std=0.5, out_std=0.5, precision=FLOAT32, rngs=nnx.Rngs(0))
    return params.partition(layer), jax.random.normal(jax.random.key(1), (4 * EACH, D))


def one_sided(dispatch: str) -> MoEConfig:
    router = RouterConfig(linear_bias=True)
    return MoEConfig(num_experts=E, top_k=K, ffn_dim=6, dispatch=dispatch, router=router)


def loss_on(grid: Fold, dispatch: str, remat: bool):
    """Returns (weights, buffers, x) -> (sum of y * its position, (y, aux)) of this device."""
    layer = MoE(one_sided(dispatch), D, precision=FLOAT32, fold=grid, rngs=nnx.Rngs(0))
    definition, _, _ = params.partition(layer)

    def forward(weights, buffers, x):
        merged = jax.tree.map(lambda w: w, weights)
        merged["experts"]["w_in"] = params.merge_glu(weights["experts"]["w_in"])
        rows = 4 // grid.degree("dp")
        y, aux = params.assemble(definition, merged, buffers)(x, a_stream(rows, EACH, grid))
        return y, aux

    def loss(weights, buffers, x):
        y, aux = (jax.checkpoint(forward) if remat else forward)(weights, buffers, x)
        return jnp.sum(y * jnp.cos(jnp.arange(D, dtype=jnp.float32))[None]), (y, aux)

    return loss


@pytest.mark.parametrize(
    ("name", "dispatch", "remat"),
    [
        ("ep4", "all_gather", False),
        ("ep4", "ragged", True),
        ("dp2tp2-ep4", "all_to_all", False),
        ("dp4-ep2etp2", "ragged", False),
    ],
)
def test_all_tokens_on_one_rank(name, dispatch, remat):
    """4 devices, 16 tokens, all on experts 0, 1 (then 6, 7): nothing is dropped, output and
    gradients are those of one device, and experts that no token chose have gradient 0 exactly."""
    (definition, weights, buffers), x = arrays()
    attention, experts = FOLDS[name]
    grid = fold(attention, experts)
    w_spec = {"w_in": P(grid["ep"] or None, None, None, grid["etp"] or None),
              "w_out": P(grid["ep"] or None, grid["etp"] or None)}  # fmt: skip
    specs = {"experts": w_spec, "w_router": P(), "b_router": P()}
    tokens = P(grid.tokens)

    def device(weights, buffers, x):
        own = collectives.vary(weights, grid.all)
        gradient = jax.value_and_grad(loss_on(grid, dispatch, remat), has_aux=True)
        (_, (y, aux)), grads = gradient(own, buffers, x)
        summed = {
            "experts": jax.tree.map(
                lambda g: collectives.psum(g, grid["edp"]), grads["experts"]
            ),
            "w_router": collectives.psum(grads["w_router"], grid.all),
            "b_router": collectives.psum(grads["b_router"], grid.all),
        }
        return y, collectives.psum((aux["load_E"], aux["dropped"]), grid.tokens), summed

    run = jax.jit(jax.shard_map(
        device, mesh=make_mesh(grid), in_specs=(specs, P(), tokens),
        out_specs=(tokens, P(), specs),
    ))  # fmt: skip
    for favourites in ((0, 1), (6, 7)):
        bias = jnp.zeros(E).at[jnp.asarray(favourites)].set(50.0)
        forced = weights | {"b_router": bias}
        (_, (right, _)), d_right = jax.value_and_grad(
            loss_on(Fold(), "reference", remat=False), has_aux=True
        )(forced, buffers, x)
        y, (load, dropped), grads = run(forced, buffers, x)
        np.testing.assert_array_equal(load, [16 * (e in favourites) for e in range(E)])
        assert float(dropped) == 0
        assert max_relative_error(y, right) < 1e-5
        for mine, wanted in zip(*map(jax.tree.leaves, (grads, d_right)), strict=True):
            assert max_relative_error(mine, wanted) < 1e-5
        for name_, grad in grads["experts"].items():
            idle = np.delete(np.asarray(grad), favourites, axis=0)
            assert not idle.any(), name_


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
