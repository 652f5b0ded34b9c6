"""How close a MoE layer and a whole train step come to the dense-matmul rate of a CPU.

    python benchmarks/cpu_moe.py            both parts, about three minutes on 2 cores
    python benchmarks/cpu_moe.py layer
    python benchmarks/cpu_moe.py step

(a) layer: T=4096, D=1024, E=16, K=4, F=512 SwiGLU, routing and permutation included, over the best
    dense rate of the same dtype in the same process: the best of a 2048-cube product and of the
    layer's own two shapes, batched (one product a group of T*K/E rows) and in row blocks.
(b) step: the whole train step of a Qwen3-MoE-like model (V=8192, D=512, 8 layers, 8 query and 4
    key/value heads of 64, 16 experts top-4 of F=256, L=512, batch 8), model FLOPs per second over
    the bfloat16 rate of (a).

One process, the measurements interleaved; a ratio is taken within each round, and the median over
rounds is printed. FLOPs: 2*M*K*N a product, three times that for forward and backward.
"""

import statistics
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from moejax.core import host, params
from moejax.core.mesh import ParallelConfig, fold, make_mesh
from moejax.core.precision import PrecisionConfig
from moejax.model.attention import AttentionConfig
from moejax.model.balance import BalanceConfig
from moejax.model.flops import flops_per_token
from moejax.model.moe import MoE, MoEConfig
from moejax.model.stream import Counts, make_stream
from moejax.model.transformer import ModelConfig, Transformer
from moejax.train.optimizer import OptimizerConfig, decay_mask, make_optimizer
from moejax.train.state import init_state, plan_state
from moejax.train.step import make_train_step

T, D, E, K, F = 4096, 1024, 16, 4, 512
LAYER_FLOPS = 2 * T * K * 3 * D * F
ROUNDS = 9


def _dense(dtype) -> dict:
    """The dense products whose best rate is the denominator: name -> (function, args, FLOPs)."""
    key = jax.random.key(1)
    product = jax.jit(jnp.matmul)
    rows = T * K // E
    found = {}
    cube = jax.random.normal(key, (2048, 2048), dtype)
    found["cube 2048"] = (product, (cube, cube), 2 * 2048**3)
    for name, inner, outer in (("in", D, 2 * F), ("out", F, D)):
        x = jax.random.normal(key, (E, rows, inner), dtype)
        w = jax.random.normal(key, (E, inner, outer), dtype)
        flops = 2 * E * rows * inner * outer
        found[f"batched {name}"] = (product, (x, w), flops)
        blocks = jax.jit(lambda x, w: jax.lax.map(lambda b: b @ w, x))
        found[f"blocks {name}"] = (blocks, (x, w[0]), flops)
    return found


