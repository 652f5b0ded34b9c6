"""The price of kernels, collectives and copies against measured figures; and playing steps."""

from dataclasses import replace

import pytest

from moejax.plan import cost
from moejax.plan.cost import seconds
from moejax.plan.hardware import CLUSTERS
from moejax.plan.operations import (
    ATTENTION,
    COLLECTIVE,
    GEMM,
    GROUPED,
    HOST,
    IDLE,
    MEMORY,
    Done,
    Group,
    Loop,
    Run,
    Start,
    Work,
)
from moejax.plan.timeline import Key, simulate

H100, B200, GB200, GB300 = (CLUSTERS[name] for name in ("h100", "b200", "gb200", "gb300"))
US = 1e-6

# The README of DeepGEMM, H800, FP8: groups, m, n, k -> TFLOPS.
DEEP_GEMM = {
    (1, 128, 7168, 16384): 645,
    (1, 128, 4096, 7168): 533,
    (1, 128, 7168, 2048): 510,
    (1, 4096, 2112, 7168): 1058,
    (1, 4096, 24576, 1536): 990,
    (1, 4096, 32768, 512): 590,
    (1, 4096, 7168, 16384): 1358,
    (1, 4096, 4096, 7168): 1304,
    (1, 4096, 7168, 2048): 1025,
    (4, 8192, 4096, 7168): 1297,
    (4, 8192, 7168, 2048): 1099,
    (8, 4096, 4096, 7168): 1288,
    (8, 4096, 7168, 2048): 1093,
    (1, 1024, 4096, 7168): 1233,
    (1, 1024, 7168, 2048): 925,
    (2, 512, 4096, 7168): 1040,
    (2, 512, 7168, 2048): 916,
    (4, 256, 4096, 7168): 932,
    (4, 256, 7168, 2048): 815,
}


def tflops(cluster, m, n, k, groups=1, dtype="bfloat16") -> float:
    kind = GROUPED if groups > 1 else GEMM
    work = Work("x", kind, mnk=(m, n, k), groups=groups, dtype=dtype)
    return 2 * groups * m * n * k / seconds(work, cluster) / 1e12


def test_products_run_as_measured():
    ratios = [
        tflops(H100, *mnk, groups, "fp8") / measured
        for (groups, *mnk), measured in DEEP_GEMM.items()
    ]
    assert min(ratios) > 0.84 and max(ratios) < 1.11
    assert sum(abs(r - 1) for r in ratios) / len(ratios) < 0.07
    assert tflops(H100, 4096, 4096, 4096) == pytest.approx(716, rel=0.05)  # cuBLAS, fast.cu
    assert tflops(H100, 8192, 8192, 8192) == pytest.approx(795, rel=0.07)
    assert tflops(B200, 8192, 8192, 8192) == pytest.approx(1610, rel=0.05)  # cuBLAS, Tilus


def test_the_limits_of_a_product():
    """A long sum of whole waves runs at peak times what is sustained, a row at memory's rate."""
    wave = 132 * 128
    assert tflops(H100, wave, 2048, 2**22) == pytest.approx(0.80 * 989.4, rel=3e-3)
    row = Work("x", GEMM, mnk=(1, 16384, 16384))
    moved = 2 * 16384**2 + 2 * 2 * 16384
    assert seconds(row, H100) == pytest.approx(moved / (0.84 * 3.35232e12), rel=0.02)
    named = replace(row, bytes=10 * moved)
    assert seconds(named, H100) == pytest.approx(10 * moved / (0.84 * 3.35232e12), rel=0.01)


def test_tiles_and_waves_are_whole():
    """132 tiles of 128 x 256 are a wave on H100; with a row more, the best are 552 of 64 x 128,
    five waves of a quarter."""
    one, more = (seconds(Work("x", GEMM, mnk=(m, 3072, 2**20)), H100) for m in (1408, 1409))
    assert more / one == pytest.approx(1.25, rel=0.02)
    # Groups of 129 rows need, on average, one and a half tiles of 128 each.
    even = seconds(Work("x", GROUPED, mnk=(12800, 4096, 8192), groups=8), H100)
    torn = seconds(Work("x", GROUPED, mnk=(128, 4096, 8192), groups=800), H100)
    assert torn > 1.3 * even


def test_power_bounds_the_clock_of_blackwell():
    assert cost.clock(H100) == 1
    assert cost.clock(B200) == pytest.approx(1610 / 0.966 / 2250)
    assert cost.clock(GB200) / cost.clock(B200) == pytest.approx(1.2 * 2250 / 2500)
    assert cost.clock(GB300) / cost.clock(GB200) == pytest.approx(1400 / 1200)


def test_memory():
    work = Work("x", MEMORY, bytes=1e9)
    assert seconds(work, H100) == pytest.approx(2 * US + 1e9 / (0.84 * 3.35232e12))
    small = Work("x", MEMORY, bytes=2e7)  # in L2
    assert seconds(small, H100) == pytest.approx(2 * US + 2e7 / (2 * 0.84 * 3.35232e12))


