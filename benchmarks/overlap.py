"""Which all-to-alls run under compute, in the program that XLA schedules for a cluster.

    .venv-gpu/bin/python -m benchmarks.overlap [NAME ...]

writes benchmarks/results/overlap.md: the train step of `launch/train.py` from recipes with the
published folds and batches, its forward and backward merged and scheduled by price
(`moejax.plan.guide`), and for comparison one after the other ("1f1b"). Needs the GPU compiler, and
no GPU; a recipe takes five minutes on 2 cores. Bytes and order are the compiler's, seconds are
prices (`moejax.plan.cost`); nothing here was measured on a GPU.
"""

import sys
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import jax

from moejax.config import Config, load_recipe
from moejax.core import sharding
from moejax.parallel.stages import pipeline_of
from moejax.plan import hardware, resting
from moejax.plan.compile import Compiled, compile_step
from moejax.plan.confirm import compiled_plan
from moejax.plan.guide import EXCHANGES as EP
from moejax.plan.operations import ATTENTION, GEMM, GROUPED, Event, Loop, Start, Work
from moejax.plan.plans import Plan
from moejax.plan.reader.program import spans_of
from moejax.plan.timeline import COMMUNICATION, COMPUTE

RESULTS = Path(__file__).parent / "results" / "overlap.md"
RECIPES = (
    ("qwen3_moe", "qwen3_235b_a22b_pp8_h100x256", "276, 245 without overlap"),
    ("qwen3_moe", "qwen3_235b_a22b_pp8_gb200x256", "728"),
    ("deepseek_v3", "v3_pp8_h100x1024", "338 (FP8)"),
    ("deepseek_v3", "v3_pp4_gb200x256", "857"),
)
"""(file, recipe, published TFLOP/s a GPU of the same fold; BF16 unless it says otherwise)."""
PRODUCTS = (GEMM, GROUPED, ATTENTION)
STATES = ("weights and gradients", "masters and optimizer", "activations")
THEIRS = ("deepseek_v3_pp4_gb200x256", (36.4, 32.1, 131.0))
"""(the plan that Megatron Core's paper weighs, its GB a GPU of `STATES`, BF16)."""
GB, MS = 1e9, 1e-3


def made(config: Config) -> tuple[Plan, Compiled]:
    """Returns the compiled plan."""
    cluster, num_gpus = hardware.parse(config.name.removesuffix("_apart"))
    print(config.name, flush=True)
    say = lambda line: print(" ", line, flush=True)  # noqa: E731
    plan = compiled_plan(config, cluster, num_gpus, progress=say)
    return plan, compile_step(config, cluster, num_gpus)


def apart(config: Config) -> Config:
    """Returns the recipe with forwards and backwards one after the other."""
    parallel = replace(config.parallel, schedule="1f1b")
    return replace(config, name=f"{config.name}_apart", parallel=parallel)


def steady(events: Iterable[Event]) -> tuple[Event, ...]:
    """Returns the loop's body that has most of the step's dispatch and combine: one pair of layers.
    """
    bodies: list[tuple[float, tuple[Event, ...]]] = []

    def look(events: Iterable[Event], times: float) -> None:
        events = tuple(events)
        own = [e for e in events if not isinstance(e, Loop)]
        wire = sum(times * work.wire for work, *_ in spans_of(tuple(own), 1) if work.role in EP)
        bodies.append((wire, events))
        for event in events:
            if isinstance(event, Loop):
                look(event.body, times * event.times)

    look(events, 1.0)
    return max(bodies, key=lambda body: body[0])[1]


def bare(events: tuple[Event, ...]) -> tuple[float, float, int, int]:
    """Returns of dispatch and combine (bytes sent, of those the bytes with no product between start
    and done, how many they are, how many of them have none)."""
    sent = alone = 0.0
    number = none = 0
    for work, times, _, inside in spans_of(events, 1):
        if work.role in EP:
            sent, number = sent + times * work.wire, number + 1
            if not any(one.kind in PRODUCTS for one in inside):
                alone, none = alone + times * work.wire, none + 1
    return sent, alone, number, none


def summary(rows: list[tuple[Plan, Compiled, str]]) -> Iterator[str]:
    """Yields the table of all plans."""
    yield (
        "| plan | schedule | s a step | TFLOP/s | published | dispatch and combine, s | waited for "
        "| share | GB sent | with no product beside | of a pair of layers | compile |"
    )
    yield "|---|---|---|---|---|---|---|---|---|---|---|---|"
    for plan, compiled, published in rows:
        timeline = plan.timeline
        busy, exposed = (
            sum(v for key, v in found.items() if key.role in EP)
            for found in (timeline.busy, timeline.exposed)
        )
        sent, alone, *_ = bare(plan.events)
        *_, number, none = bare(steady(plan.events))
        yield (
            f"| {plan.name.removesuffix('_apart')} | {plan.config.parallel.schedule} | "
            f"{plan.seconds:.1f} | {plan.flops / 1e12:,.0f} | {published} | {busy:.2f} | "
            f"{exposed:.2f} | {exposed / busy:.1%} | {sent / GB:,.0f} | {alone / sent:.1%} | "
            f"{none} of {number} | {sum(compiled.seconds.values()):.0f} s, "
            f"{compiled.host_bytes / GB:.1f} GB |"
        )


