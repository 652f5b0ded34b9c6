"""A small program, written in the compiler's words, read as events: each figure by hand."""

import doctest
import math
from dataclasses import replace
from pathlib import Path

import pytest

from configs import qwen3_moe
from moejax.plan.hardware import CLUSTERS
from moejax.plan.operations import (
    ATTENTION,
    COLLECTIVE,
    GEMM,
    GROUPED,
    HOST,
    MEMORY,
    Done,
    Group,
    Loop,
    Run,
    Start,
)
from moejax.plan.reader import hlo, place, program, work
from tests.plan import folds

TEXT = (Path(__file__).parent / "data" / "step.hlo.txt").read_text()
HALF, FULL = 2, 4  # bytes of bfloat16 and float32


@pytest.fixture(scope="module")
def read() -> program.Program:
    return program.read(TEXT, replace(CLUSTERS["h100"], domain=8), rows=2048)


@pytest.fixture(scope="module")
def layer(read) -> tuple:
    (loop, *_) = [event for event in read.events if isinstance(event, Loop)]
    assert (loop.name, loop.times) == ("layers", 4)
    return loop.body


def works(events, kind: str) -> list:
    return [one for one, _, _ in program.flat(events) if one.kind == kind]


@pytest.mark.parametrize("module", [work, place, program])
def test_examples(module):
    assert doctest.testmod(module).failed == 0


def test_a_gather_runs_beside_what_stands_in_its_span(layer):
    start, inside, done, product = layer[:4]
    assert isinstance(start, Start) and done == Done(start.key)
    assert isinstance(inside, Run) and isinstance(product, Run)
    gather = start.work
    assert (gather.collective, gather.role, gather.phase) == (
        "all_gather", "zero gather", "forward",
    )  # fmt: skip
    assert gather.group == Group(16, 8)
    assert gather.wire == 512 * 256 * HALF * 15 / 16
    assert gather.dtype == "bfloat16"


def test_slices_and_updates_count_as_what_they_touch(layer):
    """The stack of 4 rows is 1.6 MB; one row is read, or written, and 4 bytes say which."""
    row = 1000 * 100 * FULL
    cut, put = works(layer, MEMORY)[0], works(layer, MEMORY)[-1]
    assert cut.bytes == 2 * row + 4
    assert put.bytes == 2 * row + 4
    assert (cut.name, cut.phase) == ("block", "forward")


def test_products(layer):
    first, again, scores = works(layer, GEMM)
    assert first.flops == again.flops == 2 * 1024 * 512 * 256
    assert first.mnk == (1024, 256, 512) and first.groups == 1
    assert first.bytes == (1024 * 512 + 512 * 256 + 1024 * 256) * HALF
    assert (first.name, first.phase) == ("attend", "forward")
    assert again.phase == "recompute"  # the compiler put it there a second time
    assert scores.flops == 2 * 8 * 128 * 512 * 64 and scores.groups == 8
    assert scores.name == "attention"
    assert scores.bytes == 8 * (128 + 512) * 64 * HALF + 8 * 128 * 512 * FULL + 4


def test_a_loop_over_keys_runs_as_far_as_the_causal_mask_lets_it(layer):
    """32 blocks of 128 queries see 1 to 8 blocks of 512 keys: four each."""
    (queries,) = [event for event in layer if isinstance(event, Loop)]
    (keys,) = [event for event in queries.body if isinstance(event, Loop)]
    assert queries.times == 32 and keys.times == sum(4 * n for n in range(1, 9)) / 32


def test_experts_run_the_rows_that_an_even_load_fills(layer):
    """2,048 of the 3,072 rows that the buffer has, over 4 experts."""
    (product,) = works(layer, GROUPED)
    assert product.flops == 2 * 2048 * 512 * 1536
    assert product.mnk == (2048 / 4, 1536, 512) and product.groups == 4
    rows = 2048 * (512 + 1536) * HALF
    assert product.bytes == pytest.approx(rows + 4 * 512 * 1536 * HALF + 4 * 4)
    full = program.read(TEXT, CLUSTERS["h100"])
    (product,) = works(full.events, GROUPED)
    assert product.flops == 2 * 3072 * 512 * 1536


