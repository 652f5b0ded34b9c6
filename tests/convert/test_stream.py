"""Conversions slice by slice: there and back to the bit, what a run reads, what is refused."""

import dataclasses
import json
import shutil
import types

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from moejax import trained
from moejax.convert import __main__ as command
from moejax.convert import hf, output, store, to_hf, to_run
from moejax.convert.files import Reader
from moejax.core.mesh import ParallelConfig, fold
from moejax.train.checkpoint import CheckpointConfig, Checkpointer, load_weights, read_metadata
from tests.convert.golden import VARIANTS, golden, layout_of
from tests.convert.test_hf import PLAIN, assert_same_tensors
from tests.models import hf_folder

V3, MIXED = "deepseek_v3_dense2", "qwen3_moe_untied"
FOLD8 = ParallelConfig(dp=8, ep=4, etp=2)


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    """Every array is cut: an expert, or a few rows, at a time."""
    monkeypatch.setattr(to_run, "CHUNK_BYTES", 700)
    monkeypatch.setattr(store, "WINDOW_BYTES", 2000)


def as_run(name, where, dtype="auto"):
    to_run.convert(golden(name).folder, where, dtype)
    return where


def assert_same_trees(mine, right):
    flat, tree = jax.tree.flatten(mine)
    assert tree == jax.tree.structure(right)
    for a, b in zip(flat, jax.tree.leaves(right), strict=True):
        assert a.dtype == b.dtype and a.sharding == b.sharding
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


@pytest.mark.parametrize("name", PLAIN)
def test_there_and_back_is_the_same_to_the_bit(name, tmp_path):
    run = as_run(name, tmp_path / "run")
    done = to_hf.convert(run, tmp_path / "hf")
    right = Reader(golden(name).folder)
    assert_same_tensors(Reader(tmp_path / "hf"), right)
    assert json.loads((tmp_path / "hf" / "config.json").read_text()) == golden(name).said
    assert done.num_tensors == len(right.tensors)
    assert done.num_bytes == sum(t.num_bytes for t in right.tensors.values())


@pytest.mark.parametrize("name", sorted(set(VARIANTS) - set(PLAIN)))
def test_what_was_quantised_comes_back_dequantised(name, tmp_path):
    to_hf.convert(as_run(name, tmp_path / "run"), tmp_path / "hf")
    mine, right = Reader(tmp_path / "hf"), Reader(golden(name).folder, "dequantized.safetensors")
    for tensor in right.tensors:
        assert mine.map(tensor).tobytes() == right.map(tensor).tobytes(), tensor
    assert "quantization_config" not in json.loads((tmp_path / "hf" / "config.json").read_text())


@pytest.mark.parametrize("grid", [None, FOLD8], ids=["one device", "a fold of 8"])
def test_a_run_starts_with_it_as_it_does_with_the_source(grid, tmp_path):
    """`load_weights` and `Checkpointer.restore` read what was written in pieces."""
    made, run = golden(V3), as_run(V3, tmp_path / "run")
    grid = None if grid is None else fold(*grid.readings(8))
    layout = layout_of(made.cfg, grid=grid)
    target = {"params": layout.resting.params, "buffers": layout.resting.buffers}
    right = dict(zip(target, hf.load(made.folder, made.cfg, tuple(target.values())), strict=True))
    for part in target:
        assert_same_trees(load_weights(run, target[part], subtree=part), right[part])
    dtypes = read_metadata(run)
    assert dtypes["params.stack_1.block_0.moe.w_router"].dtype == jnp.float32  # as it was stored
    assert dtypes["params.stack_1.block_0.moe.experts.w_in"].dtype == jnp.bfloat16
    assert dtypes["buffers.stack_1.block_0.moe.bias"].dtype == jnp.float32

    def as_stored(path, leaf):
        dtype = dtypes[jax.tree_util.keystr(path, simple=True, separator=".")].dtype
        return jax.ShapeDtypeStruct(leaf.shape, dtype, sharding=leaf.sharding)

    checkpointer = Checkpointer(run, CheckpointConfig())
    state, extra = checkpointer.restore(jax.tree_util.tree_map_with_path(as_stored, target))
    checkpointer.close()
    assert extra["config"]["model"]["dim"] == made.cfg.dim
    wide = jax.tree.map(lambda a, like: a.astype(like.dtype), state, right)
    assert_same_trees(wide, right)