def pair(plan: Plan) -> Iterator[str]:
    """Yields the dispatches and combines of one pair of layers in steady state, as scheduled."""
    begun = {id(event.work) for event in steady(plan.events) if isinstance(event, Start)}
    of_pair = lambda item: sum(id(span.work) in begun for span in item[1])  # noqa: E731
    name, spans = max(plan.timeline.spans.items(), key=of_pair)
    yield f"\n## {plan.name}: one turn of `{name or 'step'}`\n"
    yield "| ms | until | what | GPUs | MB sent | products meanwhile, ms |"
    yield "|---|---|---|---|---|---|"
    for span in spans:
        if span.lane != COMMUNICATION or span.work.role not in EP:
            continue
        beside: dict[str, float] = {}
        for other in spans:
            over = min(span.end, other.end) - max(span.start, other.start)
            if other.lane == COMPUTE and other.work.kind in PRODUCTS and over > 0:
                what = f"{other.work.name} {other.work.phase}"
                beside[what] = beside.get(what, 0.0) + over
        shown = ", ".join(f"{what} {length / MS:.2f}" for what, length in beside.items())
        work: Work = span.work
        yield (
            f"| {span.start / MS:.2f} | {span.end / MS:.2f} | {work.role} {work.phase} | "
            f"{work.group.size} | {work.wire / 1e6:,.0f} | {shown or '-'} |"
        )


def memory(rows: list[tuple[Plan, Compiled, str]]) -> Iterator[str]:
    """Yields what each merged step needs, by kind, at the moment that needs most."""
    plans = [plan for plan, *_ in rows if plan.config.parallel.schedule == "merged"]
    yield "\n## GB a GPU at the moment that needs most\n"
    yield "| | " + " | ".join(plan.name for plan in plans) + " |"
    yield "|---|" + "---|" * len(plans)
    for kind in dict.fromkeys(kind for plan in plans for kind, _ in plan.memory.kinds):
        sizes = (dict(plan.memory.kinds).get(kind, 0.0) / GB for plan in plans)
        yield f"| {kind} | " + " | ".join(f"{size:.1f}" for size in sizes) + " |"
    yield "| all | " + " | ".join(f"{plan.memory.total / GB:.1f}" for plan in plans) + " |"


def held(config: Config, num_gpus: int) -> dict[str, tuple[int, float]]:
    """Returns {part of the model: (places for its layers, parameters)} of one GPU as a stage uses
    them: those of its tp and ep, of all layers it has places for."""
    fold, pipeline = config.parallel.fold(num_gpus), pipeline_of(config.parallel, config.model)
    assert pipeline is not None
    found: dict[str, tuple[int, float]] = {}
    for weight in resting.weights(config):
        part, size = weight.path.split("'")[1], weight.elements(sharding.COMPUTE, fold)
        places = 1
        if part.startswith("stack_"):
            k = int(part.removeprefix("stack_"))
            places = pipeline.placement.units[k].shape[1]
            size *= fold.degree("pp") * places / pipeline.stacks[k][1]
        found[part] = places, found.get(part, (0, 0.0))[1] + size
    return found


def beside(plan: Plan) -> Iterator[str]:
    """Yields a plan's memory beside the published one, in closed form and as compiled."""
    parts, kinds = held(plan.config, plan.num_gpus), dict(plan.memory.kinds)
    yield f"\n## {plan.name} beside Megatron Core\n"
    yield "| part | layers a GPU has places for | parameters, B | BF16 and float32 sums, GB |"
    yield "|---|---|---|---|"
    for part, (places, size) in parts.items():
        if size > 1e6:
            yield f"| {part} | {places} | {size / 1e9:.2f} | {6 * size / GB:.1f} |"
    used = sum(size for _, size in parts.values())
    masters = sum(kinds[kind] for kind in ("weights", "optimizer state"))
    rest = plan.memory.total - masters - 6 * used
    yield f"| all | | {used / 1e9:.2f} | {6 * used / GB:.1f} |"
    yield "\n| GB a GPU | here | Megatron Core |\n|---|---|---|"
    for state, mine, theirs in zip(STATES, (6 * used, masters, rest), THEIRS[1], strict=True):
        yield f"| {state} | {mine / GB:.1f} | {theirs} |"
    yield (
        "\nWeights and gradients: all GPUs run one program, so each has places for the most layers "
        "of every kind that any stage has, and for the module that predicts ahead, which runs with "
        "the loss on every rank; Megatron Core's first stage alone has dense layers, its last the "
        "module. Its 36.4 GB are 14.8 MoE layers at 6 bytes a parameter, about 61 / 4. Masters and "
        "optimizer: 12 bytes a parameter, and experts, with edp=1, are not split further: here "
        "those of 16 layers and the module; 32.1 GB are those of 15. Activations: here experts and "
        'attention are computed again and what travelled is saved (remat="selective"); the '
        "published figure recomputes nothing."
    )


def main(names: list[str]) -> None:
    """Compiles the recipes of those names (all, if none) and writes the tables."""
    jax.config.update("jax_platforms", "cpu")  # here; the compiling processes see GPUs
    rows = []
    for file, recipe, published in RECIPES:
        if not names or recipe in names:
            config = load_recipe(f"configs/{file}.py:{recipe}")
            rows += [(*made(one), published) for one in (config, apart(config))]
    lines = [__doc__.split("\n\n")[0] + "\n", __doc__.split("\n\n", 2)[2], *summary(rows)]
    lines += memory(rows)
    for plan, *_ in rows:
        lines += beside(plan) if plan.name == THEIRS[0] else ()
    for plan, *_ in rows:
        lines += pair(plan)
    print("\n".join(lines))
    if not names:
        RESULTS.write_text("\n".join(lines) + "\n")
        print(RESULTS)


if __name__ == "__main__":
    main(sys.argv[1:])
