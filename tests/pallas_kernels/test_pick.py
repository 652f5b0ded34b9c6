"""Which implementation serves, and for which device a program is traced."""

import jax
import pytest
from jax.sharding import AxisType, PartitionSpec

from pallas_kernels.deviceless import GPUS, gpu_of
from pallas_kernels.pick import Choice, pick, target

CHOICES = (Choice("fast", min, "it is out today"), Choice("plain", max), Choice("slow", sum))


def test_the_first_that_serves_or_the_one_named():
    assert pick("op", None, CHOICES) is max
    assert pick("op", "slow", CHOICES) is sum
    with pytest.raises(ValueError, match="'fast' cannot serve.*out today; these can: plain, slow"):
        pick("op", "fast", CHOICES)
    with pytest.raises(ValueError, match="unknown impl='quick'; choose from: fast, plain, slow"):
        pick("op", "quick", CHOICES)
    with pytest.raises(ValueError, match=r"no implementation serves this call \(fast: it is out"):
        pick("op", None, CHOICES[:1])


def test_the_target_is_the_mesh_in_use():
    seen = []
    mesh = jax.make_mesh((2,), ("x",), (AxisType.Auto,), devices=jax.devices()[:2])
    spec = PartitionSpec("x")
    traced = jax.shard_map(
        lambda x: seen.append(target()) or x, mesh=mesh, in_specs=spec, out_specs=spec
    )
    jax.eval_shape(jax.jit(traced), jax.ShapeDtypeStruct((2,), "float32"))
    assert seen[-1] == target() and target().platform == "cpu"


@pytest.mark.parametrize("name", GPUS)
def test_a_gpu_is_known_by_its_kind(name):
    assert gpu_of(GPUS[name].name) == gpu_of(GPUS[name].name + " 80GB HBM3") == name
    assert gpu_of("NVIDIA RTX A1000") is None and gpu_of("cpu") is None
