"""The arrays of a checkpoint, written and read a slice at a time, whatever their size.

A checkpoint of a run (`moejax.train.checkpoint`) is a folder in the format of orbax:

    checkpoints/<step>/
        _CHECKPOINT_METADATA      its two items
        extra/metadata            JSON
        state/_METADATA           the paths of the arrays, such as "params.stack_0.block_0.moe.w_in"
        state/manifest.ocdbt, d/  a key-value store: <path>/.zarray, then <path>/2.0.1 and so on,
                                  a chunk each, its place in the array for a name

orbax writes and restores whole arrays, which stack all layers. Here the same store is opened with
tensorstore, as orbax does, and takes chunks as they come, not compressed.

Sources: the format documentation of orbax (https://orbax.readthedocs.io) and of tensorstore's
drivers "zarr" and "ocdbt" (https://google.github.io/tensorstore).
"""

import ast
import json
import os
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import tensorstore as ts

from moejax.convert.table import Index

CHECKPOINTS = "checkpoints"
HANDLERS = "orbax.checkpoint._src.handlers."
ITEMS = {
    "state": f"{HANDLERS}pytree_checkpoint_handler.PyTreeCheckpointHandler",
    "extra": f"{HANDLERS}json_checkpoint_handler.JsonCheckpointHandler",
}
DICT_KEY = 2
WINDOW_BYTES = 256 * 2**20
"""Of slices that are on their way to or from the disk."""


