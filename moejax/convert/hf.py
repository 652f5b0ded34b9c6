"""Hugging Face checkpoints as our arrays, and back.

    family, said = read_config(folder)                  config.json
    cfg = model_config(family, said)                    our ModelConfig
    params, buffers = load(folder, cfg, target)         each device reads its slice
    save(folder, family, cfg, params, buffers, ...)     tensor by tensor

Whatever the size, memory holds what the devices hold, and beside it one tensor at a time. A tensor
that no rule names, one that is missing, and one of another shape stop it, with their names.
"""

import dataclasses
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from moejax.convert import names
from moejax.convert.arrays import SHOWN, Leaf, Source, check, leaves
from moejax.convert.families import COMMON_DEFAULTS, FAMILIES, Family
from moejax.convert.files import INDEX, SINGLE, Reader, Tensor, Writer
from moejax.convert.table import Index
from moejax.core.params import Tree
from moejax.model.config import ModelConfig


def read_config(folder: Path | str) -> tuple[Family, dict[str, Any]]:
    """Returns (family, config.json). Raises FileNotFoundError, or ValueError for a model_type that
    is not known."""
    path = Path(folder).expanduser() / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing: give a folder in Hugging Face's format")
    said = json.loads(path.read_text())
    family = family_of(said, path)
    return family, _with_depth(path.parent, said)


def _with_depth(folder: Path, said: dict[str, Any]) -> dict[str, Any]:
    """Returns config.json with as many further modules as the files hold: transformers' promise
    one that they lack."""
    promised, first = said.get(names.NUM_FURTHER) or 0, said.get("num_hidden_layers", 0)
    if not promised or not any((folder / name).is_file() for name in (INDEX, SINGLE)):
        return said
    held = Reader(folder).tensors
    layers = (names.LAYER.format(layer=first + depth) for depth in range(promised))
    depth = sum(f"{layer}eh_proj.weight" in held for layer in layers)
    return said | {names.NUM_FURTHER: depth}


def family_of(said: Mapping[str, Any], where: Path) -> Family:
    """Returns the family of a config.json, read from `where`. Raises ValueError for a model_type
    that is not known."""
    kind = said.get("model_type")
    # Kimi-K2 is DeepSeek-V3 under another name.
    kind = "deepseek_v3" if kind == "kimi_k2" else kind
    if kind not in FAMILIES:
        raise ValueError(f"{where}: model_type={kind!r}; known are {', '.join(FAMILIES)}")
    return FAMILIES[kind]


def with_leaves(node: Any, values: Mapping[str, Any]) -> Any:
    """Returns the config section with dotted leaves replaced, all at once."""
    direct: dict[str, Any] = {}
    nested: dict[str, dict[str, Any]] = {}
    for name, value in values.items():
        head, _, rest = name.partition(".")
        if rest:
            nested.setdefault(head, {})[rest] = value
        else:
            direct[head] = value
    for head, inner in nested.items():
        direct[head] = with_leaves(getattr(node, head), inner)
    return dataclasses.replace(node, **direct)


def leaf_of(node: Any, name: str) -> Any:
    """Returns the value of a dotted leaf."""
    for part in name.split("."):
        node = getattr(node, part)
    return node


# What no checkpoint says: how a model is computed.
OURS = (
    "init_std", "remat", "vocab_multiple", "attention.impl", "attention.mla.recompute_up",
    "moe.dispatch", "moe.budget", "moe.pieces", "moe.impl",
)  # fmt: skip


def model_config(
    family: Family,
    said: Mapping[str, Any],
    base: ModelConfig = ModelConfig(),  # noqa: B008 - frozen
) -> ModelConfig:
    """Returns the model that a config.json describes, computed as `base` is.

    Raises ValueError for a key that is missing or a value that we cannot follow.
    """
    said = COMMON_DEFAULTS | family.defaults | dict(said)
    missing = [key for key in family.keys.values() if key not in said]
    if missing:
        raise ValueError(f"config.json of a {family.model_type} lacks {', '.join(missing)}")
    values = {ours: said[key] for ours, key in family.keys.items()}
    values = family.fixed | values | family.more_from_hf(said)
    return with_leaves(ModelConfig(), values | {name: leaf_of(base, name) for name in OURS})


# What only a training run does, and no file says.
TRAINING = ("moe.router.jitter", "moe.router.record", "moe.router.replay")


def check_same(folder: Path | str, cfg: ModelConfig) -> None:
    """Raises ValueError, naming leaves, where a model is not the one that a folder holds."""
    family, said = read_config(folder)
    wrong = differences(family, said, cfg)
    if wrong:
        raise ValueError(f"{folder} holds another model: {', '.join(wrong[:SHOWN])}")
    biased = model_config(family, said, cfg).moe.balance.biased
    if biased and not cfg.moe.balance.biased:
        raise ValueError(
            f"the routers in {folder} have biases: set model.moe.balance.frozen_bias=True to keep "
            "them as they are, or bias_rate to move them"
        )


