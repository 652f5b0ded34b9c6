"""The fixtures beside this file are whole and agree with themselves. Needs numpy and safetensors.

That a model of ours computes the same is tested elsewhere; README.md says what each file holds.
"""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file

HERE = Path(__file__).parent
FOLDERS = sorted(path.parent for path in HERE.glob("*/config.json"))
BIASED = ("deepseek_v3", "glm4_moe")  # sigmoid scores; a bias that only chooses
WITH_AUX = ("gpt_oss", "mixtral", "olmoe", "qwen2_moe", "qwen3_moe")
MIN_GAP = 1e-3

each_folder = pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: path.name)


def stored(folder: Path) -> dict[str, tuple[str, list[int]]]:
    """Returns the dtype and shape of each tensor of a checkpoint, as its files say."""
    found = {}
    for file in sorted(folder.glob("model*.safetensors")):
        with safe_open(file, "numpy") as tensors:
            for name in sorted(tensors.keys()):
                entry = tensors.get_slice(name)
                assert name not in found
                found[name] = entry.get_dtype(), entry.get_shape()
    return found


def read(folder: Path) -> tuple[dict, dict[str, np.ndarray]]:
    config = json.loads((folder / "config.json").read_text())
    return config, load_file(folder / "golden.safetensors")


def cross_entropy(logits_BLV: np.ndarray, labels_BL: np.ndarray) -> float:
    logits_BLV = logits_BLV.astype(np.float64)
    logits_BLV = logits_BLV - logits_BLV.max(-1, keepdims=True)
    log_sum_BL = np.log(np.exp(logits_BLV).sum(-1))
    picked_BL = np.take_along_axis(logits_BLV, labels_BL[..., None], -1)[..., 0]
    return float((log_sum_BL - picked_BL).mean())


def test_every_variant_is_listed_and_small():
    assert len(FOLDERS) == 21
    listed = (HERE / "README.md").read_text()
    assert [f.name for f in FOLDERS if f"`{f.name}`" not in listed] == []
    sizes = {f.name: sum(file.stat().st_size for file in f.iterdir()) for f in FOLDERS}
    assert max(sizes.values()) < 300_000 and sum(sizes.values()) < 3_500_000, sizes


@each_folder
def test_checkpoint_is_whole(folder):
    config, _ = read(folder)
    tensors = stored(folder)
    index = folder / "model.safetensors.index.json"
    assert index.exists() != (folder / "model.safetensors").exists()
    if index.exists():
        files = json.loads(index.read_text())["weight_map"]
        assert sorted(files) == sorted(tensors)
        for file in set(files.values()):
            with safe_open(folder / file, "numpy") as part:
                assert {name for name in files if files[name] == file} == set(part.keys())
    vocab, hidden = config["vocab_size"], config["hidden_size"]
    assert tensors["model.embed_tokens.weight"] == ("BF16", [vocab, hidden])
    assert ("lm_head.weight" in tensors) != config["tie_word_embeddings"]
    layers = {int(name.split(".")[2]) for name in tensors if name.startswith("model.layers.")}
    extra = config.get("num_nextn_predict_layers", 0)
    assert layers == set(range(config["num_hidden_layers"] + extra))


