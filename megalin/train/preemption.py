"""Preemption: records SIGTERM and Ctrl-C, so that the run can save and exit."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from types import FrameType, TracebackType
from typing import Any, Self

from megalin.parallel.heartbeats import VARIABLE

STOP_SIGNALS = ("SIGTERM", "SIGINT")
"""Names of the signals that make a run save and end."""
_SAME_SECONDS = 1.0
"""Time after a first signal in which another one is the same: a launcher forwards the Ctrl-C of a terminal, which
interrupts all processes."""


_TEXT = b"SIGINT: saves after the work in progress and ends; Ctrl-C once more ends at once, without saving\n"


class PreemptionHandler:
    """Context manager that records SIGTERM and Ctrl-C instead of dying.

    A second Ctrl-C, more than a second later, has its previous effect: it raises KeyboardInterrupt, or does nothing on
    a rank of `megalin launch`, which then kills it. A further SIGTERM changes nothing, as launchers repeat those of the
    cluster manager. A Ctrl-C that this process ignores, as a background job of a script does, stays ignored.

    Python handles signals in its main thread only: entered in another thread, this records nothing, and the signals
    keep their previous effects.

    Attributes:
        received: name of the first signal; empty before.
    """

    def __init__(self) -> None:
        self.received = ""
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                ignored = number == signal.SIGINT and signal.getsignal(number) == signal.SIG_IGN
                if not ignored or VARIABLE in os.environ:  # the launcher's ranks ignore it while they start
                    self._previous[number] = signal.signal(number, self._on_signal)
        return self

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        now, previous = time.monotonic(), self._previous[number]
        if not self.received:
            self.received, self._since = signal.Signals(number).name, now
            if number == signal.SIGINT and callable(previous) and os.environ.get("RANK", "0") == "0":
                with contextlib.suppress(OSError):  # the terminal may be gone
                    os.write(2, _TEXT)
        elif number == signal.SIGINT and now - self._since > _SAME_SECONDS and callable(previous):
            previous(number, frame)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, previous in self._previous.items():
            # None: the previous handler was not set by Python, which cannot restore it.
            signal.signal(number, signal.SIG_DFL if previous is None else previous)
        self._previous = {}
