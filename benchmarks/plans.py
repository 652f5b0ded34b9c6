"""Published models on the clusters they were trained on: each step compiled, weighed and timed.

    .venv-gpu/bin/python -m benchmarks.plans [NAME ...]

writes benchmarks/results/plans.md; all plans take half an hour on 2 cores. Needs the GPU compiler,
and no GPU. Every number is the compiler's, or follows from its program by `moejax.plan.cost`;
nothing here was measured on a GPU.
"""

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import jax
from flax import nnx

from moejax.config import Config, load_recipe
from moejax.core import params
from moejax.model.transformer import Transformer
from moejax.plan import hardware
from moejax.plan.compile import compile_step
from moejax.plan.confirm import compiled_plan
from moejax.plan.plans import Plan, exposed, traffic
from moejax.plan.search import short

RESULTS = Path(__file__).parent / "results" / "plans.md"
RECIPES = (
    ("qwen3_moe", "qwen3_30b_a3b_h100x16", "203 (FP8)"),
    ("qwen3_moe", "qwen3_235b_a22b_h100x256", "320, 276, 214 (BF16), 253 (FP8)"),
    ("deepseek_v3", "v3_h100x256", "-"),
    ("deepseek_v3", "v3_gb300x256", "961 (BF16, no MTP), 1,635 (MXFP8)"),
    ("deepseek_v3", "v3_h100x1024", "368, 338 (FP8)"),
    ("kimi_k2", "kimi_k2_gb300x256", "-"),
    ("gpt_oss", "gpt_oss_120b_h100x64", "158 (BF16)"),
)
"""(file, recipe, published TFLOP/s a GPU, of Megatron Core, with pipelines)."""
BESIDE = (
    ("qwen3_moe", "qwen3_30b_a3b_h100x16", 16, "69 GiB dropless, 44 GiB with a buffer of 1.25"),
    ("deepseek_v3", "v3_h100x256", 64, "313 GB dropless, 63 GiB with a buffer of 1.25"),
)
"""(file, recipe, ep, what MaxText 0.2.5's step needs for it): one sequence a time on each GPU."""
GB = 1e9


