"""A run of ours as a Hugging Face checkpoint, read from the checkpoint's files slice by slice.

config.json, the dtype of each tensor and the tokenizer are those of the checkpoint that the run
came from. A run that was born here gets the config.json of the first family that its model fits,
and bfloat16.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from moejax.convert import hf, names, output, store
from moejax.convert.arrays import SHOWN, Leaf, Source, check, leaves
from moejax.convert.families import FAMILIES, Family
from moejax.convert.files import NAMES, Tensor, Writer
from moejax.convert.quantized import BFLOAT16
from moejax.convert.table import Index
from moejax.convert.to_run import (
    SOURCE,
    abstract,
    dtypes_of,
    main_dtype,
    name_of,
    pieces,
)
from moejax.model.config import ModelConfig

DTYPES = {dtype.name: dtype for dtype in NAMES}


@dataclass(frozen=True)
class Origin:
    """What an export takes over from a checkpoint."""

    family: Family
    said: Mapping[str, Any]
    """Its config.json."""
    dtype: np.dtype = BFLOAT16
    dtypes: Mapping[str, np.dtype] = field(default_factory=dict)
    """Of single tensors, where they differ."""
    folder: Path | None = None


def model_of(extra: Mapping[str, Any]) -> ModelConfig:
    """Returns the model of a checkpoint, of the JSON that it holds.

    Raises ValueError for one without a model, or with leaves that ours has not.
    """
    said = extra.get("config", {}).get("model")
    if not said:
        raise ValueError("the checkpoint does not say which model it holds")
    try:
        return hf.with_leaves(ModelConfig(), dict(_leaves(said)))
    except (AttributeError, TypeError) as error:
        raise ValueError(f"the checkpoint is of another version: {error}") from None


def _leaves(said: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in said.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{above}{name}.")
        else:
            yield above + name, tuple(value) if isinstance(value, list) else value


def origin_of(folder: Path, cfg: ModelConfig) -> Origin:
    """Returns what a folder in Hugging Face's format, or one made of it by `to_run`, says.

    Raises FileNotFoundError for another folder, ValueError where it holds another model.
    """
    facts = json.loads((folder / SOURCE).read_text()) if (folder / SOURCE).is_file() else None
    if facts:
        family, said = hf.family_of(facts["config"], folder / SOURCE), facts["config"]
    else:
        family, said = hf.read_config(folder)
    wrong = hf.differences(family, said, cfg)
    if wrong:
        raise ValueError(f"{folder} holds another model: {', '.join(wrong[: SHOWN])}")
    if facts:
        dtypes = {name: DTYPES[dtype] for name, dtype in facts["dtypes"].items()}
        return Origin(family, said, DTYPES[facts["dtype"]], dtypes, folder)
    source, known = Source(folder, said), leaves(family, cfg, *abstract(cfg))
    check(known, source, cfg)
    dtypes = dtypes_of(source, known)
    return Origin(family, said, main_dtype(source, dtypes), dtypes, folder)


def find_origin(run: Path, extra: Mapping[str, Any], cfg: ModelConfig) -> Origin:
    """Returns the origin that a run names: itself, if it was converted, or what it started from;
    else the first family that its model fits. Raises ValueError if none does."""
    init = extra.get("config", {}).get("init", {})
    started = [Path(init[key]).expanduser() for key in ("from_run", "from_hf") if init.get(key)]
    # `run` may be one checkpoint: the folder of the run is two above.
    for folder in (run, run.parent.parent, *started):
        if _is_origin(folder):
            return origin_of(folder, cfg)
    tried = []
    for family in FAMILIES.values():
        said = hf.hf_config(family, cfg)
        try:
            wrong = hf.differences(family, said, cfg)
            leaves(family, cfg, *abstract(cfg))
        except ValueError as error:
            wrong = [str(error)]
        if not wrong:
            return Origin(family, said)
        tried.append(f"{family.model_type} ({wrong[0]})")
    raise ValueError(f"no family of Hugging Face's has such a model: {'; '.join(tried)}")


def _is_origin(folder: Path) -> bool:
    config = folder / "config.json"
    return (folder / SOURCE).is_file() or (
        config.is_file() and "model_type" in json.loads(config.read_text())
    )


def convert(
    run: Path | str, out: Path | str, like: Path | str | None = None, dtype: str = ""
) -> output.Amount:
    """Writes a run's latest checkpoint, or one checkpoint, as a Hugging Face folder; returns what
    was written.

    `like` is the origin if the run does not name it; `dtype` goes over the origin's main one.
    Raises what `store.Reader`, `model_of`, `find_origin`, `leaves` and `output.new_folder`
    raise, before anything is written.
    """
    if dtype and dtype not in DTYPES:
        raise ValueError(f"--dtype {dtype}: choose from {', '.join(DTYPES)}")
    run = Path(run).expanduser().resolve()
    reader = store.Reader(run)
    cfg = model_of(reader.extra)
    origin = (
        origin_of(Path(like).expanduser(), cfg) if like else find_origin(run, reader.extra, cfg)
    )
    known = leaves(origin.family, cfg, *abstract(cfg))
    for leaf in known:
        name = name_of(leaf.tree, leaf.path)
        there = reader.arrays.get(name)
        if there is None or there.shape != leaf.shape:
            what = "missing" if there is None else f"{list(there.shape)}"
            raise ValueError(f"{reader.folder}: {name} is {what}, not {list(leaf.shape)}")
    main = DTYPES[dtype] if dtype else origin.dtype
    plan = hf.planned(known, origin.dtypes, main)
    num_bytes = sum(tensor.num_bytes for tensor in plan.values())
    with output.new_folder(out, num_bytes) as folder:
        with Writer(folder, plan) as writer, output.Bar(len(plan), num_bytes) as bar:
            _fill(writer, bar, known, plan, reader)
        said = _config(origin, cfg, main)
        (folder / "config.json").write_text(json.dumps(said, indent=2) + "\n")
        tokenizer = reader.extra.get("config", {}).get("data", {}).get("tokenizer", "")
        for source in (origin.folder, run, run.parent.parent, Path(tokenizer or run).expanduser()):
            if source is not None:
                output.copy_companions(source if source.is_dir() else source.parent, folder)
    return bar.done


def _fill(writer: Writer, bar, known: list[Leaf], plan: dict[str, Tensor], reader) -> None:
    def wanted() -> Iterator[tuple[Leaf, int, int, Index]]:
        for leaf in known:
            array = reader.arrays[name_of(leaf.tree, leaf.path)]
            for number, ended, index in pieces(leaf, array.dtype, array.chunk):
                yield leaf, number, ended, index

    places = (
        (name_of(leaf.tree, leaf.path), (number, *index) if leaf.stacked else index)
        for leaf, number, _, index in wanted()
    )
    for (leaf, number, ended, index), ours in zip(wanted(), reader.stream(places), strict=True):
        num_bytes = 0
        for name, place, values in leaf.write(number, ours, index):
            values = values.astype(plan[name].dtype, copy=False)
            writer.write(name, values, place)
            num_bytes += values.nbytes
        bar.advance(ended, num_bytes)


def _config(origin: Origin, cfg: ModelConfig, main: np.dtype) -> dict[str, Any]:
    """Returns config.json: the origin's, no longer quantised, with the dtype it now has."""
    said = dict(origin.said)
    said.pop("quantization_config", None)
    key = "dtype" if "dtype" in said else "torch_dtype"
    if names.NUM_FURTHER in said:
        said[names.NUM_FURTHER] = cfg.mtp_depth
    return said | {key: main.name}
