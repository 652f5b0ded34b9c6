"""Public bug reports of routers, each with its figures: on one device and on four folds of 8,
computed again in the backward pass or not, layers scanned over.

Of two MoE layers the first has the case, the second the same with its experts in reverse order.
Cases of losses, loads and biases: tests/train/test_cases.py; of kernels: tests/pallas_kernels.

D01: vllm-project/vllm#13474. D02: huggingface/transformers#41647. D03: pytorch/torchtitan#2258.
D04: NVIDIA/Megatron-LM#1545. D07: NVIDIA/Megatron-LM#1984. D16: NVIDIA/Megatron-LM#1877.
"""

import jax
import numpy as np
import pytest

from moejax.core.mesh import ParallelConfig
from moejax.model.balance import BalanceConfig
from moejax.model.moe import MoEConfig
from moejax.model.router import RouterConfig
from tests.cases import (
    FFN,
    LAYERS,
    D,
    Place,
    everywhere,
    layer_program,
    mirrored,
    new_layers,
    once,
    place,
    table,
)
from tests.oracle import max_relative_error

QUIET = BalanceConfig(batch_coeff=0)
BIASED = BalanceConfig(batch_coeff=0, bias_rate=1e-3)


def routed(at, cfg, logits_E, bias_E=0.0, linear_E=None, pulled=()):
    """Returns (aux, gradients of (weights, buffers, x)) of layers whose 16 tokens all have the same
    logits, and whose expert e returns the unit vector e: "y" holds a weight for each expert.

    The gradients are of the mean weight of the expert `pulled`, and of the balance losses.
    """
    weights, buffers = new_layers(cfg)
    weights["w_router"][:, 0] = mirrored(logits_E)
    weights["experts"]["w_in"][...] = 1  # a token is a unit vector, too: every product is 1
    unit_EFD = np.eye(cfg.num_experts, D)[:, None] / (FFN / (1 + np.exp(-1.0)))
    weights["experts"]["w_out"][...] = unit_EFD
    buffers["bias"][...] = mirrored(np.broadcast_to(bias_E, len(logits_E)))
    if linear_E is not None:
        weights["b_router"][...] = mirrored(linear_E)
    ids = np.zeros((8, 2), np.int32)
    pull = np.zeros((LAYERS, ids.size, D), np.float32)
    for expert in pulled:
        pull[0, :, expert] = pull[1, :, cfg.num_experts - 1 - expert] = 1 / ids.size
    program = layer_program(place(at[0], cfg.num_experts), at[1], cfg)
    by_token, aux, grads = program(weights, buffers, ids, np.eye(D, dtype=np.float32)[ids], pull)
    return jax.tree.map(np.asarray, (by_token | aux, grads))


def check_choice(aux, experts, weights):
    """Asserts that all tokens chose these experts, and have these weights on them."""
    num_experts = aux["load_E"].shape[1]
    for layer in range(LAYERS):
        mine = experts if layer == 0 else [num_experts - 1 - e for e in experts]
        wanted = np.zeros(D)
        wanted[mine] = weights
        assert {frozenset(row) for row in aux["experts"][layer].tolist()} == {frozenset(mine)}
        np.testing.assert_allclose(
            aux["y"][layer], np.broadcast_to(wanted, (16, D)), rtol=2e-6, atol=1e-9
        )
        np.testing.assert_array_equal(np.flatnonzero(aux["load_E"][layer] == 16), sorted(mine))
    np.testing.assert_array_equal(aux["load_E"].sum(axis=1), [16 * len(experts)] * LAYERS)
    np.testing.assert_array_equal(aux["dropped"], [0, 0])


def check_gradient(grads, right_E, rtol=5e-6):
    """Asserts the gradient of the logits, which all tokens share."""
    right = np.zeros(grads[0]["w_router"].shape)
    right[:, 0] = mirrored(right_E)
    np.testing.assert_allclose(grads[0]["w_router"], right, rtol=rtol, atol=1e-8)


# Of 8 experts, where a case has 4: the others are far behind.
FAR = [-30.0] * 4
GROUPS = RouterConfig(
    score="sigmoid", scale=2.5, num_groups=4, topk_groups=2, num_group_score=2
)  # fmt: skip
ONE_GROUP = RouterConfig(score="sigmoid")


