"""The attention of published models, in full, and shrunken so that each option still acts."""

from dataclasses import replace

from moejax.model.attention import AttentionConfig, MLAConfig
from moejax.model.rope import RopeConfig

_DEEPSEEK_ROPE = RopeConfig(
    dim=64, layout="interleaved", scaling="yarn", factor=40.0, mscale_all_dim=1.0
)
DEEPSEEK_V3 = AttentionConfig(
    kind="mla", num_heads=128, head_dim=128, mla=MLAConfig(q_rank=1536), rope=_DEEPSEEK_ROPE
)
DEEPSEEK_V2_LITE = AttentionConfig(
    kind="mla", num_heads=16, head_dim=128, mla=MLAConfig(),
    rope=replace(_DEEPSEEK_ROPE, mscale=0.707, mscale_all_dim=0.707),
)  # fmt: skip
MOONLIGHT = AttentionConfig(
    kind="mla", num_heads=16, head_dim=128, mla=MLAConfig(),
    rope=RopeConfig(theta=50000.0, dim=64, layout="interleaved"),
)  # fmt: skip
KIMI_K2 = replace(
    DEEPSEEK_V3, num_heads=64,
    rope=replace(_DEEPSEEK_ROPE, theta=50000.0, factor=32.0, beta_fast=1.0),
)  # fmt: skip
QWEN2_MOE = AttentionConfig(
    num_heads=16, num_kv_heads=16, head_dim=128, bias=True, rope=RopeConfig(theta=1e6)
)
QWEN3_MOE = AttentionConfig(
    num_heads=32, num_kv_heads=4, head_dim=128, qk_norm="head", rope=RopeConfig(theta=1e6)
)
MIXTRAL = AttentionConfig(
    num_heads=32, num_kv_heads=8, head_dim=128, rope=RopeConfig(theta=1e6)
)
GPT_OSS = AttentionConfig(  # with pattern "mM"
    num_heads=64, num_kv_heads=8, head_dim=64, bias=True, out_bias=True, window=128, sinks=True,
    rope=RopeConfig(theta=150000.0, scaling="yarn", factor=32.0, truncate=False),
)  # fmt: skip
OLMOE = AttentionConfig(
    num_heads=16, num_kv_heads=16, head_dim=128, qk_norm="full", clip_qkv=8.0
)
GLM_4_5 = AttentionConfig(
    num_heads=96, num_kv_heads=8, head_dim=128, bias=True, qk_norm="head",
    rope=RopeConfig(theta=1e6, dim=64),
)  # fmt: skip


def shrunken(cfg: AttentionConfig, num_heads: int = 4, num_kv_heads: int = 2) -> AttentionConfig:
    """Returns the same options on small heads, stretched from 64 tokens where they are."""
    mla = replace(cfg.mla, kv_rank=16, value_dim=6, q_rank=12 if cfg.mla.q_rank else 0)
    rope = replace(cfg.rope, dim=4 if cfg.rope.dim else 0, theta=100.0, original_length=64)
    return replace(
        cfg, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=8, mla=mla, rope=rope,
        window=3 if cfg.window else 0, clip_qkv=0.5 if cfg.clip_qkv else 0.0,
    )  # fmt: skip


FAMILIES = {
    "DeepSeek-V3": DEEPSEEK_V3,
    "DeepSeek-V2-Lite": DEEPSEEK_V2_LITE,
    "Moonlight": MOONLIGHT,
    "Kimi-K2": KIMI_K2,
    "Qwen2-MoE": QWEN2_MOE,
    "Qwen3-MoE": QWEN3_MOE,
    "Mixtral": MIXTRAL,
    "gpt-oss": GPT_OSS,
    "OLMoE": OLMOE,
    "GLM-4.5": GLM_4_5,
}
