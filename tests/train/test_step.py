"""The train step: masked batches, accumulation, skipped steps, the router bias."""

from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from moejax.core import params
from moejax.core.mesh import ParallelConfig, make_mesh
from moejax.core.precision import PrecisionConfig
from moejax.data.context import order_tokens
from moejax.train import step
from moejax.train.optimizer import OptimizerConfig, decay_mask, make_optimizer
from moejax.train.setup import Run
from moejax.train.state import init_state
from moejax.train.step import TrainConfig
from pallas_kernels import deviceless
from tests.oracle import max_relative_error
from tests.train.folds import BIAS, LENGTH, ROWS, SEQUENCE, SIGMOID, Case, batches, make_trainer

# Aux loss by document, so that splitting is exact; a bias that moves.
BALANCE = (*BIAS, *SEQUENCE)
ALONE = Case("alone", ParallelConfig(zero=0), "all_gather", 1, (), SIGMOID, BALANCE)
FOLDED = replace(
    ALONE, parallel=ParallelConfig(dp=2, cp=2, tp=2, ep=4, zero=3), dispatch="all_to_all",
    microbatches=4,
)  # fmt: skip


@cache
def trainer(case: Case):
    return make_trainer(case)


def micro(batch, case: Case):
    batch = batch | {"order": order_tokens(batch["segment_ids"], case.parallel.cp)}
    return {k: a.reshape(case.microbatches, -1, LENGTH) for k, a in batch.items()}


def host(state):
    """Returns the state's arrays; the random key as its data."""
    plain = replace(state, key=jax.random.key_data(state.key))
    return jax.tree.map(np.array, plain)


def run(case: Case, batch, state=None):
    """Returns (host state before, host state after, host metrics) of one step."""
    state = trainer(case).new_state() if state is None else state
    before = host(state)
    after, metrics = trainer(case).step(state, micro(batch, case))
    return before, host(after), jax.tree.map(np.asarray, metrics)


def uneven():
    """A batch whose microbatches (and dp ranks) hold very different numbers of targets."""
    batch = {k: a.copy() for k, a in batches(1, 1)[0].items()}
    targets = batch["targets"].reshape(ROWS, LENGTH)
    targets[:4, 1:] = -1  # few in the first microbatch of 4
    targets[8:12] = -1  # none in the third
    return batch


def test_accumulation_equals_one_big_batch_with_uneven_counts():
    _, _, big = run(ALONE, uneven())
    four = replace(ALONE, microbatches=4)
    for case in (four, FOLDED):
        _, _, small = run(case, uneven())
        assert max_relative_error(small["loss"], big["loss"]) < 1e-6
        assert max_relative_error(small["grad_norm"], big["grad_norm"]) < 2e-6
        for mine, right in zip(
            jax.tree.leaves(small["grads"]), jax.tree.leaves(big["grads"]), strict=True
        ):
            assert max_relative_error(mine, right) < 1e-5
        np.testing.assert_array_equal(small["num_tokens"], (uneven()["targets"] >= 0).sum())


def test_a_context_rank_without_a_target_changes_nothing():
    """Case D23: all targets are of tokens that one of two cp ranks has."""
    batch = {k: a.copy() for k, a in batches(1, 1)[0].items()}
    order = order_tokens(batch["segment_ids"], 2)
    np.put_along_axis(batch["targets"], order[..., : LENGTH // 2], -1, axis=-1)
    assert (batch["targets"] >= 0).any()
    (_, _, big), (_, _, small) = (run(case, batch) for case in (ALONE, FOLDED))
    assert max_relative_error(small["loss"], big["loss"]) < 1e-6
    np.testing.assert_array_equal(small["num_tokens"], (batch["targets"] >= 0).sum())
    for mine, right in zip(
        jax.tree.leaves(small["grads"]), jax.tree.leaves(big["grads"]), strict=True
    ):
        assert max_relative_error(mine, right) < 1e-5


@pytest.mark.parametrize("case", [ALONE, FOLDED], ids=["alone", "folded"])
def test_a_batch_with_no_target_and_no_token_teaches_nothing(case):
    batch = batches(1, 1)[0]
    empty = batch | {
        "targets": np.full_like(batch["targets"], -1),
        "segment_ids": np.zeros_like(batch["segment_ids"]),
    }
    _, after, metrics = run(case, empty)
    assert metrics["loss"] == 0.0 and metrics["grad_norm"] == 0.0 and metrics["skipped"] == 0
    for grad in jax.tree.leaves(metrics["grads"]):
        np.testing.assert_array_equal(grad, np.zeros_like(grad))
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(after))


def test_masked_targets_alone_give_loss_zero():
    """Tokens without targets still balance the experts: the loss is 0 and all is finite."""
    batch = batches(1, 1)[0]
    _, _, metrics = run(ALONE, batch | {"targets": np.full_like(batch["targets"], -1)})
    assert metrics["loss"] == 0.0
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(metrics["grads"]))
    head = metrics["grads"]["head"]
    np.testing.assert_array_equal(head, np.zeros_like(head))


