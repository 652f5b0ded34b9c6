"""Every way to choose experts, and who is dropped, against plain numpy in float64."""

from fractions import Fraction
from math import ceil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moejax.core.mesh import Fold
from moejax.model import capacity, choice
from moejax.model.balance import BalanceConfig
from moejax.model.moe import MoEConfig
from moejax.model.router import RouterConfig, Routing, logits, route
from moejax.model.stream import Counts, Draw, make_stream
from pallas_kernels import RouterOptions, weigh
from tests.model.test_router import routed
from tests.oracle import max_relative_error


def a_stream(segments, draw=Draw(), tokens=None):  # noqa: B008 - immutable
    one = jnp.asarray(1.0)
    segments = jnp.asarray(segments, jnp.int32)
    counts = Counts(one, one, one, one)
    return make_stream(segments, None, counts, Fold(), tokens, draw)


def softmax(x):
    return np.exp(x - x.max(-1, keepdims=True)) / np.exp(x - x.max(-1, keepdims=True)).sum(
        -1, keepdims=True
    )


def test_excluded_groups_are_out_of_reach_however_low_the_others_are():
    """Scores .5 all, biased far below 0: groups 0 and 1, experts 0, 1, 2, weights 2.5 / 3."""
    bias = [-0.6, -0.7, -0.6, -0.8, -2, -2, -2, -2]
    kinds = dict(score="sigmoid", scale=2.5)
    grouped = dict(num_groups=4, topk_groups=2, num_group_score=2)
    made = routed(np.zeros((3, 8)), 3, bias, **kinds, **grouped)
    np.testing.assert_array_equal(np.sort(made.experts_tK, axis=1), [[0, 1, 2]] * 3)
    np.testing.assert_allclose(made.weights_tK, np.full((3, 3), 2.5 / 3), rtol=1e-6)
    noise = np.random.default_rng(0).normal(size=(9, 8))
    one, none = (routed(noise, 3, bias, **kinds, num_groups=n, topk_groups=n) for n in (1, 4))
    for a, b in zip(one[:2], none[:2], strict=True):
        np.testing.assert_array_equal(a, b)


def test_num_group_score_changes_which_groups_are_reached():
    """Group 0 has the best expert, group 1 the best pair; 0 means top_k // topk_groups."""
    x = np.asarray([[3.0, -9.0, 2.0, 2.0]])
    kinds = dict(score="sigmoid", num_groups=2, topk_groups=1)
    chosen = {
        n: routed(x, 2, num_group_score=n, **kinds).experts_tK[0].tolist() for n in (0, 1, 2)
    }
    assert chosen == {0: [2, 3], 1: [0, 1], 2: [2, 3]}
    assert RouterConfig(**kinds).options(4, 2).num_group_score == 2
    two_of_four = RouterConfig(num_groups=4, topk_groups=2)
    assert two_of_four.options(16, 6).num_group_score == 3
    assert two_of_four.options(16, 1).num_group_score == 1


def test_sqrt_softplus_weights():
    x = np.asarray([[2.0, 1.0, 3.0, -1.0]])
    score = np.sqrt(np.log1p(np.exp(x[0])))
    made = routed(x, 2, score="sqrt_softplus")
    np.testing.assert_array_equal(made.experts_tK, [[2, 0]])
    expected = score[[2, 0]] / score[[2, 0]].sum()
    np.testing.assert_allclose(made.weights_tK[0], expected, rtol=1e-6)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_logits_and_their_gradients_round_no_input(dtype):
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(9, 64)), dtype)
    for w_dtype in (jnp.float32, dtype):
        w = jnp.asarray(rng.normal(size=(64, 5)), w_dtype)
        wide = [np.asarray(a.astype(jnp.float32), np.float64) for a in (x, w)]
        made, pull = jax.vjp(lambda x, w: logits(x, w, jnp.float32), x, w)
        assert made.dtype == jnp.float32
        assert max_relative_error(made, wide[0] @ wide[1]) < 1e-6
        d = np.asarray(rng.normal(size=made.shape), np.float32)
        dx, dw = pull(jnp.asarray(d))
        assert (dx.dtype, dw.dtype) == (x.dtype, w.dtype)
        rounding = 1e-6 if dtype == jnp.float32 else 4e-3
        assert max_relative_error(dx.astype(jnp.float32), d @ wide[1].T) < rounding
        assert max_relative_error(dw.astype(jnp.float32), wide[0].T @ d) < rounding