def test_only_rows_of_tokens_travel(layer):
    (sent,) = [w for w in works(layer, COLLECTIVE) if w.collective == "ragged_all_to_all"]
    assert sent.wire == 2048 * 512 * HALF * 3 / 4
    assert (sent.role, sent.name, sent.group) == ("ep dispatch", "dispatch", Group(4, 4))


def test_groups_in_all_their_spellings(layer, read):
    """[4,4]<=[4,4]T(1,0): every fourth GPU, so two of a domain of eight."""
    (reduce,) = [w for w in works(layer, COLLECTIVE) if w.collective == "reduce_scatter"]
    assert reduce.group == Group(4, 2)
    assert reduce.wire == 1000 * 100 * FULL * 3 / 4
    assert (reduce.role, reduce.phase) == ("zero reduce", "backward")
    (total,) = [w for w in works(read.events, COLLECTIVE) if w.collective == "all_reduce"]
    assert total.group == Group(16, 8) and total.wire == 2 * 100 * FULL * 15 / 16
    assert (total.role, total.phase) == ("metrics", "update")


def test_a_copy_to_the_host_runs_beside(layer):
    (start,) = [e for e in layer if isinstance(e, Start) and e.work.kind == HOST]
    assert start.work.bytes == 1000 * 100 * FULL
    assert Done(start.key) in layer


def test_tables(read):
    assert read.kernels == {"permute": 4, "grouped_gemm_forward": 4}
    rows = {row.collective: row for row in program.collectives(read)}
    assert [row.wire for row in rows.values()] == sorted(r.wire for r in rows.values())[::-1]
    gather = rows["all_gather"]
    assert gather.beside and gather.count == 4 and gather.inside == ("memory block",)
    assert not rows["ragged_all_to_all"].beside
    product, row = 2 * 1024 * 512 * 256, 2 * 128 * 512 * 64 * 8
    assert read.again == {"attend": 4 * product}
    executed = sum(work.flops * times for work, times, _ in program.flat(read.events))
    assert executed == 4 * (2 * product + 32 * 4.5 * row + 2 * 2048 * 512 * 1536)


def test_flops_add_up(read):
    found = program.flops(read, folds.qwen3_30b_16(), 16)
    assert found.executed == pytest.approx(found.model + sum(found.waste.values()))
    assert found.waste["recompute"] == sum(read.again.values())
    # 23.006 GFLOPs a token (Megatron-Bridge: 8,826 tokens/s are 203 TFLOP/s), 262,144 tokens
    assert found.model == pytest.approx(23.006e9 * 1024 * 4096 / 16, rel=1e-3)


def test_balanced_rows():
    """One sequence of 4,096 tokens on each GPU, 8 experts a token."""
    assert program.balanced_rows(folds.qwen3_30b_16(), 16) == 4096 * 8
    staged = qwen3_moe.qwen3_235b_a22b_pp8_h100x256()  # on two, of the 32 of a stage
    assert program.balanced_rows(staged, 256) == 4096 * 8 / 2


def test_a_window_hides_old_keys():
    """Blocks of 128 queries and 512 keys, a window of 128: a block sees its own keys, and one of
    four, but for the first, those of the block before as well."""
    assert program.seen_blocks(4096, 128, 512, 128) == (32 + 7) / 32
    exact = sum(math.ceil((i + 1) / 4) for i in range(32)) / 32
    assert program.seen_blocks(4096, 128, 512, 0) == exact


def test_cublas_and_cudnn():
    """Products of cuBLAS and attention of cuDNN: [batch, length, heads, width]."""
    text = """HloModule m

ENTRY %main (a: bf16[64,32]) -> bf16[64,16] {
  %a = bf16[64,32]{1,0} parameter(0)
  %b = bf16[32,16]{1,0} constant({...})
  %q = bf16[2,128,4,64]{3,2,1,0} constant({...})
  %gemm = (bf16[64,16]{1,0}, s8[1024]{0}) custom-call(%a, %b), custom_call_target="__cublas$gemm", metadata={op_name="jit(f)/jvp(loss)/mlp/dot_general"}, backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["0"],"lhs_batch_dimensions":[],"rhs_batch_dimensions":[]}}}
  ROOT %fmha = (bf16[2,4,128,64]{3,1,2,0}, u8[16]{0}) custom-call(%q, %q, %q), custom_call_target="__cudnn$fmhaSoftmax", metadata={op_name="jit(f)/jvp(loss)/attend/dot_general"}
}
"""  # noqa: E501
    gemm, attention = (w for w, _, _ in program.flat(program.read(text, CLUSTERS["h100"]).events))
    assert (gemm.flops, gemm.mnk, gemm.name) == (2 * 64 * 32 * 16, (64, 16, 32), "mlp")
    assert attention.flops == 2 * 2 * 2 * 4 * 128 * 128 * 64 / 2


