"""A schedule by price: what XLA is told, and that it then hides what it did not before."""

import re
from dataclasses import replace
from types import SimpleNamespace

import jax
import pytest

from benchmarks import overlap
from configs.demo import demo
from configs.qwen3_moe import qwen3_30b_a3b_h100x16, qwen3_235b_a22b_pp8_h100x256
from moejax.config import Config
from moejax.core.mesh import ParallelConfig
from moejax.plan import guide
from moejax.plan.compile import compile_step
from moejax.plan.confirm import compiled_plan
from moejax.plan.cost import seconds
from moejax.plan.hardware import CLUSTERS
from moejax.plan.operations import (
    COLLECTIVE,
    MEMORY,
    Done,
    Event,
    Group,
    Loop,
    Run,
    Start,
    Work,
)
from moejax.plan.reader.program import Program, spans_of

H100 = CLUSTERS["h100"]
COPY = Work("copy", MEMORY, bytes=3e9)
SEND = Work("x", COLLECTIVE, collective="permute", role="pp", wire=1e9, group=Group(2, 1))
EVENTS: dict[str, tuple[Event, ...]] = {
    "fusion.1": (Run(COPY),),
    "permute-start": (Start(SEND, "permute-start"),),
    "permute-done": (Done("permute-start"),),
    "while.2": (Loop("layers", 3, (Start(SEND, "s"), Run(COPY), Done("s"))),),
}


def merged() -> Config:
    """The demo, merged."""
    return replace(demo(), parallel=ParallelConfig(schedule="merged"))


def test_what_each_instruction_takes_is_said_in_microseconds():
    program = Program(EVENTS["fusion.1"], {}, {}, (), EVENTS)
    text = guide.profile(program, H100)
    found = dict(re.findall(r'costs \{ name: "([^"]+)" cost_us: ([\d.]+) \}\n', text))
    send, copy = seconds(SEND, H100), seconds(COPY, H100)
    assert send > copy / 0.8
    right = {"fusion.1": copy, "permute-start": send, "permute-done": 0.0, "while.2": 3 * send}
    assert {k: float(v) for k, v in found.items()} == pytest.approx(
        {k: v * 1e6 for k, v in right.items()}, abs=1e-2
    )


def test_dispatch_and_combine_are_said_to_take_more_so_that_products_fit_beside():
    """Of rows by what shares their link; of ids and weights, tiny, as long as a product."""
    rows, ids = (replace(SEND, role="ep dispatch", wire=wire) for wire in (1e9, 1e3))
    events: dict[str, tuple[Event, ...]] = {"rows": (Start(rows, "r"),), "ids": (Start(ids, "i"),)}
    text = guide.profile(Program((), {}, {}, (), events), H100)
    found = {k: float(v) for k, v in re.findall(r'name: "([^"]+)" cost_us: ([\d.]+)', text)}
    assert found == pytest.approx({"rows": 1.4e6 * seconds(rows, H100), "ids": 300.0}, rel=1e-4)


@pytest.mark.parametrize(
    "arguments, temp_free, right", [(25, 80 * 0.92 - 25, 14.0), (5, 80 * 0.92 - 5, 54.0)]
)
def test_memory_that_outputs_reuse_is_free(arguments, temp_free, right):
    """80 GB, arguments that outputs replace: XLA takes 0.8 x 80 - 2 x arguments for free."""
    cluster = replace(H100, gpu=replace(H100.gpu, memory_bytes=80))
    memory = SimpleNamespace(
        argument_size_in_bytes=arguments, output_size_in_bytes=arguments,
        alias_size_in_bytes=arguments,
    )  # fmt: skip
    assert guide.slop(memory, cluster) == round(100 * temp_free / right)
    memory.argument_size_in_bytes = memory.output_size_in_bytes = 40
    assert guide.slop(memory, cluster) == 95