@everywhere
def test_excluded_groups_stay_out_where_biased_scores_are_negative(at):
    """Case D01: scores .5, biased -.1 -.2 | -.1 -.3 | -1.5 -1.5 | -1.5 -1.5; of the groups 0 and 1
    the experts 0, 1, 2, with 2.5 / 3 each."""
    cfg = MoEConfig(num_experts=8, top_k=3, ffn_dim=FFN, router=GROUPS, balance=BIASED)
    bias = [-0.6, -0.7, -0.6, -0.8, -2, -2, -2, -2]
    aux, grads = routed(at, cfg, np.zeros(8), bias, pulled=[0])
    check_choice(aux, [0, 1, 2], [0.833333] * 3)
    w, slope = 1 / 3, 0.5  # of log sigmoid at 0
    check_gradient(grads, 2.5 * slope * np.array([w * (1 - w), -w * w, -w * w, 0, 0, 0, 0, 0]))
    aux, _ = routed(at, cfg, np.zeros(8), OUTSIDE)
    check_choice(aux, [0, 1, 2], [0.833333] * 3)


# Biased: .1 0 | .1 -.1 | .6 -1.5 | -1.5 -1.5: the best expert is in a group whose sum is not.
OUTSIDE = [-0.4, -0.5, -0.4, -0.6, 0.1, -2, -2, -2]


@everywhere
def test_the_bias_steers_the_choice_and_not_the_weights(at):
    """Case D02: sigmoid scores .6 .5 .4 .3, and .5 added to the third: experts 2 and 0 with weights
    .4 and .6, and no gradient at the bias. Case D01 with one group: the best of all experts."""
    cfg = MoEConfig(num_experts=8, top_k=2, ffn_dim=FFN, router=ONE_GROUP, balance=BIASED)
    logits, bias = [0.405465, 0.0, -0.405465, -0.847298, *FAR], [0, 0, 0.5, 0, 0, 0, 0, 0]
    aux, grads = routed(at, cfg, logits, bias, pulled=[0])
    check_choice(aux, [2, 0], [0.4, 0.6])
    np.testing.assert_array_equal(aux["experts"][:, 0], [[2, 0], [5, 7]])  # .9 before .6
    slope = 0.6 * 0.4  # of a softmax of two, times 1 - .6 and 1 - .4 of log sigmoid
    check_gradient(grads, [slope * 0.4, 0, -slope * 0.6, 0, 0, 0, 0, 0])
    np.testing.assert_array_equal(grads[1]["bias"], np.zeros((2, 8)))
    aux, _ = routed(at, cfg, logits)
    check_choice(aux, [0, 1], [0.545455, 0.454545])
    aux, _ = routed(at, cfg, np.zeros(8), OUTSIDE)
    assert set(aux["experts"][0, 0]) == {4, 0}  # of equals, 0 and 2, the first


SOFTMAX = RouterConfig(linear_bias=True)
LINEAR = MoEConfig(num_experts=8, top_k=2, ffn_dim=FFN, router=SOFTMAX, balance=QUIET)


@everywhere
def test_the_routers_linear_bias_counts_and_weights_are_renormalised(at):
    """Case D03: x w = [2, 1, 0, -1] and a linear bias of 3 on the third: experts [2, 0] with
    weights .731059 and .268941."""
    zeros = np.zeros(4)
    aux, grads = routed(at, LINEAR, [2, 1, 0, -1, *FAR], linear_E=[0, 0, 3, 0, *zeros], pulled=[2])
    check_choice(aux, [2, 0], [0.731059, 0.268941])
    np.testing.assert_array_equal(aux["experts"][:, 0], [[2, 0], [5, 7]])
    slope = 0.196612  # .731059 * .268941
    right = [-slope, 0, slope, 0, *zeros]
    check_gradient(grads, right)
    np.testing.assert_allclose(grads[0]["b_router"], mirrored(right), rtol=5e-6, atol=1e-8)


@once
@pytest.mark.parametrize("low", [-60.0, -200.0])
def test_tiny_sigmoids_are_normalised_without_an_epsilon(at, low):
    """Case D04: logits [-60, -61, -61, -61] have the probabilities .475367 and thrice .174878, and
    the loss 1.901468; so have they at -200, where a sigmoid is 0 in float32."""
    router = RouterConfig(score="sigmoid", renormalize=False)
    losses = BalanceConfig(batch_coeff=0.5)
    cfg = MoEConfig(num_experts=4, top_k=1, ffn_dim=FFN, router=router, balance=losses)
    aux, grads = routed(at, cfg, [low, low - 1, low - 1, low - 1])
    np.testing.assert_array_equal(aux["load_E"], mirrored([16, 0, 0, 0]))
    np.testing.assert_allclose(aux["batch_loss"], [1.901468] * 2, rtol=1e-6)
    # d loss / d logit_e is 4 P_0 (1 - P_0) for the first and -4 P_0 P_e for the others.
    right = 0.5 * 4 * 0.475367 * np.array([1 - 0.475367, *[-0.174878] * 3])
    check_gradient(grads, right)


