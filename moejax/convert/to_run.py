"""A Hugging Face checkpoint as a run of ours, without ever being in memory whole.

    OUT/config.json        the model, and the tokenizer's place
    OUT/checkpoints/0/     parameters and buffers, as a run saves them (`store.py`)
    OUT/hf_source.json     what an export needs: the source's config.json, and dtypes
    OUT/tokenizer.json ... copied

`--config.init.from_run=OUT` starts a run with it. An array is kept, by default, in the narrowest
dtype that holds all of its tensors, so nothing is lost and 16-bit checkpoints stay 16-bit; whoever
loads it converts to the dtypes of the run (`load_weights`).
"""

import dataclasses
import functools
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from flax import nnx

from moejax.convert import hf, output, store
from moejax.convert.arrays import Leaf, Source, check, flat, leaves
from moejax.convert.table import Index
from moejax.core import params
from moejax.core.params import Tree
from moejax.model.config import ModelConfig
from moejax.model.transformer import Transformer

SOURCE = "hf_source.json"
DTYPES = ("auto", "bfloat16", "float16", "float32")
CHUNK_BYTES = 64 * 2**20


def abstract(cfg: ModelConfig) -> tuple[Tree, Tree]:
    """Returns (parameters, buffers) of a model: shapes and dtypes."""
    model = nnx.eval_shape(lambda: Transformer(cfg, rngs=nnx.Rngs(0)))
    return params.partition(model)[1:]


def name_of(tree: str, path: tuple[str, ...]) -> str:
    """Returns the name of an array in a checkpoint."""
    return ".".join((tree, *path))


def slices(shape: tuple[int, ...], chunk: tuple[int, ...]) -> Iterator[Index]:
    """Yields the slices that cut an array into chunks, in order."""
    starts = (range(0, size, step) for size, step in zip(shape, chunk, strict=True))
    for first in itertools.product(*starts):
        ends = zip(first, shape, chunk, strict=True)
        yield tuple(slice(n, min(n + step, size)) for n, size, step in ends)


