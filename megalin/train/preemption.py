"""Preemption: records the SIGTERM of a cluster manager or launcher, so that the run can save and exit."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Self


class PreemptionHandler:
    """Context manager that records SIGTERM instead of dying.

    Further signals change nothing, as launchers repeat those of the cluster manager. Python handles signals in its main
    thread only: entered in another thread, this records nothing and SIGTERM keeps its previous effect.

    Attributes:
        received: True after a SIGTERM.
    """

    def __init__(self) -> None:
        self.received = False

    def __enter__(self) -> Self:
        self._installed = threading.current_thread() is threading.main_thread()
        if self._installed:
            self._previous = signal.signal(signal.SIGTERM, self._on_signal)
        return self

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.received = True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._installed:
            # None: the previous handler was not set by Python, which cannot restore it.
            signal.signal(signal.SIGTERM, signal.SIG_DFL if self._previous is None else self._previous)