@everywhere
def test_all_tokens_on_one_rank(at):
    """Case D16: 4 tokens on each of 8 devices, all to experts 0 and 1 in one layer and to 6 and 7
    in the other, of ep=4 the first rank and the last: nothing is dropped, the output is that of one
    device, and experts without a token have gradients of 0."""
    weights, buffers = new_layers(LINEAR)
    rng = np.random.default_rng(0)
    ids, x = np.zeros((8, 4), np.int32), rng.normal(size=(8, 4, D)).astype(np.float32)
    pull = rng.normal(size=(LAYERS, 32, D)).astype(np.float32)
    oracle = layer_program(Place(ParallelConfig(zero=0), "reference"), "none", LINEAR)
    run = layer_program(place(at[0], 8), at[1], LINEAR)
    for favourites in (((0, 1), (6, 7)), ((6, 7), (0, 1))):
        for layer, experts in enumerate(favourites):
            weights["b_router"][layer] = 50.0 * np.isin(np.arange(8), experts)
        arguments = (weights, buffers, ids, x, pull)
        (by_token, aux, grads), (right, _, right_grads) = run(*arguments), oracle(*arguments)
        assert max_relative_error(by_token["y"], right["y"]) < 1e-5
        for mine, wanted in zip(*map(jax.tree.leaves, (grads, right_grads)), strict=True):
            assert max_relative_error(mine, wanted) < 1e-5
        np.testing.assert_array_equal(aux["dropped"], [0, 0])
        for layer, experts in enumerate(favourites):
            busy_E = np.isin(np.arange(8), experts)
            np.testing.assert_array_equal(aux["load_E"][layer], 32 * busy_E)
            for grad in grads[0]["experts"].values():
                some_E = np.asarray(grad)[layer].reshape(8, -1).any(axis=1)
                np.testing.assert_array_equal(some_E, busy_E)


@once
def test_padding_counts_nowhere_where_a_device_has_as_many_tokens_as_experts(at):
    """Case D07 again, of 6 experts, and 6 tokens on each device: a mask that is broadcast along the
    experts would fit. Losses of 6 experts, of which 2 share all tokens: 6 / 2."""
    every = BalanceConfig(batch_coeff=1, sequence_coeff=1, global_coeff=1, z_coeff=1)
    router = RouterConfig(renormalize=False)
    cfg = MoEConfig(num_experts=6, top_k=1, ffn_dim=FFN, router=router, balance=every)
    here = place(at[0], 6)
    copies = here.parallel.num_devices()
    ids = np.tile([0, 0, 1, 1, -3, -3], (copies, 1)).astype(np.int32)
    x = np.eye(D, dtype=np.float32)[np.where(ids < 0, 2, ids)]
    pull = np.random.default_rng(0).normal(size=(LAYERS, ids.size, D)).astype(np.float32)
    weights, buffers = new_layers(cfg)
    far, found = [-1e3] * 4, []
    for padding in ([5, -5, *far], [1e4] * 6):
        weights["w_router"][:, :3] = table([5, -5, *far], [-5, 5, *far], padding)
        made = layer_program(here, at[1], cfg)(weights, buffers, ids, x, pull)
        by_token, aux, grads = jax.tree.map(np.asarray, made)
        for loss in ("batch_loss", "sequence_loss", "global_loss"):
            np.testing.assert_allclose(aux[loss], [3.0, 3.0], rtol=1e-6)
        np.testing.assert_allclose(aux["z_loss"], [25.00045] * 2, rtol=1e-6)
        np.testing.assert_array_equal(aux["load_E"], copies * mirrored([2, 2, 0, 0, 0, 0]))
        np.testing.assert_array_equal(aux["dropped"], [0, 0])
        assert not by_token["y"].reshape(LAYERS, copies, 6, D)[:, :, 4:].any()
        assert not grads[2][:, 4:].any() and grads[2][:, :4].any()
        # The rows of the router that only padding and no token reads are what changed.
        assert not grads[0]["w_router"][:, 2:].any() and grads[0]["w_router"][:, :2].any()
        d_x = np.delete(grads[2], 2, axis=-1)  # but for what the changed row of the router gives
        found.append((by_token, aux, grads[0], d_x))
    jax.tree.map(np.testing.assert_array_equal, *found)
