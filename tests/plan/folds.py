"""Published sizes on folds that stay as they are, whatever the recipes of the day choose."""

from dataclasses import replace

from configs import deepseek_v3, qwen3_moe
from moejax.config import Config
from moejax.core.mesh import ParallelConfig


def folded(base: Config, microbatches: int, batch_size: int = 0, **degrees) -> Config:
    """Returns the recipe with these degrees, ZeRO-3 and microbatches."""
    train = replace(
        base.train, microbatches=microbatches, batch_size=batch_size or base.train.batch_size
    )
    return replace(base, parallel=ParallelConfig(zero=3, **degrees), train=train)


def qwen3_30b_16() -> Config:
    """One sequence a time on each of 16 GPUs, experts over all of them."""
    return folded(qwen3_moe.qwen3_30b_a3b_h100x16(), 64, dp=16, ep=16)


def qwen3_235b_256() -> Config:
    """Two sequences a time on two of 256 GPUs."""
    return folded(qwen3_moe.qwen3_235b_a22b_h100x256(), 16, dp=128, tp=2, ep=32)


def v3_1024() -> Config:
    """One sequence a time on two of 1,024 GPUs."""
    return folded(deepseek_v3.v3_h100x1024(), 16, dp=512, tp=2, ep=64)
