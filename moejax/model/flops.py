"""Model FLOPs and parameter counts, from the shape of a model alone.

The formula is the field's usual one (Megatron Core's): forward plus backward is three times the
forward, a multiply-add is two; recomputation, the router, norms and padding are not counted, the
causal half of attention is.
"""

import numpy as np

from moejax.model.transformer import ModelConfig


def linear_flops_per_token(cfg: ModelConfig) -> float:
    """Returns the FLOPs of all weight matmuls, forward and backward, for one token."""
    attention = cfg.attention
    query, key = (
        heads * attention.head_dim for heads in (attention.num_heads, attention.num_kv_heads)
    )
    moe, width = cfg.moe, cfg.moe.latent_dim or cfg.dim
    experts = 3 * width * moe.top_k * moe.ffn_dim + 2 * cfg.dim * moe.latent_dim
    per_layer = {
        "D": 3 * cfg.dim * cfg.ffn_dim,
        "M": experts + 3 * cfg.dim * moe.shared_ffn_dim,
    }
    mlp = sum(per_layer[kind] for kind in cfg.kinds())
    projections = cfg.num_layers * (query + 2 * key + query)
    return 6.0 * (mlp + cfg.dim * (projections + cfg.vocab_size))


def attention_flops(cfg: ModelConfig, squared_lengths: float) -> float:
    """Returns the FLOPs of the attention cores, forward and backward, for documents whose squared
    lengths add up to `squared_lengths`. A sliding window is not discounted."""
    width = cfg.attention.num_heads * cfg.attention.head_dim
    return 6.0 * width * cfg.num_layers * squared_lengths


def flops_per_token(cfg: ModelConfig, segment_ids: np.ndarray) -> float:
    """Returns the mean FLOPs per token of packed rows [..., L], padding left out."""
    rows = segment_ids.reshape(-1, segment_ids.shape[-1])
    lengths = np.concatenate([np.unique(row[row > 0], return_counts=True)[1] for row in rows])
    tokens = max(int(lengths.sum()), 1)
    squared = float((lengths.astype(np.float64) ** 2).sum())
    return linear_flops_per_token(cfg) + attention_flops(cfg, squared) / tokens


def inactive_params(cfg: ModelConfig) -> int:
    """Returns how many expert parameters a token does not use."""
    idle = cfg.moe.num_experts - cfg.moe.top_k
    return cfg.kinds().count("M") * idle * 3 * (cfg.moe.latent_dim or cfg.dim) * cfg.moe.ffn_dim
