"""Public bug reports of balance losses, loads and biases, each with its figures, in the real train
step: on one device and on four folds of 8, computed again or not, layers scanned over.

Of two MoE layers the first has the case, the second the same with its experts in reverse order.
Where a case has fewer tokens than there are devices, its rows are repeated, once for each
data-parallel rank: means stay, counts are so many times as great. Cases of what is chosen:
tests/model/test_cases.py.

D05: huggingface/transformers#45120. D06: huggingface/transformers#31464. D07:
NVIDIA/Megatron-LM#1984. D08: NVIDIA/Megatron-LM#5798. D09: NVIDIA/Megatron-LM#5047. D10:
NVIDIA/Megatron-LM#7081. D11: pytorch/torchtitan#1593. D29: NVIDIA-NeMo/Megatron-Bridge#4657.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moejax.model import balance
from moejax.model.balance import BalanceConfig
from moejax.train.checkpoint import CheckpointConfig, Checkpointer, read_metadata
from tests.cases import (
    BIAS_RATE,
    COEFF,
    IDS,
    SPLIT_AT,
    at_each,
    batch,
    evaluation,
    everywhere,
    mirrored,
    once,
    steps,
    table,
)
from tests.oracle import max_relative_error

LOADS = ("batch_loss", "sequence_loss", "global_loss")
# The shape of a batch for two experts: 4 microbatches, of each data-parallel rank 4 rows.
MICRO, ROWS, LENGTH = 4, 4, 32


def every_micro(made, ids, padding: int = 0) -> dict:
    """Returns a batch of that shape whose every microbatch has, for each data-parallel rank, rows
    that begin with these tokens; all else is padding of the id `padding`."""
    ids, shape = np.asarray(ids), (MICRO, made.copies, ROWS, LENGTH)
    made_mcRL = np.full(shape, -1 - padding)
    made_mcRL[:, :, : len(ids), : ids.shape[1]] = ids
    return batch(made_mcRL.reshape(MICRO, -1, LENGTH))


# --- losses ---


@once
def test_scores_are_normalised_once(at):
    """Case D05: logits [4, 0, 0, 0] of all tokens have the loss 3.791660; so have they with 100
    added."""
    made = steps(at, 4)
    logits = table([4, 0, 0, 0], [104, 100, 100, 100])
    for token in (0, 1):
        _, metrics = made.run(made.state(logits), batch(np.full((1, made.copies, 8), token)))
        moe = metrics["moe"]
        for loss in LOADS:
            np.testing.assert_allclose(moe[loss], [3.791660] * 2, rtol=1e-6)
        wanted = (0.5 + 0.25 + 2.0) * 3.791660 + COEFF * moe["z_loss"]
        np.testing.assert_allclose(moe["aux_loss"], wanted, rtol=1e-6)
        np.testing.assert_allclose(metrics["loss"], np.log(IDS), rtol=1e-6)


@everywhere
def test_opposite_layers_have_losses_of_their_own(at):
    """Case D06: all tokens to one expert, another in each layer: 2 in each, not 1 of both."""
    made = steps(at, 2)
    _, metrics = made.run(made.state(table([10, -10])), every_micro(made, [[0, 0, 0, 0]]))
    moe = metrics["moe"]
    for loss in LOADS:
        np.testing.assert_allclose(moe[loss], [2.0, 2.0], rtol=1e-6)
    np.testing.assert_allclose(moe["z_loss"], [100.0, 100.0], rtol=1e-6)
    np.testing.assert_allclose(moe["aux_loss"], [COEFF * 102] * 2, rtol=1e-6)
    np.testing.assert_array_equal(moe["load"], [[1, 0], [0, 1]])
    np.testing.assert_array_equal(moe["dead"], [1, 1])
    np.testing.assert_allclose(moe["entropy"], [0, 0], atol=1e-7)


@everywhere
def test_padding_counts_nowhere(at):
    """Case D07: 2 tokens [5, -5], 2 tokens [-5, 5], then padding [5, -5] (or 1e4): loss 1, z
    25.00045, counts [2, 2], no move of the bias, 4 rows for the experts; in each of 4 microbatches,
    which have more padding than 2 tokens."""
    made = steps(at, 2)
    copies, found = MICRO * made.copies, []
    rows = every_micro(made, [[0, 1], [-3, -3], [1, 0]], padding=2)
    for padding in ([5, -5], [1e4, -1e4], [1e4, 1e4]):
        state = made.state(table([5, -5], [-5, 5], padding))
        state, metrics = made.run(state, rows)
        moe, gradient = metrics["moe"], made.router_gradient(metrics)
        for loss in LOADS:
            np.testing.assert_allclose(moe[loss], [1.0, 1.0], rtol=1e-6)
        np.testing.assert_allclose(moe["z_loss"], [25.00045] * 2, rtol=1e-6)
        np.testing.assert_array_equal(moe["load_E"], np.full((2, 2), 2 * copies))
        np.testing.assert_array_equal(made.buffers(state)["bias"], np.zeros((2, 2)))
        np.testing.assert_array_equal(moe["dropped"], [0, 0])  # of the 4 slots that are counted
        assert metrics["num_tokens"] == 4 * copies
        assert gradient[:, :2].any() and not gradient[:, 2:].any()
        found.append((moe, metrics["loss"], gradient, made.buffers(state)))
    for other in found[1:]:
        jax.tree.map(np.testing.assert_array_equal, other, found[0])


def losses_of(logits_iE, ids_sn):
    """Returns (sequence loss, z-loss, gradient [ids, E] of their sum) of sequences, by the
    formulas, in float64."""
    (sequences, length), num_experts = ids_sn.shape, logits_iE.shape[-1]
    grad, losses, z = np.zeros(logits_iE.shape), [], []
    for ids_n in ids_sn:
        logits_nE = logits_iE[ids_n]
        log_sum_n = np.log(np.exp(logits_nE).sum(axis=1))
        probs_nE = np.exp(logits_nE - log_sum_n[:, None])
        share_E = np.eye(num_experts)[logits_nE.argmax(axis=1)].mean(axis=0)
        losses.append(num_experts * (share_E * probs_nE.mean(axis=0)).sum())
        z.append((log_sum_n**2).mean())
        d_nE = num_experts * probs_nE * (share_E[None] - (probs_nE @ share_E)[:, None])
        d_nE += 2 * log_sum_n[:, None] * probs_nE
        np.add.at(grad, ids_n, d_nE / (length * sequences))
    return np.mean(losses), np.mean(z), grad


def check_losses(made, rows, logits_LiE, ids_sn):
    """Asserts losses and router gradients of a step, by the formulas."""
    _, metrics = made.run(made.state(logits_LiE), rows)
    right = [losses_of(logits_iE, ids_sn) for logits_iE in logits_LiE]
    for i, loss in enumerate(("sequence_loss", "z_loss")):
        np.testing.assert_allclose(metrics["moe"][loss], [r[i] for r in right], rtol=1e-5)
    wanted = COEFF * np.stack([grad for *_, grad in right])
    assert np.abs(wanted).max() > 1e-4
    assert max_relative_error(made.router_gradient(metrics), wanted) < 5e-7


# A, C: ids 0 to 7; B, D: the others.
SEQUENCES = np.array([[0, 1, 2, 3, 4, 5, 6, 7], [8, 9, 10, 11, 12, 13, 14, 15],
                      [7, 5, 3, 1, 1, 2, 0, 0], [15, 8, 8, 8, 9, 14, 12, 11]])  # fmt: skip
TO_0_OR_1 = np.where(np.arange(IDS) < 8, 1.0, -1.0)[:, None] * [[1.0, -1.0]]
# Microbatches of the four sequences (0: packed into one row), and of the batch, others being empty.
SPLITS = {"4xMBS1": (4, 4), "2xMBS2": (2, 4), "1xMBS4": (1, 4), "packed": (0, 4)}
# Without empty ones these are other programs, which are not compiled everywhere.
FULL = {"2xMBS2": (2, 2), "1xMBS4": (1, 1), "packed": (0, 1)}
FULL_AT = {("alone", "none"): ("1xMBS4", "packed"), ("alone", "full"): ("2xMBS2",),
           ("dp2tp4-ep", "none"): ("2xMBS2",)}  # fmt: skip
each_split = pytest.mark.parametrize("split", SPLITS)


def in_microbatches(made, split, ids_sn) -> dict:
    """Returns a batch of the four sequences, as often as there are data-parallel ranks."""
    used, microbatches = split
    pieces = ids_sn.reshape(max(used, 1), -1, ids_sn.shape[1] if used else ids_sn.size)
    shape = (microbatches, 2 if split == FULL["2xMBS2"] else ROWS, LENGTH)
    ids_mRL, documents_mRL = np.full(shape, -1), np.zeros(shape, np.int32)
    rows, length = pieces.shape[1:]
    # Padding before and after; where tp cuts rows in two, it cuts these sequences, too.
    here = (slice(len(pieces)), slice(rows), slice(12, 12 + length) if used else slice(length))
    ids_mRL[here] = pieces
    documents_mRL[here] = np.arange(length) // ids_sn.shape[1] + 1
    return batch(*(np.repeat(a, made.copies, axis=1) for a in (ids_mRL, documents_mRL)))


def check_sequences(made, split):
    """D08. Of saturated logits the loss is 2; where the softmax has a gradient, it is right."""
    rows = in_microbatches(made, split, SEQUENCES)
    _, metrics = made.run(made.state(table(*(10 * TO_0_OR_1))), rows)
    np.testing.assert_allclose(metrics["moe"]["sequence_loss"], [2.0, 2.0], rtol=1e-6)
    batch_loss = 2.0 if split[0] == 4 else 1.0  # over one sequence, or over A and B
    np.testing.assert_allclose(metrics["moe"]["batch_loss"], [batch_loss] * 2, rtol=1e-6)
    np.testing.assert_allclose(metrics["moe"]["load"], np.full((2, 2), 0.5))
    mild = TO_0_OR_1 + np.random.default_rng(0).normal(size=(IDS, 2)) / 4
    check_losses(made, rows, table(*mild), SEQUENCES)


def check_sixteen_tokens(made, split):
    """D09."""
    ids, logits = np.arange(16).reshape(4, 4), np.random.default_rng(1).normal(size=(2, IDS, 2))
    check_losses(made, in_microbatches(made, split, ids), logits, ids)


@everywhere
@each_split
def test_the_sequence_loss_does_not_depend_on_how_rows_are_split(at, split):
    """Case D08: sequences A and C all to expert 0, B and D to 1: the loss is 2 (of the batch it
    would be 1) in 4, 2 and 1 microbatches, and packed into one row; router gradients are within
    5e-7 of the formula's."""
    check_sequences(steps(at, 2), SPLITS[split])