def one_sequence(config: Config, num_gpus: int, ep: int) -> Config:
    """Returns the recipe with one sequence a time on each GPU, and room for 1.25 of a balanced load
    (the other trainer drops what is more; here the step then runs again)."""
    return replace(
        config,
        name=f"{config.name}_one_sequence",
        model=replace(config.model, moe=replace(config.model.moe, budget=1.25)),
        parallel=replace(config.parallel, dp=num_gpus, tp=1, ep=ep, edp=0),
        train=replace(config.train, microbatches=config.train.batch_size // num_gpus),
    )


def made(config: Config) -> tuple[Plan, dict[str, float]]:
    """Returns the compiled plan, and the compiler's totals for the step and for the step that runs
    an overflowed batch again."""
    cluster, num_gpus = hardware.parse(config.name.removesuffix("_one_sequence"))
    print(config.name, flush=True)
    say = lambda line: print(" ", line, flush=True)  # noqa: E731
    again = config.parallel.ep > 1
    plan = compiled_plan(config, cluster, num_gpus, worst_case=again, progress=say)
    compiled = compile_step(config, cluster, num_gpus)
    totals = {
        "step": compiled.device_bytes,
        "seconds": sum(compiled.seconds.values()),
        "host": compiled.host_bytes,
    }
    if again:
        totals["again"] = compile_step(config, cluster, num_gpus, worst_case=True).device_bytes
    return plan, totals


def summary(rows: list[tuple[Plan, dict, str]]) -> Iterator[str]:
    """Yields the table of all plans."""
    yield "| plan | fold | compile | GB | of | again | s a step | tok/s | TFLOP/s | published |"
    yield "|---|---|---|---|---|---|---|---|---|---|"
    for plan, totals, published in rows:
        again = f"{totals['again'] / GB:.1f}" if "again" in totals else "never"
        yield (
            f"| {plan.name} | {short(plan.config)} | {totals['seconds']:.0f} s, "
            f"{totals['host'] / GB:.1f} GB | {totals['step'] / GB:.1f} | "
            f"{plan.cluster.gpu.memory_bytes / GB:.1f} | {again} | {plan.seconds:.1f} | "
            f"{plan.tokens_per_second:,.0f} | {plan.flops / 1e12:,.0f} | {published} |"
        )


def details(plan: Plan, totals: dict) -> Iterator[str]:
    """Yields one plan's memory, time and collectives."""
    yield f"\n## {plan.name}\n"
    yield "| memory of a GPU | GB |\n|---|---|"
    for kind, size in plan.memory.kinds:
        yield f"| {kind} | {size / GB:.2f} |"
    off = plan.memory.total / totals["step"] - 1
    yield f"| **in all** (the compiler's total: {off:+.2%}) | **{plan.memory.total / GB:.2f}** |"
    yield "\n| a step | s |\n|---|---|"
    for what, seconds in exposed(plan):
        if seconds > 0.001 * plan.seconds:
            yield f"| {what} | {seconds:.2f} |"
    yield "\n| collectives | kind | GPUs | times | GB sent | s | exposed s |"
    yield "|---|---|---|---|---|---|---|"
    for row in traffic(plan):
        if row.bytes > 1e-4 * GB:
            yield (
                f"| {row.role} | {row.collective} | {row.size} | {row.count:,.0f} | "
                f"{row.bytes / GB:,.1f} | {row.busy:.2f} | {row.exposed:.2f} |"
            )


def closed_form(plan: Plan) -> Iterator[str]:
    """Yields DeepSeek-V3's weights, gradients and optimizer state beside the closed form."""
    model = plan.config.model
    abstract = nnx.eval_shape(lambda: Transformer(model, rngs=nnx.Rngs(0)))
    count = params.count(params.partition(abstract)[1])
    kinds = dict(plan.memory.kinds)
    yield "\n## DeepSeek-V3 on 256 GPUs beside the closed form and Megatron Core\n"
    yield (
        f"{count / 1e9:.1f}B parameters, all split over the 256 GPUs: weights, gradients and two "
        "moments in float32. Megatron Core (PP 4, VPP 4, EP 64, BF16): every data-parallel rank "
        "has its weights in BF16 and gradients in float32 whole; masters and moments are split.\n"
    )
    yield "| GB a GPU | compiled | closed form | off | Megatron Core |\n|---|---|---|---|---|"
    for kind, bytes_each, theirs in (
        ("weights", 4, "36.4 with gradients"), ("gradients", 4, ""), ("optimizer state", 8, "32.1"),
    ):  # fmt: skip
        right, found = count * bytes_each / plan.num_gpus / GB, kinds[kind] / GB
        yield f"| {kind} | {found:.2f} | {right:.2f} | {found / right - 1:+.2%} | {theirs} |"


def main(names: list[str]) -> None:
    """Compiles the plans of those names (all, if none) and writes the tables."""
    jax.config.update("jax_platforms", "cpu")  # here; the compiling processes see GPUs
    chosen = [row for row in RECIPES if not names or row[1] in names]
    rows = [
        (*made(load_recipe(f"configs/{file}.py:{recipe}")), published)
        for file, recipe, published in chosen
    ]
    lines = [__doc__.strip().partition("\n")[0], "", *summary(rows)]
    lines += ["", "## One sequence a time on each GPU, dropless, beside MaxText's\n"]
    lines += ["| plan | GB a GPU | run again | MaxText 0.2.5 |", "|---|---|---|---|"]
    beside = []
    for file, recipe, ep, theirs in BESIDE:
        base = load_recipe(f"configs/{file}.py:{recipe}")
        plan, totals = made(one_sequence(base, hardware.parse(recipe)[1], ep))
        beside.append((plan, totals))
        lines.append(
            f"| {plan.name}, {short(plan.config)} | {totals['step'] / GB:.1f} | "
            f"{totals['again'] / GB:.1f} | {theirs} |"
        )
    lines += closed_form(beside[-1][0])
    for plan, totals in [row[:2] for row in rows] + beside:
        lines += details(plan, totals)
    RESULTS.write_text("\n".join(lines) + "\n")
    print(f"\n{RESULTS}")


if __name__ == "__main__":
    main(sys.argv[1:])