@pytest.mark.parametrize(
    ("cluster", "phase", "keys", "rate"),
    [
        (H100, "forward", 4096, 553),
        (H100, "backward", 4096, 422),
        (H100, "forward", 16384, 638),
        (H100, "forward", 10240, (553 + 638) / 2),
        (GB200, "forward", 4096, 1324),
        (GB200, "backward", 65536, 1298),
    ],
)
def test_attention_runs_as_published(cluster, phase, keys, rate):
    work = Work("x", ATTENTION, phase, flops=1e13, mnk=(4096, keys, 128))
    assert seconds(work, cluster) == pytest.approx(1e13 / (rate * 1e12) + 2 * US)
    narrow = replace(work, mnk=(4096, keys, 64))
    assert seconds(narrow, cluster) - 2 * US == pytest.approx(1e13 / (rate * 1e12) / 0.75)


def exchange(kind: str, wire: float, size: int, local: int) -> Work:
    return Work("x", COLLECTIVE, collective=kind, wire=wire, group=Group(size, local))


def test_rings():
    """Inside a domain NVLink, across it each GPU's adapter, of which a domain has one a member."""
    inside = exchange("all_gather", 7e9, 8, 8)
    assert seconds(inside, H100) == pytest.approx(7e9 / (0.8 * 450e9) + 7 * 1.9 * US)
    lone = exchange("reduce_scatter", 1e9, 32, 1)
    assert seconds(lone, H100) == pytest.approx(1e9 / (0.92 * 50e9) + 31 * 4 * US)
    both = exchange("all_gather", 1e9, 256, 8)
    hops = 224 * 1.9 * US + 31 * 4 * US
    assert seconds(both, H100) == pytest.approx(1e9 / (0.8 * 450e9) + hops)
    two = exchange("all_gather", 1e9, 64, 2)
    assert seconds(two, H100) == pytest.approx(1e9 / 2 / (0.92 * 50e9) + (32 * 1.9 + 31 * 4) * US)
    few = exchange("all_reduce", 8.0, 256, 8)  # by trees
    assert seconds(few, H100) == pytest.approx(2 * (7 * 1.2 + 5 * 8.5) * US, rel=1e-3)
    assert seconds(exchange("all_gather", 1e9, 1, 1), H100) == 0


TOKENS = 4096 * 7168 * 2  # bytes of the paper's microbenchmark, once


@pytest.mark.parametrize(
    ("cluster", "size", "local", "published"),
    [(H100, 8, 8, 1265), (H100, 16, 8, 5774), (H100, 64, 8, 9164), (GB200, 8, 8, 735),
     (GB200, 64, 64, 930)],
)  # fmt: skip
def test_all_to_all_takes_what_the_paper_measured(cluster, size, local, published):
    wire = 8 * TOKENS * (size - 1) / size
    assert seconds(exchange("all_to_all", wire, size, local), cluster) == pytest.approx(
        published * US, rel=0.09
    )


@pytest.mark.parametrize(
    ("cluster", "copies", "group", "published"),
    [
        (H100, 8 * (1 - (7 / 8) ** 8) * 7 / 8, Group(8, 8), 661),
        (H100, (1 - (1 / 2) ** 8) * 2 * 1 / 2, Group(2, 1), 1485),
        (H100, 4 * (1 - (3 / 4) ** 8) * 7 / 8, Group(8, 1), 4626),
        (GB200, 8 * (1 - (7 / 8) ** 8) * 7 / 8, Group(8, 8), 391),
        (GB200, 64 * (1 - (63 / 64) ** 8) * 63 / 64, Group(64, 64), 675),
    ],
)
def test_fused_dispatch_takes_what_the_paper_measured(cluster, copies, group, published):
    work = exchange("fused_all_to_all", copies * TOKENS, group.size, group.local)
    assert seconds(work, cluster) == pytest.approx(published * US, rel=0.08)


def test_copies_and_idling():
    assert seconds(Work("x", HOST, bytes=1e9), H100) == pytest.approx(1e9 / (0.85 * 64e9))
    assert seconds(Work("x", IDLE, wait=0.5), H100) == 0.5


def test_a_gpu_without_rates_is_refused():
    ampere = replace(H100, name="a100", gpu=replace(H100.gpu, capability=(8, 0)))
    with pytest.raises(KeyError, match="8 .a100."):
        seconds(Work("x", MEMORY, bytes=1.0), ampere)


def wait(name: str, length: float) -> Work:
    """Work on the compute stream that takes so long, and counts as idle."""
    return Work(name, IDLE, wait=length)


def busy(length: float) -> Work:
    """Compute that takes so long, alone."""
    return Work("compute", MEMORY, bytes=(length - 2 * US) * 0.84 * 3.35232e12)


