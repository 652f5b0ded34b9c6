"""Where each of our arrays is in the tensors of a Hugging Face folder: `Leaf`, made of the rules of
its family; and the folder itself, `Source`."""

import dataclasses
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from moejax.convert import names, quantized
from moejax.convert.families import Family
from moejax.convert.files import Reader
from moejax.convert.table import Index, Placed, Rule
from moejax.core.params import Tree
from moejax.model.config import ModelConfig

# Tensors of old files that hold nothing a model needs: tables that are computed anew.
NEEDLESS = re.compile(r"rotary_emb\.inv_freq$")
SHOWN = 5
ROWS = 4096
"""Of an embedding, compared at a time."""


class Source:
    """Their tensors by the names that rules use, quantised ones as bfloat16."""

    def __init__(self, folder: Path | str, said: Mapping[str, Any]):
        self.reader = Reader(folder)
        scheme = said.get("quantization_config") or {}
        rows, columns = scheme.get("weight_block_size") or (128, 128)
        self._block = (rows, columns)
        self.depth = said.get(names.NUM_FURTHER) or 0

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
    """Without the rows that pad the vocabulary."""
    copies: tuple[Placed, ...] = ()
    """Where it is again."""

    def read(self, source: Source, index: Index, dtype: Any) -> np.ndarray:
        """Returns a slice of the array, zeros where the vocabulary is padded."""
        if self.stacked:
            return np.stack(
                [piece.read(source.read, index[1:], dtype) for piece in self.pieces[index[0]]]
            )
        values = self.pieces[0].read(source.read, index, dtype)
        sizes = (len(range(size)[part]) for size, part in zip(self.shape, index, strict=True))
        widths = [(0, size - n) for size, n in zip(sizes, values.shape, strict=True)]
        return np.pad(values, widths)

    def write(self, number: int, ours: np.ndarray, index: Index | None = None):
        """Yields (name, flat place, elements), copies too, of layer `number`'s array, or of a slice
        of it: see `Placed.write`."""
        for piece in (self.pieces[number], *self.copies):
            yield from piece.write(ours, index)

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yields (name, shape) of its tensors, copies too."""
        for piece in (*self.pieces, *self.copies):
            for name, shape, _ in piece.tensors():
                yield name, shape


def flat(tree: Tree, above: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yields (path, leaf) of nested dicts."""
    for name, node in tree.items():
        if isinstance(node, dict):
            yield from flat(node, (*above, name))
        else:
            yield (*above, name), node


def leaves(family: Family, cfg: ModelConfig, params: Tree, buffers: Tree) -> list[Leaf]:
    """Returns where every array is that a checkpoint holds; the trees may be abstract.

    Raises ValueError for a parameter without a rule, or a rule without a parameter.
    """
    ours = {(tree, path): leaf.shape for tree, nodes in (("params", params), ("buffers", buffers))
            for path, leaf in flat(nodes)}  # fmt: skip
    found = []
    for path, rules in _rules(family, cfg).items():
        rule = rules[0][0]
        key = next((key for key in (("params", path), ("buffers", path)) if key in ours), None)
        if key is None:
            raise ValueError(f"{family.model_type}: no array {'/'.join(path)} for {rule.name}")
        shape, stacked = ours.pop(key), path[0].startswith("stack_")
        rule.check()
        inner = shape[1:] if stacked else shape
        dims = zip(rule.ours.split(), inner, strict=True)
        inner = tuple(cfg.vocab_size if dim == "vocab" else size for dim, size in dims)
        pieces = tuple(Placed(rule, prefix, inner) for rule, prefix in rules)
        again = tuple(
            Placed(copy, names.LAYER.format(layer=cfg.num_layers + depth), inner)
            for depth in range(cfg.mtp_depth)
            for copy in names.copies(cfg)
            if copy.path == "/".join(path)
        )
        found.append(Leaf(*key, shape, stacked, pieces, again))
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
    for depth in range(cfg.mtp_depth):
        prefix = names.LAYER.format(layer=cfg.num_layers + depth)
        for rule in names.further(family.rules(cfg, cfg.mtp_kind.upper())):
            found[(f"mtp_{depth}", *rule.path.split("/"))] = [(rule, prefix)]
    return found


def check(leaves: list[Leaf], source: Source, cfg: ModelConfig) -> None:
    """Raises ValueError naming tensors that are missing, of another shape, in no rule, or no copies
    where they should be. Modules for further tokens may be more than the model has."""
    missing, wrong, used = [], [], set()
    for leaf in leaves:
        for name, shape in leaf.tensors():
            stored = source.parts(name)
            used.update(stored)
            if not stored:
                missing.append(name)
            elif source.read(name).shape != shape:
                wrong.append(f"{name} is {list(source.read(name).shape)}, not {list(shape)}")
    more = [
        name for name in source.reader.tensors
        if name not in used and not NEEDLESS.search(name)
        and not (cfg.num_layers + cfg.mtp_depth <= _layer(name) < cfg.num_layers + source.depth)
    ]  # fmt: skip
    other = [] if missing or wrong else _no_copies(leaves, source)
    complaints = (
        ("lacks", missing), ("has another shape:", wrong), ("also has", more),
        ("has other values than the main model's in", other),
    )  # fmt: skip
    for what, found in complaints:
        if found:
            dots = f" and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
            raise ValueError(f"{source.reader.folder} {what} {', '.join(found[:SHOWN])}{dots}")


def _layer(name: str) -> int:
    found = re.match(r"model\.layers\.(\d+)\.", name)
    return int(found[1]) if found else -1


def _no_copies(leaves: list[Leaf], source: Source) -> list[str]:
    """Returns the names of copies that are none."""
    wrong = []
    for leaf in leaves:
        for copy in leaf.copies:
            for (name, shape, _), (right, _, _) in zip(
                copy.tensors(), leaf.pieces[0].tensors(), strict=True
            ):
                for first in range(0, shape[0], ROWS):
                    rows = slice(first, first + ROWS)
                    mine, theirs = source.read(name)[rows], source.read(right)[rows]
                    if mine.tobytes() != theirs.tobytes():
                        wrong.append(name)
                        break
    return wrong
