"""Tokenised once, whole or not at all, by any number of processes."""

import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from moejax.data import DataConfig, load_tokenizer, token_set
from moejax.data.cache import build_once
from moejax.data.token_set import tokenise


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "texts"
    path.mkdir()
    for n in range(6):
        (path / f"{n}.txt").write_text(f"document {n}\n" * (n + 1))
    return path


@pytest.fixture
def cfg(folder):
    return DataConfig(train=(str(folder),), eval=(), vocab_size=280)


def test_documents_in_order_each_ended_by_eos(cfg, folder, tmp_path):
    tokenizer = load_tokenizer(cfg, tmp_path)
    tokens = tokenise(cfg, cfg.train, "train", tokenizer, tmp_path)
    assert tokens.tokens.dtype == np.uint16
    assert tokens.num_bytes == sum(path.stat().st_size for path in folder.iterdir())
    for n in range(6):
        document = tokens.tokens[tokens.offsets[n] : tokens.offsets[n + 1]].tolist()
        assert document == [*tokenizer.encode(f"document {n}\n" * (n + 1)), tokenizer.eos_id]


def test_long_documents_in_pieces_and_large_vocabularies(cfg, tmp_path, monkeypatch):
    tokenizer = load_tokenizer(cfg, tmp_path)
    whole = tokenise(cfg, cfg.train, "train", tokenizer, tmp_path / "whole")
    monkeypatch.setattr(token_set, "_PIECE", 15)
    monkeypatch.setattr(token_set, "_GROUP", 40)
    monkeypatch.setitem(vars(tokenizer), "vocab_size", 70_000)
    pieces = tokenise(cfg, cfg.train, "train", tokenizer, tmp_path / "pieces")
    assert pieces.tokens.dtype == np.uint32
    assert pieces.offsets.size == whole.offsets.size
    assert pieces.num_bytes == whole.num_bytes
    for n in range(6):
        ids = pieces.tokens[pieces.offsets[n] : pieces.offsets[n + 1]].tolist()
        assert tokenizer.decode(ids) == f"document {n}\n" * (n + 1)
        assert ids.count(tokenizer.eos_id) == 1 and ids[-1] == tokenizer.eos_id


def test_cache_follows_the_files_and_the_tokenizer(cfg, folder, tmp_path, monkeypatch):
    tokenizer = load_tokenizer(cfg, tmp_path)
    first = tokenise(cfg, cfg.train, "train", tokenizer, tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(token_set, "_write", None)  # would raise if it were called
        again = tokenise(cfg, cfg.train, "train", tokenizer, tmp_path)
    assert again.fingerprint == first.fingerprint
    np.testing.assert_array_equal(again.tokens, first.tokens)
    (folder / "0.txt").touch()  # written anew, with the same tokens: a resumed run may go on
    assert tokenise(cfg, cfg.train, "train", tokenizer, tmp_path).fingerprint == first.fingerprint
    (folder / "0.txt").write_text("Document 0\n")
    changed = tokenise(cfg, cfg.train, "train", tokenizer, tmp_path)
    assert changed.fingerprint != first.fingerprint


def test_empty_sources_say_so_and_leave_nothing(cfg, tmp_path):
    tokenizer = load_tokenizer(cfg, tmp_path)
    (tmp_path / "empty.txt").write_text("\n")
    source = str(tmp_path / "empty.txt")
    cache = tmp_path / "cache"
    with pytest.raises(ValueError, match=r"empty.txt' \(1 files\) has no document with text"):
        tokenise(DataConfig(train=(source,), eval=()), (source,), "train", tokenizer, cache)
    held = DataConfig(train=cfg.train, holdout=1e-9)
    with pytest.raises(ValueError, match="on the 'heldout' side of data.holdout=1e-09"):
        tokenise(held, held.train, "heldout", tokenizer, cache)
    assert [path for path in cache.iterdir() if path.suffix != ".lock"] == []


def test_damaged_cache_is_named(cfg, tmp_path):
    tokenizer = load_tokenizer(cfg, tmp_path)
    tokenise(cfg, cfg.train, "train", tokenizer, tmp_path)
    path = next(tmp_path.glob("tokens-*/tokens.bin"))
    path.write_bytes(path.read_bytes()[:-2])
    with pytest.raises(ValueError, match=r"bytes in place of \d+; delete"):
        tokenise(cfg, cfg.train, "train", tokenizer, tmp_path)


def test_build_that_fails_leaves_nothing_and_can_be_tried_again(tmp_path):
    def fails(folder):
        (folder / "half").write_text("x")
        raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        build_once(tmp_path / "thing", fails)
    assert [path.name for path in tmp_path.iterdir()] == ["thing.lock"]
    build_once(tmp_path / "thing", lambda folder: (folder / "whole").touch())
    assert (tmp_path / "thing" / "whole").exists()


def test_a_killed_build_leaves_nothing_that_is_believed(tmp_path):
    script = (
        "import os, signal, sys; from pathlib import Path;"
        "from moejax.data.cache import build_once;"
        "build_once(Path(sys.argv[1]), lambda folder: ("
        "(folder / 'half').write_text('x'), os.kill(os.getpid(), signal.SIGKILL)))"
    )
    result = subprocess.run([sys.executable, "-c", script, str(tmp_path / "thing")])
    assert result.returncode == -9
    assert not (tmp_path / "thing").exists() and list(tmp_path.glob("thing.tmp-*"))
    build_once(tmp_path / "thing", lambda folder: (folder / "whole").touch())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["thing", "thing.lock"]


def test_a_build_appears_at_once_by_a_rename(tmp_path):
    inodes = []
    build_once(tmp_path / "thing", lambda folder: inodes.append(folder.stat().st_ino))
    assert (tmp_path / "thing").stat().st_ino == inodes[0]  # a copy could be seen half done


def test_builders_that_start_together_build_once(tmp_path):
    built, together = [], threading.Barrier(4)

    def build(folder):
        built.append(folder)
        time.sleep(0.1)  # long enough for the others to come
        (folder / "whole").touch()

    def start():
        together.wait()
        build_once(tmp_path / "thing", build)

    threads = [threading.Thread(target=start) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(built) == 1


def test_another_host_may_be_first(tmp_path):
    def build(folder):
        (folder / "mine").touch()
        other = tmp_path / "thing"
        other.mkdir()
        (other / "theirs").touch()

    build_once(tmp_path / "thing", build)
    assert [path.name for path in (tmp_path / "thing").iterdir()] == ["theirs"]
    assert not list(tmp_path.glob("thing.tmp-*"))
