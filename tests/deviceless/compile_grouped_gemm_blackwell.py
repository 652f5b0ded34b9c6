"""Compiles the Blackwell grouped GEMM and its gradients for a GPU that is not there.

    python -m tests.deviceless.compile_grouped_gemm_blackwell GPU M K N G

With JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1; MOSAIC_GPU_DUMP_TO names the folder for the reports.
"""

import sys
from dataclasses import replace

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels import deviceless
from pallas_kernels.grouped_gemm import blackwell


def main(gpu: str, M: int, K: int, N: int, G: int) -> None:
    """Compiles product, both gradients, and the weight gradient added to a buffer given away; and
    both products again by pairs of blocks."""
    mesh = Mesh(deviceless.devices(gpu, hosts=1, per_host=1), ("x",))

    def array(*shape, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P()))

    def all_three(x, w, sizes, dy):
        y, back = jax.vjp(lambda x, w: blackwell.grouped_gemm(x, w, sizes), x, w)
        return y, *back(dy)

    def paired(x, w, sizes, dy):
        tiles = replace(blackwell.DEFAULT, pair=True, stages=6)
        products = (x, False), (dy, True)
        return [blackwell.product(a, w, sizes, flip, tiles) for a, flip in products]

    def added(x, dy, sizes, into):
        return blackwell.weight_gradient(x, dy, sizes, into_GKN=into)

    x, w, dy, sizes = array(M, K), array(G, K, N), array(M, N), array(G, dtype=jnp.int32)
    into = array(G, K, N, dtype=jnp.float32)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        jax.jit(all_three).lower(x, w, sizes, dy).compile(deviceless.COMPILER_OPTIONS)
        jax.jit(paired).lower(x, w, sizes, dy).compile(deviceless.COMPILER_OPTIONS)
        adding = jax.jit(added, donate_argnums=3).lower(x, dy, sizes, into)
        adding = adding.compile(deviceless.COMPILER_OPTIONS)
    print("aliased bytes:", adding.memory_analysis().alias_size_in_bytes)


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
