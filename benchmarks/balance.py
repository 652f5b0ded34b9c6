"""Balancing the demo's router from a skewed start: max / mean load by step, for each method.

    python benchmarks/balance.py [none batch sequence global bias quantile]

The demo (configs/demo.py: 4 layers of 16 experts, 2 a token, 2048 tokens a step, its text and
schedule) with train.steps=200; the bias with sigmoid scores, for which it is made, and the global
loss in two microbatches, for in one it is the batch loss. Four experts of each layer start with
router columns 5 times as long as the others': their logits are the greatest half of the time, so
that at step 1 the busiest has over 3 times the mean. Loads of a single step swing with its 8 rows,
pieces of a few files; so a run's figure is max / mean of the load of its last 20 steps together,
of the worst layer ("all 20"; beside it the mean of 20 single ones). Exits with 1 where one misses
its bar: losses and bias 1.3, quantiles 1.2, without balancing above 2.
"""

import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from configs.demo import demo
from moejax.core import host
from moejax.model.balance import BalanceConfig
from moejax.train.setup import prepare

STEPS, LAST = 200, 20
SHOWN = (1, 5, 10, 20, 50, 100, 150, 200)
# Length of each expert's router column, as a multiple of its own.
SKEW = np.where(np.arange(16) < 4, 5.0, 1.0)
OFF = BalanceConfig(batch_coeff=0.0)
WAYS = {
    "none": (OFF, (2.0, np.inf)),
    "batch": (replace(OFF, batch_coeff=0.1), (1.0, 1.3)),
    "sequence": (replace(OFF, sequence_coeff=0.2), (1.0, 1.3)),
    "global": (replace(OFF, global_coeff=0.1), (1.0, 1.3)),
    "bias": (replace(OFF, bias_rate=0.01), (1.0, 1.3)),
    "quantile": (replace(OFF, quantile_rate=0.25), (1.0, 1.2)),
}


def _skewed(weights: dict) -> dict:
    """Returns the parameters with longer router columns of some experts."""
    block = weights["stack_0"]["block_0"]
    router = block["moe"]["w_router"] * jnp.asarray(SKEW, jnp.float32)[None, None]
    block = block | {"moe": block["moe"] | {"w_router": router}}
    return weights | {"stack_0": {"block_0": block}}


def train(balance: BalanceConfig, folder: Path) -> tuple[np.ndarray, float, float]:
    """Returns (max / mean load of the worst layer, by step; that of the last steps together; their
    mean loss)."""
    base = demo()
    score = "sigmoid" if balance.bias_rate else "softmax"
    router = replace(base.model.moe.router, score=score)
    moe = replace(base.model.moe, balance=balance, router=router)
    run = prepare(
        replace(
            base, runs_dir=str(folder), model=replace(base.model, moe=moe),
            train=replace(base.train, steps=STEPS, microbatches=2 if balance.global_coeff else 1),
        )
    )  # fmt: skip
    skewed = replace(run.state, params=_skewed(run.state.params))
    state, found = jax.device_put(skewed, run.layout.shardings), []
    for _ in range(STEPS):
        state, metrics = run.train_step(state, run.put(next(run.batches)))
        found.append((metrics["moe"]["load"], metrics["loss"]))
    run.batches.close()
    loads, losses = zip(*jax.device_get(found), strict=True)
    num_experts = loads[0].shape[1]
    curve = num_experts * np.asarray(loads).max(axis=(1, 2))
    together = num_experts * np.mean(loads[-LAST:], axis=0).max()
    return curve, float(together), float(np.mean(losses[-LAST:]))


def main(names: list[str]) -> int:
    """Prints a row a way; returns 1 where one misses its bar."""
    missed, head = [], "".join(f"{step:>7}" for step in SHOWN)
    print(f"way       {head}  each of {LAST}  all {LAST}    loss  seconds")
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            balance, (low, high) = WAYS[name]
            start = time.perf_counter()
            curve, together, loss = train(balance, Path(folder))
            seconds, each = time.perf_counter() - start, curve[-LAST:].mean()
            row = "".join(f"{curve[step - 1]:7.2f}" for step in SHOWN)
            tail = f"{each:12.3f}{together:8.3f}{loss:8.3f}{seconds:9.0f}"
            print(f"{name:10}{row}{tail}", flush=True)
            if not (curve[0] >= 3 and low <= together <= high):
                missed.append(f"{name}: {curve[0]:.2f} to {together:.3f}, not {low} to {high}")
    print("\n".join(missed) or "every bar is met")
    return bool(missed)


if __name__ == "__main__":
    host.keep_freed_memory()
    sys.exit(main(sys.argv[1:] or list(WAYS)))
