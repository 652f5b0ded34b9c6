"""Modules that predict further tokens: what they are given, documents, counts, refusals."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from moejax.core import params
from moejax.core.mesh import Fold, ParallelConfig, make_mesh
from moejax.core.precision import PrecisionConfig
from moejax.data.context import order_tokens
from moejax.model import mtp
from moejax.model.context import split_rows
from moejax.model.flops import attention_flops, inactive_params, linear_flops_per_token
from moejax.model.stream import count_batch, one_microbatch
from moejax.model.transformer import Transformer
from moejax.train.loss import micro_loss, target_weights
from tests.model.test_transformer import tiny

FLOAT32 = PrecisionConfig(compute_dtype="float32")
SEGMENTS = np.array([[1, 1, 1, 0, 2, 2, 2, 2, 2, 0, 0, 0]])
A1, A2, A3, B1, B2, B3, B4, B5, I = 11, 12, 13, 21, 22, 23, 24, 25, -1  # noqa: E741 - ignore


def batch_of(segments) -> dict:
    """Tokens 11, 12, .. of document 1, 21, .. of document 2, and the usual targets."""
    segments, places = np.asarray(segments), np.zeros_like(segments)
    for row, ids in zip(places, np.asarray(segments), strict=True):
        for document in set(ids) - {0}:
            row[ids == document] = np.arange((ids == document).sum())
    tokens = np.where(segments > 0, 10 * segments + places + 1, 0)
    same = np.roll(segments, -1, axis=1) == segments
    same[:, -1] = False
    targets = np.where(same & (segments > 0), np.roll(tokens, -1, axis=1), -1)
    arrays = dict(tokens=tokens, targets=targets, segment_ids=segments, positions=places)
    return {name: jnp.asarray(a, jnp.int32) for name, a in arrays.items()}


def test_d25_no_target_crosses_a_document():
    """Public bug reports: padding between documents, and the first tokens of the next one."""
    batch = batch_of(SEGMENTS)
    main = [A2, A3, I, I, B2, B3, B4, B5, I, I, I, I]
    np.testing.assert_array_equal(batch["targets"][0], main)
    first, second, far = (mtp.ahead(batch, by) for by in (1, 2, 40))
    asked = [A3, I, I, I, B3, B4, B5, I, I, I, I, I]
    given = [A2, A3, 0, 0, B2, B3, B4, B5, 0, 0, 0, 0]
    np.testing.assert_array_equal(first["targets"][0], asked)
    np.testing.assert_array_equal(first["tokens"][0], given)
    np.testing.assert_array_equal(first["segment_ids"][0], [1, 1, 0, 0, 2, 2, 2, 2, 0, 0, 0, 0])
    np.testing.assert_array_equal(second["targets"][0], [I, I, I, I, B4, B5, I, I, I, I, I, I])
    np.testing.assert_array_equal(second["tokens"][0], [A3, 0, 0, 0, B3, B4, B5, *[0] * 5])
    counts = [int((b["targets"] >= 0).sum()) for b in (batch, first, second, far)]
    assert counts == [6, 4, 2, 0] and not far["segment_ids"].any()
    # Two documents of one id, and padding between them, are two.
    alike = mtp.ahead(batch_of([[1, 1, 0, 1, 1, 1]]), 2)
    np.testing.assert_array_equal(alike["segment_ids"], [[0, 0, 0, 1, 0, 0]])


@pytest.mark.parametrize("by", [1, 2])
def test_d25_nor_when_rows_are_split_over_cp(by):
    """Two ranks' tokens, put together again, are what they are of whole rows: targets, inputs,
    documents, counts."""
    whole = batch_of(SEGMENTS)
    order = order_tokens(SEGMENTS, 2)
    moved = mtp.ahead(whole | {"order": jnp.asarray(order)}, by)
    grid = ParallelConfig(cp=2, ep=2).fold()

    def rank(batch):
        mine = split_rows(batch, grid)
        return {name: mine[name] for name in mtp.ahead(whole, by)}

    ranks = jax.shard_map(
        rank, mesh=make_mesh(grid), in_specs=P(), out_specs=P(None, grid["cp"])
    )(moved)
    for name, right in mtp.ahead(whole, by).items():
        again = np.empty_like(right)
        np.put_along_axis(again, order, np.asarray(ranks[name]), axis=1)
        np.testing.assert_array_equal(again, right, err_msg=name)


def test_packed_documents_are_as_good_as_rows_of_their_own():
    """Loss and gradients, of two modules; each depth is a mean over its own targets."""
    cfg = tiny(mtp_depth=2)
    definition, weights, buffers = params.partition(
        Transformer(cfg, precision=FLOAT32, rngs=nnx.Rngs(0))
    )

    @jax.jit
    def run(weights, batch):
        views = []
        for by in range(3):
            view = mtp.ahead(batch, by) if by else batch
            both = (view["segment_ids"], view["targets"])
            counts = one_microbatch(count_batch(*both, Fold()))
            views.append((view | {"weights": target_weights(*both, "token")}, counts))

        def loss(weights):
            model = params.assemble(definition, weights, buffers)
            return micro_loss(model, *views[0], further=views[1:], mtp_coeff=1.0)[1][0].mtp

        return jax.value_and_grad(loss)(weights)

    packed, by_row = np.zeros((2, 12), int), np.zeros((2, 12), int)
    packed[0], by_row[0, :3], by_row[1, :5] = SEGMENTS[0], 1, 2
    with jax.default_matmul_precision("highest"):
        (loss, grads), (right, expected) = (run(weights, batch_of(s)) for s in (packed, by_row))
    np.testing.assert_allclose(loss, right, rtol=1e-6)
    assert float(jnp.abs(grads["mtp_1"]["proj"]).max()) > 1e-4
    assert float(jnp.abs(grads["stack_0"]["block_0"]["attention"]["w_q"]).max()) > 1e-5
    for mine, theirs in zip(*map(jax.tree.leaves, (grads, expected)), strict=True):
        np.testing.assert_allclose(mine, theirs, atol=1e-6, rtol=1e-4)


def test_what_is_counted():
    """A module is one more layer of the last kind, a projection of 2D to D, and a head."""
    base = tiny(first_k_dense=1, num_layers=3, pattern="MD")
    cfg = replace(base, mtp_depth=2)
    assert cfg.kinds() == "DMD" and cfg.all_kinds() == "DMDDD" and cfg.mtp_kind == "D"
    cfg = tiny(mtp_depth=2)
    assert cfg.all_kinds() == "MMMM" and cfg.kinds() == "MM"
    longer = replace(tiny(), num_layers=4)
    more = 6 * 2 * (2 * cfg.dim**2 + cfg.dim * cfg.vocab_size)
    assert linear_flops_per_token(cfg) == linear_flops_per_token(longer) + more
    assert attention_flops(cfg, 9) == attention_flops(longer, 9)
    assert inactive_params(cfg) == inactive_params(longer)
    made, other = (
        nnx.eval_shape(lambda cfg=cfg: Transformer(cfg, rngs=nnx.Rngs(0))) for cfg in (cfg, longer)
    )
    more = params.count(params.partition(made)[1]) - params.count(params.partition(other)[1])
    assert more == 2 * (2 * cfg.dim**2 + 3 * cfg.dim)
    with pytest.raises(ValueError, match="model.mtp_depth=-1 must be 0"):
        tiny(mtp_depth=-1)