@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize("score", ["softmax", "sigmoid", "sqrt_softplus"])
def test_given_experts_are_weighed_as_chosen_ones(score, renormalize):
    """The ids that `route` chose give its very weights and gradients; others their live scores."""
    x = jnp.asarray(np.random.default_rng(1).normal(size=(7, 6)), jnp.float32)
    valid = jnp.arange(7) != 3
    cfg = RouterConfig(score=score, renormalize=renormalize, scale=1.5)

    def run(x, given=None):
        made = route(x, None, valid, cfg, 3, given)
        return (made.weights_tK * jnp.asarray([[1.0, 2, 4]])).sum(), made

    (_, right), d_right = jax.value_and_grad(run, has_aux=True)(x)
    (_, mine), d_mine = jax.value_and_grad(run, has_aux=True)(x, right.experts_tK)
    for a, b in ((mine.experts_tK, right.experts_tK), (mine.weights_tK, right.weights_tK),
                 (mine.load_E, right.load_E), (d_mine, d_right)):  # fmt: skip
        np.testing.assert_array_equal(a, b)
    other = (right.experts_tK + 1) % 6
    wide = np.asarray(x, np.float64)
    scores = {
        "softmax": softmax(wide), "sigmoid": 1 / (1 + np.exp(-wide)),
        "sqrt_softplus": np.sqrt(np.log1p(np.exp(wide))),
    }[score]  # fmt: skip
    expected = np.take_along_axis(scores, np.asarray(other), axis=1)
    if renormalize:
        expected = expected / expected.sum(axis=1, keepdims=True)
    expected = np.where(np.asarray(valid)[:, None], 1.5 * expected, 0)
    (_, made), grad = jax.value_and_grad(run, has_aux=True)(x, other)
    assert max_relative_error(made.weights_tK, expected) < 1e-6
    assert np.abs(grad[0]).max() > 0 and not np.abs(grad[3]).any()


def test_ids_that_no_expert_has_reach_none():
    ids = jnp.asarray([[0, 4], [1, -1], [2, 3]], jnp.int32)
    made = weigh(jnp.zeros((3, 4)), ids, RouterOptions(2))
    np.testing.assert_array_equal(made.experts_TK, [[4, 4], [4, 4], [2, 3]])
    np.testing.assert_array_equal(made.weights_TK, [[0, 0], [0, 0], [0.5, 0.5]])
    np.testing.assert_array_equal(made.load_E, [0, 0, 1, 1])
    with pytest.raises(ValueError, match=r"experts \[T, K=3\]; got .*\(3, 2\)"):
        weigh(jnp.zeros((3, 4)), ids, RouterOptions(3))


def test_balanced_is_exactly_even():
    number = jnp.arange(5, 5 + 24, dtype=jnp.int32)
    made = np.asarray(choice.balanced(number, 8, 3))
    np.testing.assert_array_equal(
        made, [[(n * 3 + k) % 8 for k in range(3)] for n in range(5, 29)]
    )
    np.testing.assert_array_equal(np.bincount(made.ravel()), np.full(8, 9))
    late = choice.balanced(jnp.asarray([2**30 + 5], jnp.int32), 48, 7)  # n K is above 2^31
    np.testing.assert_array_equal(late, [[((2**30 + 5) * 7 + k) % 48 for k in range(7)]])


def hashed(n, num_experts, e):
    """murmur3's finaliser, one number at a time."""
    h = (n * num_experts + e) % 2**32
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        h = ((h ^ (h >> shift)) * factor) % 2**32
    return h ^ (h >> 16)


