"""The analytic plan: its FLOPs and bytes against closed forms, its bubble, and what it ranks."""

from collections import defaultdict
from dataclasses import replace

import pytest

from configs import deepseek_v3, gpt_oss, mixtral, qwen3_moe
from moejax.config import load_recipe
from moejax.core.mesh import ParallelConfig
from moejax.model.flops import attention_flops, linear_flops_per_token
from moejax.plan.analytic.events import events
from moejax.plan.analytic.setup import Setup
from moejax.plan.hardware import CLUSTERS
from moejax.plan.operations import ATTENTION, COLLECTIVE, IDLE, Group, Loop, Run, Start
from moejax.plan.timeline import simulate
from tests.plan import folds

H100, B200, GB200 = (CLUSTERS[name] for name in ("h100", "b200", "gb200"))
V3, Q235, Q30 = (
    recipe().model
    for recipe in (deepseek_v3.v3, qwen3_moe.qwen3_235b_a22b, qwen3_moe.qwen3_30b_a3b)
)
MODELS = {  # every shipped model, on folds of all kinds
    "deepseek_v2.py:v2_lite": {"ep": 8},
    "deepseek_v2.py:v2": {"ep": 32, "dispatcher": "all_gather"},
    "deepseek_v3.py:v3": {"tp": 2, "pp": 8, "vpp": 4, "ep": 16, "precision": "fp8"},
    "deepseek_v3.py:r1": {"pp": 2, "ep": 64, "overlap": True},
    "demo.py:demo": {"ep": 4, "tp": 2},
    "glm4_moe.py:glm_4_5": {"tp": 4, "ep": 8},
    "glm4_moe.py:glm_4_5_air": {"pp": 4, "ep": 32, "graphs": "none"},
    "gpt_oss.py:gpt_oss_20b": {"ep": 8, "rows": 2},
    "gpt_oss.py:gpt_oss_120b": {"pp": 4, "ep": 32},
    "kimi_k2.py:kimi_k2": {"ep": 64, "cp": 2},
    "mixtral.py:mixtral_8x7b": {"ep": 8, "tp": 2},
    "mixtral.py:mixtral_8x22b": {"ep": 8, "etp": 2, "tp": 2},
    "moonlight.py:moonlight_16b": {"ep": 8},
    "olmoe.py:olmoe_1b_7b": {"ep": 8, "dispatcher": "ragged"},
    "qwen2_moe.py:qwen2_57b_a14b": {"ep": 4, "dispatcher": "fused"},
    "qwen3_moe.py:qwen3_30b_a3b": {"ep": 128},
    "qwen3_moe.py:qwen3_235b_a22b": {"tp": 2, "pp": 2, "ep": 32, "overlap": True},
}


def flat(found, times=1.0):
    """Yields (work, how often a step has it)."""
    for event in found:
        if isinstance(event, Loop):
            yield from flat(event.body, times * event.times)
        elif isinstance(event, Run | Start):
            yield event.work, times


@pytest.mark.parametrize("where", MODELS)
def test_flops_are_those_of_the_model(where):
    """Without recomputation all GPUs together do what the formula counts, but for the router's
    logits, which it leaves out, and the scores that flash attention's backward makes again."""
    model = load_recipe(f"configs/{where}").model
    setup = Setup(model, 128, 512, **MODELS[where])
    total = 0.0
    for work, times in flat(events(setup, H100)):
        if work.name != "route" and work.phase != "recompute":
            again = work.kind == ATTENTION and work.phase == "backward"
            total += times * work.flops * (2 / 2.5 if again else 1)
    tokens = 512 * 4096
    expected = linear_flops_per_token(model) * tokens + 512 * attention_flops(model, 4096)
    assert total * 128 == pytest.approx(expected, rel=1e-9)


def test_moejax_does_the_same_products():
    """Logits are made twice, and attention's scores three times: our backward has 7 products for
    the forward's 2. Blocks of the portable attention are whole ones, 4.5 of 8 on average where
    4.0625 would do."""
    setup = replace(
        Setup.of(folds.qwen3_30b_16(), 16), recompute=(), attention="fused"
    )
    work = list(flat(events(setup, H100)))
    total = sum(t * w.flops for w, t in work if w.name != "route" and w.phase != "recompute")
    cores = sum(
        t * w.flops for w, t in work if w.kind == ATTENTION and w.phase == "backward"
    )
    expected = 1024 * (linear_flops_per_token(Q30) * 4096 + attention_flops(Q30, 4096))
    assert (total - 1.5 / 3.5 * cores) * 16 == pytest.approx(expected, rel=1e-9)
    again = sum(t * w.flops for w, t in work if w.phase == "recompute")
    assert again * 16 == pytest.approx(1024 * 4096 * 2 * 2048 * 151936)
    blocks = replace(setup, attention="xla")
    forward, backward = (
        sum(
            t * w.flops
            for w, t in flat(events(blocks, H100))
            if w.name == "attend" and w.phase == phase
        )
        - sum(t * w.flops for w, t in work if w.name == "attend" and w.phase == phase)
        for phase in ("forward", "backward")
    )
    one = 1024 * 48 * 32 * 4 * 128 * 4096**2 / 16  # the whole square, forward
    assert forward == pytest.approx(one * (4.5 / 8 - 0.5))
    assert backward == pytest.approx(one * (2.5 * 4.5 / 8 - 3.5 / 2))


