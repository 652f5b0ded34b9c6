"""Checkpoints in Hugging Face's format: there and back, from folds, and what is refused."""

import json
import shutil

import jax
import ml_dtypes
import numpy as np
import pytest

from moejax import config as configuration
from moejax.convert import hf
from moejax.convert.files import NAMES, Reader, Tensor, Writer
from moejax.core.mesh import ParallelConfig, fold
from moejax.train import loop, setup
from tests.convert.golden import VARIANTS, golden, layout_of, loaded
from tests.models import word_tokenizer
from tests.oracle import max_relative_error
from tests.train.test_loop import folder
from tests.train.test_resume import RECIPE

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
PLAIN = [name for name in VARIANTS if not name.endswith(("fp8", "mxfp4"))]

FOLD8 = ParallelConfig(dp=4, tp=2, ep=4, etp=2, zero=1)
__all__ = ["folder"]  # a fixture


def dtypes_of(name):
    reader = Reader(golden(name).folder)
    return {tensor: what.dtype for tensor, what in reader.tensors.items()}


def saved(name, where, weights, buffers, cfg=None):
    made = golden(name)
    hf.save(where, made.family, cfg or made.cfg, weights, buffers, dtypes_of(name), BFLOAT16)
    return Reader(where)


def assert_same_tensors(mine: Reader, right: Reader):
    assert mine.tensors == right.tensors
    for name in right.tensors:
        assert mine.map(name).tobytes() == right.map(name).tobytes(), name


@pytest.mark.parametrize("name", PLAIN)
def test_there_and_back_is_the_same_to_the_bit(name, tmp_path):
    _, weights, buffers = loaded(name)
    assert_same_tensors(saved(name, tmp_path, weights, buffers), Reader(golden(name).folder))
    family, said = hf.read_config(tmp_path)
    again = hf.with_leaves(hf.model_config(family, said), {})
    right = hf.model_config(golden(name).family, golden(name).said)
    assert again == right


@pytest.mark.parametrize("name", ["deepseek_v3_yarn", "deepseek_v3_dense2", "glm4_moe_plain"])
def test_from_a_fold_of_8_it_is_the_same(name, tmp_path):
    """Each device reads its slice; what they write together is what was read. A vocabulary of 67 is
    padded to 72, with zeros that are not written."""
    made = golden(name)
    cfg = hf.with_leaves(made.cfg, {"vocab_multiple": 8})
    layout = layout_of(cfg, grid=fold(*FOLD8.readings(8)), zero=1)
    target = (layout.resting.params, layout.resting.buffers)
    weights, buffers = hf.load(made.folder, cfg, target)
    assert weights["embedding"].shape[0] == -(-cfg.vocab_size // 8) * 8
    assert not np.asarray(weights["embedding"][cfg.vocab_size :]).any()
    w_in = weights["stack_1"]["block_0"]["moe"]["experts"]["w_in"]
    local = w_in.addressable_shards[0].data
    assert local.size * 8 <= w_in.size and len(w_in.addressable_shards) == 8
    assert_same_tensors(saved(name, tmp_path, weights, buffers, cfg), Reader(made.folder))


@pytest.mark.parametrize("name", ["deepseek_v3_fp8", "gpt_oss_mxfp4"])
def test_what_is_quantised_is_exported_as_the_other_implementation_dequantises_it(name, tmp_path):
    made = golden(name)
    _, weights, buffers = loaded(name)
    hf.save(tmp_path, made.family, made.cfg, weights, buffers, {}, BFLOAT16)
    mine, right = Reader(tmp_path), Reader(made.folder, "dequantized.safetensors")
    assert len(right.tensors) >= 2
    for tensor in right.tensors:
        assert mine.map(tensor).tobytes() == right.map(tensor).tobytes(), tensor


def test_router_biases_are_those_of_their_layer():
    """Case D29: float32, bit for bit, none is 0."""
    made = golden("deepseek_v3_dense2")
    _, _, buffers = loaded("deepseek_v3_dense2")
    bias = np.asarray(buffers["stack_1"]["block_0"]["moe"]["bias"])
    assert bias.dtype == np.float32 and made.cfg.first_k_dense == 2
    reader = Reader(made.folder)
    for layer in range(2):
        right = reader.map(f"model.layers.{2 + layer}.mlp.gate.e_score_correction_bias")
        np.testing.assert_array_equal(bias[layer], right)
        assert (bias[layer] != 0).all()


def altered(name, where, change):
    """A copy of a variant with its tensors changed: {name: array} -> {name: array}."""
    reader = Reader(golden(name).folder)
    arrays = change({tensor: np.array(reader.map(tensor)) for tensor in reader.tensors})
    where.mkdir()
    shutil.copy(golden(name).folder / "config.json", where)
    plan = {tensor: Tensor(array.dtype, array.shape) for tensor, array in arrays.items()}
    with Writer(where, plan) as writer:
        for tensor, array in arrays.items():
            writer.write(tensor, array)
    return where


NORM = "model.layers.1.input_layernorm.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda a: {k: v for k, v in a.items() if k != NORM}, f"lacks {NORM}$"),
        (lambda a: a | {"model.layers.1.extra.weight": a[NORM]}, "also has model.layers.1.extra"),
        (lambda a: a | {NORM: a[NORM][:-1]}, rf"another shape: {NORM} is \[\d+\], not \[\d+\]"),
    ],
    ids=["missing", "more", "shape"],
)
def test_a_tensor_that_does_not_fit_is_named(change, message, tmp_path):
    made, (layout, *_) = golden("mixtral_plain"), loaded("mixtral_plain")
    where = altered("mixtral_plain", tmp_path / "changed", change)
    with pytest.raises(ValueError, match=message):
        hf.load(where, made.cfg, (layout.resting.params, layout.resting.buffers))


