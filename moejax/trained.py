"""A trained model, opened to be used: from a run's checkpoint or a folder of Hugging Face.

`python -m moejax.generate` and `python -m moejax.evaluate` name a model in the same way; what they
share, the options and the loading, is here.
"""

import argparse
import dataclasses
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import jax
import optax

from moejax import config as configuration
from moejax.convert import hf
from moejax.core import host, sharding
from moejax.core.mesh import ParallelConfig, fold, make_mesh
from moejax.core.params import Tree
from moejax.core.precision import PrecisionConfig
from moejax.data import DataConfig, Tokenizer, load_tokenizer
from moejax.model.config import ModelConfig
from moejax.train.checkpoint import find_checkpoint, load_weights, read_extra
from moejax.train.sample import Weights
from moejax.train.setup import resolve_precision
from moejax.train.state import Layout, plan_state

DTYPES = ("auto", "float32", "bfloat16")
# What of a model's configuration is about training, or about another machine's kernels.
USED = {
    "attention.impl": "", "moe.impl": "", "moe.budget": 0.0, "moe.router.record": "",
    "moe.router.replay": "",
}  # fmt: skip


@dataclass(frozen=True)
class Trained:
    """A trained model on this machine's devices."""

    layout: Layout
    weights: Weights
    tokenizer: Tokenizer
    ends: frozenset[int]
    """Tokens after which a text has ended."""
    length: int
    """Tokens that it has seen at a time."""

    @property
    def num_ranks(self) -> int:
        """Data-parallel devices: rows divide over them."""
        return self.layout.fold.degree("dp")


