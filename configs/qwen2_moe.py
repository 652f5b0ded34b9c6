"""Qwen2-57B-A14B: 57.4B parameters, 14B of them active; a shared expert with a gate.

    python -m launch.train --config=configs/qwen2_moe.py:qwen2_57b_a14b \\
        --config.init.from_hf=FOLDER --config.data.train="('text/*.parquet',)" \\
        --config.data.tokenizer=FOLDER

Source: config.json of Qwen2-57B-A14B. Its training settings are not published; those here are
usual.
"""

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


def qwen2_57b_a14b() -> Config:
    """Qwen2-57B-A14B on any multiple of 8 devices."""
    return Config(
        name="qwen2_57b_a14b",
        model=ModelConfig(
            vocab_size=151936,
            dim=3584,
            num_layers=28,
            ffn_dim=18944,  # of dense layers, which it has none of
            attention=AttentionConfig(
                num_heads=28, num_kv_heads=4, head_dim=128, bias=True, rope=RopeConfig(theta=1e6)
            ),
            moe=MoEConfig(
                num_experts=64,
                top_k=8,
                ffn_dim=2560,
                shared_ffn_dim=20480,
                shared_gate=True,
                dispatch="ragged",
                budget=1.5,
                router=RouterConfig(renormalize=False),
            ),
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
