"""Times the tiles of the grouped GEMM kernels on the GPU that is here, and writes the fastest down.

    python -m pallas_kernels.tune                          five models' shapes, 32768 rows
    python -m pallas_kernels.tune --shape 8192,2048,1536,16      M, K, N, G; may be repeated
    python -m pallas_kernels.tune --dry-run --gpu h100     what it would time, on any machine
    .. --dry-run --gpu h100 --compile                      and what the compiler makes of it

For each shape and operation ("forward", "input" gradient, "weight" gradient) every candidate of
`tiles.candidates` is compared with a dense reference, and timed if it is right: the best of five
bursts of calls, each waited for once, groups of one size. The fastest goes to --out, by default the
file from which `tiles.choose` reads, and is used from then on for shapes within a factor of two.
"""

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.deviceless import GPUS, Gpu, gpu_of, target_gpu, too_old
from pallas_kernels.grouped_gemm import blackwell, hopper, tiles
from pallas_kernels.grouped_gemm.tiles import OPS, Measured, Tiles
from pallas_kernels.inspect import GROUPS, ROWS, SHAPES, Program, collect, gemm, report_all, table
from pallas_kernels.pick import target

TOLERANCE = 2**-7  # two roundings to bfloat16
BURSTS, SECONDS_A_BURST = 5, 0.02


def seconds(function: Callable[..., Any], *arguments: Any) -> float:
    """Returns the time of one call, after the compile."""
    jax.block_until_ready(function(*arguments))
    start = time.perf_counter()
    jax.block_until_ready(function(*arguments))
    calls = max(1, min(100, int(SECONDS_A_BURST / (time.perf_counter() - start))))
    times = []
    for _ in range(BURSTS):
        start = time.perf_counter()
        jax.block_until_ready([function(*arguments) for _ in range(calls)])
        times.append((time.perf_counter() - start) / calls)
    return min(times)


def products(gemm: Callable) -> dict[str, Callable]:
    """Returns the operations of gemm(x, w, sizes), each alone in a program of (x, w, sizes, dy)."""

    def input_gradient(x, w, sizes, dy):
        return jax.vjp(lambda x: gemm(x, w, sizes), x)[1](dy)[0]

    def weight_gradient(x, w, sizes, dy):
        return jax.vjp(lambda w: gemm(x, w, sizes), w)[1](dy)[0]

    run = (lambda x, w, sizes, dy: gemm(x, w, sizes), input_gradient, weight_gradient)
    return {op: jax.jit(function) for op, function in zip(OPS, run, strict=True)}


def expected(x, w, sizes: np.ndarray, dy) -> dict[str, jax.Array]:
    """Returns the operations' definition, a dense product for each group, in float32."""
    wide = partial(jnp.matmul, preferred_element_type=jnp.float32)
    y, dx, dw, start = [], [], [], 0
    for g, size in enumerate(sizes):
        rows = slice(start, start + int(size))
        y.append(wide(x[rows], w[g]))
        dx.append(wide(dy[rows], w[g].T))
        dw.append(wide(x[rows].T, dy[rows]))
        start += int(size)
    return dict(zip(OPS, (jnp.concatenate(y), jnp.concatenate(dx), jnp.stack(dw)), strict=True))


def error(actual, right) -> float:
    """Returns max|difference| / max|reference|; infinite where anything is not finite."""
    difference = jnp.abs(actual.astype(jnp.float32) - right).max() / jnp.abs(right).max()
    return float(jnp.where(jnp.isfinite(difference), difference, jnp.inf))


def operands(M: int, K: int, N: int, G: int) -> tuple:
    """Returns x, w and dy, normal in bfloat16."""
    keys, shapes = jax.random.split(jax.random.key(0), 3), ((M, K), (G, K, N), (M, N))
    return tuple(jax.random.normal(k, s, jnp.bfloat16) for k, s in zip(keys, shapes, strict=True))


def kernels(gpu: Gpu) -> Callable[[Tiles], Callable]:
    """Returns the function from tiles to that GPU's grouped_gemm(x, w, sizes) with these tiles."""
    if gpu.capability[0] == 9:
        return lambda own: lambda x, w, sizes: hopper.grouped_gemm(x, w, sizes, gpu, own)
    return lambda own: lambda x, w, sizes: blackwell.grouped_gemm(x, w, sizes, own)


