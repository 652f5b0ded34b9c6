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
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from moejax.convert import names, quantized
from moejax.convert.families import COMMON_DEFAULTS, FAMILIES, Family
from moejax.convert.files import Reader, Tensor, Writer
from moejax.convert.table import Index, Placed, Rule
from moejax.core.params import Tree
from moejax.model.transformer import ModelConfig

# Tensors of old files that hold nothing a model needs: tables that are computed anew.
NEEDLESS = re.compile(r"rotary_emb\.inv_freq$")
SHOWN = 5


def read_config(folder: Path | str) -> tuple[Family, dict[str, Any]]:
    """Returns (family, config.json). Raises FileNotFoundError, or ValueError for a model_type that
    is not known."""
    path = Path(folder).expanduser() / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing: give a folder in Hugging Face's format")
    said = json.loads(path.read_text())
    kind = said.get("model_type")
    # Kimi-K2 is DeepSeek-V3 under another name.
    kind = "deepseek_v3" if kind == "kimi_k2" else kind
    if kind not in FAMILIES:
        raise ValueError(f"{path}: model_type={kind!r}; known are {', '.join(FAMILIES)}")
    return FAMILIES[kind], said


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
    "init_std", "remat", "attention.impl", "attention.mla.recompute_up", "moe.dispatch",
    "moe.budget", "moe.impl",
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


def check_same(folder: Path | str, cfg: ModelConfig) -> None:
    """Raises ValueError, naming leaves, where a model is not the one that a folder holds."""
    family, said = read_config(folder)
    right = model_config(family, said, cfg)
    names = [name for name in _names(right) if not name.startswith("moe.balance.")]
    wrong = [
        f"model.{name}={leaf_of(cfg, name)!r} (there {leaf_of(right, name)!r})"
        for name in names
        if leaf_of(cfg, name) != leaf_of(right, name)
    ]
    if wrong:
        raise ValueError(f"{folder} holds another model: {', '.join(wrong[:SHOWN])}")
    if right.moe.balance.biased and not cfg.moe.balance.biased:
        raise ValueError(
            f"the routers in {folder} have biases: set model.moe.balance.frozen_bias=True to keep "
            "them as they are, or bias_rate to move them"
        )


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


class Source:
    """Their tensors by the names that rules use, quantised ones as bfloat16."""

    def __init__(self, folder: Path | str, said: Mapping[str, Any]):
        self.reader = Reader(folder)
        scheme = said.get("quantization_config") or {}
        rows, columns = scheme.get("weight_block_size") or (128, 128)
        self._block = (rows, columns)

    def parts(self, name: str) -> tuple[str, ...]:
        """Returns the stored tensors that make up `name`; () if there is none."""
        return quantized.names_of(name, self.reader.tensors)

    def read(self, name: str) -> Any:
        """Returns a tensor that is read where it is looked at. KeyError if there is none."""
        stored = self.parts(name)
        if not stored:
            raise KeyError(name)
        arrays = [self.reader.map(part) for part in stored]
        if len(arrays) == 1:
            return arrays[0]
        if stored[0] == name:
            return quantized.lazy_fp8(arrays[0], arrays[1], self._block)
        return quantized.lazy_mxfp4(arrays[0], arrays[1])


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One of our arrays, and where it is: a piece for each layer, or one."""

    tree: str
    """"params" or "buffers"."""
    path: tuple[str, ...]
    shape: tuple[int, ...]
    stacked: bool
    pieces: tuple[Placed, ...]

    def read(self, source: Source, index: Index, dtype: Any) -> np.ndarray:
        """Returns a slice of the array."""
        if not self.stacked:
            return self.pieces[0].read(source.read, index, dtype)
        return np.stack(
            [piece.read(source.read, index[1:], dtype) for piece in self.pieces[index[0]]]
        )


def _flat(tree: Tree, above: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, node in tree.items():
        if isinstance(node, dict):
            yield from _flat(node, (*above, name))
        else:
            yield (*above, name), node


def leaves(family: Family, cfg: ModelConfig, params: Tree, buffers: Tree) -> list[Leaf]:
    """Returns where every array is that a checkpoint holds; the trees may be abstract.

    Raises ValueError for a parameter without a rule, or a rule without a parameter.
    """
    ours = {(tree, path): leaf.shape for tree, nodes in (("params", params), ("buffers", buffers))
            for path, leaf in _flat(nodes)}  # fmt: skip
    found = []
    for path, rules in _rules(family, cfg).items():
        rule = rules[0][0]
        key = next((key for key in (("params", path), ("buffers", path)) if key in ours), None)
        if key is None:
            raise ValueError(f"{family.model_type}: no array {'/'.join(path)} for {rule.name}")
        shape, stacked = ours.pop(key), path[0].startswith("stack_")
        inner = shape[1:] if stacked else shape
        rule.check()
        pieces = tuple(Placed(rule, prefix, inner) for rule, prefix in rules)
        found.append(Leaf(*key, shape, stacked, pieces))
    left = ["/".join(path) for tree, path in ours if tree == "params"]
    if left:
        raise ValueError(
            f"{family.model_type} has no tensors for {', '.join(left[:SHOWN])}"
            f"{' ...' if len(left) > SHOWN else ''}: the model has parts that this family has not"
        )
    return found


def _rules(family: Family, cfg: ModelConfig) -> dict[tuple[str, ...], list[tuple[Rule, str]]]:
    """Returns, by our path, the rule and prefix of each layer's array."""
    found = {tuple(rule.path.split("/")): [(rule, "")] for rule in names.whole_model(cfg)}
    first = 0
    for i, (kinds, count) in enumerate(cfg.stacks()):
        for j, kind in enumerate(kinds):
            for rule in family.rules(cfg, kind.upper()):
                path = (f"stack_{i}", f"block_{j}", *rule.path.split("/"))
                layers = range(first + j, first + count * len(kinds), len(kinds))
                found[path] = [(rule, names.LAYER.format(layer=layer)) for layer in layers]
        first += count * len(kinds)
    return found