def pieces(
    leaf: Leaf, dtype: np.dtype, stored: tuple[int, ...] = ()
) -> Iterator[tuple[int, int, Index]]:
    """Yields (layer, tensors that end with it, slice of the layer's array) of a leaf: up to
    CHUNK_BYTES each, or more where the chunks in which it is `stored` are larger."""
    stored = stored[1:] if leaf.stacked else stored
    for number, piece in enumerate(leaf.pieces):
        cut = list(slices(piece.shape, piece.chunk(CHUNK_BYTES // dtype.itemsize, stored)))
        num_tensors = sum(1 for part in (piece, *leaf.copies) for _ in part.tensors())
        for i, index in enumerate(cut):
            yield number, num_tensors if i == len(cut) - 1 else 0, index


def dtypes_of(source: Source, leaves: list[Leaf]) -> dict[str, np.dtype]:
    """Returns the dtype of every tensor, quantised ones dequantised."""
    return {name: source.read(name).dtype for leaf in leaves for name, _ in leaf.tensors()}


def main_dtype(source: Source, dtypes: dict[str, np.dtype]) -> np.dtype:
    """Returns the dtype of most values."""
    sizes: dict[np.dtype, int] = {}
    for name, dtype in dtypes.items():
        sizes[dtype] = sizes.get(dtype, 0) + int(np.prod(source.read(name).shape, dtype=np.int64))
    return max(sizes, key=lambda dtype: sizes[dtype])


def _at_rest(leaf: Leaf, dtypes: dict[str, np.dtype], wanted: str, like: Any) -> np.dtype:
    if leaf.tree == "buffers":
        return np.dtype(like.dtype)
    if wanted != "auto":
        return np.dtype(wanted)
    return functools.reduce(np.promote_types, {dtypes[name] for name, _ in leaf.tensors()})


def convert(
    source: Path | str, out: Path | str, dtype: str = "auto", vocab_multiple: int = 1
) -> output.Amount:
    """Writes the run folder of a Hugging Face folder; returns what was written.

    `dtype`: of the parameters at rest, "auto" as the top of this file says; `vocab_multiple`: as
    the run will have it. Raises what `hf.read_config`, `leaves`, `check` and `output.new_folder`
    raise, before anything is written.
    """
    if dtype not in DTYPES:
        raise ValueError(f"--dtype {dtype}: choose from {', '.join(DTYPES)}")
    source = Path(source).expanduser()
    family, said = hf.read_config(source)
    cfg = hf.model_config(family, said, ModelConfig(vocab_multiple=vocab_multiple))
    tensors = Source(source, said)
    trees = dict(zip(("params", "buffers"), abstract(cfg), strict=True))
    known = leaves(family, cfg, trees["params"], trees["buffers"])
    check(known, tensors, cfg)
    ours = {(tree, path): leaf for tree in trees for path, leaf in flat(trees[tree])}
    dtypes = dtypes_of(tensors, known)
    plan = {}
    for leaf in known:
        rest = _at_rest(leaf, dtypes, dtype, ours.pop((leaf.tree, leaf.path)))
        chunk = leaf.pieces[0].chunk(CHUNK_BYTES // rest.itemsize)
        stacked = (1, *chunk) if leaf.stacked else chunk
        plan[name_of(leaf.tree, leaf.path)] = store.Array(leaf.shape, rest, stacked)
    zeros = {  # loads, tables: what no checkpoint has
        name_of(*key): store.Array(leaf.shape, np.dtype(leaf.dtype)) for key, leaf in ours.items()
    }
    num_bytes = sum(array.num_bytes for array in (plan | zeros).values())
    with output.new_folder(out, num_bytes) as folder:
        output.copy_companions(source, folder)
        config = _run_config(cfg, said, folder, Path(out).expanduser().absolute())
        write_json(folder / "config.json", config)
        write_json(folder / SOURCE, _facts(said, main_dtype(tensors, dtypes), dtypes))
        checkpoint = folder / store.CHECKPOINTS / "0"
        with (
            store.Writer(checkpoint, plan | zeros, extra_of(config)) as writer,
            output.Bar(len(dtypes), num_bytes) as bar,
        ):
            _fill(writer, bar, known, plan, tensors)
            for name, array in zeros.items():
                whole = tuple(slice(0, size) for size in array.shape)
                writer.write(name, whole, np.zeros(array.shape, array.dtype))
                bar.advance(0, array.num_bytes)
    return bar.done


def _fill(writer, bar, known: list[Leaf], plan: dict[str, store.Array], source: Source) -> None:
    for leaf in known:
        name = name_of(leaf.tree, leaf.path)
        for number, ended, index in pieces(leaf, plan[name].dtype):
            values = leaf.pieces[number].read(source.read, index, plan[name].dtype)
            if leaf.stacked:
                writer.write(name, (slice(number, number + 1), *index), values[None])
            else:
                writer.write(name, index, values)
            bar.advance(ended, values.nbytes)
        for index in _padding(leaf):
            sizes = [part.stop - part.start for part in index]
            writer.write(name, index, np.zeros(sizes, plan[name].dtype))


def _padding(leaf: Leaf) -> Iterator[Index]:
    """Yields the slice of an array that pads the vocabulary, if one does."""
    inner = leaf.shape[1:] if leaf.stacked else leaf.shape
    for axis, (size, padded) in enumerate(zip(leaf.pieces[0].shape, inner, strict=True)):
        if size < padded:
            yield tuple(
                slice(size if i == axis else 0, end) for i, end in enumerate(inner)
            )


def extra_of(config: dict[str, Any], compute_dtype: str = "auto") -> dict[str, Any]:
    """Returns the JSON of a checkpoint without a training state."""
    return {"config": config, "compute_dtype": compute_dtype}


def _run_config(
    cfg: ModelConfig, said: dict[str, Any], folder: Path, out: Path
) -> dict[str, Any]:
    """Returns config.json of the run folder `out`, which is being made as `folder`: what is known;
    of the other leaves the defaults hold."""
    length = {"sequence_length": said.get("max_position_embeddings", 2048)}
    config = {"name": out.name, "model": dataclasses.asdict(cfg), "train": length}
    tokenizer = (folder / "tokenizer.json").is_file()
    return config | ({"data": {"tokenizer": str(out)}} if tokenizer else {})


def _facts(said: dict[str, Any], main: np.dtype, dtypes: dict[str, np.dtype]) -> dict[str, Any]:
    other = {name: dtype.name for name, dtype in dtypes.items() if dtype != main}
    return {"config": said, "dtype": main.name, "dtypes": other}


def write_json(path: Path, values: dict) -> None:
    """Writes a JSON file."""
    path.write_text(json.dumps(values, indent=1) + "\n")
