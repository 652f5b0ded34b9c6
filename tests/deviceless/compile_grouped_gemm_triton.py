"""Compiles the Triton grouped GEMM and its gradients for two GPUs that are not there.

    python -m tests.deviceless.compile_grouped_gemm_triton GPU M K N G [DTYPE]

JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1 has to be set; JAX_TRITON_DUMP_DIR names the folder for what
Triton makes of the kernels. Prints the optimised program.
"""

import sys

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels import deviceless, grouped_gemm
from pallas_kernels.grouped_gemm import triton


def main(gpu: str, M: int, K: int, N: int, G: int, dtype: str = "bfloat16") -> None:
    """Each device has M rows and G groups of its own. The package picks the implementation, except
    on Hopper, where it is named; the weight gradient comes in float32 too."""
    mesh = Mesh(deviceless.devices(gpu, 1, 2), ("x",))
    impl = "triton" if deviceless.GPUS[gpu].capability[0] >= 9 else None

    def array(*shape, dtype=dtype):
        shape = (2 * shape[0], *shape[1:])
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P("x")))

    def step(x, w, sizes, dy):
        y, pull = jax.vjp(lambda x, w: grouped_gemm(x, w, sizes, impl=impl), x, w)
        wide = triton.weight_gradient(x, dy, sizes, deviceless.GPUS[gpu], dtype=jnp.float32)
        return y, *pull(dy), wide

    arguments = array(M, K), array(G, K, N), array(G, dtype=jnp.int32), array(M, N)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        mapped = jax.shard_map(step, mesh=mesh, in_specs=P("x"), out_specs=P("x"))
        compiled = jax.jit(mapped).lower(*arguments).compile(deviceless.COMPILER_OPTIONS)
    print(compiled.as_text())


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:6]), *sys.argv[6:])