def check(leaves: list[Leaf], source: Source) -> None:
    """Raises ValueError naming tensors that are missing, of another shape, or in no rule."""
    missing, wrong, used = [], [], set()
    for leaf in leaves:
        for piece in leaf.pieces:
            for name, shape, _ in piece.tensors():
                stored = source.parts(name)
                used.update(stored)
                if not stored:
                    missing.append(name)
                elif source.read(name).shape != shape:
                    wrong.append(f"{name} is {list(source.read(name).shape)}, not {list(shape)}")
    more = [n for n in source.reader.tensors if n not in used and not NEEDLESS.search(n)]
    for what, found in (("lacks", missing), ("has another shape:", wrong), ("also has", more)):
        if found:
            dots = f" and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
            raise ValueError(f"{source.reader.folder} {what} {', '.join(found[:SHOWN])}{dots}")


def load(folder: Path | str, cfg: ModelConfig, target: tuple[Tree, Tree]) -> tuple[Tree, Tree]:
    """Returns (params, buffers) of a folder, where and in the dtypes that the target (abstract
    arrays with shardings) says: each device reads its slice.

    Buffers that the family has not (loads, tables) are zeros. Raises as `check` does.
    """
    family, said = read_config(folder)
    source = Source(folder, said)
    known = leaves(family, cfg, *target)
    check(known, source)
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

    def dtype(leaf: Leaf, name: str) -> np.dtype:
        return dtypes.get(name, np.dtype(np.float32) if leaf.tree == "buffers" else default)

    plan = {
        name: Tensor(dtype(leaf, name), shape)
        for leaf in known
        for piece in leaf.pieces
        for name, shape, _ in piece.tensors()
    }
    with Writer(folder, dict(sorted(plan.items(), key=lambda item: _natural(item[0])))) as writer:
        for leaf in known:
            array = trees[leaf.tree]
            for part in leaf.path:
                array = array[part]
            for number, piece in enumerate(leaf.pieces):
                ours = np.asarray(array[number] if leaf.stacked else array)
                for name, _, at in piece.tensors():
                    writer.write(name, piece.write(ours, at).astype(plan[name].dtype))
    path = Path(folder).expanduser() / "config.json"
    path.write_text(json.dumps(hf_config(family, cfg, str(default)), indent=2) + "\n")


def _natural(name: str) -> list[Any]:
    """Sorts layer 10 behind layer 9."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in name.split(".")]
