"""Exit with code 75 at a SIGTERM that comes before a command can save, while modules load and ranks meet."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from types import FrameType, TracebackType
from typing import Any, Self

from megalin.errors import PreemptedError


class EarlySigterm:
    """Context manager that ends the process at SIGTERM, with the exit code of PreemptedError, unless another handler is
    installed in its body. Does nothing outside of the main thread, in which Python installs handlers.

    Python calls a handler in the main thread, which may wait for other ranks in a C call, for minutes. The signal
    therefore also writes into a pipe, which a thread reads.
    """

    def __enter__(self) -> Self:
        self._installed = threading.current_thread() is threading.main_thread()
        if self._installed:
            self._leaving = threading.Lock()
            source, self._pipe = os.pipe()
            os.set_blocking(self._pipe, False)
            threading.Thread(target=self._watch, args=(source,), name="megalin-sigterm", daemon=True).start()
            self._descriptor = signal.set_wakeup_fd(self._pipe, warn_on_full_buffer=False)
            self._previous: Any = signal.signal(signal.SIGTERM, self._leave)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._installed:
            signal.signal(signal.SIGTERM, signal.SIG_DFL if self._previous is None else self._previous)
            signal.set_wakeup_fd(self._descriptor)
            os.close(self._pipe)

    def _watch(self, source: int) -> None:
        while numbers := os.read(source, 64):
            if signal.SIGTERM in numbers and signal.getsignal(signal.SIGTERM) == self._leave:
                self._leave(signal.SIGTERM, None)
        os.close(source)

    def _leave(self, number: int, frame: FrameType | None) -> None:
        """Ends the process, once, without the interpreter's teardown: other threads may hold any lock."""
        if self._leaving.acquire(blocking=False):
            with contextlib.suppress(OSError):  # of a full disk, or without a reader
                os.write(2, b"stopped: SIGTERM while no step ran; run the same command to continue\n")
            os._exit(PreemptedError.exit_code)
