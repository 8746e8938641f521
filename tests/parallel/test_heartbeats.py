"""Heartbeats of ranks in a mapped file: slots and rings that another process reads, and files that are refused."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megalin.errors import StorageError
from megalin.parallel.heartbeats import CAPACITY, Heartbeat, HeartbeatFile, LaunchedOp, create

WRITER = """
import sys, time
from megalin.parallel.heartbeats import HeartbeatFile, current
heartbeat = current()
heartbeat.record("before", "world", ())
heartbeat.move_to(HeartbeatFile.open(sys.argv[1]), 1)
heartbeat.step = 7
heartbeat.enter("save")
heartbeat.record("send to rank 2", "pp", (2, 3))
heartbeat.start_wait("all_reduce", "data", (4,))
print("written", flush=True)
time.sleep(60)
"""


def test_another_process_is_read_after_it_was_killed(tmp_path):
    create(tmp_path / "heartbeats", 3)
    file = HeartbeatFile.open(tmp_path / "heartbeats")
    assert [slot.state for slot in file.slots()] == ["absent"] * 3
    command = [sys.executable, "-c", WRITER, str(tmp_path / "heartbeats")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=Path(__file__).parents[2]) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(signal.SIGKILL)
    first, slot, last = file.slots()
    assert (slot.rank, slot.pid, slot.phase, slot.step, slot.sequence) == (1, process.pid, "save", 7, 3)
    assert slot.state == "waiting"
    assert 0 <= time.monotonic() - slot.seconds < 60
    assert (first.pid, last.pid) == (0, 0)
    assert file.ring(1) == [
        LaunchedOp(0, "before", "world", (), 0, "start", 0),
        LaunchedOp(1, "send to rank 2", "pp", (2, 3), 7, "save", 0),
        LaunchedOp(2, "all_reduce", "data", (4,), 7, "save", 0),
    ]
    assert file.ring(0) == file.ring(2) == []


def test_ring_keeps_the_last_launches():
    heartbeat = Heartbeat()
    assert heartbeat.recent() == []
    for number in range(CAPACITY + 3):
        heartbeat.record("op" if number % 2 else "a name of more than thirty-five characters", "data", (number,) * 9)
    found = heartbeat.recent()
    assert [each.sequence for each in found] == list(range(3, CAPACITY + 3))
    assert found[0].op == "op"
    assert found[-1].op == "a name of more than thirty-five cha"
    assert found[-1].shape == (CAPACITY + 2,) * 7
    assert heartbeat.count("data") == CAPACITY + 3


def test_states_and_phases_of_a_rank(tmp_path):
    create(tmp_path / "heartbeats", 1)
    file = HeartbeatFile.open(tmp_path / "heartbeats")

    def now() -> tuple[str, str]:
        slot = file.slots()[0]
        return slot.phase, slot.state

    assert now() == ("none", "absent")
    heartbeat = Heartbeat()
    heartbeat.move_to(file, 0)
    assert now() == ("start", "computing")
    heartbeat.enter("step")
    with heartbeat.in_phase("evaluation"), heartbeat.waiting("all_reduce", "data", (1,)):
        assert now() == ("evaluation", "waiting")
        time.sleep(0.01)
    assert heartbeat.wait_seconds >= 0.01
    with heartbeat.reading():
        assert now() == ("step", "reading")
    with pytest.raises(OSError, match="disk"), heartbeat.in_phase("save"):
        raise OSError("disk")
    heartbeat.end("OSError: disk")
    assert now() == ("save", "failed")
    assert file.note(0) == "OSError: disk"
    heartbeat.accuse(7, 0)
    assert file.slots()[0][-2:] == (7, 0)
    heartbeat.end()
    assert now() == ("end", "done")


def test_new_file_leaves_the_mapped_one(tmp_path):
    path = tmp_path / "heartbeats"
    create(path, 2)
    older = Heartbeat()
    older.move_to(HeartbeatFile.open(path), 1)
    create(path, 1)
    older.record("op", "data", ())
    assert HeartbeatFile.open(path).slots()[0].pid == 0
    assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("damage", ["truncated", "empty", "other", "link", "pipe", "missing"])
def test_other_files_are_refused(tmp_path, damage):
    path = tmp_path / "heartbeats"
    create(path, 2)
    data = path.read_bytes()
    path.unlink()
    if damage == "link":
        create(tmp_path / "elsewhere", 2)
        path.symlink_to(tmp_path / "elsewhere")
    elif damage == "pipe":
        os.mkfifo(path)
    elif damage != "missing":
        path.write_bytes({"truncated": data[:-1], "empty": b"", "other": b"{" + data[1:]}[damage])
    with pytest.raises(StorageError, match="heartbeat"):
        HeartbeatFile.open(path)


def test_file_that_cannot_be_created(tmp_path):
    with pytest.raises(StorageError, match="missing/heartbeats"):
        create(tmp_path / "missing" / "heartbeats", 2)
