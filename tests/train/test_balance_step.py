"""Balance in the real train step: loads, biases and losses of whole steps, on one device and folds,
with layers scanned over and computed again."""

from dataclasses import replace
from functools import cache

import jax
import numpy as np
import pytest

from moejax.core.mesh import ParallelConfig
from moejax.model.balance import BalanceConfig
from moejax.model.moe import MoEConfig
from tests.train.folds import Case, make_trainer

TINY = (
    ("num_experts", 2), ("top_k", 1), ("shared_ffn_dim", 0),
)  # fmt: skip
PLAIN = (("renormalize", False),)
OFF = (("batch_coeff", 0.0), ("z_coeff", 0.0))
CASES = {
    "alone": Case("alone", ParallelConfig(zero=0), "all_gather"),
    "remat": Case("remat", ParallelConfig(zero=0), "all_gather", model=(("remat", "full"),)),
    "dp2tp2-ep2": Case("", ParallelConfig(dp=2, tp=2, ep=2, zero=3), "all_to_all"),
    "tp4-etp4-remat": Case(
        "", ParallelConfig(tp=4, etp=4), "all_gather", model=(("remat", "full"),)
    ),
    "dp2-ep2": Case("", ParallelConfig(dp=2, ep=2, zero=1), "ragged", model=(("remat", "full"),)),
}


@cache
def trainer(name: str, balance=(), score="softmax"):
    """Two scanned layers of two experts; tokens are what the router sees."""
    case = CASES[name]
    router = (*PLAIN, ("score", score))
    model = (("num_layers", 2), *case.model)
    return make_trainer(
        replace(case, model=model, moe=TINY, router=router, balance=(*OFF, *balance))
    )


def first_state(made, logit: float = 10.0):
    """Layer 0 sends token i < 32 to expert 0 and others to expert 1, layer 1 the other way."""
    state = made.new_state()
    params = jax.tree.map(np.array, state.params)
    sign_V = np.where(np.arange(64) < 32, 1.0, -1.0)
    params["embedding"] = np.broadcast_to(sign_V[:, None], (64, 32)).astype(np.float32)
    block = params["stack_0"]["block_0"]
    block["attention"]["w_o"][...] = 0
    block["moe"]["experts"]["w_out"][...] = 0
    layer_LDE = np.array([[[1.0, -1.0]], [[-1.0, 1.0]]]) * logit / 32
    block["moe"]["w_router"] = np.broadcast_to(layer_LDE, (2, 32, 2)).astype(np.float32)
    return jax.device_put(replace(state, params=params), made.layout.shardings)


def batch(tokens_mBL, segments_mBL=None):
    """A batch of [microbatches, rows, L] whose every token has itself for a target."""
    tokens = np.asarray(tokens_mBL, np.int32)
    segments = np.ones_like(tokens) if segments_mBL is None else np.asarray(segments_mBL, np.int32)
    positions = np.broadcast_to(np.arange(tokens.shape[-1], dtype=np.int32), tokens.shape)
    targets = np.where(segments > 0, tokens, -1)
    return dict(tokens=tokens, targets=targets, segment_ids=segments, positions=positions)


def buffers(state):
    return jax.tree.map(np.asarray, state.buffers)["stack_0"]["block_0"]["moe"]


RUNNING = {"alone": 1, "dp2tp2-ep2": 1, "dp2-ep2": 1, "tp4-etp4-remat": 1}


@pytest.mark.parametrize("name", RUNNING)
def test_the_global_loss_counts_the_microbatches_so_far(name):
    """Microbatch 0 all to expert 0, 1 all to expert 1: batch 2 and 2; global 2, then 1; mean 1.5.
    The next step starts anew."""
    made = trainer(name, (("batch_coeff", 1e-6), ("global_coeff", 1e-6)))
    turns, state = batch([[[1, 2], [3, 4]], [[41, 42], [43, 44]]]), first_state(made)
    for _ in range(2):
        state, metrics = made.step(state, turns)
        moe = jax.tree.map(np.asarray, metrics["moe"])
        np.testing.assert_allclose(moe["batch_loss"], [2.0, 2.0], rtol=1e-5)
        np.testing.assert_allclose(moe["global_loss"], [1.5, 1.5], rtol=1e-5)
        np.testing.assert_array_equal(buffers(state)["load_before"], np.zeros((2, 2)))


def test_the_busiest_rank_is_that_of_the_worst_microbatch():
    made = trainer("dp2-ep2", (("batch_coeff", 1e-6),))
    _, metrics = made.step(first_state(made), batch([[[1, 2], [43, 44]], [[41, 42], [43, 1]]]))
    np.testing.assert_allclose(np.asarray(metrics["moe"]["busiest_rank"]), [1.5, 1.5])
    np.testing.assert_allclose(np.asarray(metrics["moe"]["imbalance"]), [1.25, 1.25])


@pytest.mark.parametrize("name", ["alone", "remat", "dp2tp2-ep2", "tp4-etp4-remat"])
def test_quantiles_follow_from_the_margins_of_each_microbatch(name):
    """Of two experts, a token with logits +-d has the margins max(2d, 0) and max(-2d, 0): of 4
    tokens the third largest, of 2 microbatches the mean; the next step chooses by it."""
    made = trainer(name, (("quantile_rate", 0.5),))
    state = first_state(made)
    params = jax.tree.map(np.array, state.params)
    scale = np.array([4, 3, 2, -1, 3.5, 2.5, 0.5, -2.0], np.float32)  # of tokens 0 .. 7
    place = np.arange(32) % 4
    params["embedding"][:8] = scale[:, None] * (place == 0) + 4.0 * (place == 1)
    router = np.zeros((2, 32, 2), np.float32)
    router[:, ::4] = [0.2, -0.2]
    params["stack_0"]["block_0"]["moe"]["w_router"] = router
    state = jax.device_put(replace(state, params=params), made.layout.shardings)
    logit_t = 8 * 0.2 * scale / np.sqrt((scale**2 + 16) / 4)
    again = batch(np.arange(8).reshape(2, 2, 2))
    state, metrics = made.step(state, again)
    np.testing.assert_array_equal(metrics["moe"]["load"], [[0.75, 0.25]] * 2)
    third = [np.sort(np.maximum(2 * logit_t[first : first + 4], 0))[1] for first in (0, 4)]
    half = 0.5 * np.mean(third) / 2  # half of the way; the other expert's threshold is 0
    bias = buffers(state)["bias"]
    np.testing.assert_allclose(bias, [[-half, half]] * 2, rtol=1e-5)
    state = replace(state, params=jax.device_put(params, made.layout.shardings.params))
    state, metrics = made.step(state, again)
    share = np.mean(2 * logit_t - 2 * half > 0)
    assert share == 0.625
    np.testing.assert_array_equal(metrics["moe"]["load"], [[share, 1 - share]] * 2)


def test_a_layer_refuses_quantiles_of_all_its_experts():
    balance = BalanceConfig(batch_coeff=0, quantile_rate=0.5)
    with pytest.raises(ValueError, match="top_k=4 of num_experts=4: no expert is left out"):
        MoEConfig(num_experts=4, top_k=4, balance=balance)
