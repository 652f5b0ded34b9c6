"""DeepSeek-V2 (236B parameters, 21B active) and V2-Lite (15.7B, 2.4B active).

    python -m launch.train --config=configs/deepseek_v2.py:v2_lite \\
        --config.data.train="('text/*.parquet',)" --config.data.tokenizer=FOLDER

Source: config.json of DeepSeek-V2 and of DeepSeek-V2-Lite; rates, batches and initialisation of the
V2 report (section 3.1, appendix B). V2 was trained with 8 groups of experts, one a device, of which
a token visits 3.
"""

from moejax.config import Config
from moejax.core.mesh import ParallelConfig
from moejax.core.precision import PrecisionConfig
from moejax.model.attention import AttentionConfig, MLAConfig
from moejax.model.config import ModelConfig
from moejax.model.moe import MoEConfig
from moejax.model.rope import RopeConfig
from moejax.model.router import RouterConfig
from moejax.train.checkpoint import CheckpointConfig
from moejax.train.optimizer import OptimizerConfig
from moejax.train.step import TrainConfig

ROPE = RopeConfig(
    dim=64, layout="interleaved", scaling="yarn", factor=40.0, mscale=0.707, mscale_all_dim=0.707
)


def v2_lite() -> Config:
    """DeepSeek-V2-Lite on any multiple of 8 devices, 5.7T tokens."""
    return Config(
        name="deepseek_v2_lite",
        model=ModelConfig(
            vocab_size=102400,
            dim=2048,
            num_layers=27,
            first_k_dense=1,
            ffn_dim=10944,
            attention=AttentionConfig(
                kind="mla", num_heads=16, head_dim=128, mla=MLAConfig(), rope=ROPE
            ),
            moe=MoEConfig(
                num_experts=64,
                top_k=6,
                ffn_dim=1408,
                shared_ffn_dim=2816,
                dispatch="ragged",
                budget=1.5,
                router=RouterConfig(renormalize=False),
            ),
            init_std=0.006,
            remat="full",
        ),
        parallel=ParallelConfig(dp=0, ep=8, zero=3),
        precision=PrecisionConfig(compute_dtype="bfloat16"),
        train=TrainConfig(
            steps=302_000, batch_size=4608, sequence_length=4096, microbatches=9, eval_every=1000
        ),
        optimizer=OptimizerConfig(learning_rate=4.2e-4, warmup_steps=2000),
        checkpoint=CheckpointConfig(save_every=1000),
    )


def v2() -> Config:
    """DeepSeek-V2 on any multiple of 8 devices, 8.1T tokens."""
    return Config(
        name="deepseek_v2",
        model=ModelConfig(
            vocab_size=102400,
            dim=5120,
            num_layers=60,
            first_k_dense=1,
            ffn_dim=12288,
            attention=AttentionConfig(
                kind="mla", num_heads=128, head_dim=128, mla=MLAConfig(q_rank=1536), rope=ROPE
            ),
            moe=MoEConfig(
                num_experts=160,
                top_k=6,
                ffn_dim=1536,
                shared_ffn_dim=3072,
                dispatch="ragged",
                budget=1.5,
                router=RouterConfig(
                    renormalize=False, scale=16.0, num_groups=8, topk_groups=3, num_group_score=1
                ),
            ),
            init_std=0.006,
            remat="full",
        ),
        parallel=ParallelConfig(dp=0, ep=8, zero=3),
        precision=PrecisionConfig(compute_dtype="bfloat16"),
        train=TrainConfig(
            steps=215_000, batch_size=9216, sequence_length=4096, microbatches=9, eval_every=1000
        ),
        optimizer=OptimizerConfig(learning_rate=2.4e-4, warmup_steps=2000),
        checkpoint=CheckpointConfig(save_every=500),
    )
