"""The router: every implementation against numpy in float64, whose sorts and loops are its own."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from pallas_kernels import RouterOptions, log_scores, route
from tests.oracle import max_relative_error

IMPLS = ["xla", "reference"]
DEEPSEEK = dict(score="sigmoid", scale=2.5, num_groups=8, topk_groups=4, num_group_score=2)
# (tokens, experts, whether there is a bias, options)
CASES = [
    (7, 8, False, RouterOptions(2)),
    (7, 8, False, RouterOptions(8, renormalize=False)),  # K = E
    (5, 24, True, RouterOptions(3, renormalize=False, scale=1.5)),
    (5, 24, True, RouterOptions(24, score="sigmoid")),
    (9, 32, True, RouterOptions(4, **DEEPSEEK)),
    (9, 32, False, RouterOptions(4, **DEEPSEEK)),
    (9, 32, True, RouterOptions(4, num_groups=4, topk_groups=2, num_group_score=1)),
    (9, 30, True, RouterOptions(6, score="sigmoid", num_groups=5, topk_groups=2,
                                num_group_score=3, renormalize=False)),
    (6, 16, True, RouterOptions(2, score="sqrt_softplus", scale=0.5)),
    (6, 16, False, RouterOptions(5, score="sqrt_softplus", renormalize=False)),
    (6, 16, True, RouterOptions(4, num_groups=4, topk_groups=4)),  # every group within reach
    (9, 16, True, RouterOptions(4, score="sigmoid", bias_on="logits")),
]  # fmt: skip


def log_score(x, score):
    """Of one token, float64."""
    if score == "softmax":
        return x - x.max() - np.log(np.exp(x - x.max()).sum())
    if score == "sigmoid":
        return -np.logaddexp(0, -x)
    log_softplus = np.where(x < -30, x, np.log(np.logaddexp(0, np.maximum(x, -30))))
    return 0.5 * log_softplus


def oracle(logits, options, bias=None, valid=None):
    """(experts, weights, load), one token after the other."""
    logits, K = np.asarray(logits, np.float64), options.top_k
    (T, E), size = logits.shape, logits.shape[1] // options.num_groups
    experts, weights, load = np.full((T, K), E), np.zeros((T, K)), np.zeros(E, int)
    for t in range(T):
        if valid is not None and not valid[t]:
            continue
        log = log_score(logits[t], options.score)
        biased = np.exp(log) + (0 if bias is None else np.asarray(bias, np.float64))
        best = np.sort(biased.reshape(-1, size), axis=1)[:, ::-1][:, : options.num_group_score]
        groups = np.argsort(-best.sum(axis=1), kind="stable")[: options.topk_groups]
        ranked = logits[t] if bias is None else biased
        if bias is not None and options.bias_on == "logits":
            ranked = logits[t] + np.asarray(bias, np.float64)
        allowed = [e for e in range(E) if e // size in groups]
        mine = sorted(allowed, key=lambda e: (-ranked[e], e))[:K]  # noqa: B023 - used at once
        weight = np.exp(log[mine] - (log[mine].max() if options.renormalize else 0))
        weight = weight / weight.sum() if options.renormalize else weight
        experts[t], weights[t] = mine, weight * options.scale
        load[mine] += 1
    return experts, weights, load


def inputs(T, E, biased, dtype=np.float32, seed=0):
    """(logits, bias or None, valid); some biases sink below every score."""
    rng = np.random.default_rng(seed)
    bias = rng.uniform(-2.0, 0.5, E).astype(dtype) if biased else None
    valid = rng.random(T) < 0.8
    return (2 * rng.standard_normal((T, E))).astype(dtype), bias, valid


@partial(jax.jit, static_argnums=(0, 1))
def run(impl, options, logits, bias, valid):
    return route(logits, options, bias_E=bias, valid_T=valid, impl=impl)


def check(found, wanted, rtol):
    np.testing.assert_array_equal(found.experts_TK, wanted[0])
    np.testing.assert_allclose(found.weights_TK, wanted[1], rtol=rtol)
    np.testing.assert_array_equal(found.load_E, wanted[2])
    assert found.experts_TK.dtype == found.load_E.dtype == jnp.int32


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(("T", "E", "biased", "options"), CASES)
def test_matches_numpy(T, E, biased, options, impl, dtype):
    logits, bias, valid = inputs(T, E, biased, np.dtype(dtype))
    wanted = oracle(logits, options, bias, valid)
    with jax.enable_x64(dtype == "float64"):
        found = run(impl, options, logits, bias, valid)
        assert found.weights_TK.dtype == dtype
        check(found, wanted, 1e-12 if dtype == "float64" else 5e-6)


@pytest.mark.parametrize(("T", "E", "biased", "options"), CASES)
def test_gradient_is_autodiff_of_the_definition_and_of_differences(T, E, biased, options):
    """In float64. A step of 1e-5 moves no choice: the seeds leave room, and it would show."""
    with jax.enable_x64(True):
        logits, bias, valid = inputs(T, E, biased, np.float64)
        out = np.random.default_rng(1).standard_normal((T, options.top_k))

        def loss(impl, logits, bias):
            return (run(impl, options, logits, bias, valid).weights_TK * out).sum()

        operands = (jnp.asarray(logits), bias) if biased else (jnp.asarray(logits), None)
        which = (1, 2) if biased else (1,)
        found, *d_bias = jax.jit(jax.grad(loss, which), static_argnums=0)("xla", *operands)
        wanted = jax.jit(jax.grad(loss, 1), static_argnums=0)("reference", *operands)
        assert not any(np.asarray(d).any() for d in d_bias)
        scale = np.abs(wanted).max()
        assert np.abs(found - wanted).max() <= 1e-13 * scale
        assert not np.asarray(found)[~valid].any()
        way = np.random.default_rng(2).standard_normal((T, E))
        moved = [loss("xla", logits + h * way, bias) for h in (1e-5, -1e-5)]
        np.testing.assert_allclose((moved[0] - moved[1]) / 2e-5, (found * way).sum(), rtol=1e-6)


@pytest.mark.parametrize("impl", IMPLS)
@settings(max_examples=25)
@given(data=st.data())
def test_ties_go_to_the_lowest_index(impl, data):
    """Few values, so many ties, of experts and of groups; -0 equals 0."""
    values = st.sampled_from([-1.0, -0.0, 0.0, 1.0])
    row = st.lists(values, min_size=12, max_size=12)
    logits = np.asarray(data.draw(st.lists(row, min_size=4, max_size=4)), np.float32)
    for options in (RouterOptions(5), RouterOptions(4, num_groups=4, topk_groups=2)):
        found = run(impl, options, logits, None, np.ones(4, bool))
        check(found, oracle(logits, options), 2e-6)


@pytest.mark.parametrize("impl", IMPLS)
def test_excluded_groups_stay_out_where_biased_scores_are_negative(impl):
    """D01: scores .5, biased -.1 -.2 | -.1 -.3 | -1.5 -1.5 | -1.5 -1.5; not 0, but -inf outside."""
    bias = np.array([-0.6, -0.7, -0.6, -0.8, -2, -2, -2, -2], np.float32)
    groups = dict(num_groups=4, topk_groups=2, num_group_score=2)
    options = RouterOptions(3, score="sigmoid", scale=2.5, **groups)
    found = run(impl, options, np.zeros((2, 8), np.float32), bias, np.ones(2, bool))
    assert sorted(found.experts_TK[0].tolist()) == [0, 1, 2]
    np.testing.assert_allclose(found.weights_TK, np.full((2, 3), 2.5 / 3), rtol=1e-6)
    assert found.load_E.tolist() == [2, 2, 2, 0, 0, 0, 0, 0]


@pytest.mark.parametrize("impl", IMPLS)
def test_the_sum_of_how_many_scores_ranks_a_group(impl):
    """Group 0 has the best expert, group 1 the best pair, group 2 the best three."""
    scores = np.array([[0.9, 0.1, 0.1, 0.8, 0.7, 0.1, 0.6, 0.6, 0.6]])
    logits = np.log(scores / (1 - scores)).astype(np.float32)
    for n, wanted in ((1, [0]), (2, [3]), (3, [6])):
        options = RouterOptions(1, score="sigmoid", renormalize=False, num_groups=3,
                                topk_groups=1, num_group_score=n)  # fmt: skip
        found = run(impl, options, logits, None, np.ones(1, bool))
        assert found.experts_TK[0].tolist() == wanted


@pytest.mark.parametrize("low", [-60.0, -200.0])
@pytest.mark.parametrize("score", ["sigmoid", "sqrt_softplus"])
@pytest.mark.parametrize("impl", IMPLS)
def test_tiny_scores_are_normalised_in_log_space(impl, score, low):
    """No epsilon, and gradients as finite as the weights. In float32 exp(-200) is 0."""
    logits = np.array([[low, low - 1, low - 3, low - 2]], np.float32)
    options = RouterOptions(3, score=score)
    every = np.ones(1, bool)
    check(run(impl, options, logits, None, every), oracle(logits, options), 2e-5)
    slope = 1.0 if score == "sigmoid" else 0.5  # of log score by logit, far down
    w = oracle(logits, options)[1][0]
    found = jax.grad(lambda x: run(impl, options, x, None, every).weights_TK[0, 0])(logits)
    wanted = slope * w[0] * np.array([1 - w[0], -w[1], 0, -w[2]])
    np.testing.assert_allclose(found[0], wanted, rtol=2e-5)


def test_log_scores_join_where_the_series_takes_over():
    with jax.enable_x64(True):
        x = jnp.asarray([-40.0, -15.1, -15.0, -14.9, -1.0, 0.0, 30.0])
        wanted = 0.5 * np.log(np.log1p(np.exp(np.asarray(x))))
        np.testing.assert_allclose(log_scores(x, "sqrt_softplus"), wanted, rtol=1e-13)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("options", [RouterOptions(2), RouterOptions(2, renormalize=False)])
def test_padding_reaches_nothing_whatever_it_holds(impl, options):
    """T == E, so a mask broadcast along the wrong dimension would pass its shape check."""
    logits, _, _ = inputs(6, 6, False)
    wild = logits.copy()
    wild[4:] = [[np.nan], [np.inf]]
    valid = np.array([True] * 4 + [False] * 2)
    check(run(impl, options, wild, None, valid), oracle(logits, options, None, valid), 2e-6)
    loss = lambda x: (run(impl, options, x, None, valid).weights_TK ** 2).sum()  # noqa: E731
    one, two = jax.grad(loss)(logits), jax.grad(loss)(wild)
    np.testing.assert_array_equal(one, two)
    assert not np.asarray(two)[4:].any() and np.asarray(two)[:4].any()


@pytest.mark.parametrize("impl", IMPLS)
def test_what_is_not_a_number_still_goes_to_different_experts(impl):
    logits = np.full((4, 8), np.nan, np.float32)
    logits[1, 1:], logits[2, :], logits[3, :4] = 0, -np.inf, np.inf
    for options in (RouterOptions(3), RouterOptions(3, num_groups=2, topk_groups=1)):
        found = np.asarray(run(impl, options, logits, None, np.ones(4, bool)).experts_TK)
        assert found.min() >= 0 and found.max() < 8
        assert all(len(set(row)) == 3 for row in found.tolist())


@pytest.mark.parametrize("impl", IMPLS)
def test_inside_fully_manual_shard_map(impl):
    """The bias is the same on each device, the logits are not; forward and back."""
    T, E, options = 5, 8, RouterOptions(2, score="sigmoid")
    logits, bias, valid = inputs(4 * T, E, True)

    def local(logits, valid, bias):
        def weights(logits):
            routes = route(logits, options, bias_E=bias, valid_T=valid, impl=impl)
            return routes.weights_TK, routes

        weights_TK, pull, routes = jax.vjp(weights, logits, has_aux=True)
        return *routes[:2], routes.load_E[None], *pull(weights_TK)

    mesh = jax.make_mesh((4,), ("a",), axis_types=(jax.sharding.AxisType.Auto,))
    specs = (P("a"), P("a"), P())
    mapped = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P("a"), check_vma=True)
    *found, d_logits = jax.jit(mapped)(logits, valid, bias)
    experts, weights, load = oracle(logits, options, bias, valid)
    np.testing.assert_array_equal(found[0], experts)
    assert max_relative_error(found[1], weights) <= 2e-6
    assert np.asarray(found[2]).sum(axis=0).tolist() == load.tolist()
    assert np.isfinite(d_logits).all() and np.asarray(d_logits)[valid].any()


def test_options_and_shapes_that_do_not_fit_are_refused():
    for wrong, why in (
        (dict(top_k=0), "at least 1"),
        (dict(top_k=1, score="tanh"), "choose from softmax, sigmoid, sqrt_softplus"),
        (dict(top_k=1, num_groups=4, topk_groups=5), "topk_groups=5 is not in 1..num_groups=4"),
        (dict(top_k=1, num_groups=4, num_group_score=0), "at least 1"),
    ):
        with pytest.raises(ValueError, match=why):
            RouterOptions(**wrong)
    x = jnp.zeros((2, 8))
    for options, why in (
        (RouterOptions(9), "top_k=9 experts do not fit in topk_groups=1 groups of 8"),
        (RouterOptions(1, num_groups=3), "does not divide E=8"),
        (RouterOptions(3, num_groups=4, topk_groups=1), "groups of 2"),
        (RouterOptions(1, num_groups=4, num_group_score=3), "groups of 2 experts"),
    ):
        with pytest.raises(ValueError, match=why):
            route(x, options)
    with pytest.raises(ValueError, match="bias"):
        route(x, RouterOptions(1), bias_E=jnp.zeros(2))
    with pytest.raises(ValueError, match="valid"):
        route(x, RouterOptions(1), valid_T=jnp.ones(8, bool))
    with pytest.raises(ValueError, match="Hopper and Blackwell GPUs, and this program is for cpu"):
        route(x, RouterOptions(1), impl="mosaic")
