"""The search: what it refuses, ranks and confirms; what it writes; and what it advises."""

from dataclasses import replace
from functools import cache

import pytest

from configs import deepseek_v3, qwen3_moe
from moejax.config import REPOSITORY, Config, load_recipe
from moejax.plan import search
from moejax.plan.__main__ import options, target
from moejax.plan.advice import ways
from moejax.plan.estimate import Memory, estimate, room
from moejax.plan.hardware import CLUSTERS
from moejax.plan.plans import Plan
from moejax.plan.search import Found, analytic_plan, candidates, confirm, distinct, divisors
from moejax.plan.settings import changed, differences, flags, recipe_text, write_recipe
from moejax.plan.timeline import Timeline
from tests.plan import folds

H100 = CLUSTERS["h100"]


def base() -> Config:
    """Qwen3-30B with four layers and a batch of 8 rows, on four H100s."""
    config = qwen3_moe.qwen3_30b_a3b()
    return changed(
        config,
        {"model.num_layers": 4, "train.batch_size": 8, "train.microbatches": 2,
         "model.vocab_size": 16384, "parallel.ep": 4},
    )  # fmt: skip


@cache
def found() -> Found:
    return search.search(base(), H100, 4)


def test_candidates_cover_every_fold_that_there_is():
    seen = {
        (c["parallel.tp"], c["parallel.ep"], c["parallel.etp"]) for c in candidates(base(), H100, 4)
    }
    powers = (1, 2, 4)
    every = {(t, e, p) for t in powers for e in powers for p in powers if e * p <= 4}
    assert seen == every
    rows = {8 // 4 // c["train.microbatches"] for c in candidates(base(), H100, 4)
            if c["parallel.tp"] == 1}  # fmt: skip
    assert rows == {1, 2}
    assert divisors(12) == [1, 2, 3, 4, 6, 12]


