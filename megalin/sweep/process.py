"""A run as a process of `megalin train`: its log, its end by SIGTERM, and the processes' devices and threads."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Protocol

from megalin.launcher.parent_death import end_with_parent

_ERROR_LINES = 5


class RunProcess:
    """A command whose output goes to the end of a log file. It gets SIGTERM, which makes a run save and end, with
    `end`, and on Linux when this process dies, however it dies."""

    def __init__(
        self, command: Sequence[str], log: Path, environment: Mapping[str, str], *, inherited: Sequence[int] = ()
    ) -> None:
        """Starts the command; `inherited` are descriptors that it keeps open. To be called in the main thread, at whose
        end the process would be ended too."""
        self._log, self._asked = log, False
        self._started = time.perf_counter()
        with log.open("ab") as file:
            self._process = subprocess.Popen(
                command,
                stdout=file,
                stderr=subprocess.STDOUT,
                env={**os.environ, **environment},
                start_new_session=True,  # Ctrl-C reaches this process alone, which then asks its runs to save
                pass_fds=inherited,
                preexec_fn=partial(end_with_parent, signal.SIGTERM),
            )

    @property
    def seconds(self) -> float:
        """Wall time since the start."""
        return time.perf_counter() - self._started

    def poll(self) -> int | None:
        """The exit code; None while it runs."""
        return self._process.poll()

    def end(self) -> None:
        """Asks the run to save and end, once."""
        if not self._asked:
            self._asked = True
            self._process.send_signal(signal.SIGTERM)

    def wait(self) -> None:
        """Waits for the end of the process."""
        self._process.wait()

    def error(self, code: int) -> str:
        """The exit code and the last lines of the log."""
        lines = self._log.read_text(errors="replace").splitlines()
        return "\n".join([f"exit code {code}", *lines[-_ERROR_LINES:]])


def train_command(config: Path, folder: Path, overrides: Sequence[str]) -> list[str]:
    """The command of a run, as a user would give it."""
    return [sys.executable, "-m", "megalin", "train", str(config), "--folder", str(folder), *overrides]


class Slot(Protocol):
    """Work that holds one of the slots of `ended_with`."""

    def cut(self) -> None:
        """Asks its run to save and end."""

    def wait(self) -> None:
        """Waits for the end of its run."""


@contextmanager
def ended_with(slots: Sequence[Slot | None]) -> Iterator[None]:
    """Ends the runs of the slots where this process ends before them, by Ctrl-C or an error."""
    try:
        yield
    finally:
        running = [each for each in slots if each is not None]
        for each in running:
            each.cut()
        for each in running:
            each.wait()


def environments(processes: int) -> list[dict[str, str]]:
    """Environment of each slot: its GPU, where there are several, and its number of CPU threads."""
    from torch.cuda import device_count

    devices = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(device_count())))).split(",")
    threads = os.environ.get("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // processes)))
    return [
        {"OMP_NUM_THREADS": threads}
        | ({"CUDA_VISIBLE_DEVICES": devices[slot % len(devices)]} if len(devices) > 1 else {})
        for slot in range(processes)
    ]
