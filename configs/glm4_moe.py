"""GLM-4.5 (355B parameters, 32B active) and GLM-4.5-Air (106B, 12B active).

    python -m launch.train --config=configs/glm4_moe.py:glm_4_5_air \\
        --config.init.from_hf=FOLDER --config.data.train="('text/*.parquet',)" \\
        --config.data.tokenizer=FOLDER

Source: config.json of GLM-4.5 and of GLM-4.5-Air. They were trained with Muon; the rates here are
AdamW's of a model of that size.
"""

from dataclasses import replace

from moejax.config import Config
from moejax.core.mesh import ParallelConfig
from moejax.core.precision import PrecisionConfig
from moejax.model.attention import AttentionConfig
from moejax.model.balance import BalanceConfig
from moejax.model.config import ModelConfig
from moejax.model.moe import MoEConfig
from moejax.model.rope import RopeConfig
from moejax.model.router import RouterConfig
from moejax.train.checkpoint import CheckpointConfig
from moejax.train.optimizer import OptimizerConfig
from moejax.train.step import TrainConfig


def glm_4_5() -> Config:
    """GLM-4.5 on any multiple of 32 devices."""
    return Config(
        name="glm_4_5",
        model=ModelConfig(
            vocab_size=151552,
            dim=5120,
            num_layers=92,
            first_k_dense=3,
            mtp_depth=1,
            ffn_dim=12288,
            attention=AttentionConfig(
                num_heads=96, num_kv_heads=8, head_dim=128, bias=True, qk_norm="head",
                rope=RopeConfig(theta=1e6, dim=64),
            ),
            moe=MoEConfig(
                num_experts=160,
                top_k=8,
                ffn_dim=1536,
                shared_ffn_dim=1536,
                dispatch="ragged",
                budget=1.5,
                router=RouterConfig(score="sigmoid", scale=2.5),
                balance=BalanceConfig(batch_coeff=0.0, sequence_coeff=1e-4, bias_rate=1e-3),
            ),
            norm_eps=1e-5,
            remat="full",
        ),
        parallel=ParallelConfig(dp=0, ep=32, zero=3),
        precision=PrecisionConfig(compute_dtype="bfloat16"),
        train=TrainConfig(
            steps=350_000, batch_size=16384, sequence_length=4096, microbatches=16, eval_every=1000
        ),
        optimizer=OptimizerConfig(learning_rate=2.5e-4, warmup_steps=2000),
        checkpoint=CheckpointConfig(save_every=500),
    )  # fmt: skip


def glm_4_5_air() -> Config:
    """GLM-4.5-Air on any multiple of 32 devices."""
    base = glm_4_5()
    moe, router = base.model.moe, base.model.moe.router
    return replace(
        base,
        name="glm_4_5_air",
        model=replace(
            base.model,
            dim=4096,
            num_layers=46,
            first_k_dense=1,
            ffn_dim=10944,
            attention=replace(base.model.attention, qk_norm=""),
            moe=replace(
                moe, num_experts=128, ffn_dim=1408, shared_ffn_dim=1408,
                router=replace(router, scale=1.0),
            ),
        ),
    )  # fmt: skip
