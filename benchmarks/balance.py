"""Balancing the demo's router from a skewed start: max / mean load by step, for each method.

    python benchmarks/balance.py [none batch sequence global bias quantile]

The demo (configs/demo.py: 4 layers of 16 experts, 2 a token, 2048 tokens a step, its text and
learning rate), 200 steps. Every embedding gets a common part as large as its own, and the router
answers that with one constant an expert, so that at step 1 the busiest expert of each layer has
over 3 times the mean. A run's figure is the mean of its last 20 steps, of the worst layer; exits
with 1 where a figure misses its bar: losses and bias 1.3, quantiles 1.2, and without balancing
above 2.
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
# Offset of each expert's logit, from the favourite down.
SKEW = 3.0 - 0.6 * np.arange(16)
OFF = BalanceConfig(batch_coeff=0.0)
WAYS = {
    "none": (OFF, (2.0, np.inf)),
    "batch": (replace(OFF, batch_coeff=0.1), (1.0, 1.3)),
    "sequence": (replace(OFF, sequence_coeff=0.1), (1.0, 1.3)),
    "global": (replace(OFF, global_coeff=0.1), (1.0, 1.3)),
    "bias": (replace(OFF, bias_rate=0.01), (1.0, 1.3)),
    "quantile": (replace(OFF, quantile_rate=1.0), (1.0, 1.2)),
}


def _skewed(weights: dict, std: float) -> dict:
    """Returns the parameters with an offset on each expert's logit, by the embeddings' common
    part. A normed embedding holds 1 / sqrt(2) of it in every column."""
    dim = weights["embedding"].shape[1]
    common_D = np.where(np.arange(dim) % 2, 1.0, -1.0)
    block = weights["stack_0"]["block_0"]
    offset_DE = np.sqrt(2) * common_D[:, None] * SKEW[None] / dim
    router = block["moe"]["w_router"] + jnp.asarray(offset_DE, jnp.float32)[None]
    block = block | {"moe": block["moe"] | {"w_router": router}}
    embedding = weights["embedding"] + jnp.asarray(std * common_D, jnp.float32)[None]
    return weights | {"embedding": embedding, "stack_0": {"block_0": block}}


def train(balance: BalanceConfig, folder: Path) -> tuple[np.ndarray, float]:
    """Returns (max / mean load of the worst layer, by step; mean loss of the last steps)."""
    base = demo()
    moe = replace(base.model.moe, balance=balance)
    run = prepare(replace(base, runs_dir=str(folder), model=replace(base.model, moe=moe)))
    skewed = replace(run.state, params=_skewed(run.state.params, base.model.init_std))
    state, found = jax.device_put(skewed, run.layout.shardings), []
    for _ in range(STEPS):
        state, metrics = run.train_step(state, run.put(next(run.batches)))
        found.append((metrics["moe"]["imbalance"].max(), metrics["loss"]))
    run.batches.close()
    curve, losses = np.asarray(jax.device_get(found)).T
    return curve, float(losses[-LAST:].mean())


def main(names: list[str]) -> int:
    """Prints a row a way; returns 1 where one misses its bar."""
    missed, head = [], "".join(f"{step:>7}" for step in SHOWN)
    print(f"way       {head}  last {LAST}    loss  seconds")
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            balance, (low, high) = WAYS[name]
            start = time.perf_counter()
            curve, loss = train(balance, Path(folder))
            seconds, last = time.perf_counter() - start, curve[-LAST:].mean()
            row = "".join(f"{curve[step - 1]:7.2f}" for step in SHOWN)
            print(f"{name:10}{row}{last:9.3f}{loss:8.3f}{seconds:9.0f}", flush=True)
            if not (curve[0] >= 3 and low <= last <= high):
                missed.append(f"{name}: {curve[0]:.2f} to {last:.3f}, not {low} to {high}")
    print("\n".join(missed) or "every bar is met")
    return bool(missed)


if __name__ == "__main__":
    host.keep_freed_memory()
    sys.exit(main(sys.argv[1:] or list(WAYS)))
