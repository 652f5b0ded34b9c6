"""DeepSeek-V3 and R1: 671B parameters, 37B of them active.

    python -m launch.train --config=configs/deepseek_v3.py:v3_h100x1024 \\
        --config.data.train="('text/*.parquet',)" --config.data.tokenizer=FOLDER

Source: config.json of DeepSeek-V3 (R1 has the same); rates, batch and initialisation of its
technical report (section 4.2). Published by Megatron-Bridge, tokens/s a GPU: on 1,024 H100s (TP 2,
PP 8, EP 64, FP8) 1,297; on 256 GB200s (PP 4, EP 64, BF16) 3,139. Folds without
stages rest the weights over all devices; those named pp.. have the stages of the published rows.
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


def v3() -> Config:
    """DeepSeek-V3 on any multiple of 64 devices, 14.8T tokens."""
    return Config(
        name="deepseek_v3",
        model=ModelConfig(
            vocab_size=129280,
            dim=7168,
            num_layers=61,
            first_k_dense=3,
            mtp_depth=1,
            ffn_dim=18432,
            attention=AttentionConfig(
                kind="mla",
                num_heads=128,
                head_dim=128,
                mla=MLAConfig(q_rank=1536, kv_rank=512, value_dim=128),
                rope=RopeConfig(
                    dim=64, layout="interleaved", scaling="yarn", factor=40.0, mscale_all_dim=1.0
                ),
            ),
            moe=MoEConfig(
                num_experts=256,
                top_k=8,
                ffn_dim=2048,
                shared_ffn_dim=2048,
                dispatch="ragged",
                budget=1.5,
                router=RouterConfig(
                    score="sigmoid", scale=2.5, num_groups=8, topk_groups=4, num_group_score=2
                ),
                balance=BalanceConfig(batch_coeff=0.0, sequence_coeff=1e-4, bias_rate=1e-3),
            ),
            init_std=0.006,
            remat="full",
        ),
        parallel=ParallelConfig(dp=0, ep=64, zero=3),
        precision=PrecisionConfig(compute_dtype="bfloat16"),
        train=TrainConfig(
            steps=235_000, batch_size=15360, sequence_length=4096, microbatches=15, eval_every=1000
        ),
        optimizer=OptimizerConfig(learning_rate=2.2e-4, warmup_steps=2000),
        checkpoint=CheckpointConfig(save_every=500),
    )


def r1() -> Config:
    """DeepSeek-R1: the same architecture, to start from its weights (init.from_hf)."""
    return replace(v3(), name="deepseek_r1")


def v3_h100x1024() -> Config:
    """V3 on 1,024 H100s, the published row's batch: eight sequences a time on two GPUs."""
    base = v3()
    return replace(
        base,
        name="deepseek_v3_h100x1024",
        parallel=ParallelConfig(dp=512, tp=2, ep=64, zero=3),
        train=replace(base.train, batch_size=8192, microbatches=2),
    )


def v3_gb200x256() -> Config:
    """V3 without MTP on 256 GB200s, the published row's batch: one sequence a time on each GPU."""
    base = v3()
    return replace(
        base,
        name="deepseek_v3_gb200x256",
        model=replace(base.model, mtp_depth=0),
        parallel=ParallelConfig(dp=256, ep=64, zero=3),
        train=replace(base.train, batch_size=4096, microbatches=16),
    )


def v3_h100x256() -> Config:
    """V3 on 256 H100s, where memory is short: four sequences a time on two GPUs."""
    base = v3()
    return replace(
        base,
        name="deepseek_v3_h100x256",
        parallel=ParallelConfig(dp=128, tp=2, ep=256, zero=3),
        train=replace(base.train, batch_size=4096, microbatches=8),
    )


def v3_gb300x256() -> Config:
    """V3 on 256 GB300s, the published row's batch, all at once: 16 sequences on each GPU."""
    base = v3()
    return replace(
        base,
        name="deepseek_v3_gb300x256",
        parallel=ParallelConfig(dp=256, ep=64, zero=3),
        train=replace(base.train, batch_size=4096, microbatches=1),
    )


def v3_pp8_h100x1024() -> Config:
    """V3 on 1,024 H100s by the published fold and batch: eight ranks of four stages each, forward
    and backward merged so that the all-to-alls run under compute."""
    base = v3()
    moe = replace(base.model.moe, dispatch="hierarchical", budget=1.25)
    return replace(
        base,
        name="deepseek_v3_pp8_h100x1024",
        model=replace(base.model, moe=moe, remat="selective"),
        parallel=ParallelConfig(
            dp=64, tp=2, pp=8, vpp=4, schedule="merged", ep=64, node=8, zero=1
        ),
        train=replace(base.train, batch_size=8192, microbatches=128),
    )


def v3_pp4_gb200x256() -> Config:
    """V3 on 256 GB200s by the published fold and batch: four ranks of four stages each, merged."""
    base = v3()
    return replace(
        base,
        name="deepseek_v3_pp4_gb200x256",
        model=replace(
            base.model, moe=replace(base.model.moe, budget=1.25), remat="selective"
        ),
        parallel=ParallelConfig(dp=64, pp=4, vpp=4, schedule="merged", ep=64, zero=1),
        train=replace(base.train, batch_size=8192, microbatches=128),
    )
