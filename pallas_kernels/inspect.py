"""What the compiler made of each GPU kernel, on a machine with no GPU.

    python -m pallas_kernels.inspect [--gpu h100,gb300] [--shape qwen3-30b]

Compiles each kernel for each GPU and model shape with the real assembler, and prints registers,
spilled bytes, shared and tensor memory, tensor-core instructions found in the machine code, and the
floor: the larger of FLOPs over the peak rate and bytes over the memory's. Exits 1 where a kernel
spills, or lacks the tensor-core instruction of its GPU, or needs more shared memory than there is.
Needs the `gpu` and `inspect` extras, and `triton` for GPUs before Hopper (a100, l40s).
"""

import argparse
import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pallas_kernels import (
    RouterOptions,
    attention,
    deviceless,
    grouped_gemm,
    grouped_mlp,
    permute,
    route,
    unpermute,
)

ROWS, GROUPS = 32768, 8  # 4096 rows an expert, eight experts a device


class Expert(NamedTuple):
    """Width of the model, and of one of its experts (the models' published configurations)."""

    dim: int
    ffn: int


SHAPES = {
    "deepseek-v3": Expert(7168, 2048),
    "qwen3-235b": Expert(4096, 1536),
    "qwen3-30b": Expert(2048, 768),
    "gpt-oss": Expert(2880, 2880),
    "mixtral-8x7b": Expert(4096, 14336),
}
_GROUPS_OF_32 = RouterOptions(
    8, score="sigmoid", scale=2.5, num_groups=8, topk_groups=4, num_group_score=2
)
# Numbers of experts (gpt-oss: 20b and 120b), and how a token's are chosen.
ROUTERS = {
    "deepseek-v3": ((256,), _GROUPS_OF_32),
    "qwen3-235b": ((128,), RouterOptions(8)),
    "qwen3-30b": ((128,), RouterOptions(8)),
    "gpt-oss": ((32, 128), RouterOptions(4)),
    "mixtral-8x7b": ((8,), RouterOptions(2)),
}
LENGTH = 4096  # of a packed row


class Heads(NamedTuple):
    """Query heads, key heads, and their widths (the models' published configurations)."""

    num: int
    keys: int
    dim: int = 128
    values: int = 128


HEADS = {
    "deepseek-v3": Heads(128, 128, 192),
    "qwen3-235b": Heads(64, 4),
    "qwen3-30b": Heads(32, 4),
    "gpt-oss": Heads(64, 8, 64, 64),
    "mixtral-8x7b": Heads(32, 8),
}
# Dense bfloat16 FLOP/s with float32 sums (data sheets, without sparsity).
PEAK = {"a100": 312e12, "l40s": 362e12, "h100": 989e12, "h200": 989e12}
PEAK |= {"b200": 2250e12, "gb200": 2500e12, "gb300": 2500e12}
# The tensor-core instruction of each major compute capability, in machine code and in PTX.
TENSOR = {8: r"HMMA|mma\.sync", 9: r"HGMMA|wgmma\.mma_async", 10: r"UTCHMMA|UTCQMMA|tcgen05\.mma"}


class Floor(NamedTuple):
    """The least that a kernel has to do."""

    flops: float
    """2 for each multiply-add; 0 for a kernel that only moves bytes."""
    num_bytes: float
    """Each operand read once, each result written once."""


@dataclasses.dataclass(frozen=True)
class Program:
    """A function of one or more kernels, at one shape."""

    shape: str
    function: Callable[..., Any]
    arguments: tuple[jax.ShapeDtypeStruct, ...]
    floors: dict[str, Floor]
    """By the start of the kernel's name; a longer start wins."""


class Report(NamedTuple):
    """What was found of one kernel; -1 where the assembler said nothing."""

    kernel: str
    gpu: str
    shape: str
    registers: int = -1
    spilled: int = -1
    shared: int = -1
    tensor_columns: int = 0
    instructions: int = 0
    floor_us: float = 0.0
    wrong: str = ""


