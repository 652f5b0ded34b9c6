"""Every family against another implementation: logits, choices of the routers, loss, gradients.

The models are tiny and random; weights and values: `tests/golden` (float32).
"""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moejax.convert import arrays
from moejax.model.attention import empty_cache
from moejax.model.stream import Draw, count_batch, one_microbatch
from moejax.train.loss import micro_loss, target_weights
from tests.convert.golden import VARIANTS, golden, loaded
from tests.oracle import max_relative_error


def batch_of(tokens):
    """Rows whose every token but the last has the next one for a target."""
    ids, (rows, length) = np.asarray(tokens, np.int32), tokens.shape
    targets = np.concatenate([ids[:, 1:], np.full((rows, 1), -1, np.int32)], axis=1)
    places = np.tile(np.arange(length, dtype=np.int32), (rows, 1))
    arrays = dict(tokens=ids, targets=targets, segment_ids=np.ones_like(ids), positions=places)
    return {name: jnp.asarray(array) for name, array in arrays.items()}


@cache
def found(name: str, compute: str = "float32"):
    """Returns (logits, ids of experts [layers, T, K], loss, gradients by our tree)."""
    layout, weights, buffers = loaded(name, compute)
    batch = batch_of(golden(name).arrays["input_ids"])
    weights, buffers = jax.tree.map(np.asarray, (weights, buffers))

    @jax.jit
    def run(weights, buffers):
        with jax.default_matmul_precision("highest"):
            model = layout.model(weights, buffers)
            counted = count_batch(batch["segment_ids"], batch["targets"], model.fold)
            micro = batch | {
                "weights": target_weights(batch["segment_ids"], batch["targets"], "token")
            }

            def loss(weights):
                model = layout.model(weights, buffers)
                return micro_loss(model, micro, one_microbatch(counted))

            (value, (_, auxes)), grads = jax.value_and_grad(loss, has_aux=True)(weights)
            return model(batch["tokens"]), auxes, value, grads

    logits, auxes, loss, grads = run(weights, buffers)
    ids = []
    for stack in auxes.values():
        blocks = list(stack.values())
        for layer in range(len(blocks[0]["experts"]) if blocks else 0):
            ids += [np.sort(np.asarray(block["experts"][layer]), axis=-1) for block in blocks]
    return np.asarray(logits), np.asarray(ids), float(loss), grads


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_choices_and_loss_are_those_of_the_other_implementation(name):
    logits, ids, loss, _ = found(name)
    right = golden(name).arrays
    assert max_relative_error(logits, right["logits"]) < 1e-5
    np.testing.assert_array_equal(ids, right["choices"])
    assert max_relative_error(loss, right["loss"]) < 1e-6


@pytest.mark.parametrize("name", VARIANTS)
def test_gradients_are_those_of_the_other_implementation(name):
    """Of a handful of tensors: embedding, attention, router, an expert, norms, sinks, biases."""
    made, grads = golden(name), found(name)[3]
    right = {k.removeprefix("grad/"): v for k, v in made.arrays.items() if k.startswith("grad/")}
    buffers = loaded(name)[2]
    seen = {}
    for leaf in arrays.leaves(made.family, made.cfg, grads, buffers):
        if leaf.tree == "buffers":
            continue
        array = grads
        for part in leaf.path:
            array = array[part]
        for number, piece in enumerate(leaf.pieces):
            ours = np.asarray(array[number] if leaf.stacked else array)
            for theirs, _, values in piece.write(ours):
                if theirs in right:
                    seen[theirs] = max_relative_error(values, right[theirs])
    assert set(seen) == set(right) and len(seen) >= 5
    assert max(seen.values()) < 2e-5, seen


@pytest.mark.parametrize("name", VARIANTS)
def test_bfloat16_is_off_by_its_roundings(name):
    """By the square root of their number along the longest path, for they are independent, times
    2^-8, the most that one is off by, times 2 for what softmax and gates make of an error. 10 a
    layer: two norms, what enters and leaves the attention core, two products of the MLP and the
    activation between, two sums. Experts are those of the other implementation, so that no near
    choice turns."""
    made = golden(name)
    layout, weights, buffers = loaded(name, "bfloat16")
    batch, (rows, length) = batch_of(made.arrays["input_ids"]), made.arrays["input_ids"].shape
    choices = np.asarray(made.arrays["choices"], np.int32)
    given = choices.reshape(len(choices), rows, length, -1).transpose(1, 2, 0, 3)

    @jax.jit
    def run(weights, buffers):
        model = layout.model(weights, buffers)
        counts = one_microbatch(count_batch(batch["segment_ids"], batch["targets"], model.fold))
        arrays = (batch["tokens"], batch["segment_ids"], batch["positions"])
        x_TD, _ = model.hidden(*arrays, counts, Draw(routing_bLNK=jnp.asarray(given)))
        return jnp.matmul(x_TD, model.head_weight(), preferred_element_type=jnp.float32)

    logits = run(*jax.tree.map(np.asarray, (weights, buffers)))
    vocab = made.arrays["logits"].shape[-1]
    error = max_relative_error(logits[:, :vocab].reshape(rows, length, -1), made.arrays["logits"])
    assert 1e-4 < error < 2 * 2**-8 * (10 * made.cfg.num_layers + 2) ** 0.5


@pytest.mark.parametrize(
    "name",
    [
        "deepseek_v2_grouped", "deepseek_v3_moonlight", "qwen2_moe_plain", "qwen3_moe_tied",
        "mixtral_sliding", "gpt_oss_yarn", "olmoe_clip", "glm4_moe_qknorm",
    ],
)  # fmt: skip
def test_prefill_and_decode_give_the_logits_of_the_whole(name):
    made = golden(name)
    layout, weights, buffers = loaded(name)
    batch, (rows, length) = batch_of(made.arrays["input_ids"]), made.arrays["input_ids"].shape
    weights, buffers = jax.tree.map(np.asarray, (weights, buffers))

    @jax.jit
    def extend(cache, tokens, segments, places):
        with jax.default_matmul_precision("highest"):
            model = layout.model(weights, buffers)
            x_TD, cache = model.extend(tokens, segments, places, cache)
            return (x_TD @ model.head_weight()).reshape(*tokens.shape, -1), cache

    cache, pieces, start = empty_cache(rows, length), [], 0
    for size in (length - 4, 1, 1, 1, 1):
        part = [batch[n][:, start : start + size] for n in ("tokens", "segment_ids", "positions")]
        logits, cache = extend(cache, *part)
        pieces.append(np.asarray(logits))
        start += size
    right = made.arrays["logits"]
    logits = np.concatenate(pieces, axis=1)[..., : right.shape[-1]]
    assert max_relative_error(logits, right) < 1e-5
