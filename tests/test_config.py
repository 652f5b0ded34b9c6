"""The configuration: leaves, flags, and one clear line for each mistake."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from configs import demo as recipes
from moejax import config as configuration

ROOT = Path(__file__).parent.parent
DEMO = f"--config={ROOT / 'configs/demo.py'}"
FROZEN = Path(__file__).with_name("leaves.txt")


def parse(*arguments: str):
    return configuration.parse([DEMO, *arguments])


def test_the_list_of_leaves_is_frozen():
    """A new leaf is a decision: write it down in leaves.txt as well."""
    names = [name for name, _, _ in configuration.leaves(configuration.Config())]
    assert names == FROZEN.read_text().split()
    assert len(names) < 135


def test_every_leaf_is_documented_in_the_help():
    text = configuration.describe(recipes.demo())
    for name, _, document in configuration.leaves(recipes.demo()):
        assert document, f"{name} has no docstring under its field"
        assert f"--config.{name}=" in text


@pytest.mark.parametrize("recipe", [recipes.demo, recipes.demo_fold8])
def test_a_recipe_survives_the_mirror(recipe):
    made = recipe()
    assert configuration.rebuild(configuration.Config, configuration.mirror(made)) == made


def test_flags_change_leaves_of_every_type():
    made = parse(
        "--config.train.steps=7", "--config.optimizer.learning_rate=0.5",
        "--config.model.tied=true",
        "--config.name=other", "--config.data.train=('a','b')", "--config.model.moe.top_k=3",
    )  # fmt: skip
    assert (made.train.steps, made.optimizer.learning_rate, made.model.tied) == (7, 0.5, True)
    assert (made.name, made.data.train, made.model.moe.top_k) == ("other", ("a", "b"), 3)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--config.train.stepz=5"], "unknown option --config.train.stepz; .*--config.train.steps"),
        (["--config.train.steps=many"], "steps"),
        (["--config.train.steps"], "--config.train.steps needs a value"),
        (["--config.model.moe.top_k=99"], "moe.top_k=99 is not in 1..num_experts=16"),
        (["--config.parallel.zero=2"], "parallel.zero=2: choose 0, 1 or 3"),
    ],
)
def test_a_wrong_flag_is_one_line(arguments, message):
    with pytest.raises(ValueError, match=message) as caught:
        parse(*arguments)
    assert "\n" not in str(caught.value)


def test_a_wrong_recipe_is_one_line():
    with pytest.raises(ValueError, match="nowhere.py: no such file; .*configs/demo.py"):
        configuration.parse(["--config=nowhere.py"])
    with pytest.raises(ValueError, match="no recipe 'huge'; .*:demo_fold8"):
        configuration.parse([DEMO + ":huge"])
    with pytest.raises(ValueError, match="give one --config=FILE.py"):
        configuration.parse([])


def launch(folder: Path, form: str, *arguments: str) -> subprocess.CompletedProcess:
    """Runs the program from another directory, as a module or as a script."""
    how = {"module": ["-m", "launch.train"], "script": [str(ROOT / "launch/train.py")]}[form]
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, *how, *arguments], cwd=folder, env=environment, text=True,
        capture_output=True, timeout=120,
    )  # fmt: skip


MISTAKES = {
    "unknown leaf": (["--config.train.stepz=5"], "--config.train.steps"),
    "missing path": (["--config.data.train=('nowhere/at/all',)"], "nowhere/at/all"),
    "empty file": (["--config.data.train=('empty.txt',)"], "empty.txt"),
    "fold": (
        ["--config.parallel.dp=3", "--config.parallel.tp=2", "--config.parallel.ep=2",
         "--config.parallel.etp=3", "--config.train.batch_size=12"],
        "nearest experts",
    ),
}  # fmt: skip


@pytest.mark.parametrize("form", ["script", "module"])
@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_gives_one_line_and_status_2(tmp_path, name, form):
    (tmp_path / "empty.txt").write_text("")
    arguments, clue = MISTAKES[name]
    made = launch(tmp_path, form, DEMO, *arguments)
    assert made.returncode == 2, made.stderr
    lines = made.stderr.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: ") and clue in lines[0], made.stderr


def test_help_is_readable(tmp_path):
    made = launch(tmp_path, "script", "--help")
    assert made.returncode == 0 and not made.stderr
    assert f"--config.train.steps={recipes.demo().train.steps}" in made.stdout
    assert "Optimizer steps." in made.stdout
    assert max(map(len, made.stdout.splitlines())) <= 120