def _rows(*shape: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def gemm(
    name: str, M: int, K: int, N: int, G: int, function: Callable[..., Any] = grouped_gemm
) -> Program:
    """Returns the three products of function(x, w, sizes), a grouped GEMM."""

    def both_ways(x_MK, w_GKN, sizes_G, dy_MN):
        y_MN, pull = jax.vjp(lambda x, w: function(x, w, sizes_G), x_MK, w_GKN)
        return y_MN, pull(dy_MN)

    arguments = _rows(M, K), _rows(G, K, N), _rows(G, dtype=jnp.int32), _rows(M, N)
    floor = Floor(2 * M * K * N, 2 * (M * (K + N) + G * K * N))
    return Program(name, both_ways, arguments, {"grouped_gemm": floor})


def _projection(name: str, K: int, N: int) -> Program:
    return gemm(f"{name} {K}x{N}", ROWS, K, N, GROUPS)


def _mlp(name: str, dim: int, ffn: int) -> Program:
    """The two kernels of the grouped MLP that are not grouped GEMMs."""

    def both_ways(x_MD, w_in_GDF2, w_out_GFD, weights_M, sizes_G, dy_MD):
        run = lambda weights_M: grouped_mlp(x_MD, w_in_GDF2, w_out_GFD, weights_M, sizes_G)  # noqa: E731
        return jax.vjp(run, weights_M)[1](dy_MD)  # y and the other gradients are not asked for

    M, G = ROWS, GROUPS
    arguments = (
        _rows(M, dim),
        _rows(G, dim, 2 * ffn),
        _rows(G, ffn, dim),
        _rows(M, dtype=jnp.float32),
        _rows(G, dtype=jnp.int32),
        _rows(M, dim),
    )
    flops, matrix = 2 * M * dim * ffn, G * dim * ffn
    floors = {
        "grouped_mlp_forward": Floor(2 * flops, 2 * (M * (dim + 3 * ffn) + 2 * matrix)),
        "grouped_mlp_gradient": Floor(flops, 2 * (M * (dim + 5 * ffn) + matrix)),
    }
    return Program(f"{name} {dim}-{ffn}", both_ways, arguments, floors)


def _moves(name: str, dim: int, top_k: int = 8) -> Program:
    """Permutation there and back, weighted, and its gradients."""
    tokens = ROWS // top_k

    def both_ways(x_TD, weights_TK, tokens_S, slots_TK, dy_TD):
        def run(x_TD, weights_TK):
            x_SD = permute(x_TD, tokens_S, slots_TK)
            return unpermute(x_SD, slots_TK, tokens_S, weights_TK=weights_TK)

        y_TD, pull = jax.vjp(run, x_TD, weights_TK)
        return y_TD, pull(dy_TD)

    arguments = (
        _rows(tokens, dim),
        _rows(tokens, top_k, dtype=jnp.float32),
        _rows(ROWS, dtype=jnp.int32),
        _rows(tokens, top_k, dtype=jnp.int32),
        _rows(tokens, dim),
    )
    floors = {
        "permute": Floor(0, 2 * dim * (tokens + ROWS)),
        "unpermute": Floor(0, 2 * dim * (tokens + ROWS)),
        "unpermute_gradient": Floor(0, 2 * dim * (tokens + 2 * ROWS)),
    }
    return Program(f"{name} D={dim}", both_ways, arguments, floors)


def _routes(name: str, num_experts: int, options: RouterOptions) -> Program:
    """The router; with a bias where its scores are sigmoids. Backward is XLA's."""
    biased = options.score == "sigmoid"

    def forward(logits_TE, bias_E, valid_T):
        return route(logits_TE, options, bias_E=bias_E if biased else None, valid_T=valid_T)

    arguments = (
        _rows(ROWS, num_experts, dtype=jnp.float32),
        _rows(num_experts, dtype=jnp.float32),
        _rows(ROWS, dtype=jnp.bool_),
    )
    floor = Floor(0, 4 * ROWS * (num_experts + 2 * options.top_k))
    return Program(f"{name} E={num_experts}", forward, arguments, {"router": floor})


def _attends(name: str, heads: Heads) -> Program:
    """Attention within documents, and its gradients; the floors are those of one document a row."""
    (N, G, H, V), B, L = heads, ROWS // LENGTH, LENGTH

    def both_ways(q_BLNH, k_BLGH, v_BLGV, ids_BL, do_BLNV):
        run = lambda *qkv: attention(*qkv, segment_ids=(ids_BL, ids_BL))[0]  # noqa: E731
        out_BLNV, pull = jax.vjp(run, q_BLNH, k_BLGH, v_BLGV)
        return out_BLNV, pull(do_BLNV)

    arguments = (
        _rows(B, L, N, H),
        _rows(B, L, G, H),
        _rows(B, L, G, V),
        _rows(B, L, dtype=jnp.int32),
        _rows(B, L, N, V),
    )
    scores, tokens = B * N * L * (L + 1) // 2, 2 * B * L
    floors = {
        "attention_forward": Floor(2 * scores * (H + V), tokens * (N + G) * (H + V)),
        "attention_query_gradient": Floor(
            2 * scores * (2 * H + V), tokens * (N * (2 * H + V) + G * (H + V))
        ),
        "attention_key_value_gradient": Floor(4 * scores * (H + V), tokens * (N + 2 * G) * (H + V)),
    }
    return Program(f"{name} {N}/{G}x{H}", both_ways, arguments, floors)


def programs(shape: str = "") -> list[Program]:
    """Returns every program of one model's shape, or of all."""
    found = []
    for name, (dim, ffn) in SHAPES.items():
        if shape in ("", name):
            found += [_projection(name, dim, 2 * ffn), _projection(name, ffn, dim)]
            found += [_mlp(name, dim, ffn), _moves(name, dim), _attends(name, HEADS[name])]
            experts, options = ROUTERS[name]
            found += [_routes(name, E, options) for E in experts]
    return found


def examine(gpu: str, program: Program, triton: Path) -> list[Report]:
    """Compiles for one device that is not here, and reads what the assembler left of each kernel.

    The environment is `_environment`'s: this runs in a child process. `triton` is the folder where
    jax-triton leaves its kernels.
    """
    mesh = Mesh(np.asarray(deviceless.devices(gpu, 1, 1)), "x")
    alone = NamedSharding(mesh, PartitionSpec())
    arguments = [
        jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=alone) for a in program.arguments
    ]
    on_mesh = jax.shard_map(
        program.function, mesh=mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec()
    )
    with tempfile.TemporaryDirectory() as folder:
        os.environ["MOSAIC_GPU_DUMP_TO"] = folder
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            jax.jit(on_mesh).lower(*arguments).compile(deviceless.COMPILER_OPTIONS)
        assemble(triton, Path(folder), deviceless.GPUS[gpu])
        kernels = sorted(Path(folder).glob("*.ptxas"))
        return [_read(path, gpu, program) for path in kernels]


