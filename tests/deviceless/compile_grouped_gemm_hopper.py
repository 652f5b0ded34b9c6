"""Compiles the Hopper grouped GEMM and its gradients for two H100s, and prints for each
program the bytes that are aliased and temporary, per device. JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1.

    python -m tests.deviceless.compile_grouped_gemm_hopper M K N G

The kernels, and the assembler's report of each, go to the folder MOSAIC_GPU_DUMP_TO.
"""

import sys

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels import deviceless
from pallas_kernels.grouped_gemm import hopper, tiles


def step(x_mK, w_gKN, sizes_g, dy_mN):
    """Returns y, dx, dw of one device's share."""
    y, gradients = jax.vjp(lambda x, w: hopper.grouped_gemm(x, w, sizes_g), x_mK, w_gKN)
    return y, *gradients(dy_mN)


def accumulate(x_mK, dy_mN, sizes_g, into_gKN):
    """Returns into + dw, in the memory of into."""
    own = tiles.choose("weight", hopper.H100, x_mK.shape[1], dy_mN.shape[1])
    return hopper.weight_gradient(x_mK, dy_mN, sizes_g, own, into=into_gKN)


def main(M: int, K: int, N: int, G: int) -> None:
    """Compiles both programs, each device with M rows and G groups of its own."""
    mesh = Mesh(deviceless.devices("h100", 1, 2), ("x",))

    def array(*shape, dtype=jnp.bfloat16):
        shape = (2 * shape[0], *shape[1:])
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P("x")))

    x, w, dy, sizes = array(M, K), array(G, K, N), array(M, N), array(G, dtype=jnp.int32)
    into = array(G, K, N, dtype=jnp.float32)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        report(step, mesh, (x, w, sizes, dy), check_vma=True)
        # JAX 0.12 hands no varying Ref to a kernel, so this one runs with the check off.
        report(accumulate, mesh, (x, dy, sizes, into), check_vma=False, donated=(3,))


def report(f, mesh, args, check_vma, donated=()):
    """Compiles f on every device's share, and prints what its memory analysis says."""
    on_all = jax.shard_map(f, mesh=mesh, in_specs=P("x"), out_specs=P("x"), check_vma=check_vma)
    lowered = jax.jit(on_all, donate_argnums=donated).lower(*args)
    memory = lowered.compile(deviceless.COMPILER_OPTIONS).memory_analysis()
    print(f"{f.__name__} {memory.alias_size_in_bytes} {memory.temp_size_in_bytes}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:5]))
