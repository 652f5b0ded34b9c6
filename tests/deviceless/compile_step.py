"""Compiles the train step of a shrunken demo, folded over 8 H100s, and prints the program.

    python -m tests.deviceless.compile_step DISPATCHER        (JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1)
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


def main(dispatch: str) -> None:
    """Prints the optimised program, and its memory analysis on the last line."""
    config = demo()
    cfg = replace(config.model, moe=replace(config.model.moe, dispatch=dispatch))
    folded = fold(*ParallelConfig(dp=4, tp=2, ep=8).readings(8))
    mesh = make_mesh(folded, list(deviceless.devices("h100", 1, 8)))
    precision = PrecisionConfig(compute_dtype="bfloat16")
    model = nnx.eval_shape(lambda: Transformer(cfg, rngs=nnx.Rngs(0)))
    optimizer = make_optimizer(config.optimizer, 600, decay_mask(params.dims_of(model)[0]))
    layout = plan_state(cfg, optimizer, folded, mesh, 3, precision)
    step = make_train_step(cfg, config.optimizer, optimizer, layout, precision, 600)
    state = jax.tree.map(
        lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s),
        layout.abstract,
        layout.shardings,
    )
    rows = jax.ShapeDtypeStruct(
        (1, 16, 256), jnp.int32, sharding=NamedSharding(mesh, batch_spec(layout))
    )
    batch = dict.fromkeys(("tokens", "targets", "segment_ids", "positions"), rows)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        compiled = step.lower(state, batch).compile(deviceless.COMPILER_OPTIONS)
    print(compiled.as_text())
    print(compiled.memory_analysis())


if __name__ == "__main__":
    main(sys.argv[1])
