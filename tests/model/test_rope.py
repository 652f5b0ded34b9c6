"""Rotary positions against float64 numpy: layouts, partial rotation, and each way of stretching."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moejax.model.rope import RopeConfig, apply_rope, rope_table
from tests.model.attention_oracle import cos_sin
from tests.model.families import DEEPSEEK_V2_LITE, DEEPSEEK_V3, GPT_OSS, KIMI_K2, MIXTRAL
from tests.oracle import max_relative_error

PLACES = [0, 1, 4095, 4096]
LLAMA3 = RopeConfig(
    theta=500000.0, scaling="llama3", factor=8.0, beta_fast=4.0, original_length=8192
)
CASES = {
    "none": (RopeConfig(theta=1e6), 128),
    "linear": (RopeConfig(scaling="linear", factor=4.0), 64),
    "DeepSeek-V3": (DEEPSEEK_V3.rope, 64),
    "DeepSeek-V2-Lite": (DEEPSEEK_V2_LITE.rope, 64),
    "Kimi-K2": (KIMI_K2.rope, 64),
    "gpt-oss": (GPT_OSS.rope, 64),
    "llama3": (LLAMA3, 128),
    "explicit factor": (replace(DEEPSEEK_V3.rope, attention_factor=1.25), 64),
}


@pytest.mark.parametrize("name", CASES)
def test_tables_are_those_of_the_definition(name):
    cfg, dim = CASES[name]
    right = np.array([cos_sin(cfg, dim, place) for place in PLACES])
    with jax.enable_x64(True):
        table = rope_table(jnp.asarray([PLACES]), dim, cfg, jnp.dtype("float64"))
        mine = np.stack([np.asarray(t[0]) for t in table], axis=1)
    assert max_relative_error(mine, right) < 1e-11
    narrow = rope_table(jnp.asarray([PLACES], jnp.int32), dim, cfg, jnp.dtype("float32"))
    narrow = np.stack([np.asarray(t[0]) for t in narrow], axis=1)
    assert max_relative_error(narrow[:2], right[:2]) < 3e-7
    assert max_relative_error(narrow, right) < 4096 * 2**-23, "an angle of 4096 in float32"


@pytest.mark.parametrize(
    "attention, rope_factor, scale",
    [
        (DEEPSEEK_V3, 1.0, 0.1352338),
        (DEEPSEEK_V2_LITE, 1.0, 0.1147214),
        (replace(DEEPSEEK_V3, rope=RopeConfig(dim=64)), 1.0, 0.0721688),
        (replace(DEEPSEEK_V3, rope=CASES["explicit factor"][0]), 1.25, 0.1352338),
        (GPT_OSS, 0.1 * np.log(32) + 1, 0.125),
        (MIXTRAL, 1.0, 128**-0.5),
    ],
)
def test_the_two_factors_of_yarn(attention, rope_factor, scale):
    assert attention.rope.rope_factor == pytest.approx(rope_factor, abs=1e-12)
    assert attention.scale == pytest.approx(scale, abs=5e-8)


def test_truncation_moves_the_ramp_to_whole_pairs():
    whole = replace(GPT_OSS.rope, truncate=True)
    assert np.abs(whole.speeds(64) / GPT_OSS.rope.speeds(64) - 1).max() > 0.01


@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_pairs_turn_and_the_rest_stays(layout):
    """As multiplication by exp(i angle) of first + i second; 4 of 6 dims turn."""
    x = np.random.default_rng(0).normal(size=(1, 5, 2, 6)).astype(np.float32)
    places = jnp.arange(5, dtype=jnp.int32)[None]
    table = rope_table(places, 4, RopeConfig(), jnp.dtype("float32"))
    mine = np.asarray(apply_rope(jnp.asarray(x), table, layout))
    first, second = ([0, 1], [2, 3]) if layout == "half" else ([0, 2], [1, 3])
    angle = np.arange(5)[:, None] * np.array([1.0, 0.01])[None]
    turned = (x[..., first] + 1j * x[..., second]) * np.exp(1j * angle)[None, :, None]
    right = x.copy()
    right[..., first], right[..., second] = turned.real, turned.imag
    assert max_relative_error(mine, right) < 1e-6
    np.testing.assert_array_equal(mine[..., 4:], x[..., 4:])


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(layout="other"), "rope.layout='other': choose from half, interleaved"),
        (dict(scaling="ntk"), "rope.scaling='ntk': choose from none, linear, yarn, llama3"),
        (dict(dim=3), "rope.dim=3 must be even"),
        (dict(factor=2.0), "rope.factor=2.0 with scaling='none': choose at least 1"),
        (dict(beta_fast=0.5), "rope.beta_fast=0.5 is below beta_slow=1.0"),
    ],
)
def test_what_cannot_be_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        RopeConfig(**changes)
