"""The scan whose backward is ours: right gradients, and no weight saved twice."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from configs.demo import demo
from moejax.core import params
from moejax.core.mesh import Fold
from moejax.core.precision import PrecisionConfig
from moejax.core.sharding import is_dims, to_compute
from moejax.model.rope import RopeConfig, rope_table
from moejax.model.stack import backward, forward, scan_layers
from moejax.model.stream import Counts, make_stream
from moejax.model.transformer import Inputs, ModelConfig, Transformer
from tests.oracle import max_relative_error

LAYERS, WIDTH = 3, 16


def toy_layer(weights, buffers, x, shared, choices=None):
    """A layer with everything the scan knows: weights, a buffer, a shared input, an aux."""
    y = x + jnp.tanh(x @ weights["in"] + buffers[None]) @ weights["out"] * shared[:, None]
    return y, {"square": (y**2).mean()}, {}


def toy_weights_of(stored):
    return {name: w * 0.5 for name, w in stored.items()}


def toy_inputs():
    generator = np.random.default_rng(0)

    def draw(*shape):
        return jnp.asarray(generator.normal(size=shape), jnp.float32)

    stored = {"in": draw(LAYERS, WIDTH, 24), "out": draw(LAYERS, 24, WIDTH)}
    return stored, draw(LAYERS, 24), draw(5, WIDTH), draw(5)


def toy_loss(run):
    def loss(stored, x, buffers, shared):
        y, aux, _ = run(stored, x, buffers, shared)
        return (y * jnp.cos(y)).sum() + (aux["square"] * jnp.arange(1.0, LAYERS + 1)).sum()

    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))


def unrolled(stored, x, buffers, shared):
    auxes = []
    for i in range(LAYERS):
        weights = toy_weights_of(jax.tree.map(lambda w, i=i: w[i], stored))
        x, aux, _ = toy_layer(weights, buffers[i], x, shared)
        auxes.append(aux)
    return x, jax.tree.map(lambda *a: jnp.stack(a), *auxes), {}


@pytest.mark.parametrize("remat", ["none", "selective", "full"])
def test_gradients_equal_those_of_an_unrolled_loop(remat):
    stored, buffers, x, shared = toy_inputs()

    def scanned(stored, x, buffers, shared):
        return scan_layers(toy_layer, toy_weights_of, stored, buffers, x, shared, remat=remat)

    value, grads = toy_loss(scanned)(stored, x, buffers, shared)
    value_right, right = toy_loss(unrolled)(stored, x, buffers, shared)
    assert max_relative_error(value, value_right) < 1e-6
    for mine, expected in zip(jax.tree.leaves(grads), jax.tree.leaves(right), strict=True):
        assert max_relative_error(mine, expected) < 2e-6


@pytest.mark.parametrize("remat", ["none", "selective", "full"])
def test_sums_get_the_gradients_added(remat):
    """Of two scans that differ in the sums alone; what stands beside the weights gets its own."""
    stored, buffers, x, shared = toy_inputs()
    before = jax.tree.map(lambda w: jnp.cos(w), stored)

    def loss(stored, extra, sums):
        def layer(weights, buffers, x, shared, choices):
            y, aux, made = toy_layer(weights[0], buffers, x, shared)
            return y + weights[1][None], aux, made

        def run(stored, x, buffers, shared):
            both = lambda p: (toy_weights_of(p[0]), p[1])  # noqa: E731
            pair = (stored, extra)
            return scan_layers(layer, both, pair, buffers, x, shared, remat=remat, sums=sums)

        y, aux, _ = run(stored, x, buffers, shared)
        return (y * jnp.cos(y)).sum() + (aux["square"] * jnp.arange(1.0, LAYERS + 1)).sum()

    extra = jnp.ones((LAYERS, WIDTH), jnp.float32) / 7
    right, d_extra = jax.grad(loss, argnums=(0, 1))(stored, extra, None)
    summed, d_extra_too = jax.grad(loss, argnums=(2, 1))(stored, extra, before)
    np.testing.assert_array_equal(d_extra, d_extra_too)
    for mine, d, start in zip(*map(jax.tree.leaves, (summed, right, before)), strict=True):
        assert max_relative_error(mine, start + d) < 2e-7


def one_unit(compute_dtype: str):
    """Returns (layer, stored, weights_of, buffers, x, stream) of one abstract layer of a demo."""
    base, precision = demo().model, PrecisionConfig(compute_dtype=compute_dtype)
    attention = replace(base.attention, num_heads=4, num_kv_heads=2, head_dim=10, bias=True)
    moe = replace(base.moe, num_experts=6, ffn_dim=20, shared_ffn_dim=28)
    cfg = replace(base, vocab_size=64, dim=36, num_layers=2, pattern="MD", ffn_dim=44,
                  attention=attention, moe=moe)  # fmt: skip
    model = nnx.eval_shape(lambda: Transformer(cfg, precision=precision, rngs=nnx.Rngs(0)))
    definition, stored, buffers = params.partition(model.stack_0)
    dims = jax.tree.map(lambda d: d[1:], params.dims_of(model.stack_0)[0], is_leaf=is_dims)
    first = lambda a: jax.ShapeDtypeStruct(a.shape[1:], a.dtype)  # noqa: E731
    stored, buffers = jax.tree.map(first, (stored, buffers))

    def layer(w, b, x, stream, choices=None):
        inputs = Inputs(jnp.asarray(0, jnp.int32), None, None)
        return params.assemble(definition, w, b)(x, stream, inputs, choices)

    def weights_of(stored):
        return to_compute(stored, dims, Fold(), 0, precision)

    x = jax.ShapeDtypeStruct((26, 36), precision.dtype("compute"))
    return layer, stored, weights_of, buffers, x


def stream_of_two_rows():
    segments = jnp.ones((2, 13), jnp.int32)
    positions = jnp.tile(jnp.arange(13, dtype=jnp.int32)[None], (2, 1))
    ones = Counts(*[jnp.ones((), jnp.float32)] * 4)
    rope = rope_table(positions, 10, RopeConfig(), jnp.dtype("float32"))
    return make_stream(segments, rope, ones, Fold())


@pytest.mark.parametrize("compute_dtype", ["float32", "bfloat16"])
def test_no_residual_has_the_shape_of_a_weight(compute_dtype):
    layer, stored, weights_of, buffers, x = one_unit(compute_dtype)

    def saved(stored, buffers, x):
        weights = weights_of(stored)
        return forward(layer, weights, buffers, x, stream_of_two_rows(), "none")[3], weights

    def naive(stored, buffers, x):
        run = lambda s, x: layer(weights_of(s), buffers, x, stream_of_two_rows())[:2]  # noqa: E731
        return jax.vjp(run, stored, x)[1], weights_of(stored)

    def heavy(function):
        kept, weights = jax.eval_shape(function, stored, buffers, x)
        shapes = {tuple(sorted(w.shape)) for w in jax.tree.leaves(weights) if w.ndim > 1}
        sizes = {w.size for w in jax.tree.leaves(weights) if w.ndim > 1}
        kept = jax.tree.leaves(kept)
        assert len(kept) > 10
        return [a for a in kept if tuple(sorted(a.shape)) in shapes or a.size in sizes]

    assert not heavy(saved)
    assert heavy(naive), "the check finds the weights that plain autodiff saves"


def test_saved_residuals_are_enough_for_the_backward():
    """`restore` puts the stripped arrays back: also with another trace's weights."""
    stored, buffers, x, shared = jax.tree.map(lambda a: a, toy_inputs())
    first = jax.tree.map(lambda w: w[0], stored)
    y, aux, _, saved = forward(toy_layer, first, buffers[0], x, shared, "none")
    held = {id(leaf) for leaf in jax.tree.leaves(saved)}
    assert not held & {id(leaf) for leaf in jax.tree.leaves((first, buffers[0], shared))}
    cotangents = (jnp.ones_like(y), jax.tree.map(jnp.ones_like, aux))
    mine = backward(toy_layer, first, buffers[0], saved, shared, cotangents, "none")
    pull = jax.vjp(lambda w, x: toy_layer(w, buffers[0], x, shared)[:2], first, x)[1]
    for a, b in zip(jax.tree.leaves(mine), jax.tree.leaves(pull(cotangents)), strict=True):
        np.testing.assert_array_equal(a, b)


def test_eight_layers_hold_no_copy_of_the_weights():
    """Temporary memory of forward and backward: far below one bfloat16 copy of all layers."""
    layers, width, tokens = 8, 256, 4
    stored = jax.ShapeDtypeStruct((layers, width, width), jnp.float32)
    x = jax.ShapeDtypeStruct((tokens, width), jnp.bfloat16)

    def layer(w, _, x, __, ___):
        return jnp.tanh(x @ w), {}, {}

    def cast(w):
        return w.astype(jnp.bfloat16)

    def ours(w, x):
        return scan_layers(layer, cast, w, {}, x, {})[0].astype(jnp.float32).sum()

    def plain(w, x):
        step = lambda x, w: layer(cast(w), None, x, None, None)[:2]  # noqa: E731
        return jax.lax.scan(step, x, w)[0].astype(jnp.float32).sum()

    def temporary(function) -> int:
        compiled = jax.jit(jax.grad(function)).lower(stored, x).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    copy = layers * width * width * 2
    assert temporary(ours) < temporary(plain) - 0.7 * copy


def test_remat_is_checked():
    with pytest.raises(ValueError, match="model.remat='some': choose from none, selective, full"):
        ModelConfig(remat="some")
