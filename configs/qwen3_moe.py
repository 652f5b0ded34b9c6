"""Qwen3-30B-A3B (30.5B parameters, 3.3B active) and Qwen3-235B-A22B (235B, 22B active).

    python -m launch.train --config=configs/qwen3_moe.py:qwen3_30b_a3b_h100x16 \\
        --config.data.train="('text/*.parquet',)" --config.data.tokenizer=FOLDER

Source: config.json of Qwen3-30B-A3B and of Qwen3-235B-A22B; their training settings are not
published, those here are usual. Published by Megatron-Bridge, tokens/s a GPU: 30B on 16 H100s
(EP 16, FP8) 8,826; on 8 GB200s (EP 8, MXFP8) 39,936; 235B on 256 H100s (TP 2, PP 8, EP 32, FP8)
1,712; on 256 GB200s (PP 8, EP 32, BF16) 4,916. Folds without stages rest the weights over all
devices; those named pp.. have the stages of the published rows.
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


def qwen3_30b_a3b() -> Config:
    """Qwen3-30B-A3B on any multiple of 8 devices."""
    return Config(
        name="qwen3_30b_a3b",
        model=ModelConfig(
            vocab_size=151936,
            dim=2048,
            num_layers=48,
            ffn_dim=6144,  # of dense layers, which it has none of
            attention=AttentionConfig(
                num_heads=32, num_kv_heads=4, head_dim=128, qk_norm="head",
                rope=RopeConfig(theta=1e6),
            ),
            moe=MoEConfig(
                num_experts=128, top_k=8, ffn_dim=768, dispatch="ragged", budget=1.5
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
    )  # fmt: skip


def qwen3_30b_a3b_h100x16() -> Config:
    """The 30B on 16 H100s, the published row's batch: 16 sequences a time on each GPU, which has
    all experts of a layer while it computes that (ep=16, one sequence a time: half as fast)."""
    base = qwen3_30b_a3b()
    return replace(
        base,
        name="qwen3_30b_a3b_h100x16",
        parallel=ParallelConfig(dp=16, zero=3),
        train=replace(base.train, batch_size=1024, microbatches=4),
    )


def qwen3_30b_a3b_gb200x8() -> Config:
    """The 30B on 8 GB200s, the published row's batch: four sequences a time on each GPU."""
    base = qwen3_30b_a3b()
    return replace(
        base,
        name="qwen3_30b_a3b_gb200x8",
        parallel=ParallelConfig(dp=8, ep=8, zero=3),
        train=replace(base.train, batch_size=512, microbatches=16),
    )


def qwen3_235b_a22b() -> Config:
    """Qwen3-235B-A22B on any multiple of 32 devices."""
    base = qwen3_30b_a3b()
    return replace(
        base,
        name="qwen3_235b_a22b",
        model=replace(
            base.model,
            dim=4096,
            num_layers=94,
            ffn_dim=12288,
            attention=replace(base.model.attention, num_heads=64),
            moe=replace(base.model.moe, ffn_dim=1536),
        ),
        parallel=ParallelConfig(dp=0, ep=32, zero=3),
    )


def qwen3_235b_a22b_h100x256() -> Config:
    """The 235B on 256 H100s; of the published row's 8,192 sequences a step, 2,048: all at once, and
    each GPU has all experts of a layer while it computes that."""
    base = qwen3_235b_a22b()
    return replace(
        base,
        name="qwen3_235b_a22b_h100x256",
        parallel=ParallelConfig(dp=256, zero=3),
        train=replace(base.train, batch_size=2048, microbatches=1),
    )


def qwen3_235b_a22b_gb200x256() -> Config:
    """The 235B on 256 GB200s, the published row's batch: one sequence a time on each GPU."""
    base = qwen3_235b_a22b()
    return replace(
        base,
        name="qwen3_235b_a22b_gb200x256",
        parallel=ParallelConfig(dp=256, ep=32, zero=3),
        train=replace(base.train, batch_size=8192, microbatches=32),
    )


def qwen3_235b_a22b_pp8_h100x256() -> Config:
    """The 235B on 256 H100s by the published fold and batch: eight ranks of four stages each,
    forward and backward merged so that the all-to-alls run under compute."""
    base = qwen3_235b_a22b()
    moe = replace(base.model.moe, dispatch="hierarchical", budget=1.25)
    return replace(
        base,
        name="qwen3_235b_a22b_pp8_h100x256",
        model=replace(base.model, moe=moe, remat="selective"),
        parallel=ParallelConfig(
            dp=16, tp=2, pp=8, vpp=4, schedule="merged", ep=32, node=8, zero=1
        ),
        train=replace(base.train, batch_size=2048, microbatches=128),
    )


def qwen3_235b_a22b_pp8_gb200x256() -> Config:
    """The 235B on 256 GB200s by the published fold and batch (PP 8, VPP 3, EP 32), merged."""
    base = qwen3_235b_a22b()
    moe = replace(base.model.moe, dispatch="ragged", budget=1.25)
    return replace(
        base,
        name="qwen3_235b_a22b_pp8_gb200x256",
        model=replace(base.model, moe=moe, remat="selective"),
        parallel=ParallelConfig(dp=32, pp=8, vpp=3, schedule="merged", ep=32, zero=1),
        train=replace(base.train, batch_size=8192, microbatches=256),
    )
