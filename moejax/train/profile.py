"""A profiler trace of a few steps, taken at a step named beforehand.

`TraceAtStep` is called around every step of the training loop and does nothing but compare two
numbers, until its step comes. The trace lands in `<run>/profile`, for Perfetto, XProf or
TensorBoard.
"""

from pathlib import Path
from typing import Any, Self

import jax

PROFILE_DIR = "profile"


class TraceAtStep:
    """Traces the steps `step .. step + num_steps - 1` into `<run>/profile`; step 0: never.

    A run that starts or resumes after `step` takes no trace. As a context manager it also ends a
    trace that the end of the run, or an error, cuts short.
    """

    def __init__(self, run_dir: Path, step: int, num_steps: int) -> None:
        self._dir = run_dir / PROFILE_DIR
        self._first = step
        self._last = step + num_steps - 1
        self._running = False

    def before_step(self, step: int) -> None:
        """Starts the trace when `step` is its first."""
        if self._first > 0 and step == self._first and not self._running:
            jax.profiler.start_trace(str(self._dir))
            self._running = True

    def after_step(self, step: int, outputs: Any = ()) -> None:
        """Ends the trace after its last step, once `outputs` (arrays of that step) are ready.

        Waits for the device on that one step only: a trace ended earlier would lack the step's
        tail.
        """
        if self._running and step >= self._last:
            jax.block_until_ready(outputs)
            self.close()

    def close(self) -> None:
        """Ends a running trace; does nothing otherwise."""
        if self._running:
            self._running = False
            jax.profiler.stop_trace()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()