class Parser(argparse.ArgumentParser):
    """Raises ValueError, one line, for what cannot be parsed."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message} (--help explains)")


def parser(text: str) -> Parser:
    """Returns a parser of a program with this docstring, with the options that name a model."""
    usage, _, rest = text.partition("\n\n")
    made = Parser(
        usage=usage, description=rest, allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    add = made.add_argument
    add("--from", dest="where", metavar="FOLDER", default="",
        help="a run folder, one checkpoint in it, or a folder in Hugging Face's format")
    add("--config", metavar="FILE[:RECIPE]", default="",
        help="instead of --from: the run of this recipe (--config.LEAF=VALUE as it was trained)")
    add("--tp", type=int, default=1, help="devices over which heads and vocabulary are split")
    add("--ep", type=int, default=1, help="devices over which experts are split")
    add("--dtype", choices=DTYPES, default="auto",
        help="of matmuls and their weights; auto: the run's, or what is fast here")
    return made  # fmt: skip


def parse(made: Parser, arguments: Sequence[str]) -> argparse.Namespace:
    """Returns the parsed arguments, `where` and `parallel` filled in. Raises ValueError."""
    parsed, rest = made.parse_known_args(list(arguments))
    unknown = [a for a in rest if not (parsed.config and a.startswith("--config."))]
    if unknown:
        raise ValueError(f"unknown option {unknown[0]} (--help lists all)")
    if bool(parsed.where) == bool(parsed.config):
        raise ValueError("give one of --from=FOLDER and --config=FILE.py[:RECIPE]")
    if parsed.config:
        parsed.where = str(configuration.parse([f"--config={parsed.config}", *rest]).run_dir)
    devices = max(parsed.tp, parsed.ep)
    if min(parsed.tp, parsed.ep) < 1 or devices % parsed.tp or devices % parsed.ep:
        raise ValueError(f"--tp={parsed.tp}, --ep={parsed.ep}: let one be a multiple of the other")
    parsed.parallel = ParallelConfig(dp=devices // parsed.tp, tp=parsed.tp, ep=parsed.ep, zero=0)
    return parsed


def program(prepare: Callable[[argparse.Namespace], Callable[[], None]], made: Parser) -> NoReturn:
    """Runs what `prepare` returns for this process's arguments, and exits: with 0, or, after one
    line that says what is wrong with them, with 2."""
    try:
        parsed = parse(made, sys.argv[1:])
        jax.config.update("jax_num_cpu_devices", parsed.parallel.num_devices())
        if jax.default_backend() == "cpu":
            host.keep_freed_memory()
        run = prepare(parsed)
    except (ValueError, FileNotFoundError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    try:
        run()
    except KeyboardInterrupt:
        sys.exit(130)
    sys.exit(0)


def load(where: str, parallel: ParallelConfig = ParallelConfig(), dtype: str = "auto") -> Trained:  # noqa: B008 - frozen
    """Returns the model of a folder, over the devices that `parallel` names.

    Raises FileNotFoundError or ValueError, one line, for a folder that holds no model, or one that
    does not divide over the devices.
    """
    folder = Path(where).expanduser()
    said = folder / "config.json"
    if said.is_file() and "model_type" in json.loads(said.read_text()):
        return _from_hf(folder, parallel, dtype)
    if not folder.is_dir():
        raise FileNotFoundError(
            f"{where} is no folder: give a run folder, one checkpoint in it, or a folder in "
            "Hugging Face's format"
        )
    return _from_run(folder, parallel, dtype)


def _from_run(folder: Path, parallel: ParallelConfig, dtype: str) -> Trained:
    checkpoint = find_checkpoint(folder)
    extra, run = read_extra(checkpoint), checkpoint.parent.parent
    config = configuration.rebuild(configuration.Config, extra["config"])
    tokenizer = _tokenizer(run, config.model)
    compute = extra["compute_dtype"] if dtype == "auto" else dtype
    precision = dataclasses.replace(config.precision, compute_dtype=compute)
    precision = resolve_precision(precision, None)  # "auto": of a run that was converted
    layout = _layout(config.model, parallel, precision)
    weights = tuple(
        load_weights(checkpoint, target, subtree=part)
        for part, target in zip(("params", "buffers"), _target(layout, precision), strict=True)
    )
    ends = frozenset([tokenizer.eos_id])
    return Trained(layout, weights, tokenizer, ends, config.train.sequence_length)


def _from_hf(folder: Path, parallel: ParallelConfig, dtype: str) -> Trained:
    family, said = hf.read_config(folder)
    cfg = hf.model_config(family, said)
    tokenizer = _tokenizer(folder, cfg)
    precision = resolve_precision(PrecisionConfig(compute_dtype=dtype), None)
    layout = _layout(cfg, parallel, precision)
    weights = hf.load(folder, cfg, _target(layout, precision))
    named = said.get("eos_token_id")
    ends = frozenset([tokenizer.eos_id, *(named if isinstance(named, list) else [named])])
    return Trained(layout, weights, tokenizer, ends, said.get("max_position_embeddings", 2048))


def _tokenizer(folder: Path, cfg: ModelConfig) -> Tokenizer:
    tokenizer = load_tokenizer(DataConfig(tokenizer=str(folder)), folder)
    tokenizer.check_vocab_size(cfg.vocab_size)
    return tokenizer


def _layout(cfg: ModelConfig, parallel: ParallelConfig, precision: PrecisionConfig) -> Layout:
    """Returns the layout of a model that is used; of its optimizer there is no array."""
    cfg = hf.with_leaves(cfg, USED)
    grid = fold(*parallel.readings(parallel.num_devices()))
    return plan_state(cfg, optax.adam(1.0), grid, make_mesh(grid), parallel.zero, precision)


def _target(layout: Layout, precision: PrecisionConfig) -> tuple[Tree, Tree]:
    """Returns (parameters, buffers), abstract: where they are to lie, each in the dtype in which it
    is used."""

    def used(leaf: Any, dims: tuple[str, ...]) -> jax.ShapeDtypeStruct:
        dtype = sharding.used_dtype(leaf.dtype, dims, precision)
        return jax.ShapeDtypeStruct(leaf.shape, dtype, sharding=leaf.sharding)

    resting = layout.resting
    return jax.tree.map(used, resting.params, layout.dims), resting.buffers
