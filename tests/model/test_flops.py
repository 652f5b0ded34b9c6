"""FLOPs of windows and documents, counted pair by pair (of published models: tests/configs)."""

from dataclasses import replace

import numpy as np
import pytest

from moejax.model.flops import attention_flops, flops_per_token, linear_flops_per_token
from moejax.model.transformer import ModelConfig
from tests.model.families import MIXTRAL


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