@each_folder
def test_checkpoint_dtypes(folder):
    for name, (dtype, shape) in stored(folder).items():
        if name.endswith("e_score_correction_bias") or name.endswith("_scale_inv"):
            assert dtype == "F32", name
        elif name.endswith(("_blocks", "_scales")):
            assert dtype == "U8" and shape[2] == (3 if "gate_up" in name else 1), name
        elif folder.name == "deepseek_v3_fp8" and "_proj" in name:
            assert dtype == "F8_E4M3", name
            blocks = stored(folder)[f"{name}_scale_inv"][1]
            assert blocks == [-(-size // 128) for size in shape], name
        elif folder.name == "deepseek_v3_dense2" and name.endswith("mlp.gate.weight"):
            assert dtype == "F32", name
        else:
            assert dtype == "BF16", name


@each_folder
def test_loss_is_that_of_the_logits(folder):
    config, golden = read(folder)
    ids, logits = golden["input_ids"], golden["logits"]
    assert ids.dtype == np.int32 and ids.shape[0] == 2 and ids.shape[1] % 2 == 1
    assert ids.min() >= 0 and ids.max() < config["vocab_size"]
    assert logits.shape == (*ids.shape, config["vocab_size"]) and 0.5 < logits.std() < 2.5
    assert abs(cross_entropy(logits[:, :-1], ids[:, 1:]) - golden["loss"]) < 1e-6
    assert golden["layer_outputs"].shape[0] == config["num_hidden_layers"]
    if "mtp_logits" in golden:
        mtp = cross_entropy(golden["mtp_logits"][:, :-1], ids[:, 2:])
        assert abs(mtp - golden["mtp_loss"]) < 1e-6


@each_folder
def test_choices_are_distinct_and_clear(folder):
    config, golden = read(folder)
    for prefix in ("", "mtp_") if "mtp_logits" in golden else ("",):
        scores, ids = golden[f"{prefix}router_logits"], golden[f"{prefix}choices"]
        assert ids.shape == (*scores.shape[:2], config["num_experts_per_tok"])
        assert ids.min() >= 0 and ids.max() < scores.shape[-1]
        assert (np.diff(ids, axis=-1) > 0).all()  # in rising order, so distinct
        # The last score taken is this far above the first left: float32 noise flips no choice.
        assert golden[f"{prefix}choice_gap"].min() >= MIN_GAP
        assert golden[f"{prefix}choice_weights"].min() > 0


@each_folder
def test_choices_and_weights_follow_from_the_logits(folder):
    config, golden = read(folder)
    logits = golden["router_logits"].astype(np.float64)
    kind, groups = config["model_type"], config.get("n_group") or 1
    if kind in BIASED:
        with safe_open(sorted(folder.glob("model*.safetensors"))[0], "numpy") as tensors:
            names = [n for n in stored(folder) if n.endswith("e_score_correction_bias")]
            bias = [tensors.get_tensor(n) for n in names if n in set(tensors.keys())]
        scores = 1 / (1 + np.exp(-logits))
        for_choice = scores + np.stack(bias)[: len(scores), None] if groups == 1 else None
    else:
        scores = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
        for_choice = scores if groups == 1 else None
    if for_choice is not None:
        best = np.argsort(-for_choice, -1)[..., : config["num_experts_per_tok"]]
        np.testing.assert_array_equal(np.sort(best, -1), golden["choices"])
    weights = np.take_along_axis(scores, golden["choices"], -1)
    if kind in ("gpt_oss", "mixtral") or config.get("norm_topk_prob"):
        weights = weights / weights.sum(-1, keepdims=True)
    weights = weights * config.get("routed_scaling_factor", 1.0)
    np.testing.assert_allclose(golden["choice_weights"], weights, rtol=2e-6)


@each_folder
def test_aux_loss_follows_from_the_router_logits(folder):
    config, golden = read(folder)
    assert ("aux_loss" in golden) == (config["model_type"] in WITH_AUX)
    if "aux_loss" in golden:
        logits = golden["router_logits"].reshape(-1, golden["router_logits"].shape[-1])
        share = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
        counts = np.bincount(golden["choices"].ravel(), minlength=share.shape[1])
        # All layers as one, not divided by K: with an even load it is K, not 1.
        aux = share.shape[1] * (counts / len(logits) * share.mean(0)).sum()
        np.testing.assert_allclose(golden["aux_loss"], aux, rtol=1e-6)


@each_folder
def test_gradients_are_of_tensors_of_the_checkpoint(folder):
    _, golden = read(folder)
    tensors = stored(folder)
    names = [name for name in golden if "grad/" in name]
    assert len(names) >= 8
    for name in names:
        assert list(golden[name].shape) == tensors[name.split("grad/")[1]][1], name
        assert np.isfinite(golden[name]).all() and np.abs(golden[name]).max() > 1e-6, name


@pytest.mark.parametrize("name", ["deepseek_v3_fp8", "gpt_oss_mxfp4"])
def test_dequantized_tensors_have_a_source(name):
    tensors = stored(HERE / name)
    with safe_open(HERE / name / "dequantized.safetensors", "numpy") as expected:
        for key in sorted(expected.keys()):
            shape = expected.get_slice(key).get_shape()
            assert expected.get_slice(key).get_dtype() == "BF16"
            if key in tensors:
                assert shape == tensors[key][1]
            else:  # [E, out, in / 32, 16] of pairs -> [E, in, out]
                experts, fan_out, groups, bytes_ = tensors[f"{key}_blocks"][1]
                assert shape == [experts, groups * bytes_ * 2, fan_out]