def test_a_run_compiles_twice_where_microbatches_are_merged(tmp_path, monkeypatch, capsys):
    """By the first program's prices, which lie in a file; elsewhere once, as it always was."""
    asked: list = []
    program = SimpleNamespace(
        as_text=lambda: "the program",
        memory_analysis=lambda: SimpleNamespace(
            argument_size_in_bytes=0, output_size_in_bytes=0, alias_size_in_bytes=0
        ),
    )
    lowered = SimpleNamespace(compile=lambda *options: asked.append(options) or program)
    read = Program((), {}, {}, (), EVENTS)
    monkeypatch.setattr(guide, "read_step", lambda text, *_: read if text else None)
    guide.compiler(merged(), tmp_path)(lowered)  # a CPU's
    assert asked == [()] and "no prices" in capsys.readouterr().out
    devices = [SimpleNamespace(device_kind="NVIDIA H100 80GB HBM3")] * 8
    monkeypatch.setattr(jax, "devices", lambda: devices)
    guide.compiler(demo(), tmp_path)(lowered)
    assert asked == [(), ()]
    guide.compiler(merged(), tmp_path)(lowered)
    (first,), (second,) = asked[2:]
    assert first == guide.OPTIONS and first.items() < second.items()
    (path,) = tmp_path.iterdir()
    assert second["xla_gpu_pgle_profile_file_or_directory_path"] == str(path)
    assert path.read_text() == guide.profile(read, H100)


def small() -> Config:
    """Layers of Qwen3-235B as they are, eight of them on two stages of 32 H100s."""
    base = qwen3_235b_a22b_pp8_h100x256()
    return replace(
        base, name="qwen3_235b_h100x64", model=replace(base.model, num_layers=8),
        parallel=replace(base.parallel, pp=2, vpp=1),
        train=replace(base.train, batch_size=128, microbatches=8),
    )  # fmt: skip


@pytest.mark.deviceless
def test_by_price_dispatch_and_combine_run_under_products():
    """In steady state each that carries rows has a product between start and done, and little is
    waited for; one microbatch after the other most of it is, and nothing that is saved is copied.
    """
    plan = compiled_plan(small(), H100, 64)
    spans = spans_of(overlap.steady(plan.events), 1)
    rows = [inside for work, _, _, inside in spans if work.role in overlap.EP and work.wire > 1e7]
    assert len(rows) == 8  # two hops there and two back, forward and backward
    assert all(any(one.kind in overlap.PRODUCTS for one in inside) for inside in rows)

    def exposed(plan) -> float:
        busy, waits = (
            sum(v for key, v in found.items() if key.role in overlap.EP)
            for found in (plan.timeline.busy, plan.timeline.exposed)
        )
        return waits / busy

    assert exposed(plan) < 0.3
    kinds = dict(plan.memory.kinds)  # what loops carry has its name
    rows = 2 * 20480 * 4096  # of one layer's rows, bytes
    assert 12 * rows < kinds["saved activations"] < 20 * rows  # 3 slots of 4 layers, and more
    assert kinds["gradients"] > 0.9 * kinds["weights"]
    assert exposed(compiled_plan(overlap.apart(small()), H100, 64)) > 0.7
    program = compile_step(overlap.apart(small()), H100, 64).text
    saved = r"bf16\[\d+,20480,4096\]"  # rows of 2,048 tokens, eight times, and a quarter more
    assert re.search(saved, program) and not re.search(rf"= {saved}\S* copy\(", program)


def gathering() -> Config:
    """Layers of Qwen3-30B as they are, six of them, on 16 H100s that gather their weights."""
    base = qwen3_30b_a3b_h100x16()
    return replace(base, name="qwen3_30b_h100x16", model=replace(base.model, num_layers=6))


@pytest.mark.deviceless
def test_weights_are_gathered_and_gradients_reduced_beside_products():
    """In the loops over layers: all that is large has a product between start and done."""
    plan = compiled_plan(gathering(), H100, 16)
    bodies: dict[str, list[list[Work]]] = {"forward": [], "backward": []}
    for work, times, _, inside in spans_of(plan.events, 1):
        if work.role in ("zero gather", "zero reduce") and work.wire > 1e8 and times > 4:
            bodies[work.phase].append(inside)
    assert len(bodies["forward"]) == 2 and len(bodies["backward"]) == 4  # the experts' two weights
    for inside in bodies["forward"] + bodies["backward"]:
        assert any(one.kind in overlap.PRODUCTS for one in inside)
