"""Compiling in a process of its own: what is refused before, what a failure says; and with the real
GPU compiler, a shrunken DeepSeek-V3 on 16 H100s, its totals and figures against closed forms."""

import importlib.metadata
import math
import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from configs.deepseek_v3 import v3
from configs.demo import demo
from moejax.config import Config
from moejax.core.mesh import ParallelConfig
from moejax.model import flops
from moejax.plan import compile
from moejax.plan.hardware import CLUSTERS
from moejax.plan.operations import GEMM
from moejax.plan.reader import memory, program

H100 = CLUSTERS["h100"]


def shrunken() -> Config:
    """DeepSeek-V3 with 3 layers, one of them dense, of an eighth of the width and the experts."""
    base = v3()
    mla = replace(base.model.attention.mla, q_rank=192, kv_rank=64)
    router = replace(base.model.moe.router, num_groups=4, topk_groups=2)
    moe = replace(
        base.model.moe, num_experts=32, ffn_dim=256, shared_ffn_dim=256, top_k=4, router=router
    )
    model = replace(
        base.model, dim=1024, num_layers=3, first_k_dense=1, ffn_dim=2048, vocab_size=4096,
        mtp_depth=0, attention=replace(base.model.attention, num_heads=16, mla=mla), moe=moe,
    )  # fmt: skip
    return replace(
        base, model=model, parallel=ParallelConfig(dp=16, ep=8, zero=3),
        train=replace(base.train, batch_size=64, microbatches=2, sequence_length=1024),
    )  # fmt: skip


