"""gpt-oss-20b (20.9B parameters, 3.6B active) and gpt-oss-120b (116.8B, 5.1B active).

    python -m launch.train --config=configs/gpt_oss.py:gpt_oss_120b_h100x64 \\
        --config.init.from_hf=FOLDER --config.data.train="('text/*.parquet',)" \\
        --config.data.tokenizer=FOLDER

Source: config.json of gpt-oss-20b and of gpt-oss-120b; their training settings are not published,
those here are usual. Published by Megatron-Bridge for the 120b, BF16, tokens/s a GPU: on 64 H100s
(PP 4, EP 8) 5,824; on 64 GB200s (EP 64) 16,640.
"""

from dataclasses import replace

from moejax.config import Config
from moejax.core.mesh import ParallelConfig
from moejax.core.precision import PrecisionConfig
from moejax.model.attention import AttentionConfig
from moejax.model.config import ModelConfig
from moejax.model.moe import MoEConfig
from moejax.model.rope import RopeConfig
from moejax.model.router import RouterConfig
from moejax.train.checkpoint import CheckpointConfig
from moejax.train.optimizer import OptimizerConfig
from moejax.train.step import TrainConfig


def gpt_oss_20b() -> Config:
    """gpt-oss-20b on any multiple of 8 devices."""
    return Config(
        name="gpt_oss_20b",
        model=ModelConfig(
            vocab_size=201088,
            dim=2880,
            num_layers=24,
            pattern="mM",  # a window in every other layer
            attention=AttentionConfig(
                num_heads=64, num_kv_heads=8, head_dim=64, bias=True, out_bias=True, window=128,
                sinks=True,
                rope=RopeConfig(theta=150000.0, scaling="yarn", factor=32.0, truncate=False),
            ),
            moe=MoEConfig(
                num_experts=32,
                top_k=4,
                ffn_dim=2880,
                bias=True,
                swiglu_limit=7.0,
                dispatch="ragged",
                budget=1.5,
                router=RouterConfig(linear_bias=True),
            ),
            norm_eps=1e-5,
            remat="full",
        ),
        parallel=ParallelConfig(dp=0, ep=8, zero=3),
        precision=PrecisionConfig(compute_dtype="bfloat16"),
        train=TrainConfig(
            steps=100_000, batch_size=1024, sequence_length=4096, microbatches=4, eval_every=1000
        ),
        optimizer=OptimizerConfig(learning_rate=3e-4, warmup_steps=2000),
        checkpoint=CheckpointConfig(save_every=1000),
    )  # fmt: skip


def gpt_oss_120b() -> Config:
    """gpt-oss-120b on any multiple of 8 devices."""
    base = gpt_oss_20b()
    moe = replace(base.model.moe, num_experts=128)
    return replace(base, name="gpt_oss_120b", model=replace(base.model, num_layers=36, moe=moe))


def gpt_oss_120b_h100x64() -> Config:
    """The 120b on 64 H100s, the published row's batch: ten sequences a time on each GPU."""
    base = gpt_oss_120b()
    return replace(
        base,
        name="gpt_oss_120b_h100x64",
        parallel=ParallelConfig(dp=64, ep=8, zero=3),
        train=replace(base.train, batch_size=1280, microbatches=2),
    )


def gpt_oss_120b_gb200x64() -> Config:
    """The 120b on 64 GB200s, the published row's batch: four sequences a time on each GPU."""
    base = gpt_oss_120b()
    return replace(
        base,
        name="gpt_oss_120b_gb200x64",
        parallel=ParallelConfig(dp=64, ep=64, zero=3),
        train=replace(base.train, batch_size=1280, microbatches=5),
    )
