"""OLMoE-1B-7B: 6.9B parameters, 1.3B of them active; weights, data and code are open.

    python -m launch.train --config=configs/olmoe.py:olmoe_1b_7b \\
        --config.data.train="('text/*.jsonl.gz',)" --config.data.tokenizer=FOLDER

Source: config.json of OLMoE-1B-7B-0924; rates and batch of its paper (Muennighoff et al., 2024,
appendix B).
"""

from moejax.config import Config
from moejax.core.mesh import ParallelConfig
from moejax.core.precision import PrecisionConfig
from moejax.model.attention import AttentionConfig
from moejax.model.config import ModelConfig
from moejax.model.moe import MoEConfig
from moejax.model.router import RouterConfig
from moejax.train.checkpoint import CheckpointConfig
from moejax.train.optimizer import OptimizerConfig
from moejax.train.step import TrainConfig


def olmoe_1b_7b() -> Config:
    """OLMoE-1B-7B on any multiple of 8 devices, 5.1T tokens in steps of 4M."""
    return Config(
        name="olmoe_1b_7b",
        model=ModelConfig(
            vocab_size=50304,
            dim=2048,
            num_layers=16,
            attention=AttentionConfig(
                num_heads=16, num_kv_heads=16, head_dim=128, qk_norm="full"
            ),
            moe=MoEConfig(
                num_experts=64,
                top_k=8,
                ffn_dim=1024,
                dispatch="ragged",
                budget=1.5,
                router=RouterConfig(renormalize=False),
            ),
            norm_eps=1e-5,
            remat="full",
        ),
        parallel=ParallelConfig(dp=0, ep=8, zero=3),
        precision=PrecisionConfig(compute_dtype="bfloat16"),
        train=TrainConfig(
            steps=1_220_000, batch_size=1024, sequence_length=4096, microbatches=4, eval_every=1000
        ),
        optimizer=OptimizerConfig(learning_rate=4e-4, warmup_steps=2500),
        checkpoint=CheckpointConfig(save_every=1000),
    )