def differences(family: Family, said: Mapping[str, Any], cfg: ModelConfig) -> list[str]:
    """Returns "model.LEAF=OURS (there THEIRS)" of each leaf that a config.json has otherwise."""
    right = model_config(family, said, cfg)
    # Modules for further tokens may be left out.
    fewer = ("mtp_depth",) if cfg.mtp_depth < right.mtp_depth else ()
    skip = ("moe.balance.", *TRAINING, *fewer)
    return [
        f"model.{name}={leaf_of(cfg, name)!r} (there {leaf_of(right, name)!r})"
        for name in _names(right)
        if not name.startswith(skip) and leaf_of(cfg, name) != leaf_of(right, name)
    ]


def _names(node: Any, above: str = "") -> Iterator[str]:
    for field in dataclasses.fields(node):
        value = getattr(node, field.name)
        if dataclasses.is_dataclass(value):
            yield from _names(value, f"{above}{field.name}.")
        else:
            yield above + field.name


def hf_config(family: Family, cfg: ModelConfig, dtype: str = "bfloat16") -> dict[str, Any]:
    """Returns config.json of a model of ours, with the published keys."""
    said = {key: leaf_of(cfg, ours) for ours, key in family.keys.items()}
    kinds = {"architectures": [family.architecture], "model_type": family.model_type}
    more = {"hidden_act": "silu", "torch_dtype": dtype, "use_cache": True}
    return kinds | said | more | family.more_to_hf(cfg)


def load(folder: Path | str, cfg: ModelConfig, target: tuple[Tree, Tree]) -> tuple[Tree, Tree]:
    """Returns (params, buffers) of a folder, where and in the dtypes that the target (abstract
    arrays with shardings) says: each device reads its slice.

    Buffers that the family has not (loads, tables) are zeros. Raises as `check` does.
    """
    family, said = read_config(folder)
    source = Source(folder, said)
    known = leaves(family, cfg, *target)
    check(known, source, cfg)
    by_path = {(leaf.tree, leaf.path): leaf for leaf in known}

    def one(tree: str, path: tuple[str, ...], like: Any) -> jax.Array:
        leaf = by_path.get((tree, path))

        def part(index: Index | None) -> np.ndarray:
            index = index or (slice(None),) * len(like.shape)
            if leaf is None:
                sizes = [len(range(n)[at]) for n, at in zip(like.shape, index, strict=True)]
                return np.zeros(sizes, like.dtype)
            return leaf.read(source, index, like.dtype)

        return jax.make_array_from_callback(like.shape, like.sharding, part)

    made = []
    for tree, nodes in zip(("params", "buffers"), target, strict=True):
        made.append(_mapped(nodes, lambda path, like, tree=tree: one(tree, path, like)))
    return made[0], made[1]


def _mapped(tree: Tree, function: Any, above: tuple[str, ...] = ()) -> Tree:
    return {
        name: _mapped(node, function, (*above, name))
        if isinstance(node, dict)
        else function((*above, name), node)
        for name, node in tree.items()
    }


def save(
    folder: Path | str,
    family: Family,
    cfg: ModelConfig,
    params: Tree,
    buffers: Tree,
    dtypes: Mapping[str, np.dtype],
    default: np.dtype,
) -> None:
    """Writes a folder in Hugging Face's format, a layer's array in memory at a time.

    `dtypes` are those of single tensors, `default` that of the others; router biases are float32.
    """
    trees = {"params": params, "buffers": buffers}
    known = leaves(family, cfg, params, buffers)
    plan = planned(known, dtypes, default)
    with Writer(folder, plan) as writer:
        for leaf in known:
            array = trees[leaf.tree]
            for part in leaf.path:
                array = array[part]
            for number, piece in enumerate(leaf.pieces):
                ours = np.asarray(array[number] if leaf.stacked else array)
                tokens = tuple(slice(0, size) for size in piece.shape)
                for name, place, values in leaf.write(number, ours[tokens]):
                    writer.write(name, values.astype(plan[name].dtype), place)
    path = Path(folder).expanduser() / "config.json"
    path.write_text(json.dumps(hf_config(family, cfg, str(default)), indent=2) + "\n")


def planned(
    leaves: list[Leaf], dtypes: Mapping[str, np.dtype], default: np.dtype
) -> dict[str, Tensor]:
    """Returns the tensors of a checkpoint, in order; dtypes as `save` says."""

    def dtype(leaf: Leaf, name: str) -> np.dtype:
        return dtypes.get(name, np.dtype(np.float32) if leaf.tree == "buffers" else default)

    plan = {
        name: Tensor(dtype(leaf, name), shape)
        for leaf in leaves
        for name, shape in leaf.tensors()
    }
    return dict(sorted(plan.items(), key=lambda item: _natural(item[0])))


def _natural(name: str) -> list[Any]:
    """Sorts layer 10 behind layer 9."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in name.split(".")]