def test_what_is_no_program_is_refused():
    with pytest.raises(ValueError, match="no ENTRY"):
        hlo.parse("no program")


def test_attention_of_ours_is_a_kernel():
    """Scores and the product with values forward; 3 products for dq, 4 for dk and dv; the causal
    half, of which the layers see 3/4 in the mean."""
    call = (
        '  %c = (bf16[2,64,4,192]{3,2,1,0}) custom-call(%b, %q, %k, %v), custom_call_target="mosaic'
        '_gpu_v2", metadata={op_name="jit(step)/jvp(loss)/attend/attention/KERNEL/mosaic"}'
    )
    arrays = ["s32[4,2,1] %b", "bf16[2,64,4,192] %q", "bf16[2,64,2,192] %k", "bf16[2,64,2,128] %v"]
    inputs = [
        f"  {name} = {shape} parameter({i})"
        for i, (shape, name) in enumerate(a.split() for a in arrays)
    ]
    pairs = 0.75 * 2 * 4 * 64 * 64 / 2
    for kernel, width in (
        ("attention_forward", 192 + 128),
        ("attention_query_gradient", 2 * 192 + 128),
        ("attention_key_value_gradient", 2 * (192 + 128)),
    ):
        lines = [*inputs, call.replace("KERNEL", kernel).replace("  %c", "  ROOT %c")]
        text = "\n".join(["HloModule m, is_scheduled=true", "", "ENTRY %main {", *lines, "}"])
        found = program.read(text, CLUSTERS["h100"], seen=0.75)
        (event,) = found.events
        assert event.work.kind == ATTENTION and event.work.mnk == (64, 64, 128)
        assert event.work.flops == 2 * pairs * width
        assert found.kernels == {kernel: 1}


def test_a_branch_counts_as_often_as_its_name_says():
    """A pipeline's head runs in the ticks whose number its scope has; of a layer's branches that
    with the most work, not the most instructions, is taken every time."""
    text = """HloModule m

%head (a: bf16[64,32]) -> bf16[64,16] {
  %a = bf16[64,32]{1,0} parameter(0)
  %w = bf16[32,16]{1,0} constant({...})
  ROOT %dot = bf16[64,16]{1,0} dot(%a, %w), lhs_contracting_dims={1}, rhs_contracting_dims={0}, metadata={op_name="jit(f)/while/body/SCOPE/cond/branch_1_fun/forward/loss/dot_general"}
}

%none (b: bf16[64,32]) -> bf16[64,16] {
  %b = bf16[64,32]{1,0} parameter(0)
  %one = bf16[1]{0} constant({...})
  %two = bf16[1]{0} copy(%one)
  %three = bf16[1]{0} copy(%two)
  ROOT %c = bf16[64,16]{1,0} constant({...})
}

ENTRY %main (x: bf16[64,32], p: pred[]) -> bf16[64,16] {
  %x = bf16[64,32]{1,0} parameter(0)
  %p = pred[] parameter(1)
  ROOT %conditional = bf16[64,16]{1,0} conditional(%p, %x, %x), true_computation=%head, false_computation=%none, metadata={op_name="jit(f)/while/body/SCOPE/cond"}
}
"""  # noqa: E501
    for scope, times, notes in (("taken_3_of_12", 0.25, 0), ("eval_jaxpr", 1.0, 1)):
        found = program.read(text.replace("SCOPE", scope), CLUSTERS["h100"])
        ((product, often, _),) = program.flat(found.events)
        assert (product.flops, product.phase, often) == (2 * 64 * 32 * 16, "forward", times)
        assert len(found.notes) == notes
