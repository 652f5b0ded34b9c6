"""Where a conversion writes: a folder that is whole or not there, with room for it; and how far it
is."""

import shutil
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

# Beside the weights: what turns text into tokens, and how its makers sample from the model.
COMPANIONS = (
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json",
    "added_tokens.json", "vocab.json", "merges.txt", "*.tiktoken", "chat_template.*",
    "generation_config.json",
)  # fmt: skip


@contextmanager
def new_folder(path: Path | str, num_bytes: int) -> Generator[Path]:
    """Gives a folder to write into that takes the name `path` when all is done, and goes away
    otherwise.

    Raises FileExistsError where something is in the way, OSError where `num_bytes` do not fit.
    """
    path = Path(path).expanduser().absolute()
    if path.exists() and not (path.is_dir() and not any(path.iterdir())):
        raise FileExistsError(f"{path} is there and not empty: name a new folder")
    being_made = path.with_name(path.name + ".part")
    if being_made.exists():
        raise FileExistsError(f"{being_made} is left from a conversion that was killed: remove it")
    path.parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(path.parent).free
    if num_bytes > free:
        raise OSError(f"{path} needs {num_bytes / 1e9:.1f} GB, the disk has {free / 1e9:.1f} GB")
    being_made.mkdir()
    try:
        yield being_made
        if path.exists():
            path.rmdir()
        being_made.rename(path)
    except BaseException:
        shutil.rmtree(being_made, ignore_errors=True)
        raise


def copy_companions(source: Path, target: Path) -> None:
    """Copies the files of the tokenizer that are in `source` and not yet in `target`."""
    for pattern in COMPANIONS:
        for file in sorted(source.glob(pattern)):
            if not (target / file.name).exists():
                shutil.copyfile(file, target / file.name)


@dataclass
class Amount:
    """What was converted."""

    num_tensors: int = 0
    num_bytes: int = 0
    """Written."""
    seconds: float = 0.0

    def __str__(self) -> str:
        rate = self.num_bytes / 1e9 / max(self.seconds, 1e-9)
        return (
            f"{self.num_tensors} tensors, {self.num_bytes / 1e9:.2f} GB in {self.seconds:.1f} s "
            f"({rate:.2f} GB/s)"
        )


class Bar:
    """A bar with tensors, bytes and rate, on stderr; `done` counts along."""

    def __init__(self, num_tensors: int, num_bytes: int):
        self.done, self._total, self._started = Amount(), num_tensors, time.monotonic()
        columns = (
            BarColumn(), TextColumn("{task.description}"), DownloadColumn(), TransferSpeedColumn(),
            TimeRemainingColumn(),
        )  # fmt: skip
        self._progress = Progress(*columns, console=Console(stderr=True))
        self._task = self._progress.add_task(self._text(), total=num_bytes)

    def _text(self) -> str:
        return f"{self.done.num_tensors}/{self._total} tensors"

    def advance(self, num_tensors: int, num_bytes: int) -> None:
        """Counts what has been written."""
        self.done.num_tensors += num_tensors
        self.done.num_bytes += num_bytes
        self.done.seconds = time.monotonic() - self._started
        self._progress.update(self._task, advance=num_bytes, description=self._text())

    def __enter__(self) -> "Bar":
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.done.seconds = time.monotonic() - self._started
        self._progress.stop()