def _layer(dtype):
    """(forward, forward+backward) of the product's own MoE layer, and their arguments."""
    precision = PrecisionConfig(compute_dtype=dtype)
    cfg = MoEConfig(num_experts=E, top_k=K, ffn_dim=F, balance=BalanceConfig(batch_coeff=0.01))
    layer = MoE(cfg, D, precision=precision, rngs=nnx.Rngs(0))
    definition, weights, buffers = params.partition(layer)
    weights = jax.tree.map(lambda w: w.astype(dtype), weights)
    segments = jnp.ones((8, T // 8), jnp.int32)
    one = jnp.ones((), jnp.float32)
    stream = make_stream(segments, (one, one), Counts(one, one * T, one, one * T), layer.fold)
    x = jax.random.normal(jax.random.key(0), (T, D), dtype)

    def forward(weights, x):
        y, aux = params.assemble(definition, weights, buffers)(x, stream)
        return y, aux["batch_loss"]

    def loss(weights, x):
        y, aux = forward(weights, x)
        return (y * y).sum(dtype=jnp.float32) + aux

    return jax.jit(forward), jax.jit(jax.grad(loss, argnums=(0, 1))), (weights, x)


def _seconds(function, arguments) -> float:
    start = time.perf_counter()
    jax.block_until_ready(function(*arguments))
    return time.perf_counter() - start


def bench_layer(dtype: str) -> None:
    """Prints part (a) for one dtype."""
    dense = _dense(jnp.dtype(dtype))
    forward, both, arguments = _layer(dtype)
    for function, args, _ in (*dense.values(), (forward, arguments, 0), (both, arguments, 0)):
        _seconds(function, args)
    rates: dict[str, list[float]] = {name: [] for name in (*dense, "forward", "forward+backward")}
    for _ in range(ROUNDS):
        for name, (function, args, flops) in dense.items():
            rates[name].append(flops / min(_seconds(function, args) for _ in range(2)))
        rates["forward"].append(LAYER_FLOPS / _seconds(forward, arguments))
        rates["forward+backward"].append(3 * LAYER_FLOPS / _seconds(both, arguments))
    best = [max(rates[name][i] for name in dense) for i in range(ROUNDS)]
    for name, values in rates.items():
        ratios = [value / top for value, top in zip(values, best, strict=True)]
        print(
            f"{dtype:9} {name:18} {statistics.median(values) / 1e9:7.0f} GFLOP/s"
            f"   {statistics.median(ratios):5.2f} of the best dense"
        )


def _step():
    """(train step, state, batch, model FLOPs of a step) of the Qwen3-MoE-like model."""
    cfg = ModelConfig(
        vocab_size=8192,
        dim=512,
        num_layers=8,
        attention=AttentionConfig(num_heads=8, num_kv_heads=4, head_dim=64, qk_norm="head"),
        moe=MoEConfig(num_experts=16, top_k=4, ffn_dim=256),
    )
    precision = PrecisionConfig(compute_dtype="bfloat16")
    folded = fold(*ParallelConfig().readings(1))
    mesh = make_mesh(folded)
    model = nnx.eval_shape(lambda: Transformer(cfg, rngs=nnx.Rngs(0)))
    opt_cfg = OptimizerConfig()
    optimizer = make_optimizer(opt_cfg, 1000, decay_mask(params.dims_of(model)[0]))
    layout = plan_state(cfg, optimizer, folded, mesh, 0, precision)
    state = init_state(cfg, optimizer, layout, precision, 0)
    step = make_train_step(cfg, opt_cfg, optimizer, layout, precision, 1000)
    shape, rng = (1, 8, 512), np.random.default_rng(0)
    tokens = jnp.asarray(rng.integers(0, cfg.vocab_size, shape), jnp.int32)
    places = jnp.broadcast_to(jnp.arange(512, dtype=jnp.int32), shape)
    ones = jnp.ones(shape, jnp.int32)
    batch = {"tokens": tokens, "targets": tokens, "segment_ids": ones, "positions": places}
    return step, state, batch, flops_per_token(cfg, np.asarray(ones)) * tokens.size


def bench_step() -> None:
    """Prints part (b)."""
    dense = _dense(jnp.dtype("bfloat16"))
    step, state, batch, flops = _step()
    state, _ = step(state, batch)
    ratios, rates = [], []
    for _ in range(ROUNDS + 1):
        best = max(
            work / min(_seconds(function, args) for _ in range(2))
            for function, args, work in dense.values()
        )
        start = time.perf_counter()
        state, metrics = step(state, batch)
        jax.block_until_ready((state, metrics))
        seconds = time.perf_counter() - start
        rates.append(flops / seconds)
        ratios.append(rates[-1] / best)
    rate, ratio = statistics.median(rates[1:]), statistics.median(ratios[1:])
    tokens = rate / flops * batch["tokens"].size
    print(
        f"bfloat16  train step         {rate / 1e9:7.0f} GFLOP/s"
        f"   {ratio:5.2f} of the best dense   ({tokens:.0f} tokens/s)"
    )


if __name__ == "__main__":
    host.keep_freed_memory()
    parts = sys.argv[1:] or ["layer", "step"]
    if "layer" in parts:
        for name in ("float32", "bfloat16"):
            bench_layer(name)
    if "step" in parts:
        bench_step()