def saved_run(name, where, grid=None, leaves=types.MappingProxyType({})):
    """A run's own checkpoint, as training writes it, of a model that a fold holds."""
    cfg = hf.with_leaves(golden(name).cfg, leaves)
    layout = layout_of(cfg, grid=grid)
    target = (layout.resting.params, layout.resting.buffers)
    weights, buffers = hf.load(golden(name).folder, cfg, target)
    checkpointer = Checkpointer(where, CheckpointConfig())
    config = {"model": dataclasses.asdict(cfg), "init": {"from_hf": "", "from_run": ""}}
    checkpointer.save(7, {"params": weights, "buffers": buffers}, {"config": config})
    checkpointer.close()
    return where


@pytest.mark.parametrize("grid", [None, fold(*FOLD8.readings(8))], ids=["one", "fold8"])
def test_the_checkpoint_of_a_training_run_is_exported(grid, tmp_path):
    """With what `--like` says of dtypes; it was saved a layer, or a device's share of one, a
    chunk."""
    run = saved_run(V3, tmp_path / "run", grid)
    chunk = store.Reader(run).arrays["params.stack_1.block_0.moe.experts.w_in"].chunk
    cfg = golden(V3).cfg
    share = (4, 2) if grid else (1, 1)
    experts, width = cfg.moe.num_experts // share[0], cfg.moe.ffn_dim // share[1]
    assert chunk == (1, experts, cfg.dim, 2, width)
    to_hf.convert(run, tmp_path / "hf", like=golden(V3).folder)
    assert_same_tensors(Reader(tmp_path / "hf"), Reader(golden(V3).folder))


def test_a_run_that_was_born_here_finds_its_family(tmp_path):
    run = saved_run(MIXED, tmp_path / "run")
    to_hf.convert(run / "checkpoints" / "7", tmp_path / "hf")
    family, said = hf.read_config(tmp_path / "hf")
    assert family.model_type == "qwen3_moe" and said["torch_dtype"] == "bfloat16"
    right = Reader(golden(MIXED).folder)
    mine = Reader(tmp_path / "hf")
    assert set(mine.tensors) == set(right.tensors)
    for name in right.tensors:
        bits = np.asarray(right.map(name)).astype(ml_dtypes.bfloat16)
        assert mine.map(name).tobytes() == bits.tobytes()
    cfg = hf.with_leaves(golden(MIXED).cfg, {"moe.latent_dim": 8})
    with pytest.raises(ValueError, match="no family .* has such a model: deepseek_v2 "):
        to_hf.find_origin(tmp_path, {}, cfg)


def test_a_run_that_started_from_a_converted_one_knows_where_it_came_from(tmp_path):
    first = as_run(V3, tmp_path / "first")
    extra = {"config": {"init": {"from_run": str(first), "from_hf": ""}}}
    origin = to_hf.find_origin(tmp_path / "second", extra, golden(V3).cfg)
    assert origin.folder == first and origin.said == golden(V3).said
    assert set(origin.dtypes.values()) == {np.dtype(np.float32)}


def test_the_tokenizer_goes_along(tmp_path):
    shutil.copytree(golden(MIXED).folder, tmp_path / "source")
    for name in ("tokenizer.json", "merges.txt", "chat_template.jinja", "README.md"):
        (tmp_path / "source" / name).write_text(name)
    to_run.convert(tmp_path / "source", tmp_path / "run")
    said = json.loads((tmp_path / "run" / "config.json").read_text())
    assert said["data"]["tokenizer"] == str(tmp_path / "run")
    shutil.rmtree(tmp_path / "source")
    to_hf.convert(tmp_path / "run", tmp_path / "hf")
    for folder in ("run", "hf"):
        assert (tmp_path / folder / "merges.txt").read_text() == "merges.txt"
        assert not (tmp_path / folder / "README.md").exists()


