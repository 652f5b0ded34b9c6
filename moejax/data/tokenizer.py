"""Text to token ids and back: a Hugging Face tokenizer.json, or a byte-level BPE trained here.

Only what is inside the file matters here: its truncation and padding are switched off, and special
tokens spelled out in a text stay text, so that no document can end itself.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import fsspec
import numpy as np
import tokenizers
from jaxtyping import Int
from tokenizers import Regex, decoders, models, pre_tokenizers, trainers

from moejax.data.cache import build_once, cache_key
from moejax.data.config import DataConfig
from moejax.data.source import list_files, read_documents

EOS = "<|endoftext|>"
"""The end-of-document token of a BPE trained here."""

_KNOWN_EOS = (EOS, "<|end_of_text|>", "<｜end▁of▁sentence｜>", "<|im_end|>", "</s>", "<eos>")
_TRAINING_CHARACTERS = 50_000_000  # of all sources together; a BPE learns nothing from more

# GPT-4's split of text into words, with one change: an end of line takes the punctuation before it
# and the indentation after it, but for the last space, which stays with its word as anywhere else:
# "x:\n    return" is "x", ":\n   ", " return". On the standard library's source, vocabulary 4096,
# bytes per token: 3.48 with GPT-2's split, 3.57 with GPT-4's, 3.79 with this one.
_WORDS = "|".join(
    (
        r"[^\r\n\p{L}\p{N}]?\p{L}+",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+(?:[\r\n]+ *(?= )|[\r\n]+)?",
        r"\s*[\r\n]+ *(?= )",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)


@dataclass(frozen=True)
class Tokenizer:
    """A tokenizer and its end-of-document token."""

    backend: tokenizers.Tokenizer
    eos_id: int

    @cached_property
    def vocab_size(self) -> int:
        """One more than the largest id, which is what an embedding table needs."""
        return max(self.backend.get_vocab(with_added_tokens=True).values()) + 1

    @cached_property
    def fingerprint(self) -> str:
        """Equal for two tokenizers that give the same ids."""
        return cache_key(self.backend.to_str(), self.eos_id)

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`, with nothing put before or after."""
        return self.backend.encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """`encode` of each text, on all cores."""
        encodings = self.backend.encode_batch_fast(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def decode(self, ids: Iterable[int] | Int[np.ndarray, " L"]) -> str:
        """The text of `ids`; special tokens give none."""
        return self.backend.decode([int(token) for token in ids])

    @cached_property
    def begin(self) -> list[int]:
        """What its own rules put before a text (a begin-of-text token); usually nothing."""
        plain, whole = self.encode("a"), self.backend.encode("a").ids
        return whole[: whole.index(plain[0])]

    def decode_each(self, ids: Iterable[int], before: Sequence[int]) -> Iterator[str]:
        """Yields the text of ids that follow those `before`, each as soon as it is whole: bytes of
        a character that is still incomplete wait."""
        stream = decoders.DecodeStream(ids=list(before), skip_special_tokens=True)
        for token in ids:
            yield stream.step(self.backend, token) or ""

    def save(self, path: Path | str) -> None:
        """Writes a tokenizer.json, and beside it which token ends a document; both are what
        `DataConfig.tokenizer` reads back."""
        path, eos = Path(path), self.backend.id_to_token(self.eos_id)
        path.write_text(self.backend.to_str(pretty=True), encoding="utf-8")
        beside = path.with_name("tokenizer_config.json")
        beside.write_text(json.dumps({"eos_token": eos}) + "\n", encoding="utf-8")

    def check_vocab_size(self, vocab_size: int) -> None:
        """Raises ValueError if a model of `vocab_size` has no row for some of the tokens."""
        if vocab_size < self.vocab_size:
            raise ValueError(
                f"the model's vocabulary of {vocab_size} is smaller than the tokenizer's "
                f"{self.vocab_size}; raise the model's or take another tokenizer"
            )


def load_tokenizer(cfg: DataConfig, cache_dir: Path) -> Tokenizer:
    """The tokenizer that `cfg` names, or a BPE trained on its training documents (in cache_dir).

    Raises FileNotFoundError for a missing file, ValueError for one that is no tokenizer or whose
    end-of-document token is not known, and what `read_documents` raises.
    """
    if cfg.tokenizer:
        return _from_file(cfg.tokenizer, cfg.eos)
    files = [list_files(source) for source in cfg.train]
    listing = [(file.path, file.key, file.stamp) for group in files for file in group]
    key = cache_key(
        listing, cfg.vocab_size, cfg.held_out_share, cfg.text_column, _WORDS, tokenizers.__version__
    )
    folder = build_once(
        Path(cache_dir) / f"bpe-{cfg.vocab_size}-{key}",
        lambda empty: _train_bpe(cfg).save(empty / "tokenizer.json"),
    )
    return _from_file(str(folder / "tokenizer.json"), EOS)


def _from_file(path: str, eos: str) -> Tokenizer:
    filesystem, where = fsspec.core.url_to_fs(path)
    if filesystem.isdir(where):
        where = where.rstrip("/") + "/tokenizer.json"
    if not filesystem.isfile(where):
        raise FileNotFoundError(
            f"data.tokenizer {path!r}: no file {where!r}; give a tokenizer.json or its folder"
        )
    try:
        # tokenizers raises a bare Exception for a file it cannot parse.
        backend = tokenizers.Tokenizer.from_str(filesystem.cat_file(where).decode("utf-8"))
    except Exception as error:
        raise ValueError(
            f"data.tokenizer {where!r} is not a Hugging Face tokenizer.json: {error}"
        ) from error
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = True
    beside = where.rpartition("/")[0] + "/tokenizer_config.json"
    if not eos and filesystem.isfile(beside):
        named = json.loads(filesystem.cat_file(beside)).get("eos_token")
        eos = named["content"] if isinstance(named, dict) else named or ""
    names = (eos,) if eos else _KNOWN_EOS
    ids = [id for id in map(backend.token_to_id, names) if id is not None]
    if not ids:
        special = [token.content for token in backend.get_added_tokens_decoder().values()]
        raise ValueError(
            f"data.tokenizer {where!r} has no end-of-document token among {', '.join(names)}; "
            f"set data.eos to one of its own: {', '.join(special[:20]) or '(it has none)'}"
        )
    return Tokenizer(backend, ids[0])


def _train_bpe(cfg: DataConfig) -> Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(_WORDS), behavior="isolated")
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([split, to_bytes])  # type: ignore[assignment]
    backend.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    trainer = trainers.BpeTrainer(
        vocab_size=cfg.vocab_size,
        special_tokens=[EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(_training_text(cfg), trainer)
    return Tokenizer(backend, backend.encode(EOS).ids[0])


def _training_text(cfg: DataConfig) -> Iterator[str]:
    share = _TRAINING_CHARACTERS // len(cfg.train)
    for source in cfg.train:
        left = share
        documents = read_documents(
            list_files(source),
            part="train",
            holdout=cfg.held_out_share,
            text_column=cfg.text_column,
        )
        for text in documents:
            yield text[:left]
            left -= len(text)
            if left <= 0:
                break
