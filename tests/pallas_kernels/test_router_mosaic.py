"""The router's Mosaic GPU kernel: simulated on CPU, and compiled for GPUs that are not there.

The simulation compares with numpy in float64, and looks for data races (an error if it finds one).
"""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import PartitionSpec as P

from pallas_kernels import RouterOptions, deviceless
from pallas_kernels.router import mosaic, reference
from tests.deviceless.child import printed
from tests.pallas_kernels.test_router import DEEPSEEK, check, inputs, oracle

route = partial(mosaic.route, num_sms=1)  # four blocks


@pytest.fixture(autouse=True)
def simulated(request):
    """Runs every kernel of the test in the simulator; a data race raises."""
    if request.node.get_closest_marker("deviceless"):
        yield
        return
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True)):
        yield


# Tiles of 8 x 256, four a block and the last block three, the last tile of 3 rows; groups, a bias.
# Tiles of 64 x 8, the second of one row; K = E.
# 16 x 32 for 24 experts, nearly all chosen: those of negative choice, and no column that is not
# there; a softmax over all, in which such columns have no part.
# 8 x 2 x 160 for 264 experts: two boxes, the second overhanging.
# 16 x 64: groups without a bias, more scores a group than one, all of them kept or all but one.
@pytest.mark.parametrize(
    ("T", "E", "biased", "options"),
    [
        (115, 256, True, RouterOptions(8, **DEEPSEEK)),
        (65, 8, False, RouterOptions(8)),
        (20, 24, True, RouterOptions(20, renormalize=False, scale=1.5)),
        (9, 264, True, RouterOptions(5, score="sqrt_softplus")),
        (17, 64, False, RouterOptions(4, score="sigmoid", renormalize=False, num_groups=2,
                                      topk_groups=1, num_group_score=3)),
    ],
)  # fmt: skip
def test_matches_numpy(T, E, biased, options):
    logits, bias, valid = inputs(T, E, biased)
    found = route(logits, None if bias is None else jnp.asarray(bias), jnp.asarray(valid), options)
    check(found, oracle(logits, options, bias, valid), 5e-6)


def test_ties_infinities_and_what_is_not_a_number():
    """Three values, so most of a row ties; -0 equals 0; NaN and +-infinity in rows of their own."""
    rng = np.random.default_rng(0)
    logits = rng.choice(np.array([-1.0, -0.0, 0.0, 1.0], np.float32), (24, 64))
    every = jnp.ones(24, bool)
    for options in (RouterOptions(6), RouterOptions(6, num_groups=2, topk_groups=1)):
        check(route(jnp.asarray(logits), None, every, options), oracle(logits, options), 5e-6)
    logits[3], logits[4, 9:], logits[5], logits[6, :5] = np.nan, -np.nan, -np.inf, np.inf
    logits[7, 5:], logits[8] = -np.inf, np.inf
    found = route(jnp.asarray(logits), None, every, options)
    experts = np.asarray(found.experts_TK)
    assert experts.min() >= 0 and experts.max() < 64 and found.load_E.sum() == 24 * 6
    assert all(len(set(row)) == 6 for row in experts.tolist())
    plain = np.asarray(route(jnp.asarray(logits), None, every, RouterOptions(6)).experts_TK)
    assert plain[5].tolist() == plain[8].tolist() == [0, 1, 2, 3, 4, 5]
    assert sorted(plain[7, :5]) == [0, 1, 2, 3, 4] and plain[7, 5] == 5
    assert plain[6, :5].tolist() == [0, 1, 2, 3, 4]


def test_excluded_groups_stay_out_where_biased_scores_are_negative():
    """D01, as wide as the kernel's groups: group 0 is the better one, and every choice is below
    what a mask of zeros would give group 1; K is more than group 0's best few."""
    bias = jnp.linspace(-0.6, -2.0, 64, dtype=jnp.float32)
    options = RouterOptions(32, score="sigmoid", num_groups=2, topk_groups=1, num_group_score=2)
    found = route(jnp.zeros((3, 64)), bias, jnp.ones(3, bool), options)
    assert found.experts_TK.tolist() == [list(range(32))] * 3
    np.testing.assert_allclose(found.weights_TK, np.full((3, 32), 1 / 32), rtol=1e-6)


def test_tiny_scores():
    """In float32 exp(-200) is 0: the weights come from logarithms, as in the definition."""
    for low in (-60.0, -200.0):
        logits = np.full((4, 8), low, np.float32) - np.arange(8, dtype=np.float32) / 2
        for score in ("sigmoid", "sqrt_softplus"):
            options = RouterOptions(3, score=score)
            found = route(jnp.asarray(logits), None, jnp.ones(4, bool), options)
            check(found, oracle(logits, options), 2e-5)


def test_scores_at_the_joins_of_their_formulas():
    """Every kind of logit, each the only choice of a row: the weight is its score."""
    values = [-80.0, -30, -15.1, -15, -14.9, -6, -1, -1e-4, 0, 1e-4, 1, 6, 16, 17, 40, 120]
    logits = np.asarray(values, np.float32)[:, None] + np.zeros(8, np.float32)
    bias = np.asarray([0, 0, 1e-3, 0, 0, 0, 0, 0], np.float32)
    for score in ("sigmoid", "sqrt_softplus"):
        options = RouterOptions(1, score=score, renormalize=False)
        found = route(jnp.asarray(logits), jnp.asarray(bias), jnp.ones(16, bool), options)
        assert found.experts_TK[:, 0].tolist() == [2] * 16
        np.testing.assert_allclose(found.weights_TK, oracle(logits, options, bias)[1], rtol=2e-5)


