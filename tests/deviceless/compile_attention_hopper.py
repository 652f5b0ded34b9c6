"""Compiles the Hopper attention and its gradients for two H100s that are not there.

    python -m tests.deviceless.compile_attention_hopper B L N G H V [DTYPE]

With JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1; the kernels, and the assembler's report of each, go to the
folder MOSAIC_GPU_DUMP_TO.
"""

import sys

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels import attention, deviceless


def step(q, k, v, ids, sinks, do, dlse):
    """Returns out, lse and the gradients of one device's rows; with a window, and with sinks.
    The package picks the implementation."""

    def call(q, k, v, sinks):
        return attention(q, k, v, segment_ids=(ids, ids), window=1000, sinks=sinks)

    results, pull = jax.vjp(call, q, k, v, sinks)
    return *results, *pull((do, dlse))


def main(B: int, L: int, N: int, G: int, H: int, V: int, dtype: str = "bfloat16") -> None:
    """Each device has B rows of its own."""
    mesh = Mesh(deviceless.devices("h100", 1, 2), ("x",))

    def array(*shape, dtype=dtype, axis="x"):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(axis)))

    own = (2 * B, L)
    arguments = (
        array(*own, N, H),
        array(*own, G, H),
        array(*own, G, V),
        array(*own, dtype=jnp.int32),
        array(N, dtype=jnp.float32, axis=None),
        array(*own, N, V),
        array(*own, N, dtype=jnp.float32),
    )
    specs = (P("x"),) * 4 + (P(),) + (P("x"),) * 2
    outs = (P("x"),) * 5 + (P(),)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        mapped = jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=outs, check_vma=True)
        compiled = jax.jit(mapped).lower(*arguments).compile(deviceless.COMPILER_OPTIONS)
    print(compiled.memory_analysis().temp_size_in_bytes)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:7]), *sys.argv[7:])