def test_a_router_bias_that_nobody_maps_is_named(tmp_path):
    """Case D03: gpt-oss's linear bias, left out of the model."""
    made = golden("gpt_oss_yarn")
    plain = hf.with_leaves(made.cfg, {"moe.router.linear_bias": False})
    layout = layout_of(plain)
    with pytest.raises(ValueError, match="no array .*b_router for mlp.router.bias"):
        hf.load(made.folder, plain, (layout.resting.params, layout.resting.buffers))
    more = hf.with_leaves(golden("mixtral_plain").cfg, {"attention.bias": True})
    layout = layout_of(more)
    with pytest.raises(ValueError, match="lacks model.layers.0.self_attn.q_proj.bias"):
        hf.load(
            golden("mixtral_plain").folder, more,
            (layout.resting.params, layout.resting.buffers),
        )  # fmt: skip


MTP = "model.layers.2."


def test_modules_for_further_tokens():
    """They may be left out; what repeats the main model's embedding and head has to."""
    made = golden("deepseek_v3_mtp")
    assert made.cfg.mtp_depth == 1
    without = hf.with_leaves(made.cfg, {"mtp_depth": 0})
    hf.check_same(made.folder, without)
    layout = layout_of(without)
    weights, _ = hf.load(made.folder, without, (layout.resting.params, layout.resting.buffers))
    assert "mtp_0" not in weights
    two = hf.with_leaves(made.cfg, {"mtp_depth": 2})
    with pytest.raises(ValueError, match=r"model.mtp_depth=2 \(there 1\)"):
        hf.check_same(made.folder, two)


@pytest.mark.parametrize("tensor", ["embed_tokens.weight", "shared_head.head.weight"])
def test_a_copy_that_is_none_is_named(tensor, tmp_path):
    made, (layout, *_) = golden("deepseek_v3_mtp"), loaded("deepseek_v3_mtp")
    name = MTP + tensor
    where = altered(made.name, tmp_path / "changed", lambda a: a | {name: a[name] + a[name]})
    with pytest.raises(ValueError, match=f"other values than the main model's in {name}$"):
        hf.load(where, made.cfg, (layout.resting.params, layout.resting.buffers))


def test_modules_that_are_promised_and_not_there(tmp_path):
    """transformers writes num_nextn_predict_layers=1 into every config.json."""
    where = altered(
        "deepseek_v3_mtp", tmp_path / "changed",
        lambda a: {name: array for name, array in a.items() if not name.startswith(MTP)},
    )  # fmt: skip
    family, said = hf.read_config(where)
    assert said["num_nextn_predict_layers"] == 0 and hf.model_config(family, said).mtp_depth == 0


