"""The data section refuses what cannot work, in one line that says the way out."""

import pytest

from moejax.data import DataConfig


def test_default_holds_documents_of_the_standard_library_out():
    cfg = DataConfig()
    assert cfg.train == ("stdlib",)
    assert cfg.eval_sources == {"val": "heldout"}
    assert cfg.held_out_share == cfg.holdout == 0.05


def test_nothing_is_held_out_when_no_set_asks_for_it():
    assert DataConfig(eval=("val=some/folder",)).held_out_share == 0
    assert DataConfig(eval=()).eval_sources == {}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"train": ()}, "data.train is empty"),
        ({"train": ("a", "b"), "weights": (1.0,)}, "1 numbers for the 2 sources"),
        ({"weights": (0.0,)}, "weights are above 0"),
        ({"weights": (float("nan"),)}, "weights are above 0"),
        ({"holdout": 1.0}, "not between 0 and 1"),
        ({"vocab_size": 256}, "below 257"),
        ({"eos": "</s>"}, "needs data.tokenizer"),
        ({"eval": ("stdlib",)}, 'write "name=source"'),
        ({"eval": ("val=",)}, 'write "name=source"'),
        ({"eval": ("a/b=c",)}, 'write "name=source"'),
        ({"eval": ("val=a", "val=b")}, "names 'val' twice"),
    ],
)
def test_refuses(fields, message):
    with pytest.raises(ValueError, match=message) as error:
        DataConfig(**fields)
    assert "\n" not in str(error.value)