@everywhere
@each_split
def test_router_gradients_do_not_depend_on_fold_and_microbatches(at, split):
    """Case D09: 16 tokens in 4 sequences, no gradient of the cross-entropy, coefficients .01: for
    tp 1, 2, 4, 8 and 1, 2, 4 microbatches within 5e-7 of the formula's."""
    check_sixteen_tokens(steps(at, 2), SPLITS[split])


@at_each(SPLIT_AT)
def test_nor_on_how_rows_are_split_over_cp(at):
    """Cases D08 and D09 for cp 2 and 4: a sequence is in pieces of one to two tokens, or four."""
    for split in SPLITS.values():
        check_sequences(steps(at, 2), split)
        check_sixteen_tokens(steps(at, 2), split)


@at_each(list(FULL_AT))
def test_splits_of_a_step_without_empty_microbatches(at):
    """Cases D08 and D09 where the step has 1 or 2 microbatches in all."""
    for split in FULL_AT[at]:
        check_sequences(steps(at, 2), FULL[split])
        check_sixteen_tokens(steps(at, 2), FULL[split])


# --- biases ---


def test_counts_and_the_bias_move_in_float32():
    """Case D10: counts [40840, 41080] move the bias by [+.001, -.001]; in bfloat16 both are 40960.
    1 becomes 1.001; in bfloat16 it would stay 1."""
    counts = jnp.asarray([40840.0, 41080.0])
    np.testing.assert_array_equal(counts.astype(jnp.bfloat16), [40960, 40960])
    cfg, rate = BalanceConfig(batch_coeff=0, bias_rate=BIAS_RATE), np.float32(BIAS_RATE)
    for before in (0.0, 1.0):
        moved = balance.updated(jnp.full(2, before), {"load_E": counts}, cfg)
        assert moved.dtype == jnp.float32
        np.testing.assert_array_equal(moved, np.float32(before) + np.array([rate, -rate]))


