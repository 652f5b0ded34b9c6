"""Every kind of source gives its documents, and what cannot be read is named with file and line."""

import gzip
import json
import os

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from moejax.data.source import list_files, read_documents


def documents(source, part="all", holdout=0.0, text_column="text"):
    return list(
        read_documents(list_files(str(source)), part=part, holdout=holdout, text_column=text_column)
    )


def test_text_of_a_file_a_folder_and_a_glob(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "b.txt").write_text("bé\n", encoding="utf-8")
    (tmp_path / "sub" / "a.py").write_text("x = 1")
    (tmp_path / ".hidden").write_text("no")
    (tmp_path / "empty.txt").write_text("  \n")
    (tmp_path / "z.txt.gz").write_bytes(gzip.compress(b"zipped"))
    assert documents(tmp_path / "b.txt") == ["bé\n"]
    assert documents(tmp_path / ".hidden") == ["no"]
    assert documents(tmp_path) == ["bé\n", "x = 1", "zipped"]
    assert documents(f"{tmp_path}/**/*.py") == ["x = 1"]
    assert [file.key for file in list_files(f"{tmp_path}/s*/*.py")] == ["sub/a.py"]


@pytest.mark.parametrize("ending", ["jsonl", "jsonl.gz", "json", "ndjson"])
def test_json_lines(tmp_path, ending):
    lines = "\n\n".join(json.dumps({"id": n, "content": f"text {n} é"}) for n in range(3))
    raw = lines.encode()
    (tmp_path / f"f.{ending}").write_bytes(gzip.compress(raw) if ending.endswith("gz") else raw)
    assert documents(tmp_path, text_column="content") == [f"text {n} é" for n in range(3)]


def test_parquet(tmp_path):
    texts = [f"row {n}" for n in range(600)]
    pq.write_table(pa.table({"text": texts, "n": list(range(600))}), tmp_path / "f.parquet")
    assert documents(tmp_path) == texts


def test_a_source_behind_an_fsspec_url():
    memory = fsspec.filesystem("memory")
    try:
        memory.pipe({"/corpus/b.txt": b"two", "/corpus/a.jsonl": b'{"text": "one"}'})
        assert documents("memory://corpus") == ["one", "two"]
        assert documents("memory://corpus/*.txt") == ["two"]
    finally:
        memory.rm("/corpus", recursive=True)


def test_holdout_splits_every_kind_of_document_without_overlap(tmp_path):
    for n in range(200):
        (tmp_path / f"{n}.txt").write_text(f"file {n}")
    records = [{"text": f"record {n}"} for n in range(200)]
    (tmp_path / "r.jsonl").write_text("\n".join(json.dumps(record) for record in records))
    train = documents(tmp_path, "train", 0.2)
    heldout = documents(tmp_path, "heldout", 0.2)
    assert sorted(train + heldout) == sorted(documents(tmp_path))
    for kind in ("file", "record"):
        assert 20 <= sum(text.startswith(kind) for text in heldout) <= 60
    # The same record is on the same side wherever it lies, so a copy does not leak.
    (tmp_path / "copy.jsonl").write_text("\n".join(json.dumps(r) for r in reversed(records)))
    assert set(documents(tmp_path, "heldout", 0.2)) == set(heldout)


def test_standard_library_is_enough_text_and_its_sides_share_no_file():
    files = list_files("stdlib")
    keys = [file.key for file in files]
    assert keys == sorted(set(keys)) and "json/decoder.py" in keys
    assert not any("test" in key.split("/") or "site-packages" in key for key in keys)
    train, heldout = documents("stdlib", "train", 0.05), documents("stdlib", "heldout", 0.05)
    assert sum(map(len, train)) > 4_000_000
    assert sum(map(len, heldout)) > 100_000
    assert not set(train) & set(heldout)


def test_a_touched_file_gets_another_stamp(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("abc")
    before = list_files(str(path))[0].stamp
    os.utime(path, (1, 1))
    assert list_files(str(path))[0].stamp != before


@pytest.mark.parametrize("where", ["nowhere/at/all", "memory://nowhere"])
def test_missing_path(where):
    with pytest.raises(FileNotFoundError, match=f"'{where}' does not exist.*give a file, a folder"):
        list_files(where)


@pytest.mark.parametrize("where", ["", "/*.txt"])
def test_folder_or_glob_without_a_file(tmp_path, where):
    with pytest.raises(ValueError, match="holds no file"):
        list_files(f"{tmp_path}{where}")


def test_unknown_protocol():
    with pytest.raises(
        ValueError, match="'nosuch://bucket/x' cannot be opened: Protocol not known"
    ):
        list_files("nosuch://bucket/x")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"abc\xff", r"a.txt' is not UTF-8 text \(invalid start byte at byte 3\)"),
        ("a.jsonl", b'{"text": "x"}\n\n{"b": "y"}', r"line 3: no column 'text' \(it has: b\)"),
        ("a.jsonl", b"[1]", "line 1: no column 'text'"),
        ("a.jsonl", b'{"text": "x"}\n{"text', "line 2: not JSON"),
        ("a.jsonl", b'{"text": null}', "line 1: column 'text' holds NoneType, not text"),
        ("a.jsonl", b'{"text": "\\ud800"}', "line 1: column 'text' holds half of a surrogate pair"),
        ("a.jsonl", b'{"text": "\xff"}', "line 1: not JSON in UTF-8"),
        ("a.jsonl.gz", b"not gzip at all", "a.jsonl.gz' is not whole gzip"),
        ("a.jsonl.gz", gzip.compress(b'{"text": "x"}\n' * 99)[:-12], "is not whole gzip"),
        ("a.txt.gz", gzip.compress(os.urandom(999))[:500], "is not whole gzip"),
        ("a.parquet", b"PAR?", "a.parquet' is not Parquet"),
    ],
)
def test_unreadable_content_is_one_line_with_the_place(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message) as error:
        documents(tmp_path)
    assert "\n" not in str(error.value)


def test_parquet_without_the_column_or_with_a_null(tmp_path):
    pq.write_table(pa.table({"body": ["x"]}), tmp_path / "a.parquet")
    with pytest.raises(
        ValueError, match=r"no column 'text' \(it has: body\); set data.text_column"
    ):
        documents(tmp_path)
    pq.write_table(pa.table({"text": ["x", None]}), tmp_path / "a.parquet")
    with pytest.raises(ValueError, match="row 2: column 'text' holds NoneType"):
        documents(tmp_path)
