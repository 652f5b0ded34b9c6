"""A thread that notices when training stands still, and writes down where.

A collective that one process never joins, a data source that hangs, a full disk: from outside all
of them look like silence. `Watchdog` waits beside the training loop; when no step has ended for
`timeout_s` seconds it writes the stacks of all threads to `<run>/stacks-<time>-process<n>.txt` and
says so in one line on stderr, once for each stall. It only looks: the run goes on, and the next
`beat` arms it again. Nothing here touches the accelerator library, which may be what hangs.
"""

import faulthandler
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self


@dataclass
class Heartbeat:
    """When the last step ended: written by the training loop, read by the watchdog's thread."""

    count: int = 0
    """Beats so far: one a step, and one for anything else that counts as progress."""
    step: int | None = None
    """The last step that ended, where the beat told it."""
    time_s: float = field(default_factory=time.monotonic)
    """When the last beat came, in seconds of the monotonic clock."""

    def beat(self, step: int | None = None) -> None:
        """Notes that there was progress just now."""
        self.time_s = time.monotonic()
        self.step = self.step if step is None else step
        self.count += 1

    def age_s(self) -> float:
        """Seconds since the last beat, or since the start."""
        return time.monotonic() - self.time_s


class Watchdog:
    """Dumps all stacks when no `beat` comes for `timeout_s` seconds; 0 watches nothing.

    A context manager: it watches between enter and exit, and its thread never outlives either the
    block or the process.
    """

    def __init__(self, run_dir: Path, timeout_s: float, *, process_index: int = 0) -> None:
        self._run_dir = run_dir
        self._timeout_s = timeout_s
        self._process_index = process_index
        self._heart = Heartbeat()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def beat(self, step: int | None = None) -> None:
        """Progress: a step has ended (or a compile, an evaluation, a save)."""
        self._heart.beat(step)

    def __enter__(self) -> Self:
        if self._timeout_s > 0 and self._thread is None:
            self._heart.beat()
            self._stop.clear()
            self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _watch(self) -> None:
        dumped_at = -1
        while not self._stop.wait(min(self._timeout_s / 5, 5.0)):
            beats = self._heart.count
            if beats != dumped_at and self._heart.age_s() > self._timeout_s:
                dumped_at = beats
                self._dump()

    def _dump(self) -> None:
        moment = time.time()
        stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(moment))
        name = f"stacks-{stamp}-{int(moment % 1 * 1000):03d}-process{self._process_index}.txt"
        where = "no step has ended yet" if self._heart.step is None else f"step {self._heart.step}"
        what = f"watchdog: no progress for {self._heart.age_s():.1f} s (last: {where})"
        path = self._run_dir / name
        try:
            self._run_dir.mkdir(parents=True, exist_ok=True)
            with open(path, "w", encoding="utf-8") as file:
                file.write(what + "\n\n")
                file.flush()
                faulthandler.dump_traceback(file=file, all_threads=True)
        except OSError as error:  # a full or lost disk must not end the watch: stderr is left
            print(f"{what}; {path} cannot be written: {error}", file=sys.stderr, flush=True)
            return
        print(f"{what}; stacks in {path}", file=sys.stderr, flush=True)
