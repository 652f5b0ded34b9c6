"""The analytic plan of moejax's own step against the program that the GPU compiler makes of it: the
same price, in all and by kind of work. Both are priced by `cost`; what is compared is the work."""

from collections import defaultdict
from dataclasses import replace

import pytest

from configs.deepseek_v3 import v3
from moejax.config import Config
from moejax.core.mesh import ParallelConfig
from moejax.plan import compile
from moejax.plan.analytic.events import events
from moejax.plan.analytic.setup import Setup
from moejax.plan.hardware import CLUSTERS
from moejax.plan.reader import program
from moejax.plan.timeline import Timeline, simulate
from tests.plan import folds

pytestmark = pytest.mark.deviceless
H100 = CLUSTERS["h100"]


def qwen() -> tuple[Config, int]:
    """Qwen3-30B on 16 H100s, with 4 of its 48 layers."""
    config = folds.qwen3_30b_16()
    model = replace(config.model, num_layers=4)
    return replace(config, model=model, train=replace(config.train, batch_size=64,
                                                      microbatches=4)), 16  # fmt: skip


def deepseek() -> tuple[Config, int]:
    """DeepSeek-V3 on 256 H100s, with 5 of its 61 layers, a row at a time. As a whole it does not
    fit: XLA then computes slices and gathers again wherever it can, which no plan foresees."""
    config = v3()
    model = replace(config.model, num_layers=5, first_k_dense=1, mtp_depth=0)
    return replace(
        config, model=model, parallel=ParallelConfig(dp=256, ep=64, zero=3),
        train=replace(config.train, batch_size=1024, microbatches=4),
    ), 256  # fmt: skip


def by_kind(timeline: Timeline) -> dict[str, float]:
    """Returns seconds by kind of work."""
    found: dict[str, float] = defaultdict(float)
    for key, value in timeline.busy.items():
        found[key.kind] += value
    return found


@pytest.mark.parametrize("make", [qwen, deepseek])
def test_the_analytic_plan_is_that_of_the_program(make):
    config, num_gpus = make()
    compiled = compile.compile_step(config, H100, num_gpus)
    read = program.read(compiled.text, H100, rows=program.balanced_rows(config, num_gpus))
    real = simulate(read.events, H100)
    ours = simulate(events(Setup.of(config, num_gpus), H100), H100)
    assert ours.seconds == pytest.approx(real.seconds, rel=0.15)
    real_kinds, our_kinds = by_kind(real), by_kind(ours)
    for kind, seconds in real_kinds.items():
        if seconds > 0.05 * real.seconds:
            assert our_kinds[kind] == pytest.approx(seconds, rel=0.25), kind
