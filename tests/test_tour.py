"""The README's tour: each stop's file is there, and its name is in the compiled step."""

import re
from pathlib import Path

import pytest

from moejax.core.mesh import ParallelConfig
from tests.train.folds import Case, batches, make_trainer

ROOT = Path(__file__).parent.parent
# stop -> (file or folder, the scope that a profile shows).
TOUR = {
    "load": ("moejax/data/loader.py", None),
    "embed": ("moejax/model/transformer.py", "embed"),
    "attend": ("moejax/model/attention", "attend"),
    "route": ("moejax/model/router.py", "route"),
    "dispatch": ("moejax/model/dispatch", "dispatch"),
    "experts": ("moejax/model/experts.py", "experts"),
    "combine": ("moejax/model/dispatch", "combine"),
    "loss": ("moejax/train/loss.py", "loss"),
    "update": ("moejax/train/step.py", "apply_update"),
}


@pytest.fixture(scope="module")
def lowered():
    """Returns the scopes named in the step, lowered on one device."""
    made = make_trainer(Case("alone", ParallelConfig(zero=0), "all_gather"), with_grads=False)
    text = made.step.lower(made.layout.abstract, batches(1, 1)[0]).as_text(debug_info=True)
    # Names of operations, not of source files.
    names = [name for name in re.findall(r'loc\("([^"]*)"\(', text) if ".py" not in name]
    return {part for name in names for part in re.split(r"[/()]", name)}


@pytest.mark.parametrize("stop", TOUR)
def test_a_stop_is_where_the_tour_says(stop, lowered):
    place, scope = TOUR[stop]
    assert (ROOT / place).exists()
    if scope:
        assert scope in lowered, f"no scope {scope} in the step"


def test_the_readme_names_each_stop_and_only_files_that_exist():
    text = (ROOT / "README.md").read_text()
    for stop, (place, _) in TOUR.items():
        short = place.removeprefix("moejax/")
        assert short in text, f"README's tour does not name {short} ({stop})"
    for path in re.findall(r"`([a-z_]+/[\w/.]*\.(?:py|md))`", text):
        assert any((ROOT / top / path).exists() for top in ("", "moejax")), path
