"""The configuration tree: sections put together, checked across, and driven by flags.

Each section is a frozen dataclass beside its owner and validates itself. Here they are only
composed. A recipe is a Python function returning a complete `Config`; `load_recipe` finds it,
`mirror` turns it into the `ConfigDict` that `ml_collections` flags act on, and `rebuild` turns
that back, so that every validation runs again on what the flags made of it.
"""

import ast
import dataclasses
import difflib
import inspect
import runpy
import textwrap
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, get_type_hints

from absl import flags
from ml_collections import ConfigDict, config_flags

from moejax.convert import hf
from moejax.core.mesh import Fold, ParallelConfig
from moejax.core.precision import PrecisionConfig
from moejax.data import DataConfig
from moejax.model.transformer import ModelConfig
from moejax.parallel.stages import pipeline_of
from moejax.train.checkpoint import CheckpointConfig
from moejax.train.metrics import LogConfig
from moejax.train.optimizer import OptimizerConfig
from moejax.train.step import TrainConfig

REPOSITORY = Path(__file__).resolve().parent.parent


@dataclasses.dataclass(frozen=True)
class InitConfig:
    """Where a new run's weights come from; a run that has checkpoints of its own resumes."""

    seed: int = 0
    """Seed of the weights and of the data order."""
    from_run: str = ""
    """Run folder (or one checkpoint in it) whose weights (and router biases) start this run;
    empty: random."""
    from_hf: str = ""
    """Folder in Hugging Face's format whose weights start this run, and whose config.json gives the
    shape of the model (flags go over it)."""

    def __post_init__(self):
        if self.from_run and self.from_hf:
            raise ValueError(
                f"init.from_run={self.from_run!r} and from_hf={self.from_hf!r}: give one"
            )


@dataclasses.dataclass(frozen=True)
class Config:
    """Everything that a run depends on."""

    name: str = "run"
    """Name of the run, and of its folder."""
    runs_dir: str = "runs"
    """Where run folders are kept, from the current directory."""
    model: ModelConfig = ModelConfig()
    """Shape of the model."""
    parallel: ParallelConfig = ParallelConfig()
    """How devices are read by attention and by the experts."""
    precision: PrecisionConfig = PrecisionConfig()
    """Number formats by purpose."""
    data: DataConfig = DataConfig()
    """Text, mixture, tokenizer."""
    train: TrainConfig = TrainConfig()
    """Length of the run, shape of the step, evaluation."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """AdamW and its schedule."""
    init: InitConfig = InitConfig()
    """Seed and warm start."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """When to save, what to keep."""
    log: LogConfig = LogConfig()
    """What is shown and written down."""

    def __post_init__(self):
        if self.model.moe.dispatch == "hierarchical" and not self.parallel.node:
            raise ValueError(
                "model.moe.dispatch='hierarchical' crosses nodes once a token: set parallel.node "
                "to the devices of one NVLink domain (8 on most servers)"
            )

    @property
    def run_dir(self) -> Path:
        """The folder of this run."""
        return Path(self.runs_dir).expanduser() / self.name

    def fold_over(self, num_devices: int) -> Fold:
        """Returns the fold over so many devices, the batch checked against it.

        Raises ValueError for degrees that do not cover the devices, strides that do not nest, or
        a batch that does not divide.
        """
        pipeline_of(self.parallel, self.model)
        folded = self.parallel.fold(num_devices)
        self.train.check(*(folded.degree(role) for role in ("dp", "tp", "cp")))
        return folded


def leaves(node: Any, prefix: str = "") -> Iterator[tuple[str, Any, str]]:
    """Yields (dotted name, value, documentation) of every leaf of a config tree."""
    documents = _documents(type(node))
    for field in dataclasses.fields(node):
        value, name = getattr(node, field.name), f"{prefix}{field.name}"
        if dataclasses.is_dataclass(value):
            yield from leaves(value, f"{name}.")
        else:
            yield name, value, documents.get(field.name, "")


def _documents(cls: type) -> dict[str, str]:
    """Field name -> the docstring that stands under it."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(cls)))
    body = next(node.body for node in tree.body if isinstance(node, ast.ClassDef))
    return {
        field.target.id: " ".join(str(text.value.value).split())
        for field, text in pairwise(body)
        if isinstance(field, ast.AnnAssign)
        and isinstance(field.target, ast.Name)
        and isinstance(text, ast.Expr)
        and isinstance(text.value, ast.Constant)
    }


