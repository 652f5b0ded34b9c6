"""The page and the terminal's report: self-contained, and with the plan's own numbers."""

import json
import re
from dataclasses import replace
from functools import cache
from html.parser import HTMLParser
from io import StringIO

import pytest
from rich.console import Console

from configs import deepseek_v3
from moejax.plan import page, report
from moejax.plan.advice import ways
from moejax.plan.charts import GIB, LABEL, RIGHT, WIDTH, layer_pair, waterfall
from moejax.plan.estimate import Memory
from moejax.plan.hardware import CLUSTERS
from moejax.plan.operations import (
    ATTENTION,
    COLLECTIVE,
    GEMM,
    GROUPED,
    HOST,
    Done,
    Group,
    Loop,
    Run,
    Start,
    Work,
)
from moejax.plan.plans import Plan, exposed, make_plan, model_flops, traffic
from moejax.plan.search import analytic_plan
from moejax.plan.settings import changed
from moejax.plan.timeline import simulate
from moejax.train import units
from tests.plan import folds

H100 = CLUSTERS["h100"]
VOID = {"meta", "br"}


@cache
def fitting() -> Plan:
    return analytic_plan(folds.qwen3_30b_16(), H100, 16)


@cache
def failing() -> Plan:
    return analytic_plan(changed(deepseek_v3.v3(), {"train.microbatches": 5}), H100, 256)


