"""Compiles the demo's train step for GPUs that are not there, and prints the program.

    python -m tests.deviceless.compile_step GPU              the demo as it is, on one GPU
    python -m tests.deviceless.compile_step GPU DISPATCHER   folded over two nodes of four: dp 4,
        tp 2, ep 8; with a shared expert, and layers computed again in the backward
    python -m tests.deviceless.compile_step GPU DISPATCHER SCHEDULE      four microbatches by it

JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1 has to be set.
"""

import sys
from dataclasses import replace

import jax

from configs.demo import demo
from moejax.core.mesh import ParallelConfig, fold, make_mesh
from moejax.core.precision import PrecisionConfig
from moejax.train import setup
from pallas_kernels import deviceless


def main(gpu: str, dispatch: str = "", schedule: str = "") -> None:
    """Prints the optimised program, and its memory analysis on the last line."""
    config = demo()
    if dispatch:
        moe = replace(config.model.moe, dispatch=dispatch, shared_ffn_dim=512)
        config = replace(
            config, model=replace(config.model, moe=moe, remat="full"),
            parallel=ParallelConfig(dp=4, tp=2, ep=8, zero=3, node=4, schedule=schedule),
        )  # fmt: skip
    if schedule:
        config = replace(config, train=replace(config.train, batch_size=16, microbatches=4))
    num_gpus = config.parallel.num_devices()
    folded = fold(*config.parallel.readings(num_gpus))
    hosts = 2 if dispatch else 1
    mesh = make_mesh(folded, list(deviceless.devices(gpu, hosts, num_gpus // hosts)))
    steps = setup.make_steps(config, folded, mesh, PrecisionConfig(compute_dtype="bfloat16"))
    batch = setup.abstract_batch(config, steps.layout)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        lowered = steps.train_step.lower(steps.layout.resting, batch)
        compiled = lowered.compile(deviceless.COMPILER_OPTIONS)
    print(compiled.as_text())
    print(compiled.memory_analysis())


if __name__ == "__main__":
    main(*sys.argv[1:])
