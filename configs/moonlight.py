"""Moonlight-16B-A3B: DeepSeek-V3's architecture in small, 16B parameters, 3B of them active.

    python -m launch.train --config=configs/moonlight.py:moonlight_16b_h100x8 \\
        --config.init.from_hf=FOLDER --config.data.train="('text/*.parquet',)" \\
        --config.data.tokenizer=FOLDER

Source: config.json of Moonlight-16B-A3B. It was trained with Muon; the rates here are AdamW's of
DeepSeek-V2-Lite, a model of the same size. Published by Megatron-Bridge for 8 H100s (TP 2, EP 8,
BF16, 4 sequences a step): 77.5 TFLOP/s a GPU.
"""

from dataclasses import replace

from moejax.config import Config
from moejax.core.mesh import ParallelConfig
from moejax.core.precision import PrecisionConfig
from moejax.model.attention import AttentionConfig, MLAConfig
from moejax.model.balance import BalanceConfig
from moejax.model.config import ModelConfig
from moejax.model.moe import MoEConfig
from moejax.model.rope import RopeConfig
from moejax.model.router import RouterConfig
from moejax.train.checkpoint import CheckpointConfig
from moejax.train.optimizer import OptimizerConfig
from moejax.train.step import TrainConfig


def moonlight_16b() -> Config:
    """Moonlight-16B-A3B on any multiple of 8 devices, 5.7T tokens."""
    return Config(
        name="moonlight_16b",
        model=ModelConfig(
            vocab_size=163840,
            dim=2048,
            num_layers=27,
            first_k_dense=1,
            ffn_dim=11264,
            attention=AttentionConfig(
                kind="mla",
                num_heads=16,
                head_dim=128,
                mla=MLAConfig(),
                rope=RopeConfig(theta=50000.0, dim=64, layout="interleaved"),
            ),
            moe=MoEConfig(
                num_experts=64,
                top_k=6,
                ffn_dim=1408,
                shared_ffn_dim=2816,
                dispatch="ragged",
                budget=1.5,
                router=RouterConfig(score="sigmoid", scale=2.446),
                balance=BalanceConfig(batch_coeff=0.0, sequence_coeff=1e-4, bias_rate=1e-3),
            ),
            norm_eps=1e-5,
            remat="full",
        ),
        parallel=ParallelConfig(dp=0, ep=8, zero=3),
        precision=PrecisionConfig(compute_dtype="bfloat16"),
        train=TrainConfig(
            steps=340_000, batch_size=2048, sequence_length=8192, microbatches=8, eval_every=1000
        ),
        optimizer=OptimizerConfig(learning_rate=4.2e-4, warmup_steps=2000),
        checkpoint=CheckpointConfig(save_every=1000),
    )


def moonlight_16b_h100x8() -> Config:
    """Moonlight on one node of 8 H100s, the published row's batch; to continue its training."""
    base = moonlight_16b()
    return replace(
        base,
        name="moonlight_16b_h100x8",
        parallel=ParallelConfig(dp=4, tp=2, ep=8, zero=3),
        train=replace(base.train, steps=1000, batch_size=4, sequence_length=4096, microbatches=1),
        optimizer=replace(base.optimizer, learning_rate=2e-5, warmup_steps=100),
    )
