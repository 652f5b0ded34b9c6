"""Compiles the router and its gradient for a GPU that is not there, for each kind of router.

python -m tests.deviceless.compile_router GPU [NAME]     (JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1)
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pallas_kernels import RouterOptions, deviceless
from pallas_kernels.router import mosaic

# (experts, tokens, options, whether there is a bias).
GROUPED = dict(num_groups=8, topk_groups=4, num_group_score=2, scale=2.5)
ROUTERS = {
    "deepseek-v3": (256, 8192, RouterOptions(8, score="sigmoid", **GROUPED), True),
    "deepseek-v2": (160, 8192, RouterOptions(6, renormalize=False), False),
    "qwen3": (128, 32768, RouterOptions(8), False),
    "gpt-oss": (32, 32768, RouterOptions(4), False),
    "mixtral": (8, 8200, RouterOptions(2), False),
    "largest": (512, 8192, RouterOptions(32, score="sqrt_softplus"), True),
    "largest-softmax": (512, 8192, RouterOptions(10, renormalize=False), True),
}


def main(gpu: str, name: str = "") -> None:
    """Prints the names; the assembler's reports go where MOSAIC_GPU_DUMP_TO says."""
    mesh = Mesh(np.asarray(deviceless.devices(gpu, 1, 1)), ("x",))

    def array(*shape, dtype=jnp.float32):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec()))

    for router, (E, T, options, biased) in ROUTERS.items():
        if name not in ("", router):
            continue

        def both_ways(logits, bias, valid, dw, options=options, biased=biased):
            def run(logits):
                routes = mosaic.route(
                    logits, bias if biased else None, valid, options,
                    num_sms=deviceless.GPUS[gpu].cores,
                )  # fmt: skip
                return routes.weights_TK, routes

            _, pull, routes = jax.vjp(run, logits, has_aux=True)
            return routes, pull(dw)

        arguments = array(T, E), array(E), array(T, dtype=bool), array(T, options.top_k)
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            jax.jit(both_ways).lower(*arguments).compile(deviceless.COMPILER_OPTIONS)
        print(router)


if __name__ == "__main__":
    main(*sys.argv[1:])