def check_257_tokens(made, dtype):
    """D10."""
    abstract = made.made.layout.abstract
    assert {leaf.dtype.name for leaf in jax.tree.leaves(abstract.params)} == {dtype}
    assert {leaf.dtype.name for leaf in jax.tree.leaves(abstract.buffers)} == {"float32"}
    ids = np.full(MICRO * ROWS * made.copies * LENGTH, -1)
    ids[:257], ids[257:512] = 0, 1
    rows = batch(np.random.default_rng(0).permutation(ids).reshape(MICRO, -1, LENGTH))
    state, metrics = made.run(made.state(table([10, -10], [-10, 10]), 1.0), rows)
    np.testing.assert_array_equal(metrics["moe"]["load_E"], mirrored([257, 255]))
    bias, rate = made.buffers(state)["bias"], np.float32(BIAS_RATE)
    assert bias.dtype == np.float32
    np.testing.assert_array_equal(bias, mirrored([np.float32(1) - rate, np.float32(1) + rate]))


@everywhere
def test_a_step_counts_beyond_256_and_moves_a_bias_of_1(at):
    """Case D10: 257 tokens to expert 0 and 255 to 1, where in bfloat16 256 + 1 is 256, and 1 + .001
    is 1."""
    check_257_tokens(steps(at, 2), "float32")


