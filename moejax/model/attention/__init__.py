"""Attention layers, one file for each kind, and what they remember for decoding."""

from moejax.model.attention.config import AttentionConfig, MLAConfig
from moejax.model.attention.gqa import Attention
from moejax.model.attention.memory import Cache, empty_cache
from moejax.model.attention.mla import LatentAttention

ATTENTIONS = {"gqa": Attention, "mla": LatentAttention}

__all__ = ["ATTENTIONS", "AttentionConfig", "Cache", "MLAConfig", "empty_cache"]
