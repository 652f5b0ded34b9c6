"""The README's tour: each stop's file is there, its name is in the compiled step, and the arrays
that it holds have the dims that the table gives them."""

import re
from pathlib import Path

import pytest

from moejax.core.mesh import ParallelConfig
from moejax.model import experts, moe
from moejax.model.attention import context
from moejax.model.transformer import Transformer
from moejax.train import loss
from tests.train.folds import LENGTH, ROWS, VOCAB, Case, batches, make_trainer

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


def watch(patch: pytest.MonkeyPatch, owner, name: str, held: dict, names: str) -> None:
    """Notes the shapes of a function's arguments and results under these names ("_": none)."""
    function = getattr(owner, name)

    def watched(*args, **options):
        result = function(*args, **options)
        results = result if isinstance(result, tuple) else (result,)
        for label, array in zip(names.split(), (*args, *results), strict=False):
            if label != "_":
                held.setdefault(label, set()).add(array.shape)
        return result

    patch.setattr(owner, name, watched)


def test_arrays_have_the_dims_of_the_table(monkeypatch):
    """On 8 devices: a lowercase letter is the share of one, over the roles of the last column."""
    dp, tp, ep, etp, held = 4, 2, 2, 2, {}
    watch(monkeypatch, Transformer, "embed", held, "_ tokens_bL x_tD")
    watch(monkeypatch, context, "attention", held, "q_blnH k_blgH")
    watch(monkeypatch, moe, "route", held, "logits_tE")
    watch(monkeypatch, experts, "grouped_mlp", held, "_ _ w_out_efD weights_s")
    watch(monkeypatch, experts.Experts, "__call__", held, "_ x_sD _ sizes_e y_sD")
    watch(monkeypatch, moe.MoE, "__call__", held, "_ _ _ y_tD")
    watch(monkeypatch, loss, "logit_stats", held, "x_TD w_Dv _ lse_T logit_T")
    case = Case("tour", ParallelConfig(dp=dp, tp=tp, ep=ep, etp=etp, zero=0), "all_to_all")
    made = make_trainer(case, with_grads=False)
    made.step.lower(made.layout.abstract, batches(1, 1)[0])
    cfg = made.model
    b, T, E, K = ROWS // dp, ROWS // dp * LENGTH, cfg.moe.num_experts, cfg.moe.top_k
    t, D, H = T // tp, cfg.dim, cfg.attention.head_dim
    s = ep * etp * t * min(K, E // ep)  # the worst case: every slot of the group comes here
    assert held == {
        "tokens_bL": {(b, LENGTH)},
        "x_tD": {(t, D)},
        "q_blnH": {(b, LENGTH, cfg.attention.num_heads // tp, H)},
        "k_blgH": {(b, LENGTH, cfg.attention.num_kv_heads // tp, H)},
        "logits_tE": {(t, E)},
        "x_sD": {(s, D)},
        "sizes_e": {(E // ep,)},
        "weights_s": {(s,)},
        "w_out_efD": {(E // ep, cfg.moe.ffn_dim // etp, D)},
        "y_sD": {(s, D)},
        "y_tD": {(t, D)},
        "x_TD": {(T, D)},
        "w_Dv": {(D, VOCAB // tp)},
        "lse_T": {(T,)},
        "logit_T": {(T,)},
    }
