"""The kernels on a GPU: right first, then how fast, against a dense product and against peers.

    python benchmarks/gpu.py                 one table, under five minutes on one H200
    python benchmarks/gpu.py --small         tiny shapes: shows on any machine that it runs

Grouped GEMM (forward, input gradient, weight gradient) at the expert shapes of five models, 32768
rows for 8 experts, balanced and Zipf-skewed, as a share of one dense bfloat16 product of the same
FLOPs; `jax.lax.ragged_dot`, and tokamax and torch._grouped_mm where they can be imported, beside
it. The grouped MLP over its parts. Permutation and router as a share of a device copy's bandwidth.
Attention within documents, in TFLOP/s of what is seen, over the portable one.
Needs jax and numpy alone.

A time is the best of five bursts of calls, each waited for once. Errors are max|difference| /
max|reference| against float32 products of the same bfloat16 operands, group by group.
"""

import argparse
import importlib.util
import sys
import time
import types
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))


class _AnyArray(types.ModuleType):
    """Stands in for jaxtyping where there is none: `Float[Array, "M K"]` is some list, unread."""

    def __getattr__(self, name: str) -> Any:
        return list


if not importlib.util.find_spec("jaxtyping"):
    sys.modules["jaxtyping"] = _AnyArray("jaxtyping")

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

from pallas_kernels import (  # noqa: E402
    attention,
    grouped_gemm,
    grouped_mlp,
    permute,
    route,
    sort_slots,
    unpermute,
)
from pallas_kernels.grouped_mlp import parts  # noqa: E402
from pallas_kernels.inspect import GROUPS, HEADS, LENGTH, ROUTERS, ROWS, SHAPES  # noqa: E402
from pallas_kernels.tune import (  # noqa: E402
    TOLERANCE,
    error,
    expected,
    operands,
    products,
    seconds,
)


def zipf_sizes(rows: int, groups: int) -> np.ndarray:
    """Group sizes that fall as 1/rank; they add up to `rows`."""
    share = 1 / np.arange(1, groups + 1)
    sizes = np.floor(rows * share / share.sum()).astype(np.int32)
    sizes[0] += rows - sizes.sum()
    return sizes


def peers() -> dict[str, Callable]:
    """Other implementations that can be imported here: (x, w, sizes) -> y, differentiable."""
    found: dict[str, Callable] = {"ragged_dot": jax.lax.ragged_dot}
    if importlib.util.find_spec("tokamax"):
        tokamax = importlib.import_module("tokamax")
        found["tokamax"] = lambda x, w, sizes: tokamax.ragged_dot(x, w, group_sizes=sizes)
    return found


def torch_seconds(x: Any, w: Any, sizes: np.ndarray) -> float | None:
    """Time of torch._grouped_mm's forward at the same shapes; None where it cannot be had."""
    if not importlib.util.find_spec("torch"):
        return None
    torch = importlib.import_module("torch")
    if not torch.cuda.is_available() or not hasattr(torch, "_grouped_mm"):
        return None
    made = partial(torch.randn, device="cuda", dtype=torch.bfloat16)
    x_t, w_t = made(*x.shape), made(*w.shape)
    ends = torch.tensor(np.cumsum(sizes), device="cuda", dtype=torch.int32)
    for _ in range(3):
        torch._grouped_mm(x_t, w_t, offs=ends)
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(20):
        torch._grouped_mm(x_t, w_t, offs=ends)
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / 20


