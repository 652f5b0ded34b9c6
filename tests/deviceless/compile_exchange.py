"""Compiles the exchange and its gradient for GPUs that are not there, inside a loop over layers.

python -m tests.deviceless.compile_exchange GPU HOSTS PER_HOST D DTYPE

JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1 has to be set.
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pallas_kernels import Tables, deviceless, return_rows, send_rows

T, K, LAYERS = 4096, 8, 4
AXES = ("dp_ep", "tp_ep")


def layer(x_TD, w_DD, tokens_S, slots_TK, weights_S4, tables):
    """Tokens there, a product, and back."""
    there, back = Tables(*tables[:4]), Tables(*tables[4:])
    order, move = (tokens_S, slots_TK), {"collective": lax.ragged_all_to_all, "impl": "mosaic"}
    rows, beside = send_rows(x_TD, weights_S4, order, there, back, 2 * T * K, AXES, **move)
    y = (rows @ w_DD) * beside[:, :1].astype(rows.dtype)
    return x_TD + return_rows(y, order, there, back, AXES, **move)


def main(gpu: str, hosts: int, per_host: int, dim: int, dtype: str) -> None:
    """Prints the optimised program."""
    num = hosts * per_host
    grid = np.asarray(deviceless.devices(gpu, hosts, per_host)).reshape(2, -1)
    mesh, spec = Mesh(grid, AXES), PartitionSpec(AXES)
    place = NamedSharding(mesh, spec)

    def local(x, dy, w, weights, tokens, slots, *tables):
        def run(x, weights):
            def step(x, w):
                return layer(x, w, tokens, slots, weights, tables), None

            return lax.scan(step, x, w)[0]

        y, back = jax.vjp(run, x, weights)
        return y, *back(dy)

    def array(shape, dtype=jnp.int32):
        return jax.ShapeDtypeStruct((num * shape[0], *shape[1:]), dtype, sharding=place)

    mapped = jax.shard_map(local, mesh=mesh, in_specs=(spec,) * 14, out_specs=spec)
    rows, weights = array((T, dim), dtype), array((T * K, 4), jnp.float32)
    indices = array((T * K,)), array((T, K)), *(array((num,)) for _ in range(8))
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        lowered = jax.jit(mapped).lower(
            rows, rows, array((LAYERS, dim, dim), dtype), weights, *indices
        )
        print(lowered.compile(deviceless.COMPILER_OPTIONS).as_text())


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), sys.argv[5])