@at_each([("alone", "none"), ("dp4tp2-ep-etp2", "full")])
def test_so_does_a_step_in_bfloat16(at):
    """Case D10 with every dtype bfloat16, but for that of biases and counts."""
    check_257_tokens(steps(at, 2, "bfloat16"), "bfloat16")


# Three tokens to one expert, one to the other; half of them in a row that another tp rank has.
THREE_TO_ONE = [[0, 0], [-1, -1], [0, 1]]


@everywhere
def test_the_bias_moves_once_a_step_by_the_load_of_all_microbatches(at, tmp_path):
    """Case D11: 4 microbatches of 3 tokens to expert 0 and 1 to 1: load [12, 4], bias [-.001,
    +.001] after the step. Evaluations change nothing. The bias is saved, and has no moments."""
    made = steps(at, 2)
    evaluate = evaluation(at[0])
    rows = every_micro(made, THREE_TO_ONE)
    state = made.state(table([10, -10], [-10, 10]))

    def unchanged_by_evaluation(state):
        before = jax.tree.map(np.asarray, state.buffers)
        nll, targets = evaluate(state, rows)
        assert targets == 16 * made.copies
        np.testing.assert_allclose(nll / targets, np.log(IDS), rtol=0.1)
        jax.tree.map(np.testing.assert_array_equal, state.buffers, before)

    unchanged_by_evaluation(state)
    state, metrics = made.run(state, rows)
    moe, mine, rate = metrics["moe"], made.buffers(state), np.float32(BIAS_RATE)
    np.testing.assert_array_equal(moe["load_E"], made.copies * mirrored([12, 4]))
    np.testing.assert_array_equal(moe["load"], mirrored([0.75, 0.25]))
    np.testing.assert_array_equal(mine["bias"], mirrored([-rate, rate]))
    np.testing.assert_array_equal(mine["load_before"], np.zeros((2, 2)))
    np.testing.assert_array_equal(moe["bias_max"], [rate, rate])
    np.testing.assert_array_equal(moe["bias_min"], [-rate, -rate])
    np.testing.assert_allclose(moe["imbalance"], [1.5, 1.5])
    np.testing.assert_allclose(moe["entropy"], [0.811278] * 2, atol=1e-6)
    np.testing.assert_array_equal(moe["dead"], [0, 0])
    np.testing.assert_array_equal(moe["dropped"], [0, 0])
    # One rank has all of 4 slots; of two, 3 of 4; of two that get half of the rows, 2 of 2.
    busiest = {"alone": 1.0, "tp8-etp8": 1.0, "dp2tp4-ep": 2.0}.get(at[0], 1.5)
    np.testing.assert_array_equal(moe["busiest_rank"], [busiest] * 2)
    unchanged_by_evaluation(state)

    checkpointer = Checkpointer(tmp_path, CheckpointConfig(asynchronous=False))
    checkpointer.save(1, state, {})
    checkpointer.close()
    saved = read_metadata(tmp_path)
    assert saved["buffers.stack_0.block_0.moe.bias"].dtype == jnp.float32
    moments = [path for path in saved if path.startswith("opt_state")]
    assert any("w_router" in path for path in moments)
    assert not any("bias" in path or "load_before" in path for path in moments)


