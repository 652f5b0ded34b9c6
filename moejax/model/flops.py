"""Model FLOPs and parameter counts, from the shape of a model alone.

The formula is the field's usual one (Megatron Core's): forward plus backward is three times the
forward, a multiply-add is two; recomputation, the router, norms and padding are not counted, the
causal half of attention is, and of a window what it shows. Modules that predict further tokens
count as the layers, projections and heads that they are.
"""

import numpy as np
from numpy.typing import ArrayLike

from moejax.model.attention import AttentionConfig
from moejax.model.config import ModelConfig


def _attention_weights(cfg: AttentionConfig, dim: int) -> int:
    """Returns the multiply-adds of a token with the projections of one attention layer."""
    query, out = cfg.num_heads * cfg.qk_dim, cfg.num_heads * cfg.value_dim
    if cfg.kind == "gqa":
        return dim * (query + 2 * cfg.num_kv_heads * cfg.head_dim + out)
    rank, latent = cfg.mla.q_rank, cfg.mla.kv_rank
    queries = rank * (dim + query + 1) if rank else dim * query
    keys_values = cfg.num_heads * (cfg.head_dim + cfg.value_dim)
    return queries + latent * (dim + keys_values + 1) + dim * cfg.rope_dim + out * dim


def linear_flops_per_token(cfg: ModelConfig) -> float:
    """Returns the FLOPs of all weight matmuls, forward and backward, for one token."""
    moe, width = cfg.moe, cfg.moe.latent_dim or cfg.dim
    experts = 3 * width * moe.top_k * moe.ffn_dim + 2 * cfg.dim * moe.latent_dim
    per_layer = {
        "D": 3 * cfg.dim * cfg.ffn_dim,
        "M": experts + 3 * cfg.dim * moe.shared_ffn_dim,
    }
    kinds, heads = cfg.all_kinds(), 1 + cfg.mtp_depth
    mlp = sum(per_layer[kind] for kind in kinds)
    attention = len(kinds) * _attention_weights(cfg.attention, cfg.dim)
    joined = cfg.mtp_depth * 2 * cfg.dim**2
    return 6.0 * (mlp + attention + joined + heads * cfg.dim * cfg.vocab_size)


def attention_flops(cfg: ModelConfig, lengths: ArrayLike) -> float:
    """Returns the FLOPs of the attention cores, forward and backward, for documents of these
    lengths. A query of a layer with a window is counted with the keys that it sees."""
    lengths = np.asarray(lengths, np.float64)
    width = cfg.attention.num_heads * (cfg.attention.qk_dim + cfg.attention.value_dim) / 2
    squares = 0.0  # twice the pairs of query and key that are seen
    windows = cfg.windows()
    for window in (*windows, *windows[-1:] * cfg.mtp_depth):
        seen = np.minimum(lengths, window) if window else lengths
        squares += float((2 * lengths * seen - seen**2).sum())
    return 6.0 * width * squares


def flops_per_token(cfg: ModelConfig, segment_ids: np.ndarray) -> float:
    """Returns the mean FLOPs per token of packed rows [..., L], padding left out."""
    rows = segment_ids.reshape(-1, segment_ids.shape[-1])
    lengths = np.concatenate([np.unique(row[row > 0], return_counts=True)[1] for row in rows])
    tokens = max(int(lengths.sum()), 1)
    return linear_flops_per_token(cfg) + attention_flops(cfg, lengths) / tokens


def inactive_params(cfg: ModelConfig) -> int:
    """Returns how many expert parameters a token does not use."""
    moe, width = cfg.moe, cfg.moe.latent_dim or cfg.dim
    expert = 3 * width * moe.ffn_dim + (2 * moe.ffn_dim + width if moe.bias else 0)
    return cfg.all_kinds().count("M") * (moe.num_experts - moe.top_k) * expert