class Balanced(HTMLParser):
    """Fails where a tag is not closed, and keeps what could reach outside."""

    def __init__(self):
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.addresses: list[str] = []

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.addresses += [v or "" for k, v in attrs if k in ("src", "href", "xlink:href")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.add(tag)

    def handle_endtag(self, tag):
        assert self.open and self.open.pop() == tag, tag


def checked(html: str) -> str:
    parser = Balanced()
    parser.feed(html)
    assert not parser.open and not parser.addresses
    assert not parser.tags & {"script", "link", "img", "iframe", "object"}
    assert "url(" not in html and "@import" not in html
    assert set(re.findall(r"https?://[^\"' <]+", html)) <= {"http://www.w3.org/2000/svg"}
    return html


def test_a_page_needs_nothing_from_outside(tmp_path):
    plans = [fitting(), failing()]
    path = page.write_page(plans, tmp_path / "new", {failing().name: ways(failing())})
    html = checked(path.read_text(encoding="utf-8"))
    for plan in plans:
        assert plan.name in html and f"{plan.tokens_per_second:,.0f}" in html
    assert "Side by side" in html and not list(path.parent.glob("*.new"))
    hostile = replace(fitting(), name="<script>alert(1)</script>")
    for some in ([hostile], [hostile, fitting()]):
        assert "<script>" not in checked(page.render(some, {}))


def test_the_numbers_are_the_plans():
    plan = fitting()
    html = page.render([plan], {})
    for text in (
        f"{plan.seconds:.2f} s", f"{plan.tokens_per_second:,.0f}",
        f"{plan.memory.total / GIB:.1f} GiB", f"{100 * plan.utilization:.1f} % of peak",
    ):  # fmt: skip
        assert text in html
    for row in traffic(plan):
        assert f"<td>{row.count:,.0f}</td>" in html and f"{row.bytes / 1e9:,.2f} GB" in html
    assert plan.tokens_per_second == pytest.approx(1024 * 4096 / 16 / plan.seconds)
    assert plan.flops == pytest.approx(23.006e9 * plan.tokens_per_second, rel=1e-3)


def test_bars_of_the_waterfall_add_up():
    """Each begins where the last one ended, and the last one is as long as all of them."""
    plan = fitting()
    drawn = waterfall(plan)
    found = re.findall(r'<rect x="([\d.]+)" y="\d+" width="([\d.]+)"', drawn)
    bars = [(float(x), float(w)) for x, w in found]
    assert len(bars) == len(plan.memory.kinds) + 1
    pixel = plan.cluster.gpu.memory_bytes * 1.06 / (WIDTH - LABEL - RIGHT)
    begin = 0.0
    for (x, width), (_, size) in zip(bars, plan.memory.kinds, strict=False):
        assert x == pytest.approx(LABEL + begin / pixel, abs=0.1)
        assert width == pytest.approx(max(size / pixel, 1.0), abs=0.1)
        begin += size
    assert bars[-1] == pytest.approx((LABEL, plan.memory.total / pixel), abs=0.1)


def test_a_plan_that_does_not_fit_says_by_how_much_and_what_to_do():
    found = ways(failing())
    html = checked(page.render([failing()], {failing().name: found}))
    assert f"exceeds what H100 GPUs hold by {units.data_size(failing().over)}" in html
    for way in found:
        assert way.text in html
    out = StringIO()
    report.show(failing(), found, Console(file=out, width=160))
    said = out.getvalue()
    assert f"by {units.data_size(failing().over)}" in " ".join(said.split())
    assert "Ways under it" in said and found[0].text in said
    assert page.best_of([failing()]) is None
    assert page.best_of([failing(), fitting()]) == fitting()


def toy() -> Plan:
    """A step of ten microbatches and two layers, with known traffic."""
    group = Group(16, 8)
    gather = Work("gather", COLLECTIVE, collective="all_gather", role="zero gather", wire=4e9,
                  group=group)  # fmt: skip
    send = Work("dispatch", COLLECTIVE, collective="all_to_all", role="ep dispatch", wire=1e8,
                group=group)  # fmt: skip
    attend = Work("attend", ATTENTION, flops=1e11, mnk=(4096, 4096, 128))
    experts = Work("experts", GROUPED, mnk=(512, 2048, 768), groups=8)
    layer = (Start(gather, "g"), Run(attend), Done("g"), Run(send), Run(experts))
    back = tuple(
        type(e)(replace(e.work, phase="backward"), *([e.key] if isinstance(e, Start) else []))
        if not isinstance(e, Done) else e
        for e in layer
    )  # fmt: skip
    copies = (Start(Work("moments", HOST, "update", bytes=1e9), "h"), Done("h"))
    head = Run(Work("unembed", GEMM, mnk=(4096, 151936, 2048)))
    events = (
        Loop("microbatches", 10, (Loop("fwd", 2, layer), head, Loop("bwd", 2, back))), *copies,
    )  # fmt: skip
    memory = Memory((("weights", 6e9), ("gradients", 3e9)), "layer")
    return make_plan(folds.qwen3_30b_16(), H100, 16, memory, events)


def test_traffic_counts_loops_and_splits_what_is_exposed():
    plan = toy()
    rows = {row.role: row for row in traffic(plan)}
    assert rows["zero gather"].count == rows["ep dispatch"].count == 40
    assert rows["zero gather"].bytes == 40 * 4e9 and rows["moments"].bytes == 1e9
    assert rows["ep dispatch"].phases == "forward, backward"
    for row in rows.values():
        assert row.busy * (1 + 1e-9) >= row.exposed > 0
    alone = simulate([Run(Work("x", ATTENTION, flops=1e11, mnk=(4096, 4096, 128)))], H100)
    hidden = rows["zero gather"].busy - rows["zero gather"].exposed
    assert hidden >= 40 * alone.seconds * 0.99
    found = dict(exposed(plan))
    assert sum(found.values()) == pytest.approx(plan.seconds, rel=1e-6)
    assert found["waiting: ep dispatch"] == pytest.approx(rows["ep dispatch"].exposed)


def test_the_layer_pair_is_one_layer_forward_and_one_backward():
    pair = layer_pair(toy().timeline)
    assert [name for name, _ in pair] == ["forward layer", "backward layer"]
    for _, spans in pair:
        assert {s.work.name for s in spans} == {"gather", "attend", "dispatch", "experts"}
    assert {s.work.phase for s in pair[1][1]} == {"backward"}
    real = layer_pair(fitting().timeline)
    assert len(real) == 2
    # 48 layers and 64 microbatches of the two make up most of the step.
    whole = 48 * 64 * sum(max(s.end for s in spans) for _, spans in real)
    assert 0.7 * fitting().seconds < whole < fitting().seconds


def test_the_record_is_json_with_the_same_numbers():
    plan = replace(fitting(), again=replace(fitting().memory))
    kept = json.loads(json.dumps(report.record(plan, ways(failing())), default=str))
    assert sum(kept["memory"].values()) == pytest.approx(plan.memory.total)
    assert kept["seconds"] == plan.seconds and kept["memory_again"] == plan.memory.total
    assert kept["flops_per_gpu"] == pytest.approx(
        model_flops(plan.config) * kept["tokens_per_second_per_gpu"]
    )
    assert kept["config"]["parallel"]["ep"] == 16 and len(kept["ways"]) == len(ways(failing()))
