"""The recipes of published models: their shape, parameters, FLOPs, and folds."""

import inspect
import json
import runpy
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from flax import nnx
from jax.sharding import AbstractMesh

from moejax.config import Config, mirror, rebuild
from moejax.convert import hf
from moejax.core import params
from moejax.model.flops import attention_flops, inactive_params, linear_flops_per_token
from moejax.model.transformer import Transformer
from moejax.parallel.stages import pipeline_of
from moejax.train.optimizer import decay_mask, make_optimizer, make_schedule
from moejax.train.state import plan_state
from tests.configs.published import PUBLISHED

ROOT = Path(__file__).parent.parent.parent


def recipes() -> dict[tuple[str, str], Config]:
    """Returns every recipe of configs/ by (file, name)."""
    found = {}
    for path in sorted((ROOT / "configs").glob("*.py")):
        for name, value in runpy.run_path(str(path)).items():
            if inspect.isfunction(value) and Path(inspect.getfile(value)) == path:
                found[path.stem, name] = value()
    return found


ALL = recipes()


def test_every_published_model_has_its_recipe():
    assert set(PUBLISHED) <= set(ALL)
    assert len({config.name for config in ALL.values()}) == len(ALL)


@pytest.mark.parametrize("key", PUBLISHED, ids="/".join)
def test_a_recipe_is_the_published_model_leaf_by_leaf(key, tmp_path):
    """Its model is what config.json describes, and what it writes describes the same again."""
    model = ALL[key].model
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED[key]))
    family, said = hf.read_config(tmp_path)
    assert hf.model_config(family, said, model) == model
    written = hf.hf_config(family, model)
    assert hf.model_config(family, written, model) == model
    for name, value in PUBLISHED[key].items():
        if name in written and name not in ("model_type", "rope_scaling"):
            assert written[name] == value, name


@cache
def layout_of(key):
    """Returns the layout of a recipe on the devices it names, or the fewest it takes; no device
    is needed."""
    config = ALL[key]
    parallel = config.parallel
    devices = parallel.num_devices() or max(parallel.tp, parallel.ep * parallel.etp)
    fold = config.fold_over(devices)
    names, sizes = fold.all or ("one",), [size for _, size in fold.axes] or [1]
    model = nnx.eval_shape(lambda: Transformer(config.model, rngs=nnx.Rngs(0)))
    steps = config.train.steps
    optimizer = make_optimizer(config.optimizer, steps, decay_mask(params.dims_of(model)[0]))
    mesh = AbstractMesh(tuple(sizes), tuple(names))
    pipeline = pipeline_of(parallel, config.model)
    zero = parallel.zero
    return plan_state(config.model, optimizer, fold, mesh, zero, config.precision, pipeline)


@pytest.mark.parametrize("key", ALL, ids="/".join)
def test_a_recipe_fits_the_devices_it_names(key):
    """Its fold nests, every dim divides, the batch does, the schedule fits, flags can change it."""
    config = ALL[key]
    layout_of(key)
    make_schedule(config.optimizer, config.train.steps)
    hardware = key[1].rpartition("x")[2] if "_h100x" in key[1] or "_gb200x" in key[1] else ""
    if hardware:
        assert config.parallel.num_devices() == int(hardware)
    assert rebuild(Config, mirror(config)) == config


NEITHER, EMBEDDING, BOTH = 0, 1, 2
# Recipe -> (total, active, in billions as published; what the lab leaves out of the active ones:
# nothing, the embedding, embedding and head). MTP modules count nowhere.
COUNTS = {
    "v2_lite": ("15.7", "2.4", EMBEDDING),
    "v2": ("236", "21", NEITHER),
    "v3": ("671", "37", EMBEDDING),
    "moonlight_16b": ("16", "3", NEITHER),
    "kimi_k2": ("1026", "32", EMBEDDING),
    "qwen2_57b_a14b": ("57.4", "14", NEITHER),
    "qwen3_30b_a3b": ("30.5", "3.3", NEITHER),
    "qwen3_235b_a22b": ("235.1", "22.2", NEITHER),
    "mixtral_8x7b": ("46.7", "12.9", NEITHER),
    "mixtral_8x22b": ("141", "39", NEITHER),
    "gpt_oss_20b": ("20.9", "3.6", EMBEDDING),
    "gpt_oss_120b": ("116.8", "5.1", EMBEDDING),
    "olmoe_1b_7b": ("6.9", "1.3", NEITHER),
}