def test_varies_as_its_logits_and_has_the_gradient_of_the_definition():
    """Under check_vma, a bias that is the same everywhere; no tokens give no kernel."""
    options = RouterOptions(2, score="sigmoid")
    logits, bias, valid = inputs(6, 8, True)

    def both(run, logits, valid, bias):
        weights = lambda x: (r := run(x, bias, valid, options), r.weights_TK)[::-1]  # noqa: E731
        weights_TK, pull, routes = jax.vjp(weights, logits, has_aux=True)
        return routes.experts_TK, routes.load_E, *pull(weights_TK)

    def local(logits, valid, bias):
        experts, load, d_logits = both(route, logits, valid, bias)
        return experts, load[None], d_logits

    mesh = jax.make_mesh((2,), ("a",), axis_types=(jax.sharding.AxisType.Auto,))
    specs = P("a"), P("a"), P()
    mapped = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P("a"), check_vma=True)
    shapes = jax.eval_shape(mapped, logits, valid, bias)
    assert [s.shape for s in shapes] == [(6, 2), (2, 8), (6, 8)]
    same = jax.shard_map(
        lambda valid: route(jnp.zeros((3, 8)), None, valid, options).load_E,
        mesh=mesh, in_specs=P("a"), out_specs=P("a"),
    )  # fmt: skip
    with pytest.raises(ValueError, match=r"\['a'\] and the logits do not"):
        jax.eval_shape(same, valid)
    operands = [jnp.asarray(a) for a in (logits, valid, bias)]
    found, wanted = both(route, *operands), both(reference.route, *operands)
    assert np.array_equal(found[0], wanted[0]) and np.array_equal(found[1], wanted[1])
    np.testing.assert_allclose(found[2], wanted[2], rtol=2e-5, atol=1e-7)
    none = route(operands[0][:0], operands[2], operands[1][:0], options)
    assert none.experts_TK.shape == (0, 2) and not none.load_E.any()


@pytest.mark.parametrize(
    ("dtype", "T", "E", "options", "why"),
    [
        ("float32", 1, 8, RouterOptions(8), None),
        ("float32", 1, 512, RouterOptions(32, num_groups=16, topk_groups=4), None),
        ("float32", 1, 8, RouterOptions(1, num_groups=2, topk_groups=2), None),
        ("float64", 1, 8, RouterOptions(1), "float64"),
        ("float32", 1, 12, RouterOptions(1), "multiples of 8"),
        ("float32", 1, 520, RouterOptions(1), "up to 512"),
        ("float32", 1, 64, RouterOptions(33), "K=33"),
        ("float32", 1, 64, RouterOptions(1, num_groups=4, topk_groups=2), "multiple of 32"),
        ("float32", 2**25, 64, RouterOptions(1), "tokens"),
        ("float32", 1, 64, RouterOptions(1, bias_on="logits"), "a bias on scores is served"),
    ],
)
def test_refuses(dtype, T, E, options, why):
    found = mosaic.refusal(jnp.dtype(dtype), T, E, options)
    assert found is None if why is None else why in (found or "")


def test_a_refused_call_raises():
    with pytest.raises(ValueError, match="multiples of 8"):
        route(jnp.zeros((2, 12)), None, jnp.ones(2, bool), RouterOptions(1))


def test_plans_fit():
    """A box is at most 256 wide and high, boxes hold whole spans, outputs fit in the narrow tile,
    and four blocks' stages fit in the shared memory of a multiprocessor."""
    for T in (1, 100, 8192, 2**20):
        for E in range(8, 513, 8):
            plan = mosaic.make_plan(T, E, 132)
            width = plan.cols // plan.boxes
            assert E <= plan.cols == width * plan.boxes and width <= 256 and width % plan.span == 0
            assert plan.span >= min(E, mosaic.MAX_K) and plan.rows <= 128
            assert plan.rows % (128 // plan.lanes) == 0
            assert 4 * (mosaic.STAGES * plan.rows * plan.cols * 4 + 4096) <= 227 * 1024
    assert (mosaic.make_plan(8192, 256, 132).rows, mosaic.make_plan(8192, 8, 132).rows) == (8, 64)


@pytest.mark.deviceless
@pytest.mark.parametrize("gpu", ["h100", "gb300"])
def test_compiles_without_spills(gpu, tmp_path):
    """The real compiler and assembler: registers hold everything, of the largest router too."""
    said = printed("compile_router", gpu, dump=tmp_path)
    reports = [path.read_text(errors="replace") for path in tmp_path.glob("*.ptxas")]
    assert len(reports) == len(said.split()) == 7
    target = "sm_{}{}a".format(*deviceless.GPUS[gpu].capability)
    for report in reports:
        assert re.findall(r"entry function '(\w+)_mosaic_gpu_kernel'", report) == ["router"]
        assert f"for '{target}'" in report
        assert "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" in report
        assert " 0 bytes lmem" in report
