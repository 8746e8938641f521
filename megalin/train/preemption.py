"""What asks a run to leave before its end: SIGTERM, as cluster managers and launchers send it."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Self


class Termination:
    """Hears SIGTERM, which would end this process, while it is entered; a context manager.

    Further signals change nothing, as launchers repeat those of the cluster manager. Python takes signals in its main
    thread alone: entered in another one, it hears nothing, and a signal does what it did before.

    Attributes:
        asked: whether a signal came.
    """

    def __init__(self) -> None:
        self.asked = False

    def __enter__(self) -> Self:
        self._hears = threading.current_thread() is threading.main_thread()
        if self._hears:
            self._previous = signal.signal(signal.SIGTERM, self._hear)
        return self

    def _hear(self, number: int, frame: FrameType | None) -> None:
        self.asked = True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._hears:
            # None: a handler that Python did not set, and cannot set again.
            signal.signal(signal.SIGTERM, signal.SIG_DFL if self._previous is None else self._previous)