def test_a_padded_vocabulary_and_a_model_without_its_further_modules(tmp_path):
    """As a run under tp has them: rows of zeros, which are not exported."""
    to_run.convert(golden(V3).folder, tmp_path / "run", vocab_multiple=8)
    arrays = store.Reader(tmp_path / "run")
    assert arrays.arrays["params.embedding"].shape == (72, 32)
    assert arrays.arrays["params.head"].shape == (32, 72)
    assert not arrays.read("params.embedding", (slice(67, 72),)).any()
    to_hf.convert(tmp_path / "run", tmp_path / "hf")
    assert_same_tensors(Reader(tmp_path / "hf"), Reader(golden(V3).folder))
    run = saved_run("deepseek_v3_mtp", tmp_path / "bare", leaves={"mtp_depth": 0})
    to_hf.convert(run, tmp_path / "less", like=golden("deepseek_v3_mtp").folder)
    _, said = hf.read_config(tmp_path / "less")
    assert said["num_nextn_predict_layers"] == 0
    right = Reader(golden("deepseek_v3_mtp").folder).tensors
    assert Reader(tmp_path / "less").tensors.keys() == {n for n in right if ".layers.2." not in n}


def test_it_is_opened_as_the_folder_is_that_it_came_from(tmp_path):
    """By `moejax.generate` and `moejax.evaluate`."""
    source = tmp_path / "source"
    hf_folder(source, MIXED)
    to_run.convert(source, tmp_path / "run")
    mine, right = (trained.load(str(tmp_path / name)) for name in ("run", "source"))
    assert mine.length == right.length and mine.tokenizer.fingerprint == right.tokenizer.fingerprint
    for ours, theirs in zip(mine.weights, right.weights, strict=True):
        assert_same_trees(ours, theirs)


def test_dtypes_that_are_asked_for(tmp_path):
    run = as_run(V3, tmp_path / "run", "float32")
    assert read_metadata(run)["params.embedding"].dtype == jnp.float32
    to_hf.convert(run, tmp_path / "hf", dtype="float32")
    assert {t.dtype for t in Reader(tmp_path / "hf").tensors.values()} == {np.dtype(np.float32)}
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["dtype"] == "float32"


def test_every_mistake_is_one_line(tmp_path, capsys):
    source, run = str(golden(V3).folder), str(as_run(V3, tmp_path / "run"))
    capsys.readouterr()
    other = str(golden(MIXED).folder)
    new = str(tmp_path / "new")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    for arguments, message in (
        (["hf-to-moejax", str(tmp_path / "no"), new], "config.json is missing: give a folder"),
        (["hf-to-moejax", source, str(tmp_path / "full")], "is there and not empty"),
        (["moejax-to-hf", run, str(tmp_path / "full")], "is there and not empty"),
        (["moejax-to-hf", str(tmp_path / "full"), new], "no checkpoint in"),
        (["moejax-to-hf", run, new, "--like", other], "holds another model: model."),
    ):
        assert command.main(arguments) == 2
        error = capsys.readouterr().err
        assert message in error and error.startswith("error: ") and error.count("\n") == 1
    assert not list(tmp_path.glob("new*"))
    assert command.main(["hf-to-moejax", source, new]) == 0
    assert " tensors, " in capsys.readouterr().out


def test_a_disk_that_is_too_small_and_a_conversion_that_fails(tmp_path, monkeypatch):
    with pytest.raises(OSError, match=r"needs 1000000000.0 GB, the disk has"):
        to_hf.output.new_folder(tmp_path / "new", 10**18).__enter__()
    with pytest.raises(RuntimeError), output.new_folder(tmp_path / "new", 1) as folder:
        (folder / "half").touch()
        raise RuntimeError
    assert not list(tmp_path.iterdir())
    (tmp_path / "new.part").mkdir()
    with pytest.raises(FileExistsError, match="was killed: remove it"):
        output.new_folder(tmp_path / "new", 1).__enter__()
