"""Upcycling: where the mathematics says so, the model with experts starts equal to the dense."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moejax.convert import __main__ as command
from moejax.convert import store, upcycle
from moejax.convert.to_hf import model_of
from moejax.convert.to_run import abstract
from moejax.core import params
from moejax.model.attention import AttentionConfig
from moejax.model.transformer import ModelConfig
from moejax.train.checkpoint import CheckpointConfig, Checkpointer, load_weights
from tests.convert.golden import layout_of
from tests.oracle import max_relative_error

DENSE = ModelConfig(
    vocab_size=32, dim=16, num_layers=3, first_k_dense=1, pattern="D", ffn_dim=24, init_std=0.3,
    attention=AttentionConfig(num_heads=2, num_kv_heads=1, head_dim=8),
)  # fmt: skip
TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, 32, (2, 12)))


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    """The folder of a run with a dense model, and its logits."""
    folder = tmp_path_factory.mktemp("dense")
    rng, layout = np.random.default_rng(5), layout_of(DENSE)
    weights = jax.tree.map(
        lambda a: jnp.asarray(rng.normal(0.5, 0.3, a.shape).astype(a.dtype)), abstract(DENSE)[0]
    )
    checkpointer = Checkpointer(folder, CheckpointConfig())
    config = {"name": "dense", "model": dataclasses.asdict(DENSE)}
    checkpointer.save(3, {"params": weights, "buffers": {}}, {"config": config})
    checkpointer.close()
    return folder, np.asarray(logits_of(layout.model(weights, {})))


def logits_of(model):
    definition, *arrays = params.partition(model)

    @jax.jit
    def run(arrays):
        with jax.default_matmul_precision("highest"):
            return params.assemble(definition, *arrays)(TOKENS)

    return run(arrays)


def opened(run):
    """The model of a run folder, its weights read as a run's start reads them."""
    layout = layout_of(model_of(store.Reader(run).extra))
    target = {"params": layout.resting.params, "buffers": layout.resting.buffers}
    return layout.model(*(load_weights(run, tree, subtree=part) for part, tree in target.items()))


@pytest.mark.parametrize(("experts", "top_k", "granularity"), [(4, 2, 1), (12, 6, 3)])
def test_with_weights_that_sum_to_1_it_starts_equal(experts, top_k, granularity, dense, tmp_path):
    run, right = dense
    plan = upcycle.Plan(experts, top_k, granularity)
    done = upcycle.convert(run, tmp_path / "moe", plan)
    model = opened(tmp_path / "moe")
    assert model.cfg.kinds() == "DMM" and model.cfg.moe.num_experts == experts
    assert model.cfg.moe.ffn_dim == 24 // granularity
    assert max_relative_error(np.asarray(logits_of(model)), right) < 1e-5
    assert done.num_tensors == len(store.Reader(tmp_path / "moe").arrays)


def test_the_parts_of_a_copy_are_chosen_together(dense, tmp_path):
    upcycle.convert(dense[0], tmp_path / "moe", upcycle.Plan(8, 4, 2))
    reader = store.Reader(tmp_path / "moe")
    router = reader.read("params.stack_1.block_0.moe.w_router", (slice(None),))
    np.testing.assert_array_equal(router[..., 0::2], router[..., 1::2])
    columns = router[0, :, 0::2].T
    assert len(np.unique(columns, axis=0)) == 4 and abs(columns.std() - 0.3) < 0.1
    assert not np.array_equal(router[0], router[1])
    w_in = reader.read("params.stack_1.block_0.moe.experts.w_in", (slice(None),))
    np.testing.assert_array_equal(w_in[:, 0], w_in[:, 2])  # copies of part 0
    assert not np.array_equal(w_in[:, 0], w_in[:, 1])
    mlp = store.Reader(dense[0]).read("params.stack_1.block_0.mlp.w_in", (slice(None),))
    np.testing.assert_array_equal(w_in[:, 1, :, 0], mlp[:, :, 0, 12:])  # the gate, not scaled
    np.testing.assert_allclose(w_in[:, 1, :, 1], mlp[:, :, 1, 12:] * 2**0.5, rtol=1e-6)


def test_with_a_softmax_over_all_experts_it_starts_equal_where_they_are(dense, tmp_path):
    """Routers of zeros: every weight is 1/E."""
    run, right = dense
    plan = upcycle.Plan(8, 4, 2, renormalize=False)
    assert np.prod(plan.factors()) == pytest.approx(4 * 2**2 / 4)
    upcycle.convert(run, tmp_path / "moe", plan)
    model = opened(tmp_path / "moe")
    router = model.stack_1.block_0.moe.w_router
    router[...] = jnp.zeros_like(router[...])
    assert max_relative_error(np.asarray(logits_of(model)), right) < 1e-5


def test_the_published_scaling_is_near_for_a_silu(dense, tmp_path):
    run, right = dense
    plan = upcycle.Plan(4, 2, 2, scaling="cube_root")
    assert plan.factors() == pytest.approx((2 ** (1 / 3),) * 3)
    upcycle.convert(run, tmp_path / "moe", plan)
    error = max_relative_error(np.asarray(logits_of(opened(tmp_path / "moe"))), right)
    assert 1e-4 < error < 0.5


def test_what_cannot_be_upcycled_is_one_line(dense, tmp_path, capsys):
    run, new = str(dense[0]), str(tmp_path / "new")
    for numbers, message in (
        ("4 2 3", "--experts 4 do not divide into --granularity 3 parts"),
        ("8 3 2", "--top-k 3 is not a multiple of --granularity 2"),
        ("10 5 5", "model.ffn_dim=24 does not divide by --granularity 5"),
        ("4 1 1", "leaves the router without a gradient"),
    ):
        experts, top_k, granularity = numbers.split()
        asked = ["--experts", experts, "--top-k", top_k, "--granularity", granularity]
        assert command.main(["upcycle", run, new, *asked]) == 2
        error = capsys.readouterr().err
        assert message in error and error.startswith("error: ") and error.count("\n") == 1
    asked = ["--experts", "4", "--top-k", "1", "--softmax", "before"]
    assert command.main(["upcycle", run, new, *asked]) == 0
    capsys.readouterr()
    assert command.main(["upcycle", new, new + "2", *asked]) == 2
    assert "is no dense model's" in capsys.readouterr().err
