"""Tiny trained models to use: a golden checkpoint with a tokenizer beside it, opened."""

import shutil
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import jax
import numpy as np
from tokenizers import Tokenizer, models, pre_tokenizers

from moejax import trained
from moejax.core.mesh import ParallelConfig
from moejax.trained import Trained
from tests.convert.golden import golden


def word_tokenizer(where: Path, vocab_size: int) -> Path:
    """Returns a folder whose tokenizer reads "t5 t3" as the ids 5 and 3; "t0" ends a document."""
    words = {f"t{i}": i for i in range(vocab_size)}
    backend = Tokenizer(models.WordLevel(words, unk_token="t1"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.add_special_tokens(["t0"])
    where.mkdir(exist_ok=True)
    backend.save(str(where / "tokenizer.json"))
    (where / "tokenizer_config.json").write_text('{"eos_token": "t0"}')
    return where


def hf_folder(where: Path, name: str) -> Path:
    """Returns a copy of a golden checkpoint, with a tokenizer."""
    word_tokenizer(where, golden(name).cfg.vocab_size)
    for path in golden(name).folder.iterdir():
        if path.name != "golden.safetensors":
            shutil.copy(path, where)
    return where


@cache
def opened(name: str, parallel: ParallelConfig = ParallelConfig()) -> Trained:  # noqa: B008 - frozen
    """Returns a golden model, opened in float32."""
    where = Path(mkdtemp()) / name
    model = trained.load(str(hf_folder(where, name)), parallel, "float32")
    shutil.rmtree(where.parent)
    return model


@cache
def _logits(name: str):
    model = opened(name)
    return jax.jit(lambda tokens: model.layout.model(*model.weights)(tokens)[0])


def log_probs(name: str, ids: Sequence[int]) -> np.ndarray:
    """Returns log p of every token after each of at most 64 ids, [L, V], float64, by numpy from the
    logits of one call for the whole text on one device (what follows a token does not matter)."""
    tokens = np.zeros((1, 64), np.int32)
    tokens[0, : len(ids)] = ids
    logits_LV = np.asarray(_logits(name)(tokens)[: len(ids)], np.float64)
    logits_LV -= logits_LV.max(axis=1, keepdims=True)
    return logits_LV - np.log(np.exp(logits_LV).sum(axis=1, keepdims=True))
