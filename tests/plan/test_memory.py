"""Memory by kind: the arguments of DeepSeek-V3 on 256 H100s as the compiler laid them out, and a
small block of temporary memory by hand."""

import dataclasses
import doctest
import math
from pathlib import Path

import jax
import pytest
from flax import nnx

from configs.deepseek_v3 import v3
from moejax.core import params, sharding
from moejax.model.transformer import Transformer
from moejax.plan.reader import buffers, memory

DATA = Path(__file__).parent / "data"
PROGRAM = (DATA / "deepseek_v3_h100x256.hlo.txt").read_text()
ASSIGNMENT = (DATA / "deepseek_v3_h100x256.buffers.txt").read_text()
STEP = (DATA / "step.hlo.txt").read_text()
TEMP = "allocation 152: size 64, page 0, preallocated-temp:\n"
LIVE = "HloLiveRange (max 1):\n  InstructionSequence:\n    0:none\n  BufferLiveRange:\n"

# What XLA would say of the small step: the stack that a layer's row goes into, the row twice (a
# slice, and the carry), something else in the same place later, and a gathered weight.
SMALL = """BufferAssignment:
allocation 0: size 1048576, page 0, parameter 0, shape |bf16[1024,512]| at ShapeIndex {}:
 value: <1 x @0> (size=1048576,offset=0): bf16[1024,512]{1,0}
allocation 1: size 400000, page 0, parameter 1, shape |f32[1000,100]| at ShapeIndex {}:
 value: <2 w @0> (size=400000,offset=0): f32[1000,100]{1,0}
allocation 2: size 4, page 0, maybe-live-out:
 value: <3 loss @0> (size=4,offset=0): f32[]
allocation 3: size 3000000, page 0, preallocated-temp:
 value: <4 stack @0> (size=1600000,offset=0): f32[4,1000,100]{2,1,0}
 value: <5 layers{2} @0> (size=1600000,offset=0): f32[4,1000,100]{2,1,0}
 value: <6 slice.3 @0> (size=400000,offset=1600000): f32[1000,100]{1,0}
 value: <7 product @0> (size=524288,offset=2000000): bf16[1024,256]{1,0}
 value: <8 product.remat @0> (size=524288,offset=1600000): bf16[1024,256]{1,0}
 value: <9 gather-done @0> (size=262144,offset=2600000): bf16[512,256]{1,0}
allocation 4: size 400000, color 5, page 0, preallocated-temp:
 value: <10 away-done @0> (size=400000,offset=0): f32[1000,100]{1,0:S(5)}
"""
SMALL_LIVE = """HloLiveRange (max 9):
  InstructionSequence:
    0:stack
    1:gather-done
    2:slice.3
    3:product
    4:product.remat
    5:away-done
    6:sum-done
  BufferLiveRange:
    stack{}:0-2
    layers{2}:2-6
    slice.3{}:2-3
    product{}:3-3
    product.remat{}:4-5
    gather-done{}:1-4
    away-done{}:5-6
  Live ranges at 3 (peak):
    stack{}: 1600000 bytes
"""


@pytest.mark.parametrize("module", [memory, buffers])
def test_examples(module):
    assert doctest.testmod(module).failed == 0


@pytest.fixture(scope="module")
def arguments() -> memory.Memory:
    return memory.account(PROGRAM, ASSIGNMENT + TEMP, LIVE)


def resting_bytes() -> dict[str, int]:
    """Bytes on one GPU of each weight of V3, from its shape and the sharding tables."""
    config = v3()
    fold = config.fold_over(256)
    model = nnx.eval_shape(lambda: Transformer(config.model, rngs=nnx.Rngs(0)))
    _, weights, _ = params.partition(model)
    table = sharding.store_table(config.parallel.zero)

    def size(leaf, dims):
        degrees = [fold.degree(table[dim]) if dim in table else 1 for dim in dims]
        return math.prod(leaf.shape) // math.prod(degrees) * leaf.dtype.itemsize

    sizes = jax.tree.map(size, weights, params.dims_of(model)[0])
    flat = jax.tree_util.tree_flatten_with_path(sizes)[0]
    return {f"state.params{jax.tree_util.keystr(path)}": one for path, one in flat}


def test_weights_and_optimizer_rest_where_the_tables_say(arguments):
    """Each leaf to the byte; two moments of the same size, and two counters."""
    expected = resting_bytes()
    found = {name: size for name, size in arguments.leaves.items() if "params" in name}
    assert found == expected
    assert arguments.kinds["weights"] == sum(expected.values())
    assert arguments.kinds["optimizer"] == 2 * sum(expected.values()) + 2 * 4


def test_deepseek_v3_by_its_published_size(arguments):
    """671 billion parameters and 11.5 of the module that predicts ahead (its embedding and head are
    the model's), in float32, over 256 GPUs."""
    assert arguments.kinds["weights"] == pytest.approx(682.5e9 * 4 / 256, rel=0.01)
    tokens = 15360 // 256 * 4096
    assert arguments.kinds["batch"] == 4 * tokens * 4


@pytest.fixture(scope="module")
def small() -> memory.Memory:
    return memory.account(STEP, SMALL, SMALL_LIVE)


def test_kinds_add_up_and_name_what_is_there(small):
    """The fullest moment is step 3: the stack, the slice, the product and the gathered weight."""
    assert small.peak == "product" and small.where == "forward, attend"
    assert small.kinds == {
        "batch": 1048576, "weights": 400000, "outputs": 4, "saved activations": 1600000,
        "residual stream": 400000, "attention": 524288, "gathered weights": 262144,
        "fragmentation": 3000000 - 1600000 - 400000 - 524288 - 262144,
    }  # fmt: skip
    assert small.host == {"residual stream": 400000, "fragmentation": 0}
    assert small.total == 1048576 + 400000 + 4 + 3000000
    assert [buffer.bytes for buffer in small.live] == [1600000, 524288, 400000, 262144]
    assert small.saved == {"block input f32[4,1000,100]": 1600000}


def test_values_that_share_addresses_count_once():
    """Of [0, 10) and [5, 15) 15 bytes are in use, and ten of those are the first's."""
    values = tuple(
        buffers.Value(name, "", 10, offset, "u8[10]") for name, offset in (("a", 0), ("b", 5))
    )
    allocation = buffers.Allocation(20, "temp", -1, 0, values)
    when = buffers.Times(("a", "b", "c"), {("a", ""): (0, 2), ("b", ""): (1, 1)})
    step, pieces = buffers.peak_of(allocation, when)
    assert step == 1 and [piece.bytes for piece in pieces] == [10, 5]
    later = dataclasses.replace(when, live={("a", ""): (0, 0), ("b", ""): (1, 1)})
    step, pieces = buffers.peak_of(allocation, later)
    assert [piece.bytes for piece in pieces] == [10]


def test_what_is_no_assignment_is_refused():
    with pytest.raises(ValueError, match="no allocation"):
        buffers.allocations("nothing")
