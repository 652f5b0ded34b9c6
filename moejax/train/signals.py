"""Stopping a run between two steps when it is asked to: `GracefulStop`.

    with GracefulStop() as stop:
        for step in ...:
            ...
            if stop.should_stop():
                checkpointer.save(...)
                break

The first SIGTERM or SIGINT only sets a flag, which the loop polls. A second SIGINT (Ctrl-C pressed
again by somebody who does not want to wait) raises KeyboardInterrupt; a second SIGTERM is ignored,
because cluster managers repeat it while the last checkpoint is being written.

In a run of many processes all must leave the loop after the same step, or those that go on wait for
ever in a collective, and signals do not arrive everywhere at once. `agree` is the hook for that: it
gets this process's flag at each poll and returns the common answer. It must be called at the same
steps on all processes and give all the same answer; so that no step waits for it, let each process
feed its flag into the step as an input, reduce by maximum over all devices, and return the value
that came out of the previous step.
"""

import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Self

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class GracefulStop:
    """Turns SIGTERM and SIGINT into a flag while its `with` block runs, then restores the handlers.

    Outside the main thread, where Python allows no handlers, it changes nothing and never stops.
    """

    def __init__(self, agree: Callable[[bool], bool] | None = None) -> None:
        self.requested = False
        """Whether this process has been asked to stop."""
        self.reason = ""
        """Name of the signal that asked first, such as "SIGTERM"; empty if none has."""
        self._agree = agree
        self._interrupts = 0
        self._previous: dict[signal.Signals, Callable | int | None] = {}

    def should_stop(self) -> bool:
        """Whether to stop after this step: this process's flag, or what `agree` makes of it."""
        return self._agree(self.requested) if self._agree else self.requested

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for number, handler in self._previous.items():
            # None is a handler that was not set from Python and cannot be set again from here.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._previous = {}

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._interrupts += number == signal.SIGINT
        if self._interrupts > 1:
            raise KeyboardInterrupt
        self.reason = self.reason or signal.Signals(number).name
        self.requested = True
