"""CPU seconds of a command with all of its processes, those included for which no other process waits.

python tools/cpu_seconds.py COMMAND [ARGUMENT ...]

Runs the command, prints as the last line the user and system time of every process that it started, and exits with the
command's exit code. A shell's `time` leaves out processes that outlive their parent, such as a fork server and the
ranks that it starts.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import subprocess
import sys
import time

_SET_CHILD_SUBREAPER = 36
"""Option of prctl(2): orphans become children of this process, which then waits for them."""
_ORPHAN_SECONDS = 30.0
"""Longest time that orphans have to end after the command."""


def wait_for_orphans(seconds: float) -> bool:
    """Waits for every child of this process; returns False if some are still running after `seconds`."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            ended, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return True
        if not ended:
            time.sleep(0.05)
    return False


def main(command: list[str]) -> int:
    """Runs the command; returns its exit code, that of a shell where a signal ended it."""
    if ctypes.CDLL(None, use_errno=True).prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise SystemExit(f"prctl(PR_SET_CHILD_SUBREAPER) failed: {os.strerror(ctypes.get_errno())}; Linux is needed")
    signal.signal(signal.SIGINT, lambda *_: None)  # the command receives it too, and ends
    started = time.monotonic()
    code = subprocess.run(command, check=False).returncode
    seconds = time.monotonic() - started
    complete = wait_for_orphans(_ORPHAN_SECONDS)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(
        f"{used.ru_utime + used.ru_stime:.0f} CPU seconds ({used.ru_utime:.0f} user + {used.ru_stime:.0f} system) in "
        f"{seconds:.0f} s" + ("" if complete else ", without processes that are still running"),
        flush=True,
    )
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
