"""SIGTERM before a run can save: exit code 75 at once, wherever the main thread is."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

BODY = """
import ctypes, signal, time
from megalin.commands.early_sigterm import EarlySigterm
with EarlySigterm():
    {body}
signal.raise_signal(signal.SIGTERM)
"""
BODIES = {
    "Python": "print('ready', flush=True)\n    while True: time.sleep(1)",
    # Locks a mutex that it holds, as a rank that waits for others: no signal ends such a call.
    "a C call": "lock = ctypes.create_string_buffer(64); lib = ctypes.CDLL(None); lib.pthread_mutex_lock(lock)\n"
    "    print('ready', flush=True); lib.pthread_mutex_lock(lock)",
}


def _start(*arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def _wait_for(process: subprocess.Popen[str], pattern: str) -> None:
    """Waits until the kernel's status of a process matches."""
    deadline = time.monotonic() + 60
    while not re.search(pattern, Path(f"/proc/{process.pid}/status").read_text()):
        assert time.monotonic() < deadline, pattern
        time.sleep(0.01)


def _end(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGTERM)
    started = time.monotonic()
    try:
        error = process.communicate(timeout=60)[1]
    finally:
        process.kill()
    assert time.monotonic() - started < 5
    assert process.returncode == 75, error
    assert error == "stopped: SIGTERM while no step ran; run the same command to continue\n"


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
def test_process_leaves_with_75(body):
    process = _start("-c", BODY.format(body=body))
    assert process.stdout is not None
    process.stdout.readline()
    _wait_for(process, r"State:\s*S")
    _end(process)


def test_train_leaves_with_75_while_its_modules_load(tmp_path):
    process = _start("-m", "megalin", "train", str(tmp_path / "missing.toml"))
    _wait_for(process, r"SigCgt:\s*[0-9a-f]+[4567c-f][0-9a-f]{3}\n")  # bit 14: it handles SIGTERM
    _end(process)


def test_handler_of_the_body_and_the_one_before_are_kept():
    handler = "lambda *_: print('recorded', flush=True)"
    body = f"signal.signal(signal.SIGTERM, {handler}); signal.raise_signal(signal.SIGTERM)"
    process = _start("-c", BODY.format(body=body))
    output, _ = process.communicate(timeout=60)
    assert output == "recorded\n"
    assert process.returncode == -signal.SIGTERM
