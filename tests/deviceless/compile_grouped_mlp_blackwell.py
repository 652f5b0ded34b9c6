"""Compiles the Blackwell grouped MLP and its gradients for GPUs that are not there.

    python -m tests.deviceless.compile_grouped_mlp_blackwell GPU M D F G

Inside shard_map(check_vma=True), over the experts of two GPUs. With
JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1; MOSAIC_GPU_DUMP_TO names the folder for the reports.
"""

import sys

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels import deviceless
from pallas_kernels.grouped_mlp import blackwell


def main(gpu: str, M: int, D: int, F: int, G: int) -> None:
    """Compiles output and all gradients; sizes are those of one GPU."""
    mesh = Mesh(deviceless.devices(gpu, hosts=1, per_host=2), ("e",))
    split = NamedSharding(mesh, P("e"))

    def array(first, *shape, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct((2 * first, *shape), dtype, sharding=split)

    def local(x, w_in, w_out, weights, sizes, dy):
        y, back = jax.vjp(
            lambda *args: blackwell.grouped_mlp(*args, sizes), x, w_in, w_out, weights
        )
        return y, *back(dy)

    experts = array(G, D, 2 * F), array(G, F, D)
    sizes = array(G, dtype=jnp.int32)
    arguments = array(M, D), *experts, array(M, dtype=jnp.float32), sizes, array(M, D)
    run = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=P("e"), out_specs=P("e")))
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        run.lower(*arguments).compile(deviceless.COMPILER_OPTIONS)


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