def test_all_that_is_ranked_fits_and_the_fastest_is_first():
    ranked = found().ranked
    assert ranked and found().counts["fit and are priced"] == len(ranked)
    times = [round(c.seconds, 4) for c in ranked]  # of equal ones that of least memory
    assert times == sorted(times)
    for one in ranked[:: max(len(ranked) // 40, 1)]:
        fold = one.config.fold_over(4)
        assert fold.degree("dp") * fold.degree("tp") == 4
        assert estimate(one.config, fold).total == one.memory.total <= room(H100)
        tokens = 8 * 4096 / 4
        assert one.tokens_per_second == pytest.approx(tokens / one.seconds)
        kept = differences(one.config, base())
        assert not {"model.moe.budget", "train.batch_size", "model.moe.dispatch"} & kept.keys()


def test_the_best_is_no_slower_than_the_recipe_itself():
    recipe = analytic_plan(changed(base(), {"parallel.dp": 4}), H100, 4)
    assert found().ranked[0].seconds <= recipe.seconds


def test_of_near_duplicates_one_is_kept():
    few = distinct(found().ranked, 5)
    keys = [(c.config.parallel.tp, c.config.parallel.ep, c.config.parallel.etp,
             c.config.train.microbatches) for c in few]  # fmt: skip
    assert len(set(keys)) == len(few) == 5 and few[0] == found().ranked[0]


def scaled(memory: Memory, factor: float) -> Memory:
    return replace(memory, kinds=tuple((kind, factor * size) for kind, size in memory.kinds))


def compiler(factor: float, seen: list):
    """A compiler whose steps need `factor` times what was estimated."""

    def compiled(config: Config) -> Plan:
        seen.append(config)
        plan = analytic_plan(config, H100, 4)
        return replace(plan, memory=scaled(plan.memory, factor), compiled=True)

    return compiled


def test_the_best_few_are_confirmed():
    seen: list[Config] = []
    plans = confirm(found(), 2, compiler(1.0, seen), lambda line: None)
    assert [p.config for p in plans] == [c.config for c in distinct(found().ranked, 2)] == seen
    assert all(plan.compiled and not plan.over for plan in plans)


def test_what_the_compiler_needs_more_is_learnt():
    """Every step needs so much more than estimated that the first just does not fit. No other is
    then compiled whose estimate times that would not either."""
    hungry = sorted(found().ranked, key=lambda one: -one.memory.total)
    factor = 1.001 * room(H100) / hungry[0].memory.total
    full = replace(found(), ranked=tuple(hungry))
    seen: list[Config] = []
    plans = confirm(full, 1, compiler(factor, seen), lambda line: None)
    assert plans[-1].config == hungry[0].config and plans[-1].over > 0
    assert plans[0].fits and len(seen) == 2
    between = [c for c in hungry if factor * c.memory.total > room(H100)]
    assert all(one.config not in seen[1:] for one in between)


def test_where_nothing_fits_the_smallest_is_named():
    small = replace(H100, gpu=replace(H100.gpu, memory_bytes=2 * 10**9))
    result = search.search(base(), small, 4)
    assert not result.ranked and result.smallest is not None
    assert result.smallest[1].total > room(small)


def test_a_search_can_ask_that_the_worst_case_fits_too(monkeypatch):
    """Folds whose second run would need six times the memory are left out."""
    weigh = search.weigh

    def greedy(config, num_gpus, *, worst_case=False):
        memory = weigh(config, num_gpus, worst_case=worst_case)
        return scaled(memory, 6.0) if worst_case else memory

    monkeypatch.setattr(search, "weigh", greedy)
    monkeypatch.setattr(search, "price", lambda *where: Timeline(1.0))
    either, both = (
        search.search(base(), H100, 4, worst_case=worst).ranked for worst in (False, True)
    )
    assert 0 < len(both) < len(either)
    for one in both:
        again = estimate(one.config, one.config.fold_over(4), worst_case=True)
        assert 6 * again.total <= room(H100) and one.memory.total <= room(H100)


def test_a_recipe_that_was_written_gives_the_config_again(tmp_path):
    where = "configs/qwen3_moe.py:qwen3_30b_a3b"
    start = load_recipe(where)
    values = {
        "parallel.tp": 2, "parallel.dp": 4, "train.microbatches": 16, "model.remat": "none",
        "model.attention.impl": "xla", "model.moe.router.scale": 2.5, "precision.accum_dtype":
        "bfloat16", "data.train": ("a.txt", "b's.txt"),
    }  # fmt: skip
    config = changed(start, values)
    path = write_recipe(tmp_path, "planned_h100x8", config, where, start, "Why.\n\nMore.")
    assert load_recipe(str(path)) == replace(config, name="planned_h100x8")
    line = flags(config, start)
    assert "--config.parallel.tp=2" in line and "--config.model.remat=none" in line
    assert recipe_text("x", start, where, start, "Why.").count("replace(") == 1


def test_sections_are_changed_together():
    """Each alone would be refused: a window needs a pattern that uses it."""
    config = changed(base(), {"model.attention.window": 128, "model.pattern": "m"})
    assert config.model.windows() == (128,) * 4
    with pytest.raises(ValueError, match="has no 'tpp'"):
        changed(base(), {"parallel.tpp": 2})


@pytest.fixture(scope="module")
def failing() -> Plan:
    """DeepSeek-V3 on 256 H100s, twelve rows a microbatch: far too much."""
    return analytic_plan(changed(deepseek_v3.v3(), {"train.microbatches": 5}), H100, 256)


def test_advice_applied_fits(failing):
    assert failing.over == pytest.approx(failing.memory.total - room(H100)) and failing.over > 30e9
    found = ways(failing)
    assert [way.cost for way in found] == sorted(way.cost for way in found)
    assert any("--config.train.microbatches=" in way.text for way in found)
    for way in found:
        arguments = [a for a in way.text.split() if a.startswith("--config.")]
        gpus = [a for a in way.text.split() if a.startswith("--gpus=")] or ["--gpus=h100x256"]
        recipe = f"--config={REPOSITORY / 'configs/deepseek_v3.py'}:v3"
        chosen = options([recipe, "--config.train.microbatches=5", *arguments, *gpus])
        config, cluster, num_gpus = target(chosen, chosen.recipes[0])
        memory = estimate(config, config.fold_over(num_gpus))
        assert memory.total == pytest.approx(way.memory.total)
        assert memory.total <= room(cluster)
        price = search.price(config, cluster, num_gpus).seconds * num_gpus
        assert way.cost == pytest.approx(price / failing.seconds / 256)


def test_a_single_setting_is_preferred_to_several():
    """Two rows a microbatch, nothing computed again: either alone is enough to change."""
    config = changed(
        folds.qwen3_30b_16(), {"model.remat": "none", "train.microbatches": 32}
    )
    found = ways(analytic_plan(config, H100, 16))
    here = [way for way in found if way.num_gpus == 16 and way.cluster == H100]
    assert "--config.model.remat=full" in [way.text for way in here]
    assert all(len(way.text.split()) == 1 for way in here)


def test_where_no_single_setting_is_enough_several_are_named():
    """V3 with everything saved needs two."""
    tight = changed(deepseek_v3.v3(), {"model.remat": "none"})
    found = ways(analytic_plan(tight, H100, 256))
    here = [w for w in found if (w.cluster, w.num_gpus) == (H100, 256)]
    assert here and all(len(way.text.split()) == 2 for way in here)


def test_where_the_worst_case_was_looked_at_it_has_to_fit_too():
    """The compiler found that it needs thrice the estimate: that is believed."""
    config = folds.qwen3_30b_16()
    plan = analytic_plan(config, H100, 16)
    again = scaled(estimate(config, config.fold_over(16), worst_case=True), 3.0)
    plan = replace(plan, again=again)
    assert plan.over == 0 and plan.over_again > 0 and not plan.fits
    found = ways(plan)
    assert found
    for way in found:
        fold = way.config.fold_over(way.num_gpus)
        assert 3 * estimate(way.config, fold, worst_case=True).total <= room(way.cluster)
        assert estimate(way.config, fold).total == way.memory.total <= room(way.cluster)


def test_advice_believes_the_compiler(failing):
    """Where the compiler needs a fifth more than was estimated, advice has to save that too."""
    worse = replace(failing, memory=scaled(failing.memory, 1.2), compiled=True)
    found = ways(worse)
    assert found and all(1.2 * way.memory.total <= room(way.cluster) for way in found)


@pytest.mark.parametrize(
    ("name", "value", "dp"),
    [("parallel.pp", 2, 2), ("parallel.cp", 2, 2), ("parallel.schedule", "merged", 4)],
)
def test_what_the_analytic_plan_does_not_know_is_refused(name, value, dp):
    """And gets no advice by its estimate, where the compiled plan does not fit."""
    known = analytic_plan(changed(base(), {"parallel.dp": 4}), H100, 4)
    config = changed(base(), {"parallel.dp": dp, name: value})
    for ask in (analytic_plan, search.search):
        with pytest.raises(ValueError, match=f"does not know {name}={value!r}"):
            ask(config, H100, 4)
    assert not ways(replace(known, config=config))
