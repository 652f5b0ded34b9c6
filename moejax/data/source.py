"""From a source's name to its documents, one string each, in an order that never changes.

A source is a file, a folder, a glob or an fsspec url (`s3://...`), or "stdlib": the Python standard
library's own source, so that a demo needs no download. `list_files` finds the files, or says early
that there are none; `read_documents` reads them one at a time and, for what it cannot read, names
the file and the line.
"""

import gzip
import hashlib
import json
import sysconfig
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import IO, Literal

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
from fsspec.spec import AbstractFileSystem

from moejax.data.config import STDLIB

Part = Literal["all", "train", "heldout"]
"""Every document of a source, or those on one side of the holdout."""

_STDLIB_SKIPPED = frozenset(
    {"test", "tests", "idle_test"}  # another kind of text, and not installed everywhere
    | {"encodings", "pydoc_data"}  # tables of characters; prose in one string
    | {"site-packages", "dist-packages", "__pycache__"}
)
_RECORD_ENDINGS: dict[str, Literal["json", "parquet"]] = {
    ".jsonl": "json",
    ".ndjson": "json",
    ".json": "json",
    ".parquet": "parquet",
}
_BROKEN_GZIP = (gzip.BadGzipFile, EOFError, zlib.error)


@dataclass(frozen=True)
class SourceFile:
    """One file of a source."""

    filesystem: AbstractFileSystem
    path: str
    """As its filesystem names it."""
    key: str
    """Path inside the source, with "/": what the holdout hashes, the same on every machine."""
    stamp: str
    """Changes when the file does: its size, and its time or tag of last modification."""

    @property
    def kind(self) -> Literal["text", "json", "parquet"]:
        ending = PurePosixPath(self.path.removesuffix(".gz")).suffix.lower()
        return _RECORD_ENDINGS.get(ending, "text")


def list_files(source: str) -> tuple[SourceFile, ...]:
    """The files of `source`, sorted by key; hidden ones are left out.

    Raises FileNotFoundError if there is nothing at that path, ValueError if it holds no file or if
    no filesystem is known for its url.
    """
    where = sysconfig.get_paths()["stdlib"] if source == STDLIB else source
    try:
        filesystem, path = fsspec.core.url_to_fs(where)
    except (ValueError, ImportError) as error:
        raise ValueError(f"data source {source!r} cannot be opened: {error}") from error
    path = path.rstrip("/") or "/"
    if filesystem.isfile(path):
        name = path.rpartition("/")[2]
        return (SourceFile(filesystem, path, name, _stamp(filesystem.info(path))),)
    if filesystem.isdir(path):
        root, found = path, filesystem.find(path, detail=True)
    elif any(mark in path for mark in "*?["):
        first = min(path.find(mark) for mark in "*?[" if mark in path)
        root, found = path[:first].rpartition("/")[0], filesystem.glob(path, detail=True)
    else:
        raise FileNotFoundError(
            f"data source {source!r} does not exist (looked for {path!r}); give a file, a folder, "
            f'a glob, an fsspec url, or "{STDLIB}"'
        )
    files = []
    for name, info in found.items():
        key = name.removeprefix(root).lstrip("/")
        if info["type"] == "file" and _wanted(key, source):
            files.append(SourceFile(filesystem, name, key, _stamp(info)))
    if not files:
        raise ValueError(f"data source {source!r} holds no file; looked in {path!r}")
    return tuple(sorted(files, key=lambda file: file.key))


def _wanted(key: str, source: str) -> bool:
    parts = PurePosixPath(key).parts
    if any(part.startswith(".") for part in parts):
        return False
    if source != STDLIB:
        return True
    # `_sysconfigdata*` is one dict of this machine's build settings.
    generated = parts[-1].startswith("_sysconfigdata")
    return key.endswith(".py") and not generated and _STDLIB_SKIPPED.isdisjoint(parts)


def _stamp(info: dict) -> str:
    tags = ("mtime", "ETag", "etag", "LastModified", "last_modified", "updated", "created")
    changed = next((info[tag] for tag in tags if info.get(tag)), "")
    return f"{info['size']} {changed}"


