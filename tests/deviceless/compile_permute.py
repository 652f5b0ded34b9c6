"""Compiles permute, unpermute and their gradients for one GPU that is not there.

python -m tests.deviceless.compile_permute GPU D DTYPE      (JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1)
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pallas_kernels import deviceless
from pallas_kernels.permute import mosaic

T, K = 8192, 8


def main(gpu: str, dim: int, dtype: str) -> None:
    """Prints the optimised program; the assembler's reports go where MOSAIC_GPU_DUMP_TO says."""
    num_sms = deviceless.GPUS[gpu].cores

    def there_and_back(x, dy, weights, tokens, slots):
        def run(x, weights):
            rows = mosaic.permute(x, tokens, slots, num_sms=num_sms)
            return mosaic.unpermute(rows, slots, tokens, weights, num_sms=num_sms)

        y, back = jax.vjp(run, x, weights)
        return y, *back(dy)

    mesh = Mesh(np.asarray(deviceless.devices(gpu, 1, 1)), ("x",))
    place = NamedSharding(mesh, PartitionSpec())
    rows = jax.ShapeDtypeStruct((T, dim), dtype, sharding=place)
    weights = jax.ShapeDtypeStruct((T, K), jnp.float32, sharding=place)
    tokens = jax.ShapeDtypeStruct((T * K,), jnp.int32, sharding=place)
    slots = jax.ShapeDtypeStruct((T, K), jnp.int32, sharding=place)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        lowered = jax.jit(there_and_back).lower(rows, rows, weights, tokens, slots)
        print(lowered.compile(deviceless.COMPILER_OPTIONS).as_text())


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
