"""A source's tokens on disk: tokenised once, then memory-mapped by every process of the host.

    <cache_dir>/tokens-<key>/
        tokens.bin    uint16 or uint32: the documents one after another, each ended by eos
        offsets.npy   int64 [documents + 1]: document d is tokens[offsets[d] : offsets[d + 1]]
        facts.json    dtype, counts, bytes of text, and a hash of the tokens

The key covers the tokenizer and every file's name, size and time of change. The fingerprint is that
of the tokens themselves: a resumed run can tell that its data are still the same, even if touched.
"""

import hashlib
import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Int64, UInt16, UInt32

from moejax.data.cache import build_once, cache_key
from moejax.data.config import DataConfig
from moejax.data.source import Part, list_files, read_documents
from moejax.data.tokenizer import Tokenizer

_PIECE = 1 << 20  # characters: a longer document is tokenised in pieces, cut after an end of line
_GROUP = 8 << 20  # characters tokenised together, on all cores
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TokenSet:
    """Documents as token ids, each ended by eos; mapped, not read."""

    tokens: UInt16[np.ndarray, " N"] | UInt32[np.ndarray, " N"]
    offsets: Int64[np.ndarray, " documents_and_one"]
    num_bytes: int
    """Of the UTF-8 text; with `tokens` it turns nats per token into bits per byte."""
    fingerprint: str


def tokenise(
    cfg: DataConfig, sources: tuple[str, ...], part: Part, tokenizer: Tokenizer, cache_dir: Path
) -> TokenSet:
    """The documents of `part` of `sources`, as tokens; from the cache if they are there.

    Raises ValueError if there is no document with text, and what reading them raises.
    """
    files = [list_files(source) for source in sources]
    listing = [(file.path, file.key, file.stamp) for group in files for file in group]
    key = cache_key(tokenizer.fingerprint, listing, part, cfg.held_out_share, cfg.text_column)

    def documents() -> Iterator[str]:
        for group in files:
            yield from read_documents(
                group, part=part, holdout=cfg.held_out_share, text_column=cfg.text_column
            )

    def build(empty: Path) -> None:
        _log.info("tokenising %s (%d files)", ", ".join(sources), len(listing))
        if not _write(empty, documents(), tokenizer):
            raise ValueError(_nothing_there(cfg, sources, part, len(listing)))

    return _load(build_once(Path(cache_dir) / f"tokens-{key}", build))


def _nothing_there(cfg: DataConfig, sources: tuple[str, ...], part: Part, num_files: int) -> str:
    where = f"data source {', '.join(map(repr, sources))} ({num_files} files)"
    if part == "all" or cfg.held_out_share == 0:
        return f"{where} has no document with text; name files that are not empty"
    return (
        f"{where} has no document with text on the {part!r} side of data.holdout="
        f"{cfg.held_out_share}; a text file is one document: give more of them, "
        'or set data.eval to sources of its own, such as ("val=folder/val.txt",), or to ()'
    )


def _write(folder: Path, documents: Iterator[str], tokenizer: Tokenizer) -> bool:
    """Writes the three files; False if there was no document."""
    dtype = np.dtype(np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.uint32)
    digest, num_bytes, offset, offsets = hashlib.sha256(), 0, 0, [0]
    with (folder / "tokens.bin").open("wb") as out:
        for group in _groups(documents):
            encoded = tokenizer.encode_batch([piece for piece, _ in group])
            for (piece, last), ids in zip(group, encoded, strict=True):
                block = np.asarray([*ids, tokenizer.eos_id] if last else ids, dtype)
                out.write(block.tobytes())
                digest.update(block.tobytes())
                num_bytes += len(piece.encode())
                offset += block.size
                if last:
                    offsets.append(offset)
    np.save(folder / "offsets.npy", np.asarray(offsets, np.int64))
    digest.update(np.asarray(offsets, np.int64).tobytes())
    facts = {"dtype": dtype.name, "num_tokens": offset, "num_bytes": num_bytes}
    facts |= {"fingerprint": digest.hexdigest()[:20]}
    (folder / "facts.json").write_text(json.dumps(facts))
    return len(offsets) > 1


def _groups(documents: Iterator[str]) -> Iterator[list[tuple[str, bool]]]:
    """(piece of a document, whether it is the last) in groups of about `_GROUP` characters."""
    group: list[tuple[str, bool]] = []
    size = 0
    for text in documents:
        start = 0
        while start < len(text):
            stop = start + _PIECE
            if stop < len(text):
                stop = text.rfind("\n", start, stop) + 1 or stop
            group.append((text[start:stop], stop >= len(text)))
            size += len(group[-1][0])
            start = stop
            if size >= _GROUP:
                yield group
                group, size = [], 0
    if group:
        yield group


def _load(folder: Path) -> TokenSet:
    facts = json.loads((folder / "facts.json").read_text())
    dtype = np.dtype(facts["dtype"])
    path = folder / "tokens.bin"
    if path.stat().st_size != facts["num_tokens"] * dtype.itemsize:
        raise ValueError(
            f"the cached tokens {path} have {path.stat().st_size} bytes in place of "
            f"{facts['num_tokens'] * dtype.itemsize}; delete {folder}"
        )
    return TokenSet(
        # Still mapped: only the subclass, slow to slice, is taken off.
        tokens=np.asarray(np.memmap(path, dtype, "r")),
        offsets=np.asarray(np.load(folder / "offsets.npy", mmap_mode="r")),
        num_bytes=facts["num_bytes"],
        fingerprint=facts["fingerprint"],
    )