def assemble(triton: Path, folder: Path, gpu: deviceless.Gpu) -> None:
    """Moves Triton's kernels to `folder`, and leaves beside them what Mosaic leaves beside its own.

    XLA hands them to the assembler only when a program is loaded on a GPU, so here it is done by
    hand: name_0.ptxas, its report; .sass, where there is nvdisasm; .resources.txt.
    """
    major, minor = gpu.capability
    target = f"sm_{major}{minor}{'a' if major >= 9 else ''}"
    for i, made in enumerate(sorted(triton.glob("*/*.ptx"))):
        info = made.with_suffix(".compile_info").read_text()
        kernel = Path(shutil.move(made, folder / f"{made.stem}_{i}.ptx"))
        machine_code = kernel.with_suffix(".cubin")
        command = ["ptxas", "-v", f"-arch={target}", str(kernel), "-o", str(machine_code)]
        said = subprocess.run(command, capture_output=True, text=True).stderr
        kernel.with_suffix(".ptxas").write_text(said)
        shared = info.rsplit("shared_mem_bytes:")[-1].strip()
        kernel.with_suffix(".resources.txt").write_text(f"smem_scratch_bytes={shared}")
        if shutil.which("nvdisasm") and machine_code.exists():
            read = ["nvdisasm", "-c", str(machine_code)]
            sass = subprocess.run(read, capture_output=True, text=True).stdout
            kernel.with_suffix(".sass").write_text(sass)