# Of two token ids; with the biases of the first layer .54 and .56, .57 and .53, and with those of
# the second .54 and .66, .57 and .63.
SCORES = np.tile(np.log([[0.54, 0.46], [0.57, 0.43]]), (2, 1, 1))


@pytest.fixture(scope="module")
def biased_run(tmp_path_factory):
    """A run saved on one fold, whose layers have biases [.1 (l + 1) i]; and these."""
    folder = tmp_path_factory.mktemp("run")
    bias = np.array([[0.1 * (layer + 1) * i for i in range(2)] for layer in range(2)], np.float32)
    made = steps(("dp4tp2-ep-etp2", "none"), 2)
    state = made.state(SCORES, bias)
    checkpointer = Checkpointer(folder, CheckpointConfig(asynchronous=False))
    checkpointer.save(1, state, {})
    checkpointer.close()
    return folder, bias


@everywhere
def test_each_layer_routes_by_its_own_bias_and_keeps_it_on_another_fold(at, biased_run):
    """Case D29 (the bias): saved on one fold, each layer's bias is bit-equal on another, not 0, and
    steers: expert 0 has the better score, 1 is chosen, in the first layer by half of the tokens.
    The losses do not know."""
    folder, bias = biased_run
    made = steps(at, 2)
    layout = made.made.layout
    target = jax.tree.map(
        lambda leaf, where: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where),
        layout.abstract, layout.shardings,
    )  # fmt: skip
    checkpointer = Checkpointer(folder, CheckpointConfig())
    state, _ = checkpointer.restore(target)
    checkpointer.close()
    kept = made.buffers(state)["bias"]
    assert kept.dtype == np.float32 and kept.tobytes() == bias.tobytes()
    rows = every_micro(made, [[0, 0], [1, 1]])
    state, metrics = made.run(state, rows)
    np.testing.assert_array_equal(metrics["moe"]["load"], [[0.5, 0.5], [0, 1]])
    for loss in LOADS:  # of the plain choice, 0: twice the mean of .54 and .57
        np.testing.assert_allclose(metrics["moe"][loss], [1.11, 1.11], rtol=1e-6)
    moved = np.float32(BIAS_RATE) * np.array([[0, 0], [1, -1]], np.float32)
    np.testing.assert_array_equal(made.buffers(state)["bias"], bias + moved)
    _, metrics = made.run(made.state(SCORES), rows)
    np.testing.assert_array_equal(metrics["moe"]["load"], [[1, 0], [1, 0]])