def bench_gemm(name: str, rows: int, groups: int, K: int, N: int) -> bool:
    """Prints the rows of one projection; returns whether every result was right."""
    x, w, dy = operands(rows, K, N, groups)
    flops, right = 2 * rows * K * N, True
    dense = flops / seconds(jax.jit(jnp.matmul), x, w[0])
    balanced = np.full(groups, rows // groups, np.int32)
    for load, sizes in (("balanced", balanced), ("zipf", zipf_sizes(rows, groups))):
        sizes_G, wanted = jnp.asarray(sizes), expected(x, w, sizes, dy)
        for op, function in products(grouped_gemm).items():
            found = error(function(x, w, sizes_G, dy), wanted[op])
            right &= found <= TOLERANCE
            rate = flops / seconds(function, x, w, sizes_G, dy)
            cells = [f"{rate / 1e12:7.1f} {rate / dense:5.2f}"]
            if load == "balanced":
                for peer, gemm in peers().items():
                    other = flops / seconds(products(gemm)[op], x, w, sizes_G, dy)
                    cells.append(f"{peer} {rate / other:.2f}x")
                if op == "forward" and (torch := torch_seconds(x, w, sizes)):
                    cells.append(f"torch {rate * torch / flops:.2f}x")
            print(
                f"{name:14}{K:6}{N:6} {op:16}{load:9}{dense / 1e12:7.1f} {'  '.join(cells)}"
                f"  error {found:.0e}{'' if found <= TOLERANCE else '  WRONG'}",
                flush=True,
            )
    return right


def bench_mlp(name: str, rows: int, groups: int, dim: int, ffn: int) -> bool:
    """Prints the grouped MLP, forward and all gradients, over its parts one after the other."""
    x, w_in, dy = operands(rows, dim, 2 * ffn, groups)
    _, w_out, _ = operands(rows, ffn, dim, groups)
    w_in, w_out, dy = w_in * dim**-0.5, w_out * ffn**-0.5, dy[:, :1] * jnp.ones_like(x)
    weights = jax.random.uniform(jax.random.key(1), (rows,))
    sizes_G = jnp.asarray(zipf_sizes(rows, groups))

    def both_ways(mlp):
        def run(x, w_in, w_out, weights, sizes, dy):
            y, pull = jax.vjp(lambda *args: mlp(*args, sizes), x, w_in, w_out, weights)
            return y, *pull(dy)

        return jax.jit(run)

    apart = partial(parts.grouped_mlp, impl=None)
    args = (x, w_in, w_out, weights, sizes_G, dy)
    ours, theirs = both_ways(grouped_mlp), both_ways(apart)
    found = max(
        error(a, b.astype(jnp.float32)) for a, b in zip(ours(*args), theirs(*args), strict=True)
    )
    took, took_apart, flops = seconds(ours, *args), seconds(theirs, *args), 18 * rows * dim * ffn
    wrong = "" if found <= 4 * TOLERANCE else "  WRONG"
    print(
        f"{name:14}{dim:6}{ffn:6} {'mlp, both ways':16}{'zipf':9}{'':7} {flops / took / 1e12:7.1f}"
        f"  parts {took_apart / took:.2f}x  error {found:.0e}{wrong}",
        flush=True,
    )
    return not wrong


def bench_moves(name: str, rows: int, dim: int, top_k: int = 8) -> bool:
    """Prints the rows of the permutation at one model's width."""
    tokens, experts = rows // top_k, 64
    rng = np.random.default_rng(0)
    chosen = np.argsort(rng.random((tokens, experts)), axis=1)[:, :top_k].astype(np.int32)
    tokens_S, slots_TK, _ = jax.jit(sort_slots, static_argnums=1)(jnp.asarray(chosen), experts)
    x = jax.random.normal(jax.random.key(0), (tokens, dim), jnp.bfloat16)
    there, back = jax.jit(permute), jax.jit(unpermute)
    moved = there(x, tokens_S, slots_TK)
    right = bool((moved == x[tokens_S]).all())
    right &= error(back(moved, slots_TK, tokens_S), top_k * x.astype(jnp.float32)) <= TOLERANCE
    copy = 2 * moved.nbytes / seconds(jax.jit(lambda a: a + 1), moved)
    for op, function, arguments in (
        ("permute", there, (x, tokens_S, slots_TK)),
        ("unpermute", back, (moved, slots_TK, tokens_S)),
    ):
        num_bytes = (rows + (rows if op == "permute" else tokens)) * dim * 2
        rate = num_bytes / seconds(function, *arguments)
        print(
            f"{name:14}{dim:6}{top_k:6} {op:16}{'':9}{copy / 1e9:7.0f} {rate / 1e9:7.0f}"
            f" {rate / copy:5.2f}{'' if right else '  WRONG'}",
            flush=True,
        )
    return right


def bench_routes(name: str, tokens: int) -> bool:
    """Prints the rows of the router at one model's numbers of experts."""
    right, (experts, options) = True, ROUTERS[name]
    for num_experts in experts:
        logits = jax.random.normal(jax.random.key(0), (tokens, num_experts))
        found = (run := jax.jit(partial(route, options=options)))(logits)
        wanted = jax.jit(partial(route, options=options, impl="reference"))(logits)
        # Scores a rounding apart may change places.
        same = float((found.experts_TK == wanted.experts_TK).mean())
        right &= same > 0.999 and int(found.load_E.sum()) == found.experts_TK.size
        copy = 2 * logits.nbytes / seconds(jax.jit(lambda a: a + 1), logits)
        rate = (logits.nbytes + 8 * found.experts_TK.size) / seconds(run, logits)
        print(
            f"{name:14}{num_experts:6}{options.top_k:6} {'router':16}{'':9}{copy / 1e9:7.0f}"
            f" {rate / 1e9:7.0f} {rate / copy:5.2f}{'' if right else '  WRONG'}",
            flush=True,
        )
    return right


def bench_attention(name: str, rows: int, documents: int) -> bool:
    """Prints the rows of attention at one model's heads: a row of `documents`, both ways."""
    N, G, H, V = HEADS[name]
    length = min(LENGTH, rows)
    N, G = (N, G) if length == LENGTH else (max(N // G, 1), 1)
    keys = jax.random.split(jax.random.key(0), 4)
    q, k, v, do = (
        jax.random.normal(key, (max(rows // length // 4, 1), length, *shape), jnp.bfloat16)
        for key, shape in zip(keys, ((N, H), (G, H), (G, V), (N, V)), strict=True)
    )
    ids = jnp.broadcast_to(1 + jnp.arange(length) * documents // length, q.shape[:2])

    def both_ways(impl):
        def run(q, k, v, do):
            attend = partial(attention, segment_ids=(ids, ids), impl=impl)
            out, pull = jax.vjp(lambda *qkv: attend(*qkv)[0], q, k, v)
            return out, *pull(do)

        return jax.jit(run)

    ours, portable = both_ways(None), both_ways("xla")
    forward = jax.jit(partial(attention, segment_ids=(ids, ids)))
    found = max(
        error(a, b.astype(jnp.float32))
        for a, b in zip(ours(q, k, v, do), portable(q, k, v, do), strict=True)
    )
    wrong = "" if found <= 4 * TOLERANCE else "  WRONG"
    flops = q.shape[0] * N * length * length / documents * (H + V)  # causal: half of all scores
    there, back = seconds(forward, q, k, v), seconds(ours, q, k, v, do)
    over = seconds(portable, q, k, v, do) / back
    for op, took, times, note in (
        ("attention", there, 1, ""),
        ("both ways", back, 3.5, f"  xla {over:.2f}x  error {found:.0e}{wrong}"),
    ):
        print(
            f"{name:14}{N:6}{G:6} {op:16}{f'{documents} a row':9}{'':7}"
            f" {times * flops / took / 1e12:7.1f}{note}",
            flush=True,
        )
    return not wrong


def main(arguments: list[str]) -> int:
    """Returns 1 where a result was wrong."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--small", action="store_true", help="tiny shapes, for any machine")
    small = parser.parse_args(arguments).small
    device = jax.devices()[0]
    print(f"{device.device_kind}, jax {jax.__version__}, {time.strftime('%Y-%m-%d')}")
    print("model              K     N operation       load       dense      ours share  ours over")
    print("                                         (TFLOP/s; GB/s of a copy and of ours)")
    rows, groups, right = (256, 4, True) if small else (ROWS, GROUPS, True)
    scale = 32 if small else 1
    for name, (dim, ffn) in list(SHAPES.items())[: 2 if small else None]:
        dim, ffn = dim // scale, ffn // scale
        right &= bench_gemm(name, rows, groups, dim, 2 * ffn)
        right &= bench_gemm(name, rows, groups, ffn, dim)
        right &= bench_mlp(name, rows, groups, dim, ffn)
        right &= bench_moves(name, rows, dim)
        right &= bench_routes(name, rows)
        right &= bench_attention(name, rows, 1) & bench_attention(name, rows, 8)
    return int(not right)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
