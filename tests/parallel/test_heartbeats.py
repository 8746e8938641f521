"""Heartbeats of ranks in mapped memory: slots and rings that another process reads, and their files in a run folder."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megalin.errors import StorageError
from megalin.parallel.heartbeat_copies import read_heartbeats, write_copy, write_pointer
from megalin.parallel.heartbeats import CAPACITY, Heartbeat, HeartbeatFile, LaunchedOp

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


def test_another_process_is_read_after_it_was_killed():
    file = HeartbeatFile.create(3)
    assert [slot.state for slot in file.slots()] == ["absent"] * 3
    command = [sys.executable, "-c", WRITER, str(file.path)]
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


def test_states_and_phases_of_a_rank():
    file = HeartbeatFile.create(1)

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


def _used(ranks: list[int], world_size: int) -> HeartbeatFile:
    """A file in which each of the ranks has recorded its number of launches, and all are in step 5."""
    file = HeartbeatFile.create(world_size, ranks)
    for rank in ranks:
        heartbeat = Heartbeat()
        heartbeat.move_to(file, rank)
        heartbeat.step = 5
        for _ in range(rank):
            heartbeat.record("op", "data", (rank,))
    return file


def test_a_run_folder_has_the_place_in_memory_and_then_a_copy(tmp_path):
    path, file = tmp_path / "heartbeats", _used([1, 3], 4)
    write_pointer(file, path)
    live = read_heartbeats(path)
    heartbeat = Heartbeat()
    heartbeat.move_to(file, 1)
    heartbeat.step = 6
    assert [(slot.step, slot.pid) for slot in live.slots()] == [(0, 0), (6, os.getpid()), (0, 0), (5, os.getpid())]
    assert path.stat().st_size < 256
    write_copy(file, path)
    assert path.stat().st_mode & 0o777 == 0o600
    copy = read_heartbeats(path)
    heartbeat.step = 7
    assert [slot.step for slot in copy.slots()] == [0, 6, 0, 5]
    assert [copy.ring(rank) for rank in range(4)] == [file.ring(rank) for rank in range(4)]
    assert len(copy.ring(3)) == 3


def test_only_the_memory_of_the_own_ranks_is_reserved():
    """So that a host of a large run does not reserve the rings of all others."""
    file = _used([8], 64)
    blocks = os.stat(file.path).st_blocks * 512
    assert CAPACITY * 128 < blocks < 2 * CAPACITY * 128


def test_no_mapped_page_can_be_missing():
    """A write to one that a full disk, or a file that has become shorter, does not have ends the process by SIGBUS."""
    file = HeartbeatFile.create(2)
    assert os.stat(file.path).st_blocks * 512 >= len(file.mapped)
    descriptor = os.open(file.path, os.O_RDWR)
    for size in (0, len(file.mapped) + 1):
        with pytest.raises(PermissionError):
            os.ftruncate(descriptor, size)
    os.close(descriptor)


@pytest.mark.parametrize("damage", ["truncated", "empty", "other", "link", "pipe", "missing", "ended", "another"])
def test_other_files_are_refused(tmp_path, damage):
    path, file = tmp_path / "heartbeats", _used([1], 2)
    if damage in ("ended", "another"):
        write_pointer(file, path)
        if damage == "ended":
            file.close()
        else:
            path.write_text(path.read_text().replace(file.name, HeartbeatFile.create(1).name))
    else:
        write_copy(file, path)
        data = path.read_bytes()
        path.unlink()
        if damage == "link":
            write_copy(file, tmp_path / "elsewhere")
            path.symlink_to(tmp_path / "elsewhere")
        elif damage == "pipe":
            os.mkfifo(path)
        elif damage != "missing":
            path.write_bytes({"truncated": data[:-1], "empty": b"", "other": b"{" + data[1:]}[damage])
    with pytest.raises(StorageError, match="heartbeat"):
        read_heartbeats(path)


def test_without_memory_there_are_no_heartbeats(monkeypatch):
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", fail)
    with pytest.raises(StorageError, match=r"cannot reserve 1028 KiB of memory for heartbeats.*No space.*free memory"):
        HeartbeatFile.create(2)


@pytest.mark.parametrize("write", [write_pointer, write_copy])
def test_a_folder_that_cannot_be_written_is_left_without_them(tmp_path, write):
    write(_used([0], 1), tmp_path / "missing" / "heartbeats")
    assert not list(tmp_path.iterdir())
