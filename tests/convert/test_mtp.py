"""The module that predicts a further token, against another implementation: DeepSeek-V3's layer
beyond the last (`tests/golden/README.md`)."""

from functools import cache, reduce
from operator import getitem

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moejax.convert import arrays
from moejax.model import mtp
from moejax.model.stream import count_batch, one_microbatch
from moejax.train.loss import micro_loss, target_weights
from tests.convert.golden import golden, loaded
from tests.oracle import max_relative_error

MADE = golden("deepseek_v3_mtp")
CFG = MADE.cfg


@cache
def found():
    """Returns (logits, aux, loss, its gradients), of the further tokens alone."""
    layout, weights, buffers = loaded(MADE.name)
    assert CFG.mtp_depth == 1 and (np.asarray(buffers["mtp_0"]["block"]["moe"]["bias"]) != 0).all()
    tokens = jnp.asarray(MADE.arrays["input_ids"], jnp.int32)
    rows, length = tokens.shape
    batch = {
        "tokens": tokens,
        "targets": jnp.pad(tokens[:, 1:], ((0, 0), (0, 1)), constant_values=-1),
        "segment_ids": jnp.ones_like(tokens),
        "positions": jnp.tile(jnp.arange(length, dtype=jnp.int32)[None], (rows, 1)),
    }

    def weighed(batch):
        both = (batch["segment_ids"], batch["targets"])
        counts = one_microbatch(count_batch(*both, layout.fold))
        return batch | {"weights": target_weights(*both, "token")}, counts

    @jax.jit
    def run(weights):
        further = [weighed(mtp.ahead(batch, 1))]

        def loss(weights):
            model = layout.model(weights, buffers)
            _, (losses, auxes) = micro_loss(model, *weighed(batch), further=further)
            return losses.mtp, auxes

        (value, auxes), grads = jax.value_and_grad(loss, has_aux=True)(weights)
        model = layout.model(weights, buffers)
        inputs = ("tokens", "segment_ids", "positions")
        h_tD, _ = model.hidden(*(batch[name] for name in inputs), weighed(batch)[1])
        moved, counts = further[0]
        h_tD, _ = model.predict_ahead(0, h_tD, *(moved[name] for name in inputs), counts)
        return (h_tD @ model.head_weight()).reshape(rows, length, -1), auxes, value, grads

    with jax.default_matmul_precision("highest"):
        return jax.tree.map(np.asarray, run(weights))


def test_logits_choices_and_loss():
    """The last position of a row has no token ahead of it: there is nothing to compare."""
    logits, auxes, loss, _ = found()
    right = MADE.arrays
    assert max_relative_error(logits[:, :-1], right["mtp_logits"]) < 1e-5
    assert max_relative_error(loss, right["mtp_loss"]) < 1e-6
    experts = auxes["mtp_0"]["block"]["experts"].reshape(*logits.shape[:2], -1)
    mine = np.sort(experts[:, :-1].reshape(-1, CFG.moe.top_k), axis=-1)
    np.testing.assert_array_equal(mine, right["mtp_choices"][0])
    assert (experts[:, -1] == CFG.moe.num_experts).all(), "a padded token goes nowhere"
    assert auxes["mtp_0"]["block"]["load_E"].sum() == mine.size


@pytest.mark.parametrize(
    "name", [k.removeprefix("mtp_grad/") for k in sorted(MADE.arrays) if k.startswith("mtp_grad/")]
)
def test_gradients(name):
    """Of its own tensors, and through it of the embedding, the head and the main model's norm."""
    grads, right = found()[3], MADE.arrays[f"mtp_grad/{name}"]
    for leaf in arrays.leaves(MADE.family, CFG, grads, loaded(MADE.name)[2]):
        if leaf.tree == "params" and name in [tensor for tensor, _ in leaf.tensors()]:
            array = reduce(getitem, leaf.path, grads)
            ((_, _, mine),) = leaf.pieces[0].write(array)
            assert max_relative_error(mine, right) < 2e-5
            return
    raise AssertionError(f"no rule for {name}")
