"""Work done once and kept: folders of the cache, each built whole or not at all.

`build_once` builds into a folder beside the wanted one and renames it, so that a run killed halfway
leaves nothing that a later one would believe. Processes that start together on one host take turns
by a file lock, which the kernel drops with its holder; where the filesystem knows no locks they all
build the same and the first rename wins.
"""

import contextlib
import fcntl
import hashlib
import os
import shutil
import socket
import uuid
from collections.abc import Callable, Generator
from pathlib import Path


def cache_key(*parts: object) -> str:
    """A short name for what depends on `parts`, told apart by their text."""
    return hashlib.sha256("\0".join(str(part) for part in parts).encode()).hexdigest()[:20]


def build_once(folder: Path, build: Callable[[Path], None]) -> Path:
    """`folder`, after `build(empty folder)` has filled it, if it was not there.

    What `build` raises passes through and leaves nothing behind.
    """
    if folder.exists():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _turn(folder.with_name(folder.name + ".lock")):
        if folder.exists():
            return folder
        mine = f"{folder.name}.tmp-{socket.gethostname()}-"
        for left_by_a_killed_run in folder.parent.glob(mine + "*"):
            shutil.rmtree(left_by_a_killed_run, ignore_errors=True)
        unfinished = folder.with_name(mine + uuid.uuid4().hex[:12])
        unfinished.mkdir()
        try:
            build(unfinished)
            unfinished.rename(folder)
        except OSError:
            if not folder.exists():  # else another host was first, with the same content
                raise
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
    return folder


@contextlib.contextmanager
def _turn(lock: Path) -> Generator[None]:
    descriptor = os.open(lock, os.O_CREAT | os.O_RDWR, 0o666)
    try:
        with contextlib.suppress(OSError):  # a filesystem without locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
