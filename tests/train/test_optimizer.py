"""The optimizer: AdamW against numpy, schedules at their key steps, mask, clipping, skipping."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from moejax.core import collectives
from moejax.train.optimizer import (
    OptimizerConfig,
    apply_update,
    clip_scale,
    decay_mask,
    global_norm,
    make_optimizer,
    make_schedule,
    map_like_params,
    num_updates,
)

DIMS = {
    "embed": ("vocab", "embed"),
    "experts": {"w_in": ("layer", "expert", "embed", "ffn"), "b_in": ("layer", "expert", "ffn")},
    "attend": {"b_q": ("layer", "heads", "head_dim"), "bias_k": ("layer", "heads", "head_dim")},
    "norm": ("layer", "embed"),
}


def update(opt, grads, state, params, *, scale=1.0, finite=True, skipped=0):
    scale, finite = jnp.float32(scale), jnp.bool(finite)
    return apply_update(opt, grads, state, params, jnp.int32(skipped), scale=scale, finite=finite)


def numpy_adamw(params, grads_of_steps, cfg, lrs, mask):
    """The published formula (Loshchilov and Hutter, algorithm 2), in float64."""
    params = {name: p.astype(np.float64) for name, p in params.items()}
    m = {name: np.zeros_like(p) for name, p in params.items()}
    v = {name: np.zeros_like(p) for name, p in params.items()}
    for t, (grads, lr) in enumerate(zip(grads_of_steps, lrs, strict=True), start=1):
        for name, p in params.items():
            g = grads[name].astype(np.float64)
            m[name] = cfg.b1 * m[name] + (1 - cfg.b1) * g
            v[name] = cfg.b2 * v[name] + (1 - cfg.b2) * g * g
            step = (m[name] / (1 - cfg.b1**t)) / (np.sqrt(v[name] / (1 - cfg.b2**t)) + cfg.eps)
            params[name] = p - lr * (step + cfg.weight_decay * mask[name] * p)
    return params, m, v


def test_adamw_equals_numpy():
    cfg = OptimizerConfig(learning_rate=0.03, warmup_steps=2, weight_decay=0.3, eps=1e-6)
    rng = np.random.default_rng(0)
    start = {"w": rng.normal(size=(3, 4)), "norm": rng.normal(size=(4,))}
    steps = [{name: rng.normal(size=p.shape) for name, p in start.items()} for _ in range(6)]
    mask = {"w": True, "norm": False}
    schedule = make_schedule(cfg, 6)
    lrs = [float(schedule(t)) for t in range(6)]
    want, want_m, want_v = numpy_adamw(start, steps, cfg, lrs, mask)

    opt = make_optimizer(cfg, 6, mask)
    params = jax.tree.map(jnp.float32, start)
    state = opt.init(params)
    step, skipped = jax.jit(lambda p, s, g: update(opt, g, s, p)), None
    for grads in steps:
        params, state, skipped = step(params, state, jax.tree.map(jnp.float32, grads))
    assert int(num_updates(state)) == 6 and skipped == 0
    adam = state[0]
    for name in start:
        np.testing.assert_allclose(params[name], want[name], rtol=2e-5, atol=2e-6)
        np.testing.assert_allclose(adam.mu[name], want_m[name], rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(adam.nu[name], want_v[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("param", "moment"), [("bfloat16", "float32"), ("float64", "float64")])
def test_moments_are_at_least_float32(param, moment):
    with jax.enable_x64(param == "float64"):
        opt = make_optimizer(OptimizerConfig(learning_rate=0.5, warmup_steps=0), 100, {"w": True})
        params = {"w": jnp.ones((2, 3), param)}
        state = opt.init(params)
        params, state, _ = update(opt, {"w": jnp.ones((2, 3), param)}, state, params, scale=0.5)
        assert params["w"].dtype == param
        assert state[0].mu["w"].dtype == state[0].nu["w"].dtype == moment
        assert float(params["w"][0, 0]) < 1


def test_schedules_at_their_key_steps():
    base = dict(learning_rate=0.4, warmup_steps=3, final_lr_ratio=0.25, decay_fraction=0.4)
    cosine = make_schedule(OptimizerConfig(schedule="warmup_cosine", **base), 23)
    wsd = make_schedule(OptimizerConfig(schedule="wsd", **base), 20)
    constant = make_schedule(OptimizerConfig(schedule="constant", **base), 20)
    for schedule in (cosine, wsd, constant):
        np.testing.assert_allclose([schedule(s) for s in range(4)], [0.1, 0.2, 0.3, 0.4], rtol=1e-6)
    # Halfway down the cosine: the mean of peak and final. After the end: final, for ever.
    np.testing.assert_allclose([cosine(13), cosine(23), cosine(99)], [0.25, 0.1, 0.1], rtol=1e-6)
    # Decay over the last 8 of 20 steps: a quarter of the way 1 - sqrt(1/4) = 1/2 is left.
    values = [wsd(11), wsd(12), wsd(14), wsd(20)]
    np.testing.assert_allclose(values, [0.4, 0.4, 0.25, 0.1], rtol=1e-6)
    np.testing.assert_allclose([constant(4), constant(20)], [0.4, 0.4], rtol=1e-6)
    traced = jax.jit(wsd)(jnp.int32(14))
    assert traced.dtype == jnp.float32
    np.testing.assert_allclose(traced, 0.25, rtol=1e-6)
    no_warmup = make_schedule(OptimizerConfig(warmup_steps=0, learning_rate=0.4), 10)
    np.testing.assert_allclose(no_warmup(0), 0.4, rtol=1e-6)


def test_config_and_schedule_refuse_in_one_line():
    for bad in (
        {"schedule": "cosine"}, {"learning_rate": 0.0}, {"b2": 1.0}, {"clip_norm": -1.0},
        {"warmup_steps": -1}, {"final_lr_ratio": 1.5}, {"learning_rate": float("nan")},
    ):  # fmt: skip
        with pytest.raises(ValueError, match=next(iter(bad))) as error:
            OptimizerConfig(**bad)
        assert "\n" not in str(error.value)
    with pytest.raises(ValueError, match="warmup_steps 10 .* 5 steps; lower"):
        make_schedule(OptimizerConfig(warmup_steps=10), 5)


def test_decay_mask_takes_matrices_alone():
    assert decay_mask(DIMS) == {
        "embed": True,
        "experts": {"w_in": True, "b_in": False},
        "attend": {"b_q": False, "bias_k": False},
        "norm": False,
    }


def test_clip_scale():
    clip = jax.jit(clip_scale, static_argnums=1)
    np.testing.assert_allclose(clip(jnp.float32(4.0), 1.0), 0.25)
    for norm, limit in ((0.5, 1.0), (0.0, 1.0), (4.0, 0.0)):
        assert float(clip(jnp.float32(norm), limit)) == 1.0


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_step_that_is_not_finite_changes_nothing(bad):
    opt = make_optimizer(OptimizerConfig(warmup_steps=0), 10, {"w": True})
    params = {"w": jnp.arange(6, dtype=jnp.float32).reshape(2, 3)}
    good = {"w": jnp.ones((2, 3), jnp.float32)}
    params, state, skipped = update(opt, good, opt.init(params), params)
    grads = {"w": good["w"].at[1, 2].set(bad)}

    norm = global_norm(grads, {"w": ()}, collectives.psum)
    finite = jnp.isfinite(norm)
    after = apply_update(
        opt, grads, state, params, skipped, scale=clip_scale(norm, 1.0), finite=finite
    )
    assert not bool(finite) and int(after[2]) == 1
    for old, new in zip(jax.tree.leaves((params, state)), jax.tree.leaves(after[:2]), strict=True):
        np.testing.assert_array_equal(old, new)
    # ... and the next good step is what it would have been without it.
    moved = update(opt, good, after[1], after[0], skipped=1)
    want = update(opt, good, state, params)
    assert int(moved[2]) == 1 and int(num_updates(moved[1])) == 2
    np.testing.assert_array_equal(moved[0]["w"], want[0]["w"])


def sharded_step(ep: int, tp: int, opt, params, axes):
    """norm and update of gradients = params, inside a fully manual shard_map of ep x tp devices."""
    mesh = jax.make_mesh((ep, tp), ("ep", "tp"), axis_types=(AxisType.Auto,) * 2)
    specs = {name: P(dims) if dims else P() for name, dims in axes.items()}
    state_specs = map_like_params(jax.eval_shape(opt.init, params), specs, P())

    def step(params, state):
        norm = global_norm(params, axes, collectives.psum)
        scale, finite = clip_scale(norm, 1.0), jnp.isfinite(norm)
        moved = apply_update(opt, params, state, params, jnp.int32(0), scale=scale, finite=finite)
        return norm, scale, *moved

    mapped = jax.shard_map(
        step, mesh=mesh, in_specs=(specs, state_specs), check_vma=True,
        out_specs=(P(), P(), specs, state_specs, P()),
    )  # fmt: skip
    put = jax.tree.map(lambda x, s: jax.device_put(x, NamedSharding(mesh, s)), params, specs)
    return jax.jit(mapped)(put, opt.init(params))


@pytest.mark.parametrize(("ep", "tp"), [(1, 1), (2, 1), (4, 1), (2, 2), (1, 4)])
def test_global_norm_counts_each_parameter_once(ep, tp):
    """Gradients 2, 4, 6, 8 of four experts and 3 of a replicated dense weight, wherever they live.

    Averaging the expert shards would give 7.236068; counting the dense weight twice, 11.747340.
    """
    grads = {"experts": jnp.array([[2.0], [4.0], [6.0], [8.0]]), "dense": jnp.array([[3.0]])}
    axes = {"experts": ("ep", "tp") if tp == 2 else ("ep",), "dense": ()}
    opt = make_optimizer(
        OptimizerConfig(warmup_steps=0, learning_rate=0.1), 10, {"experts": True, "dense": True}
    )
    norm, _, params, state, _ = sharded_step(ep, tp, opt, grads, axes)
    np.testing.assert_allclose(norm, 11.357817, rtol=1e-6)
    np.testing.assert_allclose(norm, np.sqrt(129), rtol=1e-6)
    assert isinstance(state, tuple) and int(num_updates(state)) == 1
    # One device, no mesh, the scale applied by hand: the same parameters.
    clipped = jax.tree.map(lambda g: g / np.float32(np.sqrt(129)), grads)
    alone = update(opt, clipped, opt.init(grads), grads)
    for name in grads:
        np.testing.assert_allclose(params[name], alone[0][name], rtol=1e-6)

    alone_axes = {"experts": axes["experts"]}
    opt = make_optimizer(OptimizerConfig(warmup_steps=0), 10, {"experts": True})
    norm, scale, *_ = sharded_step(ep, tp, opt, {"experts": grads["experts"]}, alone_axes)
    np.testing.assert_allclose(norm, 10.954451, rtol=1e-6)
    np.testing.assert_allclose(norm, np.sqrt(120), rtol=1e-6)
    np.testing.assert_allclose(scale, 0.0912871, rtol=1e-6)


def test_norm_sums_bfloat16_gradients_in_float32():
    grads = {"w": jnp.full((4096,), 0.25, jnp.bfloat16)}
    norm = global_norm(grads, {"w": ()}, collectives.psum)
    assert norm.dtype == jnp.float32 and float(norm) == 16.0


def test_map_like_params_covers_the_state():
    opt = make_optimizer(OptimizerConfig(), 100, {"w": True})
    state = jax.eval_shape(opt.init, {"w": jax.ShapeDtypeStruct((2, 2), jnp.float32)})
    specs = map_like_params(state, {"w": P("ep")}, P())
    is_spec = lambda x: isinstance(x, P)  # noqa: E731
    assert jax.tree.structure(specs, is_leaf=is_spec) == jax.tree.structure(state)
    assert [str(spec) for spec in jax.tree.leaves(specs, is_leaf=is_spec)] == [
        str(spec) for spec in (P(), P("ep"), P("ep"), P())
    ]
    assert isinstance(state[0], optax.ScaleByAdamState)