def as_printed(value: float, published: str) -> bool:
    """Whether a value, rounded or cut off, is what was printed."""
    unit = 10.0 ** -len(published.partition(".")[2])
    return float(published) - unit / 2 <= value < float(published) + unit


@pytest.mark.parametrize("name", COUNTS)
def test_parameters_are_those_published(name):
    """From abstract shapes. An active parameter is one that a token uses: all but the experts that
    it did not choose."""
    key = next(key for key in PUBLISHED if key[1] == name)
    cfg = replace(ALL[key].model, mtp_depth=0)
    model = nnx.eval_shape(lambda: Transformer(cfg, rngs=nnx.Rngs(0)))
    total = params.count(params.partition(model)[1])
    published, active, left_out = COUNTS[name]
    assert as_printed(total / 1e9, published), total
    used = total - inactive_params(cfg) - left_out * cfg.vocab_size * cfg.dim
    assert as_printed(used / 1e9, active), used


# Recipe, tokens of a sequence -> GFLOPs per token, as Megatron Core and (windows) Megatron-Bridge
# count them: the formula's own figures, or what published rates of tokens and of FLOPs are apart.
FLOPS = {
    ("v3", 4096): 259.99,
    ("v3_gb200x256", 4096): 249.81,
    ("qwen3_235b_a22b", 4096): 148.03,
    ("qwen3_235b_a22b", 131072): 734.7,
    ("qwen3_30b_a3b", 4096): 23.006,
    ("kimi_k2", 4096): 204.48,
    ("mixtral_8x7b", 4096): 79.71,
    ("mixtral_8x22b", 4096): 242.20,
    ("gpt_oss_120b", 4096): 32.61,
}


@pytest.mark.parametrize(("name", "length"), FLOPS)
def test_flops_per_token_are_those_published(name, length):
    cfg, expected = next(ALL[key].model for key in ALL if key[1] == name), FLOPS[name, length]
    found = linear_flops_per_token(cfg) + attention_flops(cfg, length) / length
    assert found / 1e9 == pytest.approx(expected, rel=1e-3)


def test_flops_per_token_without_windows():
    """As Megatron Core counts gpt-oss, 34.33 GFLOPs: it does not look at windows."""
    cfg = ALL["gpt_oss", "gpt_oss_120b"].model
    whole = replace(cfg, pattern="M", attention=replace(cfg.attention, window=0))
    found = linear_flops_per_token(whole) + attention_flops(whole, 4096) / 4096
    assert found / 1e9 == pytest.approx(34.33, rel=1e-3)


@pytest.mark.parametrize(
    ("name", "depth", "total", "active"),
    [("glm_4_5", 1, "355", "32"), ("glm_4_5_air", 0, "106", "12")],
)
def test_parameters_of_glm_are_those_published(name, depth, total, active):
    """Its report leaves out embedding and head everywhere; that of GLM-4.5 counts the MTP layer."""
    cfg = replace(ALL["glm4_moe", name].model, mtp_depth=depth)
    model = nnx.eval_shape(lambda: Transformer(cfg, rngs=nnx.Rngs(0)))
    found = params.count(params.partition(model)[1]) - BOTH * cfg.vocab_size * cfg.dim
    assert as_printed(found / 1e9, total), found
    assert as_printed((found - inactive_params(cfg)) / 1e9, active)
