"""A BPE trained on the spot, and tokenizer files of others."""

import json
import subprocess
import sys

import pytest
import tokenizers
from tokenizers import models, pre_tokenizers, processors

from moejax.data import DataConfig, load_tokenizer

CODE = 'def f(x):\n    """Doc é 你好."""\n\n    if x[0] >= 10:\n\treturn {"a": None}\n' * 40


@pytest.fixture
def corpus(tmp_path):
    path = tmp_path / "code.txt"
    path.write_text(CODE, encoding="utf-8")
    return DataConfig(train=(str(path),), eval=(), vocab_size=300)


def whole_words(**special):
    """A foreign tokenizer of the words a, b, c, with its own truncation, padding and template."""
    backend = tokenizers.Tokenizer(models.WordLevel({"a": 0, "b": 1, "c": 2}, unk_token="a"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.add_special_tokens(list(special.values()))
    backend.enable_truncation(2)
    backend.enable_padding(length=8)
    eos = next(iter(special.values()), None)
    if eos:
        backend.post_processor = processors.TemplateProcessing(
            single=f"{eos} $A", special_tokens=[(eos, backend.token_to_id(eos))]
        )
    return backend


def test_trained_bpe_gives_text_back_and_uses_its_vocabulary(corpus, tmp_path):
    tokenizer = load_tokenizer(corpus, tmp_path / "cache")
    assert tokenizer.vocab_size == 300
    for text in (CODE, "  any\r\n\ttext 🙂 \x00", "<|endoftext|>"):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert tokenizer.eos_id not in ids  # a text cannot end its own document
    assert len(tokenizer.encode(CODE)) < len(CODE.encode()) / 2
    assert tokenizer.encode_batch([CODE, ""]) == [tokenizer.encode(CODE), []]


def test_an_end_of_line_and_its_indentation_are_one_word(corpus, tmp_path):
    tokenizer = load_tokenizer(corpus, tmp_path / "cache")
    ids = tokenizer.encode("def f(x):\n    if x")
    assert [tokenizer.decode([token]) for token in ids[-3:]] == ["):\n   ", " if", " x"]


def test_training_is_deterministic_across_processes(corpus, tmp_path):
    mine = load_tokenizer(corpus, tmp_path / "cache").fingerprint
    script = (
        "import sys; from pathlib import Path; from moejax.data import DataConfig, load_tokenizer;"
        "cfg = DataConfig(train=(sys.argv[1],), eval=(), vocab_size=300);"
        "print(load_tokenizer(cfg, Path(sys.argv[2])).fingerprint)"
    )
    command = [sys.executable, "-c", script, corpus.train[0], str(tmp_path / "other cache")]
    assert subprocess.run(command, capture_output=True, text=True).stdout.strip() == mine


def test_training_is_done_once_for_the_same_text(corpus, tmp_path):
    load_tokenizer(corpus, tmp_path / "cache")
    made = sorted(tmp_path.glob("cache/bpe-*/tokenizer.json"))
    assert len(made) == 1
    stamp = made[0].stat().st_mtime_ns
    load_tokenizer(corpus, tmp_path / "cache")
    assert made[0].stat().st_mtime_ns == stamp
    (tmp_path / "code.txt").write_text(CODE + "something else")
    load_tokenizer(corpus, tmp_path / "cache")
    assert len(list(tmp_path.glob("cache/bpe-*/tokenizer.json"))) == 2


def test_a_saved_tokenizer_loads_as_a_given_one(corpus, tmp_path):
    tokenizer = load_tokenizer(corpus, tmp_path / "cache")
    tokenizer.save(tmp_path / "mine.json")
    again = load_tokenizer(DataConfig(tokenizer=str(tmp_path / "mine.json")), tmp_path)
    assert again.encode(CODE) == tokenizer.encode(CODE)
    assert again.eos_id == tokenizer.eos_id
    assert again.fingerprint == tokenizer.fingerprint


def test_truncation_padding_and_template_of_a_given_file_are_off(tmp_path):
    whole_words(eos="</s>").save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(DataConfig(tokenizer=str(tmp_path)), tmp_path)
    assert tokenizer.encode("a b c a") == [0, 1, 2, 0]
    assert tokenizer.encode_batch(["a b c a", "b"]) == [[0, 1, 2, 0], [1]]
    assert tokenizer.eos_id == 3
    assert tokenizer.vocab_size == 4


@pytest.mark.parametrize("named", ["<stop>", {"content": "<stop>", "lstrip": False}])
def test_eos_from_the_config_beside_it_or_from_ours(tmp_path, named):
    whole_words(start="</s>", stop="<stop>").save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": named}))
    path = str(tmp_path / "tokenizer.json")
    assert load_tokenizer(DataConfig(tokenizer=path), tmp_path).eos_id == 4
    assert load_tokenizer(DataConfig(tokenizer=path, eos="</s>"), tmp_path).eos_id == 3


def test_errors_name_the_way_out(tmp_path, corpus):
    with pytest.raises(FileNotFoundError, match=r"no file '.*/gone.json'; give a tokenizer.json"):
        load_tokenizer(DataConfig(tokenizer=str(tmp_path / "gone.json")), tmp_path)
    (tmp_path / "broken.json").write_text("{}")
    with pytest.raises(ValueError, match="is not a Hugging Face tokenizer.json"):
        load_tokenizer(DataConfig(tokenizer=str(tmp_path / "broken.json")), tmp_path)
    whole_words(odd="<odd>").save(str(tmp_path / "odd.json"))
    with pytest.raises(ValueError, match="set data.eos to one of its own: <odd>"):
        load_tokenizer(DataConfig(tokenizer=str(tmp_path / "odd.json")), tmp_path)
    with pytest.raises(ValueError, match="no end-of-document token among <no>;"):
        load_tokenizer(DataConfig(tokenizer=str(tmp_path / "odd.json"), eos="<no>"), tmp_path)
    tokenizer = load_tokenizer(corpus, tmp_path / "cache")
    tokenizer.check_vocab_size(300)
    with pytest.raises(ValueError, match="vocabulary of 299 is smaller than the tokenizer's 300"):
        tokenizer.check_vocab_size(299)
