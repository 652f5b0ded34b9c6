"""Compiles the fused attention and its gradients for two GPUs that are not there, and prints how
many kernels of ours the program has. JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1.

    python -m tests.deviceless.compile_attention_blackwell GPU H V

The kernels, and the assembler's report of each, go to the folder MOSAIC_GPU_DUMP_TO.
"""

import sys

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels import attention, deviceless


def step(q_bLNH, k_bLGH, v_bLGV, ids_bL, sinks_N, do_bLNV, dlse_bLN):
    """Returns out, lse, dq, dk, dv, dsinks of one device's rows."""
    sinks_N = jax.lax.pcast(sinks_N, "x", to="varying")

    def call(q, k, v, sinks):
        return attention(q, k, v, segment_ids=(ids_bL, ids_bL), window=1000, sinks=sinks)

    (out, lse), pull = jax.vjp(call, q_bLNH, k_bLGH, v_bLGV, sinks_N)
    *gradients, dsinks = pull((do_bLNV, dlse_bLN))
    return out, lse, *gradients, jax.lax.psum(dsinks, "x")


def main(gpu: str, H: int, V: int) -> None:
    """Compiles for packed rows of 4096, eight query and two key heads, types checked."""
    mesh = Mesh(deviceless.devices(gpu, 1, 2), ("x",))
    B, L, N, G = 4, 4096, 8, 2
    rows, whole = P("x"), P()

    def array(*shape, dtype=jnp.bfloat16, spec=rows):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

    arguments = (
        *(array(B, L, heads, width) for heads, width in ((N, H), (G, H), (G, V))),
        array(B, L, dtype=jnp.int32),
        array(N, dtype=jnp.float32, spec=whole),
        array(B, L, N, V),
        array(B, L, N, dtype=jnp.float32),
    )
    specs = (*(rows,) * 4, whole, rows, rows)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        split = jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=(*(rows,) * 5, whole))
        compiled = jax.jit(split).lower(*arguments).compile(deviceless.COMPILER_OPTIONS)
    print("kernels:", compiled.as_text().count('custom_call_target="mosaic_gpu'))


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
