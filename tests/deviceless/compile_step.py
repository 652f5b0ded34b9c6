"""Compiles the demo's train step for GPUs that are not there, and prints the program.

    python -m tests.deviceless.compile_step GPU              the demo as it is, on one GPU
    python -m tests.deviceless.compile_step GPU DISPATCHER   folded over eight: dp 4, tp 2, ep 8

JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1 has to be set.
"""

import sys
from dataclasses import replace

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding

from configs.demo import demo
from moejax.core import params
from moejax.core.mesh import ParallelConfig, fold, make_mesh
from moejax.core.precision import PrecisionConfig
from moejax.model.transformer import Transformer
from moejax.train.optimizer import decay_mask, make_optimizer
from moejax.train.state import plan_state
from moejax.train.step import batch_spec, make_train_step
from pallas_kernels import deviceless


def main(gpu: str, dispatch: str = "") -> None:
    """Prints the optimised program, and its memory analysis on the last line."""
    config = demo()
    cfg, parallel = config.model, config.parallel
    if dispatch:
        cfg = replace(cfg, moe=replace(cfg.moe, dispatch=dispatch))
        parallel = ParallelConfig(dp=4, tp=2, ep=8, zero=3)
    num_gpus, rows = parallel.num_devices(), config.train.batch_size
    folded = fold(*parallel.readings(num_gpus))
    mesh = make_mesh(folded, list(deviceless.devices(gpu, 1, num_gpus)))
    precision = PrecisionConfig(compute_dtype="bfloat16")
    model = nnx.eval_shape(lambda: Transformer(cfg, rngs=nnx.Rngs(0)))
    optimizer = make_optimizer(config.optimizer, 1200, decay_mask(params.dims_of(model)[0]))
    layout = plan_state(cfg, optimizer, folded, mesh, parallel.zero, precision)
    step = make_train_step(cfg, config.optimizer, optimizer, layout, precision, 1200)
    state = jax.tree.map(
        lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s),
        layout.abstract,
        layout.shardings,
    )
    sharding = NamedSharding(mesh, batch_spec(layout))
    tokens = jax.ShapeDtypeStruct((1, rows, 256), jnp.int32, sharding=sharding)
    batch = dict.fromkeys(("tokens", "targets", "segment_ids", "positions"), tokens)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        compiled = step.lower(state, batch).compile(deviceless.COMPILER_OPTIONS)
    print(compiled.as_text())
    print(compiled.memory_analysis())


if __name__ == "__main__":
    main(*sys.argv[1:])