def _belongs(key: str, part: Part, share: float) -> bool:
    """Whether the document of this key is in `part`, with a `share` (0..1) of them held out."""
    digest = hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
    held_out = int.from_bytes(digest[:8], "big") < share * 2**64
    return part == "all" or held_out == (part == "heldout")


def read_documents(
    files: tuple[SourceFile, ...], *, part: Part, holdout: float, text_column: str
) -> Iterator[str]:
    """The documents of `part`, in file order; those without text are left out.

    Raises ValueError, with the file and the line or row, for what cannot be read: text that is not
    UTF-8, a broken gzip, JSON or Parquet file, a record without `text_column`.
    """
    for file in files:
        if file.kind == "text":
            if _belongs(file.key, part, holdout):
                text = _read_text(file)
                if text.strip():
                    yield text
        else:
            read_records = _read_parquet if file.kind == "parquet" else _read_json_lines
            for text in read_records(file, text_column):
                if text.strip() and _belongs(text, part, holdout):
                    yield text


def _unzipped(file: SourceFile, stream: IO[bytes]) -> IO[bytes] | gzip.GzipFile:
    return gzip.GzipFile(fileobj=stream, mode="rb") if file.path.endswith(".gz") else stream


def _broken_gzip(file: SourceFile, error: Exception) -> ValueError:
    return ValueError(f"data file {file.path!r} is not whole gzip ({error}); fetch it again")


def _read_text(file: SourceFile) -> str:
    try:
        with file.filesystem.open(file.path, "rb") as stream, _unzipped(file, stream) as plain:
            return plain.read().decode("utf-8-sig")
    except _BROKEN_GZIP as error:
        raise _broken_gzip(file, error) from error
    except UnicodeDecodeError as error:
        raise ValueError(
            f"data file {file.path!r} is not UTF-8 text ({error.reason} at byte {error.start}); "
            "name the text files of its folder by a glob, such as 'folder/**/*.txt'"
        ) from error


def _read_json_lines(file: SourceFile, text_column: str) -> Iterator[str]:
    try:
        with file.filesystem.open(file.path, "rb") as stream, _unzipped(file, stream) as plain:
            for number, line in enumerate(plain, start=1):
                if line.strip():
                    yield _parse_line(line, f"data file {file.path!r}, line {number}", text_column)
    except _BROKEN_GZIP as error:
        raise _broken_gzip(file, error) from error


def _parse_line(line: bytes, where: str, text_column: str) -> str:
    try:
        record = json.loads(line.decode("utf-8-sig"))
    except ValueError as error:
        raise ValueError(
            f"{where}: not JSON in UTF-8 ({error}); write one object a line"
        ) from error
    if not isinstance(record, dict) or text_column not in record:
        columns = ", ".join(record) if isinstance(record, dict) else type(record).__name__
        raise ValueError(_no_column(where, text_column, columns))
    return _text_of(record[text_column], where, text_column)


def _read_parquet(file: SourceFile, text_column: str) -> Iterator[str]:
    where = f"data file {file.path!r}"
    with file.filesystem.open(file.path, "rb") as stream:
        try:
            table = pq.ParquetFile(stream)
        except pa.ArrowException as error:
            raise ValueError(f"{where} is not Parquet ({error}); fetch it again") from error
        names = table.schema_arrow.names
        if text_column not in names:
            raise ValueError(_no_column(where, text_column, ", ".join(names)))
        row = 0
        for batch in table.iter_batches(batch_size=256, columns=[text_column]):
            for text in batch.column(0).to_pylist():
                row += 1
                yield _text_of(text, f"{where}, row {row}", text_column)


def _no_column(where: str, text_column: str, columns: str) -> str:
    return f"{where}: no column {text_column!r} (it has: {columns}); set data.text_column"


def _text_of(value: object, where: str, text_column: str) -> str:
    if not isinstance(value, str):
        raise ValueError(
            f"{where}: column {text_column!r} holds {type(value).__name__}, not text; "
            "set data.text_column or drop the record"
        )
    if not value.isascii():
        try:
            value.encode("utf-8")
        except UnicodeEncodeError as error:
            raise ValueError(
                f"{where}: column {text_column!r} holds half of a surrogate pair at character "
                f"{error.start}, which is no Unicode text; mend or drop the record"
            ) from error
    return value
