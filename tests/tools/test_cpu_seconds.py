"""CPU seconds of a command: those of processes that nobody waits for count, and its exit code is kept."""

from __future__ import annotations

import re
import signal
import subprocess
import sys

from tools.mutation_check import ROOT

SPIN = "import time\nwhile time.process_time() < 1: pass"


def measure(script: str) -> tuple[int, float, str]:
    """Exit code of the tool for a Python script, the seconds that it prints, and its last line."""
    command = [sys.executable, str(ROOT / "tools/cpu_seconds.py"), sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    last = done.stdout.splitlines()[-1]
    return done.returncode, float(last.split()[0]), last


def test_an_orphan_counts_and_the_exit_code_is_kept():
    code, seconds, last = measure(
        f"import os, subprocess, sys\nsubprocess.Popen([sys.executable, '-c', {SPIN!r}])\nos._exit(3)"
    )
    assert code == 3
    assert seconds >= 1
    assert re.fullmatch(r"\d+ CPU seconds \(\d+ user \+ \d+ system\) in \d+ s", last)


def test_a_signal_that_ends_the_command_is_in_the_exit_code():
    assert measure("import os, signal; os.kill(os.getpid(), signal.SIGKILL)")[0] == 128 + signal.SIGKILL