def _read(path: Path, gpu: str, program: Program) -> Report:
    """What the files beside one assembler's report say."""
    said = path.read_text(errors="replace")
    beside = {p.name: p.read_text(errors="replace") for p in path.parent.glob(f"{path.stem}.*")}
    code = [text for name, text in beside.items() if "sass" in name or name.endswith(".ptx")]
    kernel = (re.findall(r"entry function '(\w+?)(?:_mosaic_gpu_kernel)?'", said) or ["?"])[0]
    resources = "\n".join(  # numbered apart from the assembler's files
        p.read_text() for p in path.parent.glob(f"{kernel}_[0-9]*.resources.txt")
    )

    def numbers(text: str, pattern: str) -> list[int]:
        return [int(number) for number in re.findall(pattern, text)]

    target = deviceless.GPUS[gpu]
    tensor = TENSOR[target.capability[0]]
    starts = [start for start in program.floors if kernel.startswith(start)]
    floor = program.floors[max(starts, key=len)] if starts else Floor(0, 0)
    report = Report(
        kernel, gpu, program.shape,
        registers=max(numbers(said, r"Used (\d+) registers"), default=-1),
        spilled=sum(numbers(said, r"(\d+) bytes (?:spill|lmem)")),
        shared=max(numbers(resources, r"smem_scratch_bytes=(\d+)"), default=-1),
        tensor_columns=max(numbers(resources, r"tmem_scratch_cols=(\d+)"), default=0),
        instructions=max((len(re.findall(tensor, text)) for text in code), default=0),
        floor_us=1e6 * max(
            floor.flops / PEAK[gpu], floor.num_bytes / target.memory_bytes_per_s
        ),
    )  # fmt: skip
    wrong = []
    if report.registers < 0:
        wrong.append("no report of the assembler")
    if report.spilled:
        wrong.append("spills")
    if floor.flops and not report.instructions:
        wrong.append("no tensor-core instruction")
    if report.shared > target.shared_bytes:
        wrong.append("more shared memory than a block can have")
    if "serialized" in said:  # the assembler's C7509 and its kin
        wrong.append("tensor-core instructions wait for each other")
    if not starts:
        wrong.append("no floor is known")
    return report._replace(wrong=", ".join(wrong))


def inspect(gpus: list[str], shape: str = "") -> list[Report]:
    """Returns a report of each kernel of each program, for each GPU."""
    command = ["pallas_kernels.inspect", "--shape", shape, "--child"]
    return [report for gpu in gpus for report in collect(gpu, [*command, gpu])]


def collect(gpu: str, command: list[str]) -> list[Report]:
    """Returns what `report_all` prints in a child process that runs this module.

    A compiler that aborts takes the child along, not this process.
    """
    command = [sys.executable, "-m", *command]
    done = subprocess.run(command, capture_output=True, text=True, env=_environment())
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    reports = [Report(**json.loads(line)) for line in lines]
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        reports.append(Report("?", gpu, "?", wrong=f"compiler failed: {last[:200]}"))
    return reports


def report_all(gpu: str, programs: list[Program]) -> None:
    """Prints a line for each kernel of each program, in the child process."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["JAX_TRITON_DUMP_DIR"] = folder  # read when jax-triton is imported
        for program in programs:
            for report in examine(gpu, program, Path(folder)):
                print(json.dumps(report._asdict()), flush=True)


def _environment() -> dict[str, str]:
    """What makes the compiler run with no GPU, and leave the assembler's report behind."""
    environ = dict(os.environ) | {
        "JAX_PLATFORMS": "",
        "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
        "MOSAIC_GPU_DUMP_PTXAS": "1",
        "MOSAIC_GPU_DUMP_SASS": "1",
    }
    if (spec := find_spec("nvidia")) and spec.submodule_search_locations:
        tools = [str(Path(place) / "cu13/bin") for place in spec.submodule_search_locations]
        environ["PATH"] = os.pathsep.join([*tools, environ["PATH"]])
    return environ


def table(reports: list[Report]) -> str:
    """Returns the reports, one a line."""
    head = (f"{'kernel':30}{'gpu':7}{'shape':26}{'regs':>5}{'spill':>6}{'smem':>8}{'tmem':>5}"
            f"{'mma':>5}{'floor':>10}")  # fmt: skip
    rows = [
        f"{r.kernel:30}{r.gpu:7}{r.shape:26}{r.registers:5}{r.spilled:6}{r.shared:8}"
        f"{r.tensor_columns:5}{r.instructions:5}{r.floor_us:7.0f} us  {r.wrong}"
        for r in reports
    ]
    return "\n".join([head, *rows])


def main(arguments: list[str]) -> int:
    """Returns the exit status: 0 where every kernel is as it should be."""
    parser = argparse.ArgumentParser(prog="python -m pallas_kernels.inspect")
    parser.add_argument("--gpu", default="h100,h200,b200,gb300", help="GPUs, by comma")
    parser.add_argument("--shape", default="", help=f"one of {', '.join(SHAPES)}; default: all")
    parser.add_argument("--child", default="", help=argparse.SUPPRESS)
    asked = parser.parse_args(arguments)
    if asked.child:
        report_all(asked.child, programs(asked.shape))
        return 0
    reports = inspect(asked.gpu.split(","), asked.shape)
    print(table(reports))
    return int(not reports or any(report.wrong for report in reports))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