def wires(setup: Setup, cluster) -> dict:
    """Returns bytes a step by role."""
    found = defaultdict(float)
    for work, times in flat(events(setup, cluster)):
        if work.kind == COLLECTIVE:
            found[work.role] += times * work.wire
    return dict(found)


def test_bytes_of_expert_communication():
    """Slots that leave the GPU, 16 bits wide: there and back, forward and backward."""
    setup = Setup(Q235, 256, 2048, ep=32, dispatcher="all_to_all")
    once = 8 * 94 * 4096 * 8 * 4096 * 2 * 31 / 32  # microbatches, layers, tokens, slots, width
    found = wires(setup, H100)
    assert found["ep dispatch"] == pytest.approx(2 * once)
    assert found["ep combine"] == pytest.approx(2 * once)
    again = wires(replace(setup, recompute=("moe",)), H100)
    assert again["ep dispatch"] == pytest.approx(3 * once)
    assert wires(replace(setup, tp=2, pp=8, vpp=4), H100)["ep dispatch"] == pytest.approx(2 * once)
    wide = wires(replace(setup, dispatcher="all_gather"), H100)
    assert wide["ep dispatch"] == pytest.approx(2 * once / 8 * 32)


def test_a_fused_dispatch_sends_a_token_once_to_each_domain():
    """DeepSeek-V3 chooses 4 of 8 nodes; a token is wanted by 4 (1 - (3/4)^8) of them, 1 in 8 is its
    own. In one domain of 64 GPUs it goes to each GPU that wants it, of the 32 in reach."""
    setup = Setup(V3, 256, 8192, pp=4, ep=64, dispatcher="fused")
    token = 2 * 7168 * 4096
    for cluster, copies, group in (
        (H100, 4 * (1 - (3 / 4) ** 8) * 7 / 8, Group(8, 1)),
        (GB200, 32 * (1 - (31 / 32) ** 8) * 63 / 64, Group(64, 64)),
    ):
        work = next(w for w, _ in flat(events(setup, cluster)) if w.role == "ep dispatch")
        assert work.wire == pytest.approx(copies * token)
        assert work.group == group


def test_a_hierarchical_dispatch_crosses_once_to_a_node_and_then_once_to_a_gpu():
    """As above, 8 nodes of 8; of the 32 GPUs in reach a copy stays on one in 8. Back: the inner hop
    first."""
    setup = Setup(V3, 256, 8192, pp=4, ep=64, dispatcher="hierarchical")
    token = 2 * 7168 * 4096
    hops = [
        (4 * (1 - (3 / 4) ** 8) * 7 / 8 * token, Group(8, 1)),
        (32 * (1 - (31 / 32) ** 8) * 7 / 8 * token, Group(8, 8)),
    ]
    works = [w for w, _ in flat(events(setup, H100)) if w.phase == "forward"]
    for role, expected in (("ep dispatch", hops), ("ep combine", hops[::-1])):
        found = [w for w in works if w.role == role][:2]
        assert [w.wire for w in found] == pytest.approx([wire for wire, _ in expected])
        assert [w.group for w in found] == [group for _, group in expected]
    (only,) = {
        w.group for w, _ in flat(events(setup, GB200)) if w.role in ("ep dispatch", "ep combine")
    }
    assert only == Group(64, 64), "inside one domain there is one hop"


def test_bytes_of_zero():
    """Of Qwen3-30B: what dp shares, and the experts, an eighth of them on each GPU."""
    dense = 48 * (2048 * (4096 + 2 * 512) + 4096 * 2048 + 2048 * 128) + 2 * 151936 * 2048
    experts = 48 * 3 * 128 * 2048 * 768
    once = wires(Setup(Q30, 64, 1024, ep=8), H100)
    weights = dense * 63 / 64 + experts / 8 * 7 / 8
    assert once["zero gather"] == pytest.approx(2 * weights)  # 16 bits
    assert once["zero reduce"] == pytest.approx(4 * weights)  # float32
    none = wires(Setup(Q30, 64, 1024, ep=8, zero=0), H100)
    assert "zero gather" not in none
    assert none["zero reduce"] == pytest.approx(2 * 4 * weights)  # all-reduced
    config = qwen3_moe.qwen3_30b_a3b()
    config = replace(config, parallel=ParallelConfig(dp=64, ep=8, zero=3))
    config = replace(config, train=replace(config.train, batch_size=1024, microbatches=4))
    each = wires(Setup.of(config, 64), H100)
    layers = dense - 2 * 151936 * 2048
    head = 151936 * 2048
    layer = layers * 63 / 64 + experts / 8 * 7 / 8
    # Layers are gathered again for the backward; the head is kept; tokens travel to the embedding.
    assert each["zero gather"] == pytest.approx(4 * (2 * 2 * layer + 2 * head * 63 / 64))
    assert each["zero reduce"] == pytest.approx(4 * 4 * (layer + head * 63 / 64))
    assert each["embed"] == pytest.approx(4 * 2 * 2 * 4 * 4096 * 2048 * 63 / 64)


