"""SIGTERM and Ctrl-C of the launcher, recorded for its loop. Imports nothing slow: they may come while torch loads."""

from __future__ import annotations

import signal
from types import FrameType, TracebackType
from typing import Any, Self

SIGNALS = (signal.SIGTERM, signal.SIGINT)
"""Signals that the launcher handles for its ranks."""


class RecordedSignals:
    """Context manager that records SIGTERM and Ctrl-C instead of dying; for the main thread.

    Attributes:
        received: names of the signals so far, such as SIGTERM, the first one first.
    """

    def __init__(self) -> None:
        self.received: list[str] = []
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> Self:
        self._previous = {number: signal.signal(number, self._on_signal) for number in SIGNALS}
        return self

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.received.append(signal.Signals(number).name)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, previous in self._previous.items():
            signal.signal(number, signal.SIG_DFL if previous is None else previous)
