"""Weights in safetensors files, read and written a slice at a time, whatever their size.

A file is an 8-byte length, a JSON header (name -> dtype, shape, place), and the bytes. Reading maps
the files, so that a slice of a tensor costs that slice; writing plans all files first, then fills
them in tensor by tensor. A folder with several has an index, as Hugging Face's libraries write it.
Source: the safetensors format, https://huggingface.co/docs/safetensors.
"""

import json
import os
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import ml_dtypes
import numpy as np

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
DTYPES = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "U8": np.dtype(np.uint8),
    "I8": np.dtype(np.int8),
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
MAX_SHARD_BYTES = 5 * 10**9
MAX_HEADER_BYTES = 100 * 2**20


@dataclass(frozen=True)
class Tensor:
    """What a header says of a tensor."""

    dtype: np.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Size of its values."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize


def _header(path: Path) -> tuple[dict, int]:
    """Returns (the tensors of a file, where their bytes begin)."""
    with path.open("rb") as file:
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else MAX_HEADER_BYTES + 1
        if length > min(MAX_HEADER_BYTES, path.stat().st_size):
            raise ValueError(f"{path} is no safetensors file, or was cut short")
        header = json.loads(file.read(length))
    header.pop("__metadata__", None)
    end = max((entry["data_offsets"][1] for entry in header.values()), default=0)
    if 8 + length + end > path.stat().st_size:
        raise ValueError(
            f"{path} was cut short: {8 + length + end} bytes are due, it has {path.stat().st_size}"
        )
    return header, 8 + length


class Reader:
    """The tensors of a folder: of the files in its index, or of its one file."""

    def __init__(self, folder: Path | str, single: str = SINGLE):
        """`single` is the name of a file that is alone. Raises FileNotFoundError for a folder
        without weights, or without some of its index; ValueError for a broken file, a dtype that
        is not known, a name that two files have."""
        self.folder = Path(folder).expanduser()
        self.tensors: dict[str, Tensor] = {}
        self._places: dict[str, tuple[Path, int]] = {}
        for path in self._files(single):
            header, begin = _header(path)
            for name, entry in header.items():
                if name in self.tensors:
                    raise ValueError(f"{self.folder}: two files hold {name!r}")
                if entry["dtype"] not in DTYPES:
                    raise ValueError(f"{path}: {name!r} has the unknown dtype {entry['dtype']!r}")
                self.tensors[name] = Tensor(DTYPES[entry["dtype"]], tuple(entry["shape"]))
                self._places[name] = (path, begin + entry["data_offsets"][0])

    def _files(self, single: str) -> list[Path]:
        files, index = [self.folder / single], self.folder / INDEX
        if single == SINGLE and index.is_file():
            named = sorted(set(json.loads(index.read_text())["weight_map"].values()))
            files = [self.folder / name for name in named]
        missing = [str(path) for path in files if not path.is_file()]
        if missing:
            raise FileNotFoundError(f"{', '.join(missing)} is missing")
        return files

    def map(self, name: str) -> np.ndarray:
        """Returns a tensor that is read where it is looked at. KeyError if there is none."""
        tensor, (path, offset) = self.tensors[name], self._places[name]
        if not tensor.num_bytes:
            return np.zeros(tensor.shape, tensor.dtype)
        raw = np.memmap(path, np.uint8, "r", offset, (tensor.num_bytes,))
        return raw.view(tensor.dtype).reshape(tensor.shape)


class Writer:
    """Writes tensors, in any order and piece by piece, into the files of a folder.

    Under other names until all are closed without an error: what has the right names is whole.
    """

    def __init__(
        self,
        folder: Path | str,
        tensors: Mapping[str, Tensor],
        max_shard_bytes: int = MAX_SHARD_BYTES,
    ):
        self.folder = Path(folder).expanduser()
        self.folder.mkdir(parents=True, exist_ok=True)
        self._tensors, self._places = dict(tensors), {}
        self._shards = _shards(self._tensors, max_shard_bytes)
        for number, names in enumerate(self._shards):
            self._begin(self._path(number), names)

    def _name(self, number: int) -> str:
        if len(self._shards) == 1:
            return SINGLE
        return f"model-{number + 1:05d}-of-{len(self._shards):05d}.safetensors"

    def _path(self, number: int) -> Path:
        return self.folder / f"{self._name(number)}.new"

    def _begin(self, path: Path, names: Iterable[str]) -> None:
        header, place = {}, 0
        for name in names:
            tensor = self._tensors[name]
            ends = [place, place + tensor.num_bytes]
            header[name] = dict(
                dtype=NAMES[tensor.dtype], shape=list(tensor.shape), data_offsets=ends
            )
            place = ends[1]
        text = json.dumps({"__metadata__": {"format": "pt"}} | header, separators=(",", ":"))
        raw = text.encode()
        raw += b" " * (-len(raw) % 8)
        with path.open("wb") as file:
            file.write(struct.pack("<Q", len(raw)) + raw)
            file.truncate(8 + len(raw) + place)
        for name in names:
            self._places[name] = (path, 8 + len(raw) + header[name]["data_offsets"][0])

    def write(self, name: str, values: np.ndarray, at: int = 0) -> None:
        """Writes values of the tensor, from its flat element `at` on, in its dtype.

        Raises ValueError for what would lose precision by a narrower dtype unseen: values have to
        come in the tensor's dtype.
        """
        tensor, (path, offset) = self._tensors[name], self._places[name]
        end = at * tensor.dtype.itemsize + values.nbytes
        if values.dtype != tensor.dtype or end > tensor.num_bytes:
            raise ValueError(
                f"{name}: {values.dtype}{list(values.shape)} at {at} does not fit into "
                f"{tensor.dtype}{list(tensor.shape)}"
            )
        with path.open("r+b") as file:
            file.seek(offset + at * tensor.dtype.itemsize)
            file.write(np.ascontiguousarray(values).view(np.uint8).data)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind, *_: object) -> None:
        if kind is not None:
            return
        for number in range(len(self._shards)):
            os.replace(self._path(number), self.folder / self._name(number))
        if len(self._shards) > 1:
            total = sum(t.num_bytes for t in self._tensors.values())
            names = {
                name: self._name(n) for n, shard in enumerate(self._shards) for name in shard
            }
            index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(names.items()))}
            (self.folder / INDEX).write_text(json.dumps(index, indent=2))


def _shards(tensors: Mapping[str, Tensor], max_bytes: int) -> list[list[str]]:
    """Returns the names of each file, in order, none larger than `max_bytes` but for a tensor that
    is."""
    shards, size = [[]], 0
    for name, tensor in tensors.items():
        if shards[-1] and size + tensor.num_bytes > max_bytes:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += tensor.num_bytes
    return shards