def test_skewed_follows_zipf():
    E, N = 6, 4000
    made = np.asarray(choice.skewed(jnp.arange(N, dtype=jnp.int32), E, 3))
    for n in range(0, N, 97):
        rings = [
            -(e + 1) * np.log((hashed(n, E, e) // 256 + 0.5) / 2**24) for e in range(E)
        ]
        np.testing.assert_array_equal(made[n], np.argsort(rings)[:3])
    assert all(len(set(row)) == 3 for row in made.tolist())
    share = 1 / np.arange(1, E + 1)
    np.testing.assert_allclose(
        np.bincount(made[:, 0], minlength=E) / N, share / share.sum(), atol=0.02
    )


def expected_drops(experts, weights, segments, E, factor, policy):
    """Row by row, expert by expert."""
    experts, weights = experts.copy(), weights.copy()
    length = segments.shape[1]
    for r, row in enumerate(segments):
        room = ceil(Fraction(str(factor)) * int((row != 0).sum()) * experts.shape[1] / E)
        mine = range(r * length, (r + 1) * length)
        for e in range(E):
            slots = [(t, k) for t in mine for k in range(experts.shape[1]) if experts[t, k] == e]
            if policy == "probs":
                slots.sort(key=lambda s: (-weights[s], s[0]))
            for t, k in slots[room:]:
                experts[t, k], weights[t, k] = E, 0
    return experts, weights


@pytest.mark.parametrize("factor", [0.5, 1.0, 1.2])
@pytest.mark.parametrize("policy", ["probs", "position"])
def test_capacity_keeps_the_right_slots(policy, factor):
    E, K = 4, 2
    segments = np.ones((3, 12), np.int32)
    segments[1, 7:] = 0
    segments[2] = 0
    stream = a_stream(segments)
    cfg = RouterConfig(capacity_factor=factor, drop_policy=policy)
    x = np.random.default_rng(2).normal(size=(36, E)) + [1.0, 0, 0, 0]
    x[4:8] = x[4]  # ties
    made = route(jnp.asarray(x, jnp.float32), None, stream.valid_t, cfg, K)
    experts, weights, filled = capacity.keep(made, E, cfg, stream, Fold())
    assert filled == 0
    right = expected_drops(
        np.array(made.experts_tK), np.array(made.weights_tK), segments, E, factor, policy
    )
    np.testing.assert_array_equal(experts, right[0])
    np.testing.assert_array_equal(weights, right[1])
    assert (np.asarray(made.experts_tK) != right[0]).any()
    grad = jax.grad(
        lambda w: capacity.keep(made._replace(weights_tK=w), E, cfg, stream, Fold())[1].sum()
    )(made.weights_tK)
    real = np.asarray(stream.valid_t)
    np.testing.assert_array_equal(grad[real], (np.asarray(experts) < E)[real])


@pytest.mark.parametrize("policy", ["probs", "position"])
def test_every_expert_is_filled_up_to_capacity(policy):
    """With exactly C of each row's tokens: those that were kept, and the first others."""
    E, K, factor = 4, 2, 1.2
    segments = np.ones((3, 12), np.int32)
    segments[1, 7:] = 0
    segments[2] = 0
    stream = a_stream(segments)
    cfg = RouterConfig(capacity_factor=factor, drop_policy=policy, pad_to_capacity=True)
    x = np.random.default_rng(2).normal(size=(36, E)) + [1.0, 0, 0, 0]
    made = route(jnp.asarray(x, jnp.float32), None, stream.valid_t, cfg, K)
    chosen = np.array(made.experts_tK), np.array(made.weights_tK)
    kept, weights = expected_drops(*chosen, segments, E, factor, policy)
    right, right_weights, filled = np.full((36, E), E), np.zeros((36, E)), 0
    for r, room in enumerate((8, 5, 0)):  # ceil(12 * 0.6), ceil(7 * 0.6)
        for e in range(E):
            mine = [t for t in range(12 * r, 12 * r + 12) if segments.ravel()[t]]
            own = [t for t in mine if e in kept[t]]
            more = [t for t in mine if e not in kept[t]][: room - len(own)]
            filled += len(more)
            right[own + more, e] = e
            for t in own:
                right_weights[t, e] = weights[t][kept[t] == e][0]
    found = capacity.keep(made, E, cfg, stream, Fold())
    np.testing.assert_array_equal(found.experts_tK, right)
    np.testing.assert_allclose(found.weights_tK, right_weights, rtol=1e-6)
    assert found.num_filled == filled > 0


def test_capacity_is_exact_and_dropless_without():
    valid = jnp.ones((2, 25), bool).at[1, 10:].set(False)
    assert capacity.capacity_b(valid, 2, 5, 1.1).tolist() == [11, 5]  # 11.000000000000002 in float
    assert capacity.capacity_b(valid, 1, 2, 1.2).tolist() == [15, 6]
    ids, weights = jnp.zeros((4, 1), jnp.int32), jnp.ones((4, 1))
    routing = Routing(ids, weights, weights, weights, ids[0])
    kept, *_ = capacity.keep(routing, 2, RouterConfig(), a_stream(np.ones((1, 4))), Fold())
    np.testing.assert_array_equal(kept, ids)


def test_expert_choice_takes_the_best_tokens_of_each_row():
    E, K, factor = 4, 2, 1.5
    segments = np.ones((2, 8), np.int32)
    segments[1, 5:] = 0
    stream = a_stream(segments)
    cfg = RouterConfig(
        selection="expert_choice", renormalize=False, capacity_factor=factor, scale=2.0
    )  # fmt: skip
    x = np.random.default_rng(3).normal(size=(16, E))
    x[5] = x[2]
    x32 = jnp.asarray(x, jnp.float32)
    ids = choice.choose(x32, None, stream, cfg, K, Fold())
    made = route(x32, None, stream.valid_t, cfg, K, ids)
    scores = softmax(np.asarray(x32, np.float64))
    right = np.full((16, E), E)
    for r, row in enumerate(segments):
        n = int((row != 0).sum())
        for e in range(E):
            best = sorted(range(r * 8, r * 8 + n), key=lambda t: (-scores[t, e], t))  # noqa: B023
            for t in best[: ceil(n * K / E * factor)]:
                right[t, e] = e
    np.testing.assert_array_equal(made.experts_tK, right)
    np.testing.assert_array_equal(made.load_E, (right < E).sum(axis=0))
    assert max_relative_error(made.weights_tK, np.where(right < E, 2 * scores, 0)) < 1e-6
    c = np.random.default_rng(9).normal(size=(16, E))

    def weighted(x):
        weights = route(x, None, stream.valid_t, cfg, K, ids).weights_tK
        return (weights * jnp.asarray(c, jnp.float32)).sum()

    d_scores = np.where(right < E, 2 * c, 0)
    wanted = scores * (d_scores - (d_scores * scores).sum(axis=1, keepdims=True))
    assert max_relative_error(jax.grad(weighted)(x32), wanted) < 1e-5


def test_sinkhorn_balances_rows_and_columns():
    rng = np.random.default_rng(4)
    x = rng.normal(size=(12, 4)) + [3.0, 0, 0, -1]
    valid = np.arange(12) < 10
    kernel = np.exp(x[:10])
    d0, d1, change = np.ones(10), np.ones(4), 1.0
    while change > 1e-4:
        d0 = 1 / (10 * (kernel * d1).sum(axis=1))
        new = 1 / (4 * (kernel * d0[:, None]).sum(axis=0))
        d1, change = new, np.abs(new - d1).mean()
    right = kernel * d0[:, None] * d1
    x[10:] = np.inf  # padding counts nowhere
    made = np.exp(choice.sinkhorn(jnp.asarray(x, jnp.float32), jnp.asarray(valid)))
    assert max_relative_error(made[:10], right) < 1e-5 and not made[10:].any()
    np.testing.assert_allclose(made.sum(axis=0), np.full(4, 0.25), rtol=1e-3)
    empty = choice.sinkhorn(jnp.zeros((3, 4)), jnp.zeros(3, bool))
    assert np.isneginf(empty).all()
    huge = choice.sinkhorn(jnp.asarray(x[:10] * 1e3, jnp.float32), jnp.ones(10, bool))
    assert np.isfinite(huge).all()


def test_sinkhorn_chooses_in_training_alone():
    x = jnp.asarray(np.random.default_rng(5).normal(size=(12, 4)) + [3.0, 0, 0, -1], jnp.float32)
    cfg = RouterConfig(selection="sinkhorn")
    segments = np.ones((2, 6))
    assert choice.choose(x, None, a_stream(segments), cfg, 1, Fold()) is None
    training = a_stream(segments, Draw(0, jax.random.key(0)))
    made = choice.choose(x, None, training, cfg, 1, Fold())
    right = [choice.sinkhorn(row, jnp.ones(6, bool)) for row in x.reshape(2, 6, 4)]
    np.testing.assert_array_equal(made[:, 0], np.argmax(np.concatenate(right), axis=1))
    assert np.bincount(made[:, 0]).max() < np.bincount(np.argmax(x, axis=1)).max()


def test_hash_layers_choose_by_token_id():
    table = choice.hash_table(jax.random.key(3), 50, 8, 3)
    assert table.shape == (50, 3) and table.dtype == jnp.int32
    assert all(len(set(row)) == 3 for row in np.asarray(table).tolist())
    assert np.bincount(np.asarray(table).ravel(), minlength=8).min() > 0
    cfg, tokens = RouterConfig(hash_layers=2), jnp.asarray([[7, 0, 49, 7, 1, 2]], jnp.int32)
    x = jnp.asarray(np.random.default_rng(6).normal(size=(6, 8)), jnp.float32)
    stream, plain = a_stream(np.ones((1, 6)), tokens=tokens), routed(x, 3).experts_tK
    for layer in range(4):
        of_layer = stream._replace(layer=jnp.asarray(layer, jnp.int32))
        made = choice.choose(x, None, of_layer, cfg, 3, Fold(), table)
        right = table[tokens[0]] if layer < 2 else plain
        np.testing.assert_array_equal(made, right)


def test_jitter_goes_by_step_layer_and_token():
    x = jnp.ones((8, 500))
    stream = a_stream(np.ones((2, 4)), Draw(3, jax.random.key(1)))
    drawn = choice.jitter(x, stream, 0.1, jnp.float32)
    assert 0.9 <= drawn.min() < 0.9005 and 1.0995 < drawn.max() <= 1.1
    assert float(drawn.mean()) == pytest.approx(1.0, abs=3e-3)
    assert len({float(v) for v in drawn[:, 0]}) == 8
    np.testing.assert_array_equal(stream.number_t, np.arange(8) + 24)
    one_row = a_stream(np.ones((1, 4)), Draw(7, jax.random.key(1)))
    later = choice.jitter(x[:4], one_row, 0.1, x.dtype)
    np.testing.assert_array_equal(later, drawn[4:])  # one row a microbatch: the same token numbers
    for other in (stream._replace(layer=1), stream._replace(key=jax.random.key(2))):
        assert (choice.jitter(x, other, 0.1, jnp.float32) != drawn).mean() > 0.99
    np.testing.assert_array_equal(choice.jitter(x, stream._replace(key=None), 0.1, x.dtype), x)


UNBALANCED = dict(balance=BalanceConfig(batch_coeff=0))
BIASED = dict(balance=BalanceConfig(batch_coeff=0, bias_rate=1e-3))


@pytest.mark.parametrize(
    ("router", "moe", "message"),
    [
        (dict(num_groups=3), {}, "num_groups=3 does not divide E=16"),
        (dict(num_groups=8, topk_groups=1), dict(top_k=3), "top_k=3 experts do not fit"),
        (dict(num_groups=2, topk_groups=3), {}, r"topk_groups=3 is not in 1..num_groups=2"),
        (dict(num_groups=8, topk_groups=2, num_group_score=3), {}, "num_group_score=3 of groups"),
        (dict(selection="sinkhorn"), {}, "balances the experts itself: set balance.batch"),
        (dict(selection="sinkhorn"), BIASED, "set balance.bias_rate=0"),
        (dict(selection="expert_choice"), UNBALANCED, "set router.renormalize=False"),
        (dict(selection="sinkhorn", num_groups=2, topk_groups=2), {}, "no groups"),
        (dict(force="skewed", replay="there"), {}, "force='skewed' and replay='there' each decide"),
        (dict(hash_layers=1, selection="sinkhorn"), {}, "hash_layers=1 and selection='sinkhorn'"),
        (dict(jitter=1.0), {}, r"router.jitter=1.0 is not in \[0, 1\)"),
        (dict(capacity_factor=-1.0), {}, "must not be negative: 0 turns each off"),
        (dict(pad_to_capacity=True), {}, "pad_to_capacity=True needs a capacity_factor"),
        (dict(drop_policy="luck"), {}, "router.drop_policy='luck': choose from probs, position"),
        (dict(force="even"), {}, "router.force='even': choose from '', balanced, skewed"),
        (dict(selection="expert_choice", record="x", renormalize=False), {}, "holds K experts"),
    ],
)
def test_settings_that_cannot_be_are_refused_in_one_line(router, moe, message):
    with pytest.raises(ValueError, match=message) as refusal:
        MoEConfig(router=RouterConfig(**router), **moe)
    assert "\n" not in str(refusal.value)


def test_layers_that_are_not_hashed_add_the_bias_where_the_others_do():
    """Quantile balancing adds it to the logits: 4 and 3 of [4 3.9 0 0] + [0 -3 0 3.5] are first."""
    x = jnp.tile(jnp.asarray([[4.0, 3.9, 0.0, 0.0]]), (3, 1))
    bias, cfg = jnp.asarray([0.0, -3.0, 0.0, 3.5]), RouterConfig(hash_layers=1)
    stream = a_stream(np.ones((1, 3)))._replace(layer=1, ids_t=jnp.zeros(3, jnp.int32))
    table = jnp.zeros((1, 2), jnp.int32)
    made = choice.choose(x, bias, stream, cfg, 2, Fold(), table, "logits")
    np.testing.assert_array_equal(made, [[0, 3]] * 3)
    on_scores = choice.choose(x, bias, stream, cfg, 2, Fold(), table)
    np.testing.assert_array_equal(on_scores, [[3, 0]] * 3)