def test_a_fold_that_does_not_fit_is_refused_before(tmp_path):
    config = replace(demo(), parallel=ParallelConfig(dp=5, tp=3))
    with pytest.raises(ValueError, match="8"):
        compile.compile_step(config, H100, 8, cache=tmp_path)
    odd = replace(shrunken(), train=replace(shrunken().train, batch_size=50))
    with pytest.raises(ValueError, match="does not divide"):
        compile.compile_step(odd, H100, 16, cache=tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_missing_compiler_is_named_with_the_command_that_installs_it(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: ())
    with pytest.raises(compile.CompileError, match=r"\.ci/venv \.venv-gpu gpu"):
        compile.compile_step(shrunken(), H100, 16, cache=tmp_path)


def test_the_cache_knows_what_a_program_depends_on():
    config = shrunken()
    key = compile.key(config, H100, 16, False)
    same = replace(config, train=replace(config.train, eval_every=7), runs_dir="elsewhere")
    assert compile.key(same, H100, 16, False) == key
    others = (
        (replace(config, model=replace(config.model, num_layers=4)), H100, 16, False),
        (replace(config, train=replace(config.train, microbatches=4)), H100, 16, False),
        (config, CLUSTERS["h200"], 16, False),
        (config, H100, 32, False),
        (config, H100, 16, True),
    )
    assert len({key, *(compile.key(*other) for other in others)}) == 6


def child(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def test_a_child_that_fails_says_on_what(tmp_path):
    """The last fatal line, the instruction, and the kernel that was written last."""
    code = """
import pathlib, os, sys
if "MOSAIC_GPU_DUMP_TO" in os.environ:  # the second time
    folder = pathlib.Path(os.environ["MOSAIC_GPU_DUMP_TO"])
    for name in ("router_0", "grouped_gemm_forward_0"):
        (folder / f"{name}.resources.txt").write_text("")
print("%all-reduce.3 = f32[] all-reduce(%x), replica_groups={}", file=sys.stderr)
print("E1130 17:56:06.668 31234 error_handler.cc:38] LLVM ERROR: Cannot select", file=sys.stderr)
os.abort()
"""
    with pytest.raises(compile.CompileError) as caught:
        compile.supervise(child(code), b"", tmp_path, lambda line: None)
    said = str(caught.value)
    for part in (
        "LLVM ERROR: Cannot select", "signal 6", "instruction: %all-reduce.3 = f32[] all-reduce",
        "kernel: grouped_gemm_forward",
    ):  # fmt: skip
        assert part in said, said


def test_a_child_hands_on_values_that_do_not_fit_and_its_progress(tmp_path, monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    lines: list[str] = []
    show = "import os; print(os.environ.get('JAX_PLATFORMS')); print('ValueError: E=6 is odd')"
    with pytest.raises(ValueError, match="^E=6 is odd$"):
        compile.supervise(child(show), b"", tmp_path, lines.append)
    assert lines == ["None"]
    assert os.environ["JAX_PLATFORMS"] == "cpu"


@pytest.fixture(scope="module")
def compiled(tmp_path_factory) -> compile.Compiled:
    cache = tmp_path_factory.mktemp("plan")
    lines: list[str] = []
    first = compile.compile_step(shrunken(), H100, 16, cache=cache, progress=lines.append)
    assert lines[:3] == ["trace", "lower", "compile"] and "GB of memory" in lines[-1]
    again = compile.compile_step(shrunken(), H100, 16, cache=cache)
    assert again.cached and not first.cached and again.totals == first.totals
    return first


def read(compiled: compile.Compiled) -> program.Program:
    return program.read_step(compiled.text, shrunken(), H100, 16)


@pytest.mark.deviceless
def test_a_shrunken_recipe_compiles_in_a_minute(compiled):
    print(compiled.seconds, compiled.host_bytes)
    assert 0 < compiled.host_bytes < 3e9
    assert set(compiled.seconds) == {"trace", "lower", "compile"}


@pytest.mark.deviceless
def test_kinds_of_memory_add_up_to_the_compilers_totals(compiled):
    found = memory.account(compiled.text, compiled.buffers, compiled.live)
    assert found.total == compiled.device_bytes
    arguments = sum(found.leaves.values())
    assert arguments == compiled.totals["arguments"]
    weights = found.kinds["weights"]
    assert found.kinds["optimizer"] == 2 * weights + 8
    # Gradients are summed in float32 where the weights rest.
    assert found.kinds["gradient sums"] == pytest.approx(weights, rel=0.02)
    # The input of both MoE layers, two rows of 1,024 tokens each, is kept in bfloat16; a dense
    # layer that is alone is no loop.
    block = sum(size for name, size in found.saved.items() if "bf16" in name)
    assert block == 2 * shrunken().model.dim * 2 * 1024 * 2
    assert found.kinds.get("other", 0) < 0.02 * found.total


@pytest.mark.deviceless
def test_collectives_send_what_the_fold_says(compiled):
    """Tokens to 4 of 32 experts over 8 GPUs, there and back, forward and backward, and there once
    more in the recomputed forward; weights are gathered over 16 GPUs, experts' over 2."""
    config, found = shrunken(), read(compiled)
    rows = program.collectives(found)
    layers, micro, tokens, K, D = 2, 2, 2 * 1024, config.model.moe.top_k, config.model.dim
    sent = layers * micro * tokens * K * D * 2 * 7 / 8

    def wire(role: str, phase: str) -> float:
        return sum(row.wire for row in rows if (row.role, row.phase) == (role, phase))

    for role, phase in (("ep dispatch", "forward"), ("ep combine", "forward")):
        assert wire(role, phase) == pytest.approx(sent, rel=0.01), (role, phase)
    assert wire("ep dispatch", "backward") == pytest.approx(sent, rel=0.01)
    assert wire("ep combine", "backward") == pytest.approx(sent, rel=0.01)
    # w_in [D, 2, F] and w_out [F, D] of 4 experts on a GPU, and everything else of 16 GPUs.
    experts = layers * micro * 4 * 3 * D * 256 * 2 / 2
    gathered = [r.wire for r in rows if r.role == "zero gather" and r.group.size == 2]
    # Forward and backward, a layer ahead: the forward's last turn gathers its own layer again.
    assert sum(gathered) == pytest.approx((2 + 1 / layers) * experts, rel=0.01)
    assert {row.group.local for row in rows if row.group.size == 16} == {8}


@pytest.mark.deviceless
def test_products_are_those_of_the_model(compiled):
    config, found = shrunken(), read(compiled)
    model, tokens = config.model, 2 * 2 * 1024
    sums: dict[tuple[str, str], float] = {}
    for work, times, _ in program.flat(found.events):
        if work.kind == GEMM:
            key = work.name, work.phase
            sums[key] = sums.get(key, 0) + times * work.flops
    mlp = 2 * tokens * 3 * model.dim * (model.ffn_dim + 2 * model.moe.shared_ffn_dim)
    # Of three products the first two are made again; XLA joins some of them with the forward's.
    assert sums["mlp", "forward"] + sums["mlp", "recompute"] == mlp * 5 / 3
    assert sums["mlp", "backward"] == 2 * mlp
    logits = 2 * tokens * model.dim * model.vocab_size
    assert sums["unembed", "forward"] == logits
    accounted = program.flops(found, config, 16)
    assert accounted.model == pytest.approx(
        tokens * flops.linear_flops_per_token(model)
        + flops.attention_flops(model, [1024]) * tokens / 1024
    )
    other = accounted.waste["rows without a token, and other"]
    # The dense layer stands alone, in no loop: what it makes again XLA joins with the forward's
    # products, where the account cannot tell it from others.
    joined = sums["mlp", "forward"] - mlp + 2 * tokens * model.dim * 16 * 128
    assert abs(other - joined) < 0.01 * accounted.model
    assert min(accounted.waste.values()) > -0.01 * accounted.model
    assert found.kernels["grouped_mlp_forward"] == 2 * 2 * 2  # forward, and once more
    assert math.isfinite(accounted.executed)


@pytest.mark.deviceless
def test_a_kernel_for_another_gpu_is_named(tmp_path):
    """Hopper's tensor-core instructions do not exist on Blackwell."""
    root = Path(__file__).parents[2]
    code = f"""
import sys
sys.path.insert(0, {str(root)!r})
import jax, jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from pallas_kernels import deviceless
from pallas_kernels.grouped_gemm import hopper
mesh = Mesh(deviceless.devices("gb200", 1, 1), ("x",))
def array(*shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec()))
with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
    lowered = jax.jit(hopper.grouped_gemm).lower(
        array(2048, 512), array(8, 512, 1024), array(8, dtype=jnp.int32)
    )
    lowered.compile(deviceless.COMPILER_OPTIONS)
"""
    with pytest.raises(compile.CompileError) as caught:
        compile.supervise(child(code), b"", tmp_path, lambda line: None)
    said = str(caught.value)
    assert "wgmma" in said and "kernel: grouped_gemm_forward" in said, said


@pytest.mark.deviceless
def test_a_dim_that_does_not_divide_is_a_mistake_of_the_users(tmp_path):
    config = replace(shrunken(), model=replace(shrunken().model, dim=1000))
    with pytest.raises(ValueError, match="does not divide"):
        compile.compile_step(config, H100, 16, cache=tmp_path)
    assert not list(tmp_path.iterdir())
