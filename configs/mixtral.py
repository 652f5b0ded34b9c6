"""Mixtral-8x7B (46.7B parameters, 12.9B active) and 8x22B (141B, 39B active).

    python -m launch.train --config=configs/mixtral.py:mixtral_8x7b \\
        --config.init.from_hf=FOLDER --config.data.train="('text/*.parquet',)" \\
        --config.data.tokenizer=FOLDER

Source: config.json of Mixtral-8x7B-v0.1 and of Mixtral-8x22B-v0.1 (its -Instruct: 32,768 tokens).
Their training settings are not published; those here are usual. Published by Megatron Core for the
8x7B on H100s: 468 TFLOP/s a GPU in BF16.
"""

from dataclasses import replace

from moejax.config import Config
from moejax.core.mesh import ParallelConfig
from moejax.core.precision import PrecisionConfig
from moejax.model.attention import AttentionConfig
from moejax.model.config import ModelConfig
from moejax.model.moe import MoEConfig
from moejax.model.rope import RopeConfig
from moejax.train.checkpoint import CheckpointConfig
from moejax.train.optimizer import OptimizerConfig
from moejax.train.step import TrainConfig


def mixtral_8x7b() -> Config:
    """Mixtral-8x7B on any multiple of 8 devices: one expert each."""
    return Config(
        name="mixtral_8x7b",
        model=ModelConfig(
            vocab_size=32000,
            dim=4096,
            num_layers=32,
            attention=AttentionConfig(
                num_heads=32, num_kv_heads=8, head_dim=128, rope=RopeConfig(theta=1e6)
            ),
            moe=MoEConfig(num_experts=8, top_k=2, ffn_dim=14336, dispatch="ragged", budget=1.5),
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
    )


def mixtral_8x22b() -> Config:
    """Mixtral-8x22B on any multiple of 8 devices: one expert each."""
    base = mixtral_8x7b()
    return replace(
        base,
        name="mixtral_8x22b",
        model=replace(
            base.model,
            dim=6144,
            num_layers=56,
            attention=replace(base.model.attention, num_heads=48),
            moe=replace(base.model.moe, ffn_dim=16384),
        ),
    )