@dataclass(frozen=True)
class Array:
    """An array of a checkpoint."""

    shape: tuple[int, ...]
    dtype: np.dtype
    chunk: tuple[int, ...] = ()
    """Shape of its chunks."""

    @property
    def num_bytes(self) -> int:
        """Size of its values."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize


def _spec(folder: Path, path: str, driver: str = "zarr") -> dict[str, Any]:
    # Chunks stay in files of their own; the paths, and the shapes under them, in one node.
    config = {"max_inline_value_bytes": 1024, "max_decoded_node_bytes": 10**8}
    store = {"driver": "ocdbt", "base": f"file://{folder}/", "path": f"{path}/", "config": config}
    return {"driver": driver, "kvstore": store}


def _context(cache_bytes: int) -> ts.Context:
    # Waiting for the disk after every chunk makes writing four times as slow: see `_sync`.
    return ts.Context({"cache_pool": {"total_bytes_limit": cache_bytes}, "file_io_sync": False})


def _sync(folder: Path) -> None:
    """Waits until all files are on the disk."""
    for path in folder.rglob("*"):
        handle = os.open(path, os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)


class Writer:
    """Writes the arrays of a new checkpoint, in any order and chunk by chunk.

    It is complete when the `with` ends without an error.
    """

    def __init__(self, folder: Path | str, arrays: Mapping[str, Array], extra: Mapping[str, Any]):
        """`arrays` by their paths, each with the chunks in which it will be written; `extra` is
        the JSON beside them."""
        self.folder = Path(folder).resolve()
        self._arrays, self._extra = dict(arrays), dict(extra)
        self._on_the_way: deque[tuple[Any, int]] = deque()
        self._bytes = 0
        (self.folder / "state").mkdir(parents=True)
        context = _context(0)
        self._open = {name: self._create(name, context) for name in self._arrays}

    def _create(self, name: str, context: ts.Context) -> Any:
        array = self._arrays[name]
        metadata = {
            "shape": array.shape, "chunks": array.chunk or array.shape, "compressor": None,
            "dtype": "bfloat16" if array.dtype.name == "bfloat16" else array.dtype.str,
        }  # fmt: skip
        spec = _spec(self.folder / "state", name) | {
            "metadata": metadata, "store_data_equal_to_fill_value": True,
        }  # fmt: skip
        return ts.open(ts.Spec(spec), context=context, create=True).result()

    def write(self, name: str, index: Index, values: np.ndarray) -> None:
        """Writes a slice, whole chunks of it, in the array's dtype; the values are then its own.

        Returns before it is on the disk. Raises ValueError for another dtype.
        """
        if values.dtype != self._arrays[name].dtype:
            raise ValueError(f"{name} holds {self._arrays[name].dtype}, not {values.dtype}")
        future = self._open[name][index].write(values, can_reference_source_data_indefinitely=True)
        self._on_the_way.append((future, values.nbytes))
        self._bytes += values.nbytes
        self._wait(WINDOW_BYTES)

    def _wait(self, left: int) -> None:
        while self._bytes > left:
            future, size = self._on_the_way.popleft()
            future.result()
            self._bytes -= size

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind, *_: object) -> None:
        if kind is not None:
            return
        self._wait(0)
        keys = {
            str((name,)): {
                "key_metadata": [{"key": name, "key_type": DICT_KEY}],
                "value_metadata": {"value_type": "jax.Array", "skip_deserialize": False},
            }
            for name in self._arrays
        }
        state = {
            "tree_metadata": keys, "use_ocdbt": True, "use_zarr3": False,
            "store_array_data_equal_to_fill_value": True, "custom_metadata": None,
        }  # fmt: skip
        _sync(self.folder)
        (self.folder / "state" / "_METADATA").write_text(json.dumps(state))
        (self.folder / "extra").mkdir()
        (self.folder / "extra" / "metadata").write_text(json.dumps(self._extra))
        whole = {"item_handlers": ITEMS, "metrics": {}, "custom_metadata": {}}
        (self.folder / "_CHECKPOINT_METADATA").write_text(json.dumps(whole))


class Reader:
    """The arrays of a run's latest checkpoint, or of one checkpoint."""

    def __init__(self, path: Path | str):
        """Raises FileNotFoundError for a folder that is neither, ValueError for a checkpoint that
        was written otherwise."""
        self.folder = _checkpoint(Path(path).expanduser().resolve())
        said = json.loads((self.folder / "state" / "_METADATA").read_text())
        if not said.get("use_ocdbt"):
            raise ValueError(f"{self.folder} is a checkpoint, but not one that a run wrote")
        driver = "zarr3" if said.get("use_zarr3") else "zarr"
        context, self.arrays, self._open = _context(WINDOW_BYTES), {}, {}
        for key in said["tree_metadata"]:
            name = ".".join(ast.literal_eval(key))
            spec = _spec(self.folder / "state", name, driver)
            # The store is only read: its own configuration holds.
            spec["kvstore"].pop("config")
            spec |= {"recheck_cached_data": False, "recheck_cached_metadata": False}
            self._open[name] = opened = ts.open(spec, context=context, read=True).result()
            chunk = tuple(size or 1 for size in opened.chunk_layout.read_chunk.shape or ())
            self.arrays[name] = Array(opened.shape, np.dtype(opened.dtype.numpy_dtype), chunk)

    @property
    def extra(self) -> dict[str, Any]:
        """The JSON beside the arrays."""
        return json.loads((self.folder / "extra" / "metadata").read_text())

    def read(self, name: str, index: Index) -> np.ndarray:
        """Returns a slice of an array."""
        return self._open[name][index].read().result()

    def stream(self, wanted: Iterable[tuple[str, Index]]) -> Iterator[np.ndarray]:
        """Yields slices in the order in which they are asked for, the next ones on their way."""
        queue, size = deque(), 0
        for name, index in wanted:
            view = self._open[name][index]
            nbytes = view.size * view.dtype.numpy_dtype.itemsize
            while queue and size + nbytes > WINDOW_BYTES:
                future, done = queue.popleft()
                yield future.result()
                size -= done
            queue.append((view.read(), nbytes))
            size += nbytes
        while queue:
            yield queue.popleft()[0].result()


def _checkpoint(path: Path) -> Path:
    if (path / "state" / "_METADATA").is_file():
        return path
    found = [p for p in (path / CHECKPOINTS).glob("*") if p.name.isdigit()]
    found = [p for p in found if (p / "state" / "_METADATA").is_file()]
    if not found:
        raise FileNotFoundError(
            f"no checkpoint in {path}: give the folder of a run, or {CHECKPOINTS}/<step> in it"
        )
    return max(found, key=lambda p: int(p.name))
