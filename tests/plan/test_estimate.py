"""Memory of a step by arithmetic, held to shapes, to closed forms and to what XLA planned."""

from dataclasses import replace
from math import prod

import jax
import pytest
from flax import nnx

from configs import deepseek_v3, qwen3_moe
from moejax.config import Config
from moejax.core import params
from moejax.core.mesh import make_mesh
from moejax.model.transformer import Transformer
from moejax.plan.estimate import KINDS, Sizes, estimate
from moejax.plan.resting import check_divides, resting, weights
from moejax.plan.settings import changed
from moejax.train.optimizer import decay_mask, make_optimizer
from moejax.train.state import plan_state
from tests.plan import folds

GB = 1e9


def shrunk(config: Config, **model) -> Config:
    return replace(config, model=replace(config.model, **model))


def small(**values) -> Config:
    """Qwen3-30B with two layers and sixteen experts, on folds of 16 devices."""
    base = qwen3_moe.qwen3_30b_a3b()
    return changed(
        base,
        {
            "model.num_layers": 2, "model.dim": 64, "model.vocab_size": 512,
            "model.attention.num_heads": 8, "model.attention.head_dim": 16,
            "model.moe.num_experts": 16, "model.moe.ffn_dim": 32, "model.moe.top_k": 2,
            "train.batch_size": 64, "train.sequence_length": 32, "train.microbatches": 2,
        } | values,
    )  # fmt: skip


@pytest.mark.parametrize("zero", [0, 1, 3])
@pytest.mark.parametrize("tp, ep, etp", [(1, 16, 1), (2, 4, 2), (4, 2, 1)])
def test_what_rests_is_what_the_shards_of_the_state_hold(zero, tp, ep, etp):
    values = {"parallel.tp": tp, "parallel.ep": ep, "parallel.etp": etp, "parallel.zero": zero}
    config = small(**values)
    fold = config.fold_over(16)
    model = nnx.eval_shape(lambda: Transformer(config.model, rngs=nnx.Rngs(0)))
    mask = decay_mask(params.dims_of(model)[0])
    optimizer = make_optimizer(config.optimizer, config.train.steps, mask)
    mesh = make_mesh(fold)
    layout = plan_state(config.model, optimizer, fold, mesh, zero, config.precision)
    local = {
        name: sum(
            prod(a.sharding.shard_shape(a.shape)) * a.dtype.itemsize
            for a in jax.tree.leaves(getattr(layout.resting, name))
            if a.ndim
        )
        for name in ("params", "opt_state", "buffers")
    }
    found = resting(config, fold)
    assert found["weights"] == local["params"]
    assert found["optimizer state"] == local["opt_state"]
    rows = 4 * 4 * 64 * 32 / fold.degree("dp")  # four arrays of int32
    assert found["batch and buffers"] == local["buffers"] + rows


def test_parameters_are_those_of_the_published_models():
    count = lambda config: sum(prod(w.shape) for w in weights(config))  # noqa: E731
    assert count(qwen3_moe.qwen3_30b_a3b()) == pytest.approx(30.53e9, rel=1e-3)
    assert count(qwen3_moe.qwen3_235b_a22b()) == pytest.approx(235.09e9, rel=1e-3)
    without = shrunk(deepseek_v3.v3(), mtp_depth=0)
    assert count(without) == pytest.approx(671.03e9, rel=1e-3)


def test_a_dim_that_does_not_divide_is_named():
    config = small(**{"parallel.tp": 2, "model.dim": 60, "parallel.zero": 3})
    with pytest.raises(ValueError, match=r"embed=60 does not divide over dp=8"):
        check_divides(config, config.fold_over(16))


QWEN, LARGE, V3 = (
    folds.qwen3_30b_16(), folds.qwen3_235b_256(), deepseek_v3.v3(),
)  # fmt: skip
ONE_ROW = changed(V3, {"train.batch_size": 512, "train.microbatches": 2, "model.moe.budget": 1.25})


