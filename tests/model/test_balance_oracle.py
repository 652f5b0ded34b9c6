"""Losses, gradients and thresholds against float64 numpy loops, over logits of every sort."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import pallas_kernels
from moejax.core.mesh import Fold
from moejax.model import balance
from moejax.model.balance import LOSSES, BalanceConfig
from moejax.model.router import Routing
from moejax.model.stream import Counts, count_batch, make_stream
from pallas_kernels import RouterOptions, log_scores

ALONE = Fold()
MICRO, ROWS, LENGTH = 2, 2, 6
T = ROWS * LENGTH
EVERY = BalanceConfig(batch_coeff=1, sequence_coeff=1, global_coeff=1, z_coeff=1)
# Experts, experts a token, groups and groups in reach.
SHAPES = ((1, 1, 1, 1), (2, 1, 1, 1), (4, 2, 2, 1), (6, 6, 1, 1), (8, 3, 4, 2))


def options_of(shape, score: str) -> RouterOptions:
    _, top_k, groups, reach = shape
    return RouterOptions(top_k, score, top_k > 1, num_groups=groups, topk_groups=reach)


@cache
def program(shape, score: str):
    """Returns the jitted (logits [m, t, E], bias [E], segments [m, rows, L]) -> (the losses of a
    step, their gradients [loss, m, t, E])."""

    def losses(logits_mtE, bias_E, segments):
        totals, total = count_batch(segments, segments, ALONE), jnp.zeros(len(LOSSES))
        before_E = jnp.zeros(shape[0])
        for logits_tE, ids_bL in zip(logits_mtE, segments, strict=True):
            counts = Counts(*totals, count_batch(ids_bL, ids_bL, ALONE).tokens)
            stream = make_stream(ids_bL, (counts.tokens, counts.tokens), counts, ALONE)
            routes = pallas_kernels.route(
                logits_tE, options_of(shape, score), bias_E=bias_E, valid_T=stream.valid_t
            )
            probs_tE = jax.nn.softmax(log_scores(logits_tE, score), axis=-1)
            routing = Routing(
                routes.experts_TK, routes.weights_TK, logits_tE, probs_tE, routes.load_E
            )
            aux = balance.losses(routing, stream, EVERY, ALONE, before_E)
            before_E = before_E + aux["plain_load_E"]
            total = total + jnp.stack([aux[name] for name in LOSSES])
        return total

    return jax.jit(lambda *args: (losses(*args), jax.jacrev(losses)(*args)))


def softmax(x):
    e = np.exp(x - x.max())
    return e / e.sum()


def probabilities(logits_E, score):
    log_E = logits_E if score == "softmax" else -np.logaddexp(0, -logits_E)
    return softmax(log_E)


def plain(logits_E, top_k):
    return np.argsort(-logits_E, kind="stable")[:top_k]


def documents(segments):
    """Returns the lists of (microbatch, token) of each document."""
    found = []
    for m, rows in enumerate(segments):
        for b, row in enumerate(rows):
            before = 0
            for place, segment in enumerate(row):
                if segment and segment != before:
                    found.append([])
                if segment:
                    found[-1].append((m, b * LENGTH + place))
                before = segment
    return found


def oracle(logits, chosen, segments, score):
    """The losses of a step, by the formulas, token by token; `chosen`: the plain choice."""
    E, top_k = logits.shape[-1], chosen.shape[-1]
    valid = segments.reshape(MICRO, T) != 0
    step_tokens = max(valid.sum(), 1)

    def of_set(tokens, load):
        """E sum_e (share of the load) (mean P over the tokens)."""
        share, P = np.zeros(E), np.zeros(E)
        for at in load:
            np.add.at(share, chosen[at], 1 / (len(load) * top_k))
        for at in tokens:
            P += probabilities(logits[at], score) / len(tokens)
        return E * (share * P).sum()

    sets = [[(m, t) for t in range(T) if valid[m, t]] for m in range(MICRO)]
    batch = total = 0.0
    so_far = []
    for tokens in sets:
        so_far = so_far + tokens
        if tokens:
            batch += of_set(tokens, tokens) * len(tokens) / step_tokens
            total += of_set(tokens, so_far) * len(tokens) / step_tokens
    docs = documents(segments)
    sequence = sum(of_set(d, d) for d in docs) / max(len(docs), 1)
    z = 0.0
    for tokens in sets:
        for at in tokens:
            peak = logits[at].max()
            z += (peak + np.log(np.exp(logits[at] - peak).sum())) ** 2 / step_tokens
    return np.array([batch, sequence, total, z])


def finite_differences(function, x, step=1e-4):
    grads = np.zeros((len(LOSSES), *x.shape))
    for at in np.ndindex(x.shape):
        up, down = x.copy(), x.copy()
        up[at] += step
        down[at] -= step
        grads[(slice(None), *at)] = (function(up) - function(down)) / (2 * step)
    return grads


@st.composite
def steps(draw):
    """(shape, score, logits, bias, segments): ties, extremes, padding, and random steps."""
    shape = draw(st.sampled_from(SHAPES))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    size = (MICRO, T, shape[0])
    kind = draw(st.sampled_from(("random", "ties", "equal", "low", "one-sided")))
    logits = {
        "random": rng.normal(size=size) * 3,
        "ties": rng.integers(-2, 3, size) / 2.0,
        "equal": np.full(size, rng.normal()),
        "low": np.full(size, -60.0),
        "one-sided": np.where(np.arange(shape[0]) == 0, 8.0, 0.0) + np.zeros(size),
    }[kind]
    layout = draw(st.sampled_from(("full", "packed", "ragged", "one", "empty micro", "none")))
    segments = np.ones((MICRO, ROWS, LENGTH), np.int32)
    if layout == "packed":
        segments[..., 2:] = 2
        segments[0, 1] = rng.integers(0, 3, LENGTH)
    elif layout == "ragged":
        segments *= rng.integers(0, 2, segments.shape)
    elif layout == "empty micro":
        segments[0] = 0
    elif layout in ("one", "none"):
        segments[:] = 0
        segments[1, 0, 3] = layout == "one"
    bias = rng.normal(size=shape[0]) * draw(st.sampled_from((0.0, 0.5)))
    score = draw(st.sampled_from(("softmax", "sigmoid")))
    return shape, score, logits.astype(np.float32), bias.astype(np.float32), segments


@settings(max_examples=60, deadline=None)
@given(steps())
def test_losses_and_gradients_equal_the_formulas(step):
    shape, score, logits, bias, segments = step
    values, grads = map(np.asarray, program(shape, score)(logits, bias, segments))
    wide = logits.astype(np.float64)
    chosen = np.array([[plain(row, shape[1]) for row in micro] for micro in wide])
    right = oracle(wide, chosen, segments, score)
    np.testing.assert_allclose(values, right, rtol=1e-6, atol=1e-6)
    slopes = finite_differences(lambda x: oracle(x, chosen, segments, score), wide)
    for mine, slope in zip(grads, slopes, strict=True):
        assert np.abs(mine - slope).max() <= 1e-5 * max(1.0, np.abs(slope).max())


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from((0, 1, 5, 40)), st.booleans())
def test_the_rank_th_largest_is_exact(seed, rows, extreme):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(40, 3)).astype(np.float32)
    if extreme:
        wild = [0.0, -0.0, 1e-45, -1e-45, np.inf, -np.inf, 3e38, -3e38, 1.0]
        x = rng.choice(np.array(wild, np.float32), x.shape)
    valid = np.arange(40) < rows
    rank = int(rng.integers(1, max(rows, 1) + 1))
    found = np.asarray(jax.jit(balance.largest, static_argnums=3)(x, valid, rank, ()))
    if rows:
        np.testing.assert_array_equal(found, -np.sort(-x[:rows], axis=0)[rank - 1])


def test_thresholds_even_the_load_they_were_found_of():
    """The definition, by sorting; where alpha is held, floor(m K / E) tokens pass each, but for
    ties: of every token that e is the (K+1)-th best of, the margin is the old threshold."""
    rng = np.random.default_rng(3)
    for E, top_k, tokens in ((8, 2, 30), (4, 1, 3), (6, 5, 11)):
        logits = (rng.normal(size=(T * 4, E)) + np.linspace(0, 3, E)).astype(np.float32)
        bias = rng.normal(size=E).astype(np.float32)
        segments = (np.arange(T * 4) < tokens).astype(np.int32)[None]
        totals = count_batch(segments, segments, ALONE)
        counts = Counts(*totals, totals.tokens)
        stream = make_stream(jnp.asarray(segments), None, counts, ALONE)
        options = RouterOptions(top_k, bias_on="logits")
        routes = pallas_kernels.route(logits, options, bias_E=bias, valid_T=stream.valid_t)
        routing = Routing(routes.experts_TK, routes.weights_TK, logits, logits, routes.load_E)
        found = np.asarray(balance.thresholds(routing, bias, stream, ALONE))
        alpha = np.sort(logits + bias, axis=1)[:, -top_k - 1]
        margin = (logits - alpha[:, None])[:tokens]
        passing = tokens * top_k // E
        np.testing.assert_array_equal(found, -np.sort(-margin, axis=0)[passing])
        assert ((margin > found).sum(axis=0) <= passing).all()
        assert ((margin >= found).sum(axis=0) > passing).all()
        if E == 8:
            np.testing.assert_array_equal((margin > found).sum(axis=0), np.full(E, passing))


def test_the_quantile_bias_is_centred_smoothed_and_kept_by_an_empty_step():
    bias, load = jnp.asarray([1.0, -1.0]), jnp.asarray([3.0, 1.0])
    moved = balance.update_quantiles(bias, jnp.asarray([4.0, 0.0]), load, 0.25)
    np.testing.assert_allclose(moved, [0.25, -0.25], atol=1e-7)  # (-.25, -.75), less -.5
    full = balance.update_quantiles(bias, jnp.asarray([4.0, 0.0]), load, 1.0)
    np.testing.assert_array_equal(full, [-2.0, 2.0])
    kept = balance.update_quantiles(bias, jnp.zeros(2), jnp.zeros(2), 1.0)
    np.testing.assert_array_equal(kept, bias)


def test_a_bias_on_logits_steers_and_leaves_the_weights():
    logits = jnp.asarray([[2.0, 1.0, 0.0, -1.0]])
    options = RouterOptions(2, bias_on="logits")
    for impl in ("xla", "reference"):
        made = pallas_kernels.route(
            logits, options, bias_E=jnp.asarray([0.0, 0.0, 1.5, 0.0]), impl=impl
        )
        np.testing.assert_array_equal(made.experts_TK, [[0, 2]])  # 2 and 1.5 lead
        np.testing.assert_allclose(made.weights_TK, [softmax(np.array([2.0, 0.0]))], rtol=1e-6)
        on_scores = pallas_kernels.route(
            logits, RouterOptions(2), bias_E=jnp.asarray([0.0, 0.0, 0.1, 0.0]), impl=impl
        )
        np.testing.assert_array_equal(on_scores.experts_TK, [[0, 1]])  # .644 .237 .187 .032


def test_what_cannot_balance_is_refused():
    with pytest.raises(ValueError, match="quantile_rate=0.5 evens the load alone: set .*batch_c"):
        BalanceConfig(quantile_rate=0.5)
    for name in ("sequence_coeff", "global_coeff", "bias_rate"):
        with pytest.raises(ValueError, match=f"set balance.{name}=0.1 to 0"):
            BalanceConfig(batch_coeff=0, quantile_rate=1, **{name: 0.1})
    with pytest.raises(ValueError, match="quantile_rate=1.5 is not in 0..1"):
        BalanceConfig(batch_coeff=0, quantile_rate=1.5)
    with pytest.raises(ValueError, match="frozen_bias=True is a bias that does not move"):
        BalanceConfig(frozen_bias=True, bias_rate=1e-3)
    with pytest.raises(ValueError, match="balance.z_coeff=-1 must be finite and not negative"):
        BalanceConfig(z_coeff=-1)
    with pytest.raises(ValueError, match="moe.top_k=4 of num_experts=4: no expert is left out"):
        BalanceConfig(batch_coeff=0, quantile_rate=1).check(4, 4)
    with pytest.raises(ValueError, match="topk_groups=1 of 2.*needs num_groups=1"):
        RouterOptions(2, bias_on="logits", num_groups=2)
    with pytest.raises(ValueError, match="bias_on='weights': choose from scores, logits"):
        RouterOptions(2, bias_on="weights")
