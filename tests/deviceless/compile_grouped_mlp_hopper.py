"""Compiles the Hopper grouped MLP and its gradients for two H100s, inside a shard_map.
JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1.

    python -m tests.deviceless.compile_grouped_mlp_hopper M D F G

The kernels, and the assembler's report of each, go to the folder MOSAIC_GPU_DUMP_TO.
"""

import sys

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels import deviceless
from pallas_kernels.grouped_mlp import hopper


def step(x, w_in, w_out, weights, sizes, dy):
    """Returns y and the gradients of one device's share."""
    run = lambda *args: hopper.grouped_mlp(*args, sizes)  # noqa: E731
    y, gradients = jax.vjp(run, x, w_in, w_out, weights)
    return y, *gradients(dy)


def main(M: int, D: int, F: int, G: int) -> None:
    """Compiles it, each device with M rows and G groups of its own; prints the temporary bytes."""
    mesh = Mesh(deviceless.devices("h100", 1, 2), ("x",))

    def array(*shape, dtype=jnp.bfloat16):
        shape = (2 * shape[0], *shape[1:])
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P("x")))

    matrices = array(M, D), array(G, D, 2 * F), array(G, F, D)
    rows = array(M, dtype=jnp.float32), array(G, dtype=jnp.int32), array(M, D)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        on_all = jax.shard_map(step, mesh=mesh, in_specs=P("x"), out_specs=P("x"), check_vma=True)
        compiled = jax.jit(on_all).lower(*matrices, *rows).compile(deviceless.COMPILER_OPTIONS)
    print(f"temporary {compiled.memory_analysis().temp_size_in_bytes}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:5]))