def test_the_bubble_is_what_a_schedule_leaves():
    """(pp - 1) / vpp microbatches: 7 / 4 of 64 with interleaving, 7 of 64 without."""
    setup = Setup(replace(Q30, num_layers=64), 64, 512, pp=8, vpp=4, ep=8)
    for vpp in (4, 1):
        timeline = simulate(events(replace(setup, vpp=vpp), H100), H100)
        bubble = sum(v for k, v in timeline.exposed.items() if k.role == "bubble")
        rest = timeline.seconds - bubble
        weights = sum(v for k, v in timeline.exposed.items() if k.role.startswith("zero"))
        update = sum(v for k, v in timeline.busy.items() if k.phase == "update" and not k.role)
        share = bubble / (rest - weights - update)
        assert share == pytest.approx(7 / vpp / setup.microbatches, rel=0.02)


def test_layers_that_do_not_divide_leave_stages_waiting():
    """Of 94 layers 12 are on the busiest of 8 stages, which the others wait for."""
    setup = Setup(Q235, 256, 2048, pp=8, vpp=4, ep=32)
    timeline = simulate(events(setup, H100), H100)
    uneven = sum(v for k, v in timeline.exposed.items() if k.role == "uneven")
    assert 0 < uneven / timeline.seconds < 0.02


def length(setup: Setup, cluster) -> float:
    return simulate(events(setup, cluster), cluster).seconds


def test_what_costs_time_costs_time():
    setup = Setup(
        Q235, 256, 2048, tp=2, pp=8, vpp=4, ep=32, dispatcher="fused", graphs="none"
    )
    base = length(setup, H100)
    assert length(replace(setup, overlap=True), H100) < base
    assert length(replace(setup, dispatcher="all_to_all"), H100) > base
    assert length(replace(setup, graphs="partial"), H100) < base
    full = length(replace(setup, graphs="full"), H100)
    assert full < length(replace(setup, graphs="partial"), H100)
    assert length(replace(setup, recompute=("norm", "moe_act")), H100) > base
    whole = length(replace(setup, recompute=("full",)), H100)
    assert whole > length(replace(setup, recompute=("norm", "moe_act")), H100)
    assert length(replace(setup, vpp=1), H100) > base
    assert length(setup, GB200) < length(setup, B200) < base
    assert length(replace(setup, batch_size=4096), H100) == pytest.approx(2 * base, rel=0.06)
    assert length(replace(setup, precision="fp8"), H100) < base


def test_full_recomputation_is_a_forward_more():
    setup = Setup(mixtral.mixtral_8x7b().model, 64, 256, ep=8)
    once = simulate(events(setup, H100), H100)
    again = simulate(events(replace(setup, recompute=("full",)), H100), H100)
    layers = sum(
        v for k, v in once.busy.items()
        if k.phase == "forward" and k.kind != IDLE and k.name not in ("embed", "unembed", "loss")
    )  # fmt: skip
    more = sum(v for k, v in again.busy.items() if k.phase == "recompute")
    assert more == pytest.approx(layers, rel=0.01)
    most = simulate(events(replace(setup, recompute=("selective",)), H100), H100)
    kept = {k: v for k, v in again.busy.items() if k.phase != "recompute" or k.name != "dispatch"}
    assert most.busy == pytest.approx(kept)  # what has travelled is there


def test_windows_are_seen():
    cfg = gpt_oss.gpt_oss_120b().model
    whole = replace(cfg, pattern="M", attention=replace(cfg.attention, window=0))
    with_window, without = (
        simulate(events(Setup(model, 64, 256, ep=8), H100), H100) for model in (cfg, whole)
    )
    assert with_window.seconds < without.seconds


def test_moejax_s_own_step_is_described():
    """What `Setup.of` reads from a recipe."""
    setup = Setup.of(folds.v3_1024(), 1024)
    assert (setup.dp, setup.tp, setup.ep, setup.edp, setup.rows) == (512, 2, 64, 16, 1)
    assert (setup.microbatches, setup.zero, setup.recompute) == (16, 3, ("full",))
    assert (setup.software, setup.attention, setup.dispatcher) == ("moejax", "fused", "ragged")
    groups = {role: setup.group(role, H100) for role in ("tp", "dp", "ep", "edp")}
    assert groups == {
        "tp": Group(2, 2), "dp": Group(512, 4), "ep": Group(64, 8), "edp": Group(16, 1),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"precision": "int8"}, "precision='int8'"),
        ({"recompute": ("all",)}, r"recompute=\['all'\]"),
        ({"tp": 3}, "tp=3 x cp=1 x pp=1 do not divide 64"),
        ({"ep": 128}, "ep=128 x etp=1 x pp=1 do not divide 64"),
        ({"rows": 3}, "rows=3 x dp=64"),
        ({"zero": 3}, "zero=3 is described for"),
    ],
)
def test_setups_that_cannot_be_are_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        Setup(Q30, 64, 1024, **wrong)
