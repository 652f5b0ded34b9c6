"""The gradient of each balance loss alone: the same on every fold of 8 devices.

At equal microbatches every loss is; the sequence loss and z are for any number of them, too.
"""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from moejax.core import collectives
from moejax.core.mesh import ParallelConfig, fold, make_mesh
from moejax.model import balance
from moejax.model.balance import LOSSES, BalanceConfig
from moejax.model.router import RouterConfig, route
from moejax.model.stream import Counts, count_batch, make_stream, my_tokens
from tests.oracle import max_relative_error

ROWS, LENGTH, D, E, K = 16, 8, 6, 8, 2
EVERY = BalanceConfig(batch_coeff=1, sequence_coeff=1, global_coeff=1, z_coeff=1)
FOLDS = {
    "dp4tp2-ep8": dict(dp=4, tp=2, ep=8),
    "dp4tp2-ep4etp2": dict(dp=4, tp=2, ep=4, etp=2),
    "dp2tp4-ep2": dict(dp=2, tp=4, ep=2),
    "tp8-etp8": dict(tp=8, etp=8),
}


def data():
    """Router, tokens, padding, and documents that, of 4 microbatches, tp cuts in two."""
    rng = np.random.default_rng(0)
    w_DE, x = rng.normal(size=(D, E)), rng.normal(size=(ROWS, LENGTH, D))
    segments = np.ones((ROWS, LENGTH), np.int32)
    segments[:, 3:] = 2
    segments[5, 6:] = 0
    segments[9] = 0
    segments[12:15, 1:] = 0  # microbatches of very different numbers of tokens
    return w_DE.astype(np.float32), (x + [2, 1, 0, 0, 0, 0]).astype(np.float32), segments


@cache
def found(name: str, microbatches: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns (the losses of a step, their gradients [loss, D, E])."""
    parallel = ParallelConfig(**FOLDS.get(name, {}))
    grid = fold(*parallel.readings(parallel.num_devices()))
    w_DE, x, segments = data()
    pieces = [a.reshape(microbatches, -1, *a.shape[1:]) for a in (x, segments)]

    def step(w_DE, x_m, segments_m):
        totals = count_batch(segments_m, segments_m, grid)

        def losses(w_DE):
            total, before_E = jnp.zeros(len(LOSSES)), jnp.zeros(E)
            for x_bLD, ids_bL in zip(x_m, segments_m, strict=True):
                counts = Counts(*totals, count_batch(ids_bL, ids_bL, grid).tokens)
                stream = make_stream(ids_bL, (counts.tokens, counts.tokens), counts, grid)
                logits_tE = my_tokens(x_bLD.reshape(-1, D), grid) @ w_DE
                # A bias, so that the choice is not what the losses count.
                bias_E = jnp.linspace(0, 0.3, E)
                routing = route(logits_tE, bias_E, stream.valid_t, RouterConfig(), K)
                aux = balance.losses(routing, stream, EVERY, grid, before_E)
                before_E = before_E + collectives.psum(aux["plain_load_E"], grid.tokens)
                total = total + jnp.stack([aux[name] for name in LOSSES])
            return collectives.psum(total, grid.tokens)

        return losses(w_DE), jax.jacrev(losses)(w_DE)

    rows = P(None, grid["dp"] or None)
    sharded = jax.shard_map(
        step, mesh=make_mesh(grid), in_specs=(P(), rows, rows), out_specs=P(), check_vma=True
    )
    values, grads = jax.jit(sharded)(w_DE, *pieces)
    return np.asarray(values), np.asarray(grads)


@pytest.mark.parametrize("microbatches", [1, 2, 4])
@pytest.mark.parametrize("name", FOLDS)
def test_each_loss_has_the_same_gradient_on_every_fold(name, microbatches):
    values, grads = found(name, microbatches)
    right_values, right = found("alone", microbatches)
    np.testing.assert_allclose(values, right_values, rtol=1e-6)
    for i, loss in enumerate(LOSSES):
        assert np.abs(right[i]).max() > 1e-3, loss
        assert max_relative_error(grads[i], right[i]) < 1e-5, loss


@pytest.mark.parametrize("microbatches", [2, 4])
def test_splitting_into_microbatches_changes_what_is_defined_by_them_alone(microbatches):
    values, grads = found("alone", microbatches)
    whole_values, whole = found("alone", 1)
    for i, loss in enumerate(LOSSES):
        error = max(
            max_relative_error(grads[i], whole[i]), max_relative_error(values[i], whole_values[i])
        )
        assert (error < 1e-5) == (loss in ("sequence_loss", "z_loss")), (loss, error)


def test_the_global_loss_of_one_microbatch_is_the_batch_loss():
    values, grads = found("alone", 1)
    first, third = LOSSES.index("batch_loss"), LOSSES.index("global_loss")
    np.testing.assert_array_equal(values[first], values[third])
    np.testing.assert_array_equal(grads[first], grads[third])