@pytest.mark.parametrize("case", [ALONE, FOLDED], ids=["alone", "folded"])
def test_a_step_that_is_not_finite_changes_nothing_and_is_counted(case):
    state = trainer(case).new_state()
    embedding = state.params["embedding"].at[3, 5].set(jnp.nan)
    state = replace(state, params=state.params | {"embedding": embedding})
    state = jax.device_put(state, trainer(case).layout.shardings)
    batch = batches(1, 1)[0]
    batch["tokens"][...] = 3
    before, after, metrics = run(case, batch, state)
    assert metrics["skipped"] == 1 and after.num_skipped == 1 and after.step == before.step + 1
    same = ("params", "buffers", "opt_state", "key")
    for name in same:
        jax.tree.map(
            np.testing.assert_array_equal, getattr(after, name), getattr(before, name)
        )


def test_the_bias_moves_once_a_step_and_loads_sum_to_one():
    for case in (ALONE, replace(ALONE, microbatches=4), FOLDED):
        before, after, metrics = run(case, batches(1, 1)[0])
        load, bias = metrics["moe"]["load"], after.buffers["stack_0"]["block_0"]["moe"]["bias"]
        np.testing.assert_allclose(load.sum(axis=1), np.ones(3), rtol=1e-6)
        mean = load.mean(axis=1, keepdims=True)
        np.testing.assert_allclose(bias, 1e-3 * np.sign(mean - load), atol=1e-9)
        assert not np.any(before.buffers["stack_0"]["block_0"]["moe"]["bias"])
        np.testing.assert_array_equal(metrics["moe"]["bias_max"], bias.max(axis=1))
        np.testing.assert_allclose(
            metrics["moe"]["imbalance"], load.max(axis=1) * load.shape[1], rtol=1e-6
        )
        assert not metrics["moe"]["dropped"].any()


def test_the_first_state_does_not_depend_on_the_fold():
    """`folds.py` makes it once, on one device: here it is made where it rests."""
    made, precision = trainer(FOLDED), PrecisionConfig(*["float32"] * 4)
    mask = decay_mask(made.layout.dims)
    optimizer = make_optimizer(OptimizerConfig(warmup_steps=2), 10, mask)
    state = init_state(made.model, optimizer, made.layout, precision, 0)
    jax.tree.map(np.testing.assert_array_equal, host(state), host(made.new_state()))
    assert params.count(state.params) == params.count(made.layout.abstract.params)


def test_the_step_calls_nothing_on_the_host():
    made = trainer(ALONE)
    text = made.step.lower(made.new_state(), batches(1, 1)[0]).as_text()
    assert "callback" not in text and "infeed" not in text and "outfeed" not in text

    def tells(x):
        jax.debug.callback(lambda _: None, x)
        return x

    assert "callback" in jax.jit(tells).lower(1.0).as_text(), "the check finds one"


def test_a_batch_that_does_not_divide_is_refused():
    config = TrainConfig(batch_size=12, sequence_length=10, microbatches=2)
    config.check(3, 2)
    with pytest.raises(ValueError, match="batch_size=12 does not divide .*dp=4.*multiple of 8"):
        config.check(4, 1)
    with pytest.raises(ValueError, match="10 tokens .* over tp=4"):
        config.check(6, 4)
    with pytest.raises(ValueError, match="train.steps=0 must be at least 1"):
        TrainConfig(steps=0)


def test_on_gpus_a_step_is_scheduled_to_hide_communication(monkeypatch):
    """What the planner compiles with, and what a run on GPUs does."""
    assert set(deviceless.SCHEDULING.items()) <= set(deviceless.COMPILER_OPTIONS.items())
    for platform, options in (("gpu", deviceless.SCHEDULING), ("cpu", None)):
        mesh = SimpleNamespace(devices=np.array([SimpleNamespace(platform=platform)]))
        assert step._options(SimpleNamespace(mesh=mesh)) == options
    monkeypatch.setattr(step, "_options", lambda layout: {"no_such_option": True})
    made = make_trainer(ALONE)
    with pytest.raises(jax.errors.JaxRuntimeError, match="no_such_option"):
        made.step(made.new_state(), batches(1, 1)[0])


@pytest.mark.parametrize("kind", ["dynamic", "ring"])
def test_a_run_orders_tokens_as_its_kind_of_cp_wants_them(kind):
    grid, ids = ParallelConfig(cp=4, ep=4, cp_kind=kind).fold(), np.repeat([[1, 2, 3, 4]] * 2, 4, 1)
    shape = jax.ShapeDtypeStruct((1, 2, 16), np.int32, sharding=NamedSharding(make_mesh(grid), P()))
    run: Any = SimpleNamespace(
        layout=SimpleNamespace(fold=grid), abstract_batch=lambda: {"order": shape}
    )
    order = Run.put(run, {"segment_ids": ids})["order"]
    whole = np.tile(np.arange(16), (1, 2, 1))
    assert np.array_equal(order, whole) == (kind == "dynamic")
    np.testing.assert_array_equal(order[0], order_tokens(ids, 4, grid.groups))
