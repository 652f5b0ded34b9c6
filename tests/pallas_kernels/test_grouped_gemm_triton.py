"""The Triton grouped GEMM: who gets it and why not; run by Triton's interpreter; assembled for GPUs
that are not there. The last two in child processes, where the extra `triton` is installed."""

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import jax.numpy as jnp
import pytest

from pallas_kernels import deviceless, grouped_gemm, inspect
from pallas_kernels.pick import Target, pick

package = sys.modules["pallas_kernels.grouped_gemm"]
A100 = Target("gpu", "NVIDIA A100-SXM4-80GB", 108)
needs_triton = pytest.mark.skipif(not find_spec("jax_triton"), reason="needs the extra `triton`")


def operands(dtype=jnp.bfloat16, K=16):
    return jnp.ones((8, K), dtype), jnp.ones((2, K, 8), dtype), jnp.array([4, 4], jnp.int32)


@pytest.fixture
def program_for(monkeypatch):
    """Makes programs ones for a GPU, with Triton installed, or not."""

    def set_up(device, installed=True):
        monkeypatch.setattr(package, "target", lambda: device)
        monkeypatch.setattr(deviceless, "target", lambda: device)
        monkeypatch.setattr(package, "find_spec", lambda name: installed or None)

    return set_up


def names_that_serve(**wanted):
    return [c.name for c in package._choices(*operands(**wanted)[:2]) if c.refusal is None]


def test_on_a_cpu_it_says_that_it_runs_on_gpus():
    with pytest.raises(ValueError, match="'triton' cannot serve.*NVIDIA GPUs, and this.* for cpu"):
        grouped_gemm(*operands(), impl="triton")


def test_where_it_is_not_installed_it_says_so(program_for):
    program_for(A100, installed=False)
    with pytest.raises(ValueError, match="needs jax_triton and triton, not installed.*`triton`"):
        grouped_gemm(*operands(), impl="triton")
    assert names_that_serve()[0] == "xla"


def test_ampere_and_ada_get_it(program_for):
    for device in (A100, Target("gpu", "NVIDIA L40S", 142)):
        program_for(device)
        assert names_that_serve() == ["triton", "xla", "reference"]
        assert names_that_serve(dtype=jnp.float32, K=7)[0] == "triton"
        assert names_that_serve(dtype=jnp.float8_e4m3fn)[0] == "xla"
        assert names_that_serve(K=0)[0] == "xla"


def test_hopper_gets_it_for_what_its_own_kernels_refuse(program_for):
    program_for(Target("gpu", "NVIDIA H100 80GB HBM3", 132))
    assert names_that_serve()[:2] in (["hopper", "triton"], ["triton", "xla"])  # JAX 0.12, or older
    assert names_that_serve(K=12)[0] == "triton"


def test_on_an_unknown_gpu_it_has_to_be_named(program_for):
    program_for(Target("gpu", "NVIDIA GeForce RTX 4090", 128))
    assert names_that_serve() == ["xla", "triton", "reference"]
    assert pick("grouped_gemm", "triton", package._choices(*operands()[:2])).__name__ == "run"
    program_for(Target("gpu", "AMD Instinct MI300X", 304))
    assert "triton" not in names_that_serve()


def child(module, *arguments, **environment):
    """Returns what the child process prints."""
    environ = {k: v for k, v in os.environ.items() if k != "JAX_PLATFORMS"} | environment
    command = [sys.executable, "-m", f"tests.deviceless.{module}", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, env=environ)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.deviceless
@needs_triton
def test_it_is_right_in_the_interpreter():
    said = child("interpret_grouped_gemm_triton", TRITON_INTERPRET="1", JAX_PLATFORMS="cpu")
    assert said.count("right:") == 9 and "a NaN stays in its group" in said


@pytest.mark.deviceless
@needs_triton
@pytest.mark.parametrize(
    ("gpu", "shape"),
    [
        ("a100", (8192, 2048, 1536, 16)),
        ("l40s", (8192, 2880, 5760, 8)),
        ("h100", (8192, 2048, 1536, 16)),
        ("a100", (100, 33, 35, 3)),
        ("l40s", (8192, 1024, 1024, 4, "float32")),
    ],
)
def test_it_assembles_without_spills(gpu, shape, tmp_path, monkeypatch):
    """All kernels, inside a shard_map whose operands vary, with the tensor cores' instruction and
    asynchronous copies of 16 bytes where rows are whole ones."""
    made, folder = tmp_path / "triton", tmp_path / "assembled"
    made.mkdir()
    folder.mkdir()
    dump = {"JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1", "JAX_TRITON_DUMP_DIR": str(made)}
    program = child("compile_grouped_gemm_triton", gpu, *shape, **dump)
    expected = ["forward", "input_gradient", "weight_gradient", "weight_gradient"]
    if "float32" in shape:  # both weight gradients are one
        expected.pop()
    assert program.count('custom_call_target="triton_kernel_call_ffi"') == len(expected)
    monkeypatch.setenv("PATH", inspect._environment()["PATH"])
    inspect.assemble(made, folder, deviceless.GPUS[gpu])
    kernels = sorted(folder.glob("*.ptx"))
    names = [re.sub(r"_\d+$", "", kernel.stem) for kernel in kernels]
    assert sorted(names) == [f"grouped_gemm_{name}" for name in expected]
    for kernel in kernels:
        check(kernel, deviceless.GPUS[gpu], whole=shape[1] % 8 == 0, exact="float32" in shape)


@pytest.mark.deviceless
@needs_triton
def test_the_demo_runs_it_on_an_a100():
    """Its whole train step: two products forward, four backward, and nothing that asks the device
    how often to loop, as the portable implementation does."""
    program = child("compile_step", "a100", JAX_SKIP_CUDA_CONSTRAINTS_CHECK="1")
    assert program.count('custom_call_target="triton_kernel_call_ffi"') == 6
    loops = [line for line in program.splitlines() if re.search(r" while\(", line)]
    assert loops and all("known_trip_count" in line for line in loops)
    assert "ragged-dot" not in program and "mosaic_gpu" not in program


def check(kernel: Path, gpu: deviceless.Gpu, whole: bool, exact: bool) -> None:
    """One kernel's PTX, and what the assembler said of it."""
    ptx, said = kernel.read_text(), kernel.with_suffix(".ptxas").read_text()
    assert ".local" not in ptx and "0 bytes spill stores, 0 bytes spill loads" in said, said
    product = "wgmma.mma_async" if gpu.capability == (9, 0) else "mma.sync.aligned.m16n8k16"
    assert (product in ptx) == (not exact)
    assert ("cp.async.cg.shared.global" in ptx) == whole
    shared = int(kernel.with_suffix(".resources.txt").read_text().split("=")[1])
    assert 0 < shared <= gpu.shared_bytes
