"""The player: stages over ranks give what one device gives (tests/train/folds.py has the folds)."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from moejax.core.mesh import ParallelConfig
from moejax.model.config import ModelConfig
from moejax.parallel.stages import CHOICES, in_slots, in_units, pipeline_of
from moejax.train.checkpoint import CheckpointConfig, Checkpointer
from moejax.train.step import make_eval_step
from tests.train.folds import Case, batches, make_trainer

SHAPE = (("num_layers", 4), ("remat", "full"))


def branches(jaxpr, uniform: bool = True):
    """Yields (equation, whether all ranks of pp take the same way to it) of a jaxpr, all levels."""
    for eqn in jaxpr.eqns:
        yield eqn, uniform
        alike = uniform
        if eqn.primitive.name == "cond":
            alike = uniform and "pp" not in eqn.invars[0].aval.manual_axis_type.varying
        for sub in jax.tree.leaves(
            list(eqn.params.values()), is_leaf=lambda p: hasattr(p, "eqns") or hasattr(p, "jaxpr")
        ):
            inner = getattr(sub, "jaxpr", sub)
            if hasattr(inner, "eqns"):
                yield from branches(inner, alike)


def could_wait(jaxpr) -> list[str]:
    """Returns the collectives, in branches that only some ranks of pp take, which wait for the
    others: over pp, or a ppermute over anything."""
    found = []
    for eqn, alike in branches(jaxpr):
        axes = eqn.params.get("axes", eqn.params.get("axis_name", ()))
        axes = axes if isinstance(axes, tuple) else (axes,)
        name = eqn.primitive.name
        waits = name == "ppermute" or "pp" in axes
        if waits and name not in ("axis_index", "pcast", "pvary") and not alike:
            found.append(name)
    return found


def traced(case: Case):
    trainer = make_trainer(case, with_grads=False)
    batch = jax.tree.map(jnp.asarray, batches(case.microbatches, 1, case.parallel.cp)[0])
    return trainer.step.trace(trainer.layout.resting, batch)


@pytest.mark.parametrize("schedule", CHOICES)
def test_no_branch_waits_for_the_branch_of_another_rank(schedule):
    parallel = ParallelConfig(pp=2, vpp=2, dp=2, tp=2, ep=4, zero=3, schedule=schedule)
    jaxpr = traced(Case("branches", parallel, "all_to_all", 4, SHAPE)).jaxpr.jaxpr
    assert any(not alike for _, alike in branches(jaxpr))  # there are such branches
    assert any(eqn.primitive.name == "all_to_all" and not alike for eqn, alike in branches(jaxpr))
    assert not could_wait(jaxpr)


@pytest.mark.parametrize("axis", ["pp", "dp"])
def test_a_planted_wait_is_found(axis):
    mesh = jax.make_mesh((2, 2), ("pp", "dp"), (AxisType.Auto,) * 2, devices=jax.devices()[:4])
    spec = jax.sharding.PartitionSpec(("pp", "dp"))

    def planted(x):
        send = lambda x: jax.lax.ppermute(x, axis, [(0, 1), (1, 0)])  # noqa: E731
        return jax.lax.cond(jax.lax.axis_index("pp") == 0, send, lambda x: x, x)

    run = jax.shard_map(planted, mesh=mesh, in_specs=spec, out_specs=spec)
    assert could_wait(jax.make_jaxpr(run)(jnp.ones(8)).jaxpr) == ["ppermute"]


@pytest.mark.parametrize(("schedule", "counts"), [("1f1b", (8, 16, 32)), ("zero_bubble", (8, 16))])
def test_memory_does_not_grow_with_the_microbatches(schedule, counts):
    """Compiled temporaries, microbatches of one row each: the tokens are more, some KiB, and what
    is kept of each for the metrics."""
    parallel = ParallelConfig(pp=2, zero=0, schedule=schedule)
    sizes = []
    for count in counts:
        case = Case("memory", parallel, "all_gather", count, SHAPE)
        trainer = make_trainer(case, with_grads=False)
        rows = {k: a[:, :1] for k, a in batches(8, 1)[0].items()}
        batch = {k: np.resize(a, (count, 1, *a.shape[2:])) for k, a in rows.items()}
        lowered = trainer.step.lower(trainer.layout.resting, jax.tree.map(jnp.asarray, batch))
        sizes.append(lowered.compile().memory_analysis().temp_size_in_bytes)
    assert max(sizes) - sizes[0] < 0.03 * sizes[0], sizes


def test_layers_come_back_in_order_from_their_slots():
    model = ModelConfig(num_layers=7, first_k_dense=2)
    pipeline = pipeline_of(ParallelConfig(pp=2, vpp=2, layout="Ett|ttt|t|tL"), model)
    assert pipeline is not None
    tree = {"stack_0": {"w": jnp.arange(2)}, "stack_1": {"w": jnp.arange(10, 15)}, "head": 3}
    placed = in_slots(pipeline, tree)
    assert placed["stack_0"]["w"].tolist() == [0, 1, 0, 0]  # the second rank has no dense layer
    assert placed["stack_1"]["w"].tolist() == [13, 0, 0, 0, 10, 11, 12, 14]
    back = in_units(pipeline, placed)
    assert jax.tree.map(lambda a: np.asarray(a).tolist(), back) == {
        "stack_0": {"w": [0, 1]}, "stack_1": {"w": [10, 11, 12, 13, 14]}, "head": 3,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("parallel", "says"),
    [
        (dict(schedule="gpipe"), "choose from 1f1b, merged, zero_bubble"),
        (dict(schedule="zero_bubble"), "pp=1 has none: set pp too"),
        (dict(pp=2, layout="Ett|ttL"), "4 layers instead of 7"),
        (dict(vpp=2), "set pp too"),
    ],
)
def test_what_cannot_be_is_said_before_any_compile(parallel, says):
    with pytest.raises(ValueError, match=says):
        pipeline_of(ParallelConfig(**parallel), ModelConfig(num_layers=7))


STAGES = ParallelConfig(pp=2, vpp=2, dp=2, tp=2, ep=4, zero=3)
MORE = (("num_layers", 5), ("first_k_dense", 1), ("remat", "full"))


def with_biases(state):
    """Returns the state with a router bias of its own for every expert of every layer."""

    def one(path, leaf):
        if path[-1].key != "bias":
            return leaf
        drawn = np.random.default_rng(len(path)).normal(0, 1, leaf.shape).astype(np.float32)
        return jax.device_put(drawn, leaf.sharding)

    return replace(state, buffers=jax.tree_util.tree_map_with_path(one, state.buffers))


@pytest.mark.parametrize("given", [False, True], ids=["chosen", "given"])
def test_every_layer_routes_as_on_one_device(given):
    """By a bias, a jitter and a first hashed layer of its own, or as given; recorded, and chosen
    again where layers are computed again. Slots of ranks are not in the order of layers here."""
    router = (("record", "somewhere"), ("jitter", 0.3), ("hash_layers", 1))
    balance = (("batch_coeff", 0.0), ("frozen_bias", True))
    batch, metrics = batches(4, 1)[0], []
    if given:
        shape = (*batch["tokens"].shape, 4)  # of 16 experts each token has two, by layer
        first = np.random.default_rng(0).integers(0, 16, shape, dtype=np.int32)
        batch = batch | {"routing": np.stack([first, (first + 1) % 16], axis=-1)}
    for parallel in (ParallelConfig(pp=2, vpp=2, zero=0), ParallelConfig(zero=0)):
        case = Case("record", parallel, "all_gather", 4, MORE, router, balance)
        trainer = make_trainer(case, with_grads=False)
        metrics.append(trainer.step(with_biases(trainer.new_state()), batch)[1])
    mine, right = metrics
    np.testing.assert_array_equal(mine["routing"], right["routing"])
    for name in ("agreed", "load", "busiest_rank"):
        np.testing.assert_array_equal(mine["moe"][name], right["moe"][name], err_msg=name)


def test_evaluation_over_stages_is_that_of_one_device():
    sums = []
    for parallel in (STAGES, ParallelConfig(zero=0)):
        case = Case("evaluation", parallel, "all_to_all", 4, MORE)
        trainer = make_trainer(case, with_grads=False)
        state = trainer.new_state()
        sums.append(
            [np.asarray(a) for a in make_eval_step(trainer.layout)(state, batches(4, 1)[0])]
        )
    (nll, targets), (right, count) = sums
    assert targets == count and abs(nll - right) < 1e-6 * right


def test_a_checkpoint_of_stages_is_one_of_layers_in_order(tmp_path):
    """Saved over stages of 3 and 2 layers, it is bit-equal to what one device saves, and goes back
    to where it came from."""
    staged, alone = (
        make_trainer(Case("saved", parallel, "all_to_all", 4, MORE), with_grads=False)
        for parallel in (STAGES, ParallelConfig(zero=0))
    )
    states = staged.new_state(), alone.new_state()
    for name, trainer, state in zip("ab", (staged, alone), states, strict=True):
        saver = Checkpointer(tmp_path / name, CheckpointConfig(asynchronous=False))
        saver.save(1, trainer.layout.in_order(state), {})
        saver.close()
    for saved in "ab":
        saver = Checkpointer(tmp_path / saved, CheckpointConfig())
        for trainer, right in zip((staged, alone), states, strict=True):
            found = trainer.layout.at_rest(saver.restore(trainer.layout.ordered)[0])
            for mine, wanted in zip(
                *map(jax.tree.leaves, (found.params, right.params)), strict=True
            ):
                assert mine.sharding == wanted.sharding
                np.testing.assert_array_equal(mine, wanted)
        saver.close()