def test_what_is_no_checkpoint_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"config.json is missing: give a folder"):
        hf.read_config(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(ValueError, match="model_type='llama'; known are deepseek_v2, deepseek_v3"):
        hf.read_config(tmp_path)
    with pytest.raises(FileNotFoundError, match="model.safetensors is missing"):
        Reader(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"not a header")
    with pytest.raises(ValueError, match="is no safetensors file, or was cut short"):
        Reader(tmp_path)
    whole = (golden("mixtral_plain").folder / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[:-5])
    with pytest.raises(ValueError, match="was cut short: .* bytes are due"):
        Reader(tmp_path)


def test_large_tensors_are_split_over_files_with_an_index(tmp_path):
    arrays = {f"t{i}": np.full((4, 3), i, np.float32) for i in range(5)}
    plan = {name: Tensor(array.dtype, array.shape) for name, array in arrays.items()}
    with Writer(tmp_path, plan, max_shard_bytes=100) as writer:
        for name in reversed(arrays):
            writer.write(name, arrays[name][:2])
            writer.write(name, arrays[name][2:], at=6)
        assert not list(tmp_path.glob("*.safetensors"))
    assert len(list(tmp_path.glob("model-0000?-of-00003.safetensors"))) == 3
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 5 * 48 and len(index["weight_map"]) == 5
    reader = Reader(tmp_path)
    for name, array in arrays.items():
        np.testing.assert_array_equal(reader.map(name), array)
    with pytest.raises(ValueError, match=r"t0: float64\[4, 3\] at 0 does not fit into float32"):
        writer.write("t0", arrays["t0"].astype(np.float64))
    assert len(NAMES) == len(set(NAMES.values()))


@pytest.mark.parametrize("name", ["deepseek_v3_yarn", "qwen3_moe_untied"])
def test_a_converted_model_goes_on_training_under_a_fold(name, folder, tmp_path):
    """Its first loss is that of the other implementation's logits."""
    made = golden(name)
    ids = made.arrays["input_ids"]
    (tmp_path / "text").mkdir()
    for i, row in enumerate(ids):
        (tmp_path / f"text/{i}.txt").write_text(" ".join(f"t{n}" for n in row))
    tokenizer = word_tokenizer(tmp_path / "tokenizer", made.cfg.vocab_size)
    read = configuration.parse(
        [
            f"--config={RECIPE}:tiny_fold8", f"--config.init.from_hf={made.folder}",
            f"--config.runs_dir={folder}/runs", f"--config.name={name}",
            f"--config.data.train=('{tmp_path}/text',)", "--config.data.eval=()",
            f"--config.data.tokenizer={tokenizer}", "--config.data.eos=t0",
            "--config.train.batch_size=2", f"--config.train.sequence_length={ids.shape[1] + 1}",
            "--config.train.steps=6", "--config.parallel.dp=2", "--config.parallel.ep=2",
            "--config.parallel.etp=2", "--config.model.moe.balance.batch_coeff=0",
            "--config.model.moe.balance.sequence_coeff=0", "--config.model.vocab_multiple=2",
        ]
    )  # fmt: skip
    assert read.model.dim == made.cfg.dim and read.model.moe.dispatch == "all_to_all"
    loop.train(setup.prepare(read))
    lines = (read.run_dir / "metrics.jsonl").read_text().splitlines()
    losses = [r["loss"] for r in map(json.loads, lines) if "loss" in r]
    targets = np.concatenate([ids[:, 1:], np.zeros((2, 1), np.int32)], axis=1)
    log_p = jax.nn.log_softmax(np.asarray(made.arrays["logits"], np.float64))
    right = -np.take_along_axis(np.asarray(log_p), targets[..., None], axis=-1).mean()
    assert max_relative_error(losses[0], right) < 2e-6
    assert losses[-1] < losses[0]


def test_another_model_than_the_folder_holds_is_refused():
    made = golden("deepseek_v3_yarn")
    hf.check_same(made.folder, made.cfg)
    other = hf.with_leaves(made.cfg, {"attention.rope.factor": 2.0})
    with pytest.raises(ValueError, match=r"another model: model.attention.rope.factor=2.0 \(there"):
        hf.check_same(made.folder, other)
    still = hf.with_leaves(made.cfg, {"moe.balance.bias_rate": 0.0})
    with pytest.raises(ValueError, match="have biases: set model.moe.balance.frozen_bias=True"):
        hf.check_same(made.folder, still)
    hf.check_same(made.folder, hf.with_leaves(still, {"moe.balance.frozen_bias": True}))
