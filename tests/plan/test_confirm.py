"""A plan by the real GPU compiler: a shrunken Qwen3-30B on 16 H100s, against the estimate."""

import pytest

from moejax.plan.confirm import compiled_plan
from moejax.plan.estimate import KINDS
from moejax.plan.hardware import CLUSTERS
from moejax.plan.plans import traffic
from moejax.plan.search import analytic_plan
from moejax.plan.settings import changed
from tests.plan import folds

pytestmark = pytest.mark.deviceless

H100 = CLUSTERS["h100"]


def test_the_compilers_plan_is_near_the_estimate():
    config = changed(
        folds.qwen3_30b_16(),
        {"model.num_layers": 4, "model.vocab_size": 32768, "train.batch_size": 64,
         "train.microbatches": 4},
    )  # fmt: skip
    plan, expected = (
        compiled_plan(config, H100, 16, worst_case=True),
        analytic_plan(config, H100, 16),
    )
    assert plan.compiled and plan.fits and plan.again is not None
    assert {kind for kind, _ in plan.memory.kinds} <= set(KINDS)
    kinds, estimated = dict(plan.memory.kinds), dict(expected.memory.kinds)
    for kind in ("weights", "optimizer state"):
        assert kinds[kind] == pytest.approx(estimated[kind], rel=1e-4)
    assert plan.memory.total == pytest.approx(expected.memory.total, rel=0.15)
    assert plan.seconds == pytest.approx(expected.seconds, rel=0.2)
    rows = {row.role: row for row in traffic(plan)}
    # Eight choices of 4,096 tokens, bfloat16 rows to 15 other GPUs: forward, again, backward.
    sent = 4 * 4 * 3 * 4096 * 8 * 2048 * 2 * 15 / 16
    assert rows["ep dispatch"].bytes == pytest.approx(sent, rel=0.01)
    assert len(plan.live) > 5 and dict(plan.facts)["the peak is at"]