def tune(
    shapes: Sequence[tuple[int, int, int, int]],
    gpu: Gpu,
    with_tiles: Callable[[Tiles], Callable],
    timer: Callable[..., float] = seconds,
) -> list[Measured]:
    """Times every candidate at every shape (M, K, N, G), prints a line for each, and returns the
    fastest right one of each operation and shape; none where no candidate was right."""
    best = []
    for M, K, N, G in shapes:
        x, w, dy = operands(M, K, N, G)
        sizes = np.full(G, M // G, np.int32)
        sizes[0] += M - sizes.sum()
        arguments = x, w, jnp.asarray(sizes), dy
        wanted = expected(x, w, sizes, dy)
        for op in OPS:
            found = []
            for own in tiles.candidates(gpu):
                function = products(with_tiles(own))[op]
                taken, said = _try(function, arguments, wanted[op], timer)
                tflops = 2e-12 * M * K * N / taken
                print(f"{op:8}{M:7}{K:6}{N:6}{G:4}  {_short(own)}  {tflops:7.1f}  {said}")
                if not said:
                    found.append(Measured(op, tiles.extent(op, M, K, N, G), own, tflops))
            if found:
                best.append(max(found, key=lambda m: m.tflops))
                print(f"{op:8}{M:7}{K:6}{N:6}{G:4}  {_short(best[-1].tiles)}  is best", flush=True)
    return best


def _try(function, arguments, right, timer) -> tuple[float, str]:
    """(seconds of a call, what is wrong); a candidate that does not run is no reason to stop."""
    try:
        found = error(function(*arguments), right)
        if found > TOLERANCE:
            return float("inf"), f"WRONG: error {found:.0e}"
        return timer(function, *arguments), ""
    except (ValueError, NotImplementedError, jax.errors.JaxRuntimeError) as failure:
        return float("inf"), f"failed: {str(failure).splitlines()[0][:100]}"


def _size(own: Tiles) -> str:
    return f"{own.rows}x{own.cols}x{own.depth}{' pair' if own.pair else ''}"


def _short(own: Tiles) -> str:
    return f"{_size(own):16} stages {own.stages} snake {own.snake:2}"


def refusal(gpu: Gpu | None, kind: str) -> str | None:
    """Returns why nothing can be timed for a device, or None."""
    if gpu is None or gpu.capability[0] not in (9, 10):
        return f"there are tiles to tune on Hopper and Blackwell GPUs, and this is {kind}"
    return too_old((hopper if gpu.capability[0] == 9 else blackwell).OLDEST_JAX)


def programs(gpu: Gpu, shapes: Sequence[tuple[int, int, int, int]]) -> list[Program]:
    """Returns one program for each candidate and shape, to compile; the snake changes no code."""
    cuts = [own for own in tiles.candidates(gpu) if own.snake == 8]
    return [
        gemm(f"{_size(own)} {K}x{N}", M, K, N, G, kernels(gpu)(own))
        for own in cuts
        for M, K, N, G in shapes
    ]


def _shape(text: str) -> tuple[int, int, int, int]:
    M, K, N, G = map(int, text.split(","))
    if min(M, K, N, G) < 1 or K % 8 or N % 8:
        raise ValueError(text)
    return M, K, N, G


def _model_shapes() -> list[tuple[int, int, int, int]]:
    both = [((dim, 2 * ffn), (ffn, dim)) for dim, ffn in SHAPES.values()]
    return [(ROWS, K, N, GROUPS) for pair in both for K, N in pair]


def _dry_run(gpu: Gpu, shapes, compiled: bool, child: bool) -> int:
    """Lists candidates; returns 1 where one does not compile, or spills."""
    key = str(gpu_of(gpu.name))
    if child:
        report_all(key, programs(gpu, shapes))
        return 0
    found = tiles.candidates(gpu)
    print(f"{gpu.name}: {len(found)} candidates, {len(OPS)} operations, {len(shapes)} shapes")
    print("\n".join(_short(own) for own in found))
    if not compiled:
        return 0
    command = ["pallas_kernels.tune", "--dry-run", "--compile", "--child", "--gpu", key]
    for shape in shapes:
        command += ["--shape", ",".join(map(str, shape))]
    reports = collect(key, command)
    print(table(reports))
    return int(any(report.wrong for report in reports))


def main(arguments: Sequence[str]) -> int:
    """Returns 1 where an operation had no right candidate, 2 where this device cannot be tuned."""
    parser = argparse.ArgumentParser(prog="python -m pallas_kernels.tune")
    parser.add_argument(
        "--shape", type=_shape, action="append", metavar="M,K,N,G", help="K, N by 8s; repeatable"
    )
    parser.add_argument("--out", type=Path, help="default: where the kernels look for it")
    parser.add_argument("--dry-run", action="store_true", help="list candidates, time nothing")
    parser.add_argument("--compile", action="store_true", help="for --dry-run: look for spills")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--gpu", choices=GPUS, help="for --dry-run; default: the one that is here")
    asked = parser.parse_args(arguments)
    if (asked.gpu or asked.compile) and not asked.dry_run:
        parser.error("--gpu and --compile are for --dry-run: times come from the GPU that is here")
    shapes = asked.shape or _model_shapes()
    gpu = GPUS[asked.gpu] if asked.gpu else target_gpu()
    why = refusal(gpu, gpu.name if gpu else target().kind)
    if gpu is None or why:
        print(f"pallas_kernels.tune: {why}", file=sys.stderr)
        return 2
    if asked.dry_run:
        return _dry_run(gpu, shapes, asked.compile, asked.child)
    best = tune(shapes, gpu, kernels(gpu))
    about = dict(device=target().kind, date=time.strftime("%Y-%m-%d"), jax=jax.__version__)
    out = asked.out or tiles.MEASURED / f"{gpu_of(gpu.name)}.json"
    tiles.save(out, best, about)
    print(f"wrote {out}")
    return int(len(best) < len(shapes) * len(OPS))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