@pytest.mark.parametrize(
    "config, gpus, worst_case, arguments, temporary",
    [
        (QWEN, 16, False, 22.91, 11.34),
        (shrunk(QWEN, num_layers=4), 16, False, 2.341, 3.743),
        (
            changed(QWEN, {"parallel.dp": 8, "parallel.ep": 8, "train.microbatches": 32}),
            8,
            False,
            45.82,
            24.05,
        ),
        (V3, 256, False, 32.02, 56.24),
        (ONE_ROW, 256, False, 32.01, 28.06),
        (ONE_ROW, 256, True, 32.01, 25.66),
        (LARGE, 256, False, 11.03, 8.082),
        (shrunk(QWEN, num_layers=8, remat="none"), 16, False, 4.210, 10.76),
    ],
    ids=[
        "30b",
        "30b-4",
        "30b-8gpus",
        "v3",
        "v3-1",
        "v3-1-worst",
        "235b-tp2",
        "30b-8-none",
    ],
)
def test_the_estimate_is_near_what_the_compiler_planned(
    config, gpus, worst_case, arguments, temporary
):
    """Totals that XLA (jax 0.12.0.1) gave for H100s, in GB."""
    memory = estimate(config, config.fold_over(gpus), worst_case=worst_case)
    assert memory.resting / GB == pytest.approx(arguments, rel=2e-3)
    assert memory.temporary / GB == pytest.approx(temporary, rel=0.15)
    assert memory.total / GB == pytest.approx(arguments + temporary, rel=0.12)
    assert {kind for kind, _ in memory.kinds} <= set(KINDS)


def test_rows_follow_budget_and_pieces():
    fold = V3.fold_over(256)
    tokens, top_k, experts, ep = 4 * 4096, 8, 256, 64
    assert (Sizes(V3, fold).received, Sizes(V3, fold).pieces) == (1.5 * tokens * top_k, 1)
    # Without a budget, 64 ranks may send each token to four experts here: 32 balanced loads.
    whole = changed(V3, {"model.moe.budget": 0.0})
    assert Sizes(whole, fold).received == ep * tokens * min(top_k, experts // ep)
    worst = replace(V3, model=V3.model.worst_case())
    assert (Sizes(worst, fold).received, Sizes(worst, fold).pieces) == (tokens * top_k, 32)
    assert estimate(V3, fold, worst_case=True).total < estimate(V3, fold).total
    assert estimate(whole, fold).total > 300 * GB


def kind(config: Config, gpus: int, name: str) -> float:
    return dict(estimate(config, config.fold_over(gpus)).kinds)[name]


def test_saved_activations_are_the_layers_inputs_or_all_of_them():
    inputs = 48 * 4096 * (2 * 2048 + 4 * 8)  # bfloat16 rows, int32 choices
    assert kind(QWEN, 16, "saved activations") == inputs
    twice = changed(QWEN, {"train.microbatches": 32})
    assert kind(twice, 16, "saved activations") == 2 * inputs
    assert kind(shrunk(QWEN, remat="none"), 16, "saved activations") > 20 * inputs
    kept = kind(shrunk(QWEN, remat="selective"), 16, "saved activations") - 48 * 4096 * 4 * 128
    assert kept > 9 * 48 * 4096 * 2 * 2048  # a token, and again at each of 8 experts
    assert kept < kind(shrunk(QWEN, remat="none"), 16, "saved activations")


def test_zero_and_dtypes_decide_what_gradients_cost():
    count = sum(prod(w.shape) for w in weights(QWEN))
    # One sum, float32, over all 16: experts over ep, the others over dp. Norms are everywhere.
    assert kind(QWEN, 16, "gradients") == pytest.approx(4 * count / 16, rel=1e-3)
    alone = changed(QWEN, {"train.batch_size": 16, "train.microbatches": 1})
    assert kind(alone, 16, "gradients") == pytest.approx(4 * count / 16, rel=1e-3)
    whole = changed(QWEN, {"parallel.zero": 1})
    dense = sum(prod(w.shape) for w in weights(QWEN) if "expert" not in w.dims)
    expected = 4 * (count / 16 + dense * 15 / 16)
    memory = estimate(whole, whole.fold_over(16))
    update = 4 * count / 16 * (memory.moment == "update")  # reduced to where they rest
    assert dict(memory.kinds)["gradients"] == pytest.approx(expected + update, rel=1e-3)
    narrow = changed(QWEN, {"precision.accum_dtype": "bfloat16"})
    memory = estimate(narrow, narrow.fold_over(16))
    again = 4 * count / 16 * (memory.moment == "update")  # the update takes them in float32
    expected = 2 * count / 16 + again
    assert dict(memory.kinds)["gradients"] == pytest.approx(expected, rel=1e-3)
