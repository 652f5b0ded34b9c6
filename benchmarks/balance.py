"""Whether each way of balancing evens out a router that starts skewed: max / mean load by step.

    python benchmarks/balance.py            all six, about five minutes on 2 cores
    python benchmarks/balance.py none bias  some

Two layers of 8 sigmoid-scored experts, 2 a token; 200 steps of 2 microbatches of 4 rows of 128
tokens, drawn from a Markov chain. Every embedding has a common part, and the router answers it with
one constant an expert, so that at step 0 the busiest expert of each layer has over 3 times the
mean. A run's figure is the mean of its last 20 steps, of the worse layer; it exits with 1 where a
figure misses its bar: losses and bias 1.3, quantiles 1.2, and without balancing above 2.
"""

import sys
import time
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from moejax.core import host, params
from moejax.core.mesh import ParallelConfig, fold, make_mesh
from moejax.core.precision import PrecisionConfig
from moejax.model.attention.gqa import AttentionConfig
from moejax.model.balance import BalanceConfig
from moejax.model.moe import MoEConfig
from moejax.model.router import RouterConfig
from moejax.model.transformer import ModelConfig, Transformer
from moejax.train.optimizer import OptimizerConfig, decay_mask, make_optimizer
from moejax.train.state import init_state, plan_state
from moejax.train.step import make_train_step

V, D, E, K, STEPS = 256, 64, 8, 2, 200
SHAPE = (2, 4, 128)  # microbatches, rows, tokens
SHOWN, LAST = (1, 5, 10, 20, 50, 100, 150, 200), 20
# Offset of each expert's logit, from the favourite down.
SKEW = 2.0 - 0.7 * np.arange(E)
OFF = BalanceConfig(batch_coeff=0.0)
WAYS = {
    "none": (OFF, (2.0, np.inf)),
    "batch": (replace(OFF, batch_coeff=0.1), (1.0, 1.3)),
    "sequence": (replace(OFF, sequence_coeff=0.1), (1.0, 1.3)),
    "global": (replace(OFF, global_coeff=0.1), (1.0, 1.3)),
    "bias": (replace(OFF, bias_rate=0.01), (1.0, 1.3)),
    "quantile": (replace(OFF, quantile_rate=1.0), (1.0, 1.2)),
}


def batches(steps: int):
    """Yields batches of a Markov chain: 8 likely successors of each token."""
    rng = np.random.default_rng(0)
    successors = rng.integers(0, V, (V, 8))
    micro, rows, length = SHAPE
    places = np.broadcast_to(np.arange(length, dtype=np.int32), SHAPE)
    for _ in range(steps):
        chain = np.empty((micro * rows, length + 1), np.int32)
        chain[:, 0] = rng.integers(0, V, len(chain))
        for i in range(length):
            chain[:, i + 1] = successors[chain[:, i], rng.integers(0, 8, len(chain))]
        tokens, targets = chain[:, :-1].reshape(SHAPE), chain[:, 1:].reshape(SHAPE)
        ones = np.ones(SHAPE, np.int32)
        yield dict(tokens=tokens, targets=targets, segment_ids=ones, positions=places)


def _skewed(weights: dict) -> dict:
    """Returns the parameters with an offset on each expert's logit, by the embeddings' mean."""
    common_D = np.where(np.arange(D) % 2, 1.0, -1.0)
    moe = weights["stack_0"]["block_0"]["moe"]
    offset_DE = common_D[:, None] * SKEW[None] / D
    router = moe["w_router"] + jnp.asarray(offset_DE, jnp.float32)[None]
    block = weights["stack_0"]["block_0"] | {"moe": moe | {"w_router": router}}
    embedding = weights["embedding"] + jnp.asarray(0.5 * common_D, jnp.float32)[None]
    return weights | {"embedding": embedding, "stack_0": {"block_0": block}}


def train(balance: BalanceConfig) -> tuple[np.ndarray, float]:
    """Returns (max / mean load of the worse layer, by step; mean loss of the last steps)."""
    cfg = ModelConfig(
        vocab_size=V, dim=D, num_layers=2, init_std=0.1,
        attention=AttentionConfig(num_heads=2, num_kv_heads=2, head_dim=32),
        moe=MoEConfig(num_experts=E, top_k=K, ffn_dim=64, balance=balance,
                      router=RouterConfig(score="sigmoid")),
    )  # fmt: skip
    precision = PrecisionConfig(compute_dtype="float32")
    folded = fold(*ParallelConfig().readings(1))
    model = nnx.eval_shape(lambda: Transformer(cfg, rngs=nnx.Rngs(0)))
    opt_cfg = OptimizerConfig(learning_rate=1e-3, warmup_steps=10)
    optimizer = make_optimizer(opt_cfg, STEPS, decay_mask(params.dims_of(model)[0]))
    layout = plan_state(cfg, optimizer, folded, make_mesh(folded), 0, precision)
    state = init_state(cfg, optimizer, layout, precision, 0)
    state = replace(state, params=_skewed(state.params))
    state = jax.device_put(state, layout.shardings)
    step = make_train_step(cfg, opt_cfg, optimizer, layout, precision, STEPS)
    found = []
    for batch in batches(STEPS):
        state, metrics = step(state, batch)
        found.append((metrics["moe"]["imbalance"].max(), metrics["loss"]))
    curve, losses = np.asarray(jax.device_get(found)).T
    return curve, float(losses[-LAST:].mean())


def main(names: list[str]) -> int:
    """Prints a row a way; returns 1 where one misses its bar."""
    missed, head = [], "".join(f"{step:>7}" for step in SHOWN)
    print(f"way       {head}  last {LAST}    loss  seconds")
    for name in names:
        balance, (low, high) = WAYS[name]
        start = time.perf_counter()
        curve, loss = train(balance)
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
