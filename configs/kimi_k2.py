"""Kimi-K2: DeepSeek-V3's architecture with more experts, fewer heads: 1T parameters, 32B active.

    python -m launch.train --config=configs/kimi_k2.py:kimi_k2 \\
        --config.data.train="('text/*.parquet',)" --config.data.tokenizer=FOLDER

Source: config.json of Kimi-K2-Instruct (the -0905 model differs in rope.factor, 64); batch and rate
of its technical report (section 2.5), which prints 1.04T; the published tensors are 1.026T. It was
trained with MuonClip, not AdamW.
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


def kimi_k2() -> Config:
    """Kimi-K2 on any multiple of 128 devices, 15.5T tokens in steps of 67M."""
    return Config(
        name="kimi_k2",
        model=ModelConfig(
            vocab_size=163840,
            dim=7168,
            num_layers=61,
            first_k_dense=1,
            ffn_dim=18432,
            attention=AttentionConfig(
                kind="mla",
                num_heads=64,
                head_dim=128,
                mla=MLAConfig(q_rank=1536),
                rope=RopeConfig(
                    theta=50000.0, dim=64, layout="interleaved", scaling="yarn", factor=32.0,
                    beta_fast=1.0, mscale_all_dim=1.0,
                ),
            ),
            moe=MoEConfig(
                num_experts=384,
                top_k=8,
                ffn_dim=2048,
                shared_ffn_dim=2048,
                dispatch="ragged",
                budget=1.5,
                router=RouterConfig(score="sigmoid", scale=2.827),
                balance=BalanceConfig(batch_coeff=0.0, sequence_coeff=1e-4, bias_rate=1e-3),
            ),
            init_std=0.006,
            remat="full",
        ),
        parallel=ParallelConfig(dp=0, ep=128, zero=3),
        precision=PrecisionConfig(compute_dtype="bfloat16"),
        train=TrainConfig(
            steps=231_000, batch_size=16384, sequence_length=4096, microbatches=16, eval_every=1000
        ),
        optimizer=OptimizerConfig(learning_rate=2e-4, warmup_steps=500, schedule="wsd"),
        checkpoint=CheckpointConfig(save_every=500),
    )  # fmt: skip


def kimi_k2_gb300x256() -> Config:
    """Kimi-K2 on 256 GB300s, all of a batch at once: 16 sequences on each GPU."""
    base = kimi_k2()
    return replace(
        base,
        name="kimi_k2_gb300x256",
        parallel=ParallelConfig(dp=256, ep=64, zero=3),
        train=replace(base.train, batch_size=4096, microbatches=1),
    )
