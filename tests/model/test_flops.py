"""FLOPs against what is published of real models, and windows against a count of pairs."""

from dataclasses import replace

import numpy as np
import pytest

from moejax.model.flops import attention_flops, flops_per_token, linear_flops_per_token
from moejax.model.moe import MoEConfig
from moejax.model.transformer import ModelConfig
from tests.model.families import DEEPSEEK_V3, GPT_OSS, KIMI_K2, MIXTRAL, QWEN3_MOE


def model(attention, vocab, layers, dim, experts, top_k, ffn, **more) -> ModelConfig:
    shared = more.pop("shared", 0)
    moe = MoEConfig(num_experts=experts, top_k=top_k, ffn_dim=ffn, shared_ffn_dim=shared)
    return ModelConfig(
        vocab_size=vocab, dim=dim, num_layers=layers, attention=attention, moe=moe, **more
    )


QWEN3_235B = model(replace(QWEN3_MOE, num_heads=64), 151936, 94, 4096, 128, 8, 1536)
GPT_OSS_FULL = replace(GPT_OSS, window=0)


@pytest.mark.parametrize(
    "expected, length, cfg",
    [
        (249.81, 4096, model(DEEPSEEK_V3, 129280, 61, 7168, 256, 8, 2048,
                             shared=2048, first_k_dense=3, ffn_dim=18432)),
        (204.48, 4096, model(KIMI_K2, 163840, 61, 7168, 384, 8, 2048,
                             shared=2048, first_k_dense=1, ffn_dim=18432)),
        (148.03, 4096, QWEN3_235B),
        (734.7, 131072, QWEN3_235B),
        (23.006, 4096, model(QWEN3_MOE, 151936, 48, 2048, 128, 8, 768)),
        (79.71, 4096, model(MIXTRAL, 32000, 32, 4096, 8, 2, 14336)),
        (242.20, 4096, model(replace(MIXTRAL, num_heads=48), 32768, 56, 6144, 8, 2, 16384)),
        (34.33, 4096, model(GPT_OSS_FULL, 201088, 36, 2880, 128, 4, 2880)),
        # With windows: the 1077 TFLOP/s over 33024 tokens/s of one published row.
        (32.61, 4096, model(GPT_OSS, 201088, 36, 2880, 128, 4, 2880, pattern="mM")),
    ],
)  # fmt: skip
def test_flops_of_published_models(expected, length, cfg):
    """GFLOPs per token, as Megatron Core and, for windows, Megatron-Bridge count them."""
    total = linear_flops_per_token(cfg) + attention_flops(cfg, length) / length
    assert total / 1e9 == pytest.approx(expected, rel=1e-3)


def test_a_window_counts_the_pairs_that_it_shows():
    """Its last key is counted half, as of a whole row the diagonal is."""
    attention = replace(MIXTRAL, window=5, num_heads=1, num_kv_heads=1, head_dim=2)
    cfg = ModelConfig(num_layers=1, pattern="m", attention=attention)
    ahead = np.arange(40)[:, None] - np.arange(40)[None]
    pairs = ((ahead >= 0) & (ahead < 5)).sum() - 5 / 2
    assert attention_flops(cfg, 40) == pytest.approx(12 * 2 * pairs)
    whole = replace(cfg, pattern="M", attention=replace(attention, window=0))
    assert attention_flops(cfg, [3, 5]) == attention_flops(whole, [3, 5])


def test_documents_are_counted_one_by_one():
    cfg = ModelConfig()
    segments = np.asarray([[1, 1, 1, 2, 2, 0], [1, 1, 1, 1, 1, 1]])
    cores = attention_flops(cfg, [3, 2, 6]) / 11
    assert flops_per_token(cfg, segments) == pytest.approx(linear_flops_per_token(cfg) + cores)
