"""Leaves of a config by their dotted names: read, changed, and written down as flags or a recipe.

    changed(config, {"parallel.tp": 2, "train.microbatches": 8})

What is written down gives the same config again: flags to a command, a recipe to `load_recipe`.
"""

import dataclasses
import json
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moejax.config import Config, leaves


def changed(config: Config, values: Mapping[str, Any]) -> Config:
    """Returns the config with other values in those leaves; every validation runs again.

    Sections are made once with all their changes, so that no half-changed one is refused. Raises
    ValueError as these do, and for an unknown leaf.
    """
    return _changed(config, {tuple(name.split(".")): value for name, value in values.items()})


def _changed(node: Any, values: Mapping[tuple[str, ...], Any]) -> Any:
    known = {field.name for field in dataclasses.fields(node)}
    made: dict[str, Any] = {}
    for name in dict.fromkeys(path[0] for path in values):
        if name not in known:
            raise ValueError(f"{type(node).__name__} has no {name!r}")
        inside = {path[1:]: value for path, value in values.items() if path[0] == name}
        made[name] = inside[()] if () in inside else _changed(getattr(node, name), inside)
    return dataclasses.replace(node, **made)


def differences(config: Config, base: Config) -> dict[str, Any]:
    """Returns {dotted name: value in `config`} of every leaf that is another in `base`."""
    before = {name: value for name, value, _ in leaves(base)}
    return {name: value for name, value, _ in leaves(config) if value != before[name]}


def flags(config: Config, base: Config) -> str:
    """Returns the command-line options that make `config` of `base`."""
    found = differences(config, base)
    shown = {name: str(v).lower() if isinstance(v, bool) else v for name, v in found.items()}
    return " ".join(f"--config.{name}={value}" for name, value in shown.items())


def recipe_text(name: str, config: Config, where: str, base: Config, why: str) -> str:
    """Returns a recipe file whose function `name` gives `config`, from the recipe `where`, which
    gives `base`. `why` is the file's docstring. The training command takes the file as it is where
    it is called NAME.py."""
    found = differences(config, base) | {"name": name}
    lines = [textwrap.fill(line, 96) for line in why.strip().splitlines()]
    return "\n".join([
        '"""' + "\n".join(lines), '"""', "",
        "from dataclasses import replace", "",
        "from moejax.config import Config, load_recipe", "", "",
        f"def {name}() -> Config:",
        f'    """{where}, with the settings that the planner chose."""',
        f"    base = load_recipe({_literal(where)})",
        *_replacement("return", "base", {tuple(k.split(".")): v for k, v in found.items()}, 4),
        "",
    ])  # fmt: skip


def _replacement(lead: str, base: str, values: dict[tuple[str, ...], Any], indent: int):
    """Lines of `LEAD replace(BASE, field=.., section=replace(BASE.section, ..))`."""
    pad, inner = " " * indent, " " * (indent + 4)
    ending = "" if lead == "return" else ","
    opening = f"{pad}{lead} replace(" if lead == "return" else f"{pad}{lead}=replace("
    yield opening
    yield f"{inner}{base},"
    for field in dict.fromkeys(path[0] for path in values):
        inside = {path[1:]: value for path, value in values.items() if path[0] == field}
        if () in inside:
            yield f"{inner}{field}={_literal(inside[()])},"
        else:
            yield from _replacement(field, f"{base}.{field}", inside, indent + 4)
    yield f"{pad}){ending}"


def _literal(value: Any) -> str:
    """The value as Python, a text in double quotes."""
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)


def write_recipe(
    folder: Path, name: str, config: Config, where: str, base: Config, why: str
) -> Path:
    """Writes `recipe_text` to FOLDER/NAME.py and returns its path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.py"
    path.write_text(recipe_text(name, config, where, base, why), encoding="utf-8")
    return path