def send(length: float, name: str = "talk") -> Work:
    """Communication that takes so long on H100s."""
    return Work(name, COLLECTIVE, collective="permute", role="pp",
                wire=(length - 20 * US) * 0.86 * 50e9, group=Group(2, 1))  # fmt: skip


def test_hidden_and_exposed_communication():
    """1 s of it beside 0.5 s of compute, which runs at 0.8: 0.375 s are waited for."""
    timeline = simulate((Start(send(1.0), "a"), Run(busy(0.5)), Done("a")), H100)
    key = Key("talk", COLLECTIVE, "pp", "forward")
    assert timeline.seconds == pytest.approx(1.0)
    assert timeline.exposed == pytest.approx({key: 1 - 0.5 / 0.8})
    assert timeline.busy[key] == pytest.approx(1.0)
    assert timeline.compute == pytest.approx(0.5 / 0.8)
    lanes = [(s.lane, round(s.start, 6), round(s.end, 6)) for s in timeline.spans[""]]
    assert lanes == [("communication", 0, 1), ("compute", 0, 0.625)]


def test_compute_is_slowed_only_while_communication_runs():
    timeline = simulate((Start(send(1.0), "a"), Run(busy(2.0)), Done("a")), H100)
    assert timeline.seconds == pytest.approx(1 + (2 - 0.8))
    assert not timeline.exposed
    copy = Work("copy", HOST, bytes=0.85 * 64e9)
    assert simulate((Start(copy, "a"), Run(busy(2.0)), Done("a")), H100).seconds == pytest.approx(2)


def test_lanes_are_in_order_and_apart():
    """Two collectives follow each other; a copy to the host does not wait for them."""
    copy = Work("copy", HOST, bytes=0.85 * 64e9 * 1.5)
    events = (Start(send(1.0), "a"), Start(send(1.0), "b"), Start(copy, "c"), Done("c"), Done("b"))
    timeline = simulate(events, H100)
    assert timeline.seconds == pytest.approx(2.0)
    assert sorted(timeline.exposed.values()) == pytest.approx([0.5, 1.5])
    both = simulate((Start(send(1.0), "a"), Run(send(0.5))), H100)  # waits for its lane
    assert both.seconds == pytest.approx(1.5)
    assert sum(both.exposed.values()) == pytest.approx(1.5)


def test_streams_share_a_link():
    """Two on one link take turns: 1 s and 0.1 s end at 1.1 and 0.2; over NVLink one goes alone."""
    events = (Start(send(1.0), "a"), Start(send(0.1), "b"), Done("b"), Done("a"))
    assert simulate(events, H100, 2).seconds == pytest.approx(1.1)
    first = simulate((*events[:3], Run(busy(0.5)), Done("a")), H100, 2)
    assert sum(first.exposed.values()) == pytest.approx(0.2 + 0.9 - 0.5 / 0.8)
    near = Work("near", COLLECTIVE, collective="permute", role="tp", wire=1e9, group=Group(2, 2))
    alone = seconds(near, H100)
    both = simulate((Start(send(1.0), "a"), Start(near, "b"), Done("b")), H100, 2)
    assert both.seconds == pytest.approx(alone)
    assert simulate((Start(send(1.0), "a"), Start(near, "b"), Done("b")), H100).seconds > 1


def test_loops_multiply():
    body = (Run(busy(0.25)), Run(wait("bubble", 0.1)))
    once, often = simulate(body, H100), simulate((Loop("outer", 3, (Loop("in", 4, body),)),), H100)
    assert often.seconds == pytest.approx(12 * once.seconds)
    assert often.busy == pytest.approx({k: 12 * v for k, v in once.busy.items()})
    assert often.exposed == pytest.approx({k: 12 * v for k, v in once.exposed.items()})
    assert set(often.spans) == {"", "outer", "outer/in"}
    twice = simulate((Loop("x", 1, body), Loop("x", 1, body)), H100)
    assert set(twice.spans) == {"", "x", "x#2"}


def test_a_loop_is_priced_in_steady_state():
    """What a turn begins the next one awaits: 0.3 s of communication under 0.25 s of compute."""
    body = (Done("w"), Start(send(0.3), "w"), Run(busy(0.2)))
    timeline = simulate((Loop("layers", 10, body),), H100)
    assert timeline.seconds == pytest.approx(10 * 0.3)
    assert sum(timeline.exposed.values()) == pytest.approx(10 * (0.3 - 0.2 / 0.8))


def test_a_step_is_compute_and_what_is_waited_for():
    events = (
        Start(send(0.4), "a"),
        Loop("l", 2, (Run(busy(0.1)), Run(send(0.05)), Start(send(0.2), "b"), Done("b"))),
        Done("a"),
        Run(wait("bubble", 0.3)),
    )
    timeline = simulate(events, H100)
    kinds = {k: v for k, v in timeline.busy.items() if k.kind == MEMORY}
    assert timeline.compute == pytest.approx(sum(kinds.values()))
    assert timeline.seconds == pytest.approx(2 * (0.1 + 0.05 + 0.2) + 0.3)