def mirror(node: Any) -> ConfigDict:
    """Returns the tree as a ConfigDict of the same leaves: what flags may override."""
    return ConfigDict(
        {
            field.name: mirror(value) if dataclasses.is_dataclass(value) else value
            for field in dataclasses.fields(node)
            for value in [getattr(node, field.name)]
        }
    )


def rebuild(cls: type, values: ConfigDict | dict) -> Any:
    """Returns the frozen dataclass of a mirror; every section's validation runs."""
    hints = get_type_hints(cls)
    made = {}
    for name, value in values.items():
        if dataclasses.is_dataclass(hints[name]):
            value = rebuild(hints[name], value)
        made[name] = tuple(value) if isinstance(value, list) else value
    return cls(**made)


def load_recipe(where: str) -> Config:
    """Returns the config of "FILE.py" (its `default` recipe) or "FILE.py:RECIPE".

    FILE is looked for from the current directory, then from the repository. Of a recipe the end of
    its name does ("h100x256"), where no other ends so. Raises ValueError, naming the recipes.
    """
    file, _, name = where.partition(":")
    found = [p for p in (Path(file), REPOSITORY / file) if p.is_file()]
    if not found:
        known = ", ".join(sorted(f"configs/{p.name}" for p in REPOSITORY.glob("configs/*.py")))
        raise ValueError(f"--config={file}: no such file; the repository has {known}")
    recipes = {
        key: value
        for key, value in runpy.run_path(str(found[0])).items()
        if inspect.isfunction(value)
        and Path(inspect.getfile(value)) == found[0]
        and not key.startswith("_")
    }
    name = name or found[0].stem
    matches = [name] if name in recipes else [key for key in recipes if key.endswith(f"_{name}")]
    if len(matches) != 1:
        raise ValueError(
            f"--config={where}: no recipe {name!r}; {file} has "
            f"{', '.join(f'{file}:{key}' for key in recipes)}"
        )
    return recipes[matches[0]]()


def parse(arguments: Sequence[str]) -> Config:
    """Returns the config of command-line arguments: --config=FILE[:RECIPE] --config.LEAF=VALUE ...

    Raises ValueError, one line, for whatever is wrong with them.
    """
    base = [a.split("=", 1)[1] for a in arguments if a.startswith("--config=")]
    rest = [a for a in arguments if not a.startswith("--config=")]
    if len(base) != 1:
        raise ValueError("give one --config=FILE.py[:RECIPE], for example --config=configs/demo.py")
    recipe = _with_hf_model(load_recipe(base[0]), rest)
    known = {f"--config.{name}": value for name, value, _ in leaves(recipe)}
    for argument in rest:
        name, equals, _ = argument.partition("=")
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.0)[0]
            raise ValueError(f"unknown option {name}; the nearest is {near} (--help lists all)")
        if not equals:
            raise ValueError(f"{name} needs a value: {name}={known[name]!r}")
    values = flags.FlagValues()
    tree, argv = mirror(recipe), ["", *rest]
    holder = config_flags.DEFINE_config_dict(
        "config", tree, flag_values=values, sys_argv=argv
    )
    try:
        values(argv)
    except flags.Error as error:
        raise ValueError(str(error).splitlines()[0]) from None
    return rebuild(Config, holder.value)


def _with_hf_model(recipe: Config, arguments: Sequence[str]) -> Config:
    """Returns the recipe with the model of the Hugging Face folder that it, or a flag, names."""
    given = [a.split("=", 1)[1] for a in arguments if a.startswith("--config.init.from_hf=")]
    folder = (given or [recipe.init.from_hf])[-1]
    if not folder:
        return recipe
    model = hf.model_config(*hf.read_config(folder), recipe.model)
    return dataclasses.replace(recipe, model=model)


def describe(config: Config) -> str:
    """Returns every leaf with its value and documentation, by section: the text of --help."""
    lines, section = [], None
    for name, value, document in leaves(config):
        head = name.rpartition(".")[0]
        if head != section:
            lines.append(f"\n{head or 'the run'}")
            section = head
        shown = str(value).lower() if isinstance(value, bool) else value
        lines.append(f"  --config.{name}={shown}")
        lines += textwrap.wrap(document, 92, initial_indent=" " * 6, subsequent_indent=" " * 6)
    return "\n".join(lines)


def nested(config: Any) -> dict:
    """Returns the tree as plain nested dicts, for JSON."""
    return dataclasses.asdict(config)
