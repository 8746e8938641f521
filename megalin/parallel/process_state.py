"""State of another process of this host, from /proc: it runs, is stopped, or has ended."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Literal, NamedTuple


class ProcessState(NamedTuple):
    """State of a process."""

    state: Literal["running", "stopped", "dead", "silent"]
    """stopped: by a signal such as SIGSTOP, or suspended with its job. silent: on a host that does not answer."""
    end: str = ""
    """The signal or exit code of a dead process whose parent has not collected it yet; else empty."""


def process_state(pid: int, started: int) -> ProcessState:
    """State of the process that had this pid when it started (`heartbeats.start_ticks`)."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ProcessState("dead")
    if int(fields[19]) != started:
        return ProcessState("dead")
    if fields[0] in "ZX":
        return ProcessState("dead", _describe_end(int(fields[49])))
    return ProcessState("stopped" if fields[0] == "T" else "running")


def _describe_end(status: int) -> str:
    """The end of a process by its wait status, which /proc has for a parent that has not collected it."""
    number = status & 0x7F
    if number == 0:
        return f"exit code {status >> 8 & 0xFF}"
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
