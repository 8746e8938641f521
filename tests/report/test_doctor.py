"""The diagnosis of runs that ended well, were preempted, killed, diverged, stalled, ran out of disk, or go on."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from megalin.__main__ import main
from megalin.parallel.heartbeat_copies import write_pointer
from megalin.parallel.heartbeats import Heartbeat, HeartbeatFile
from megalin.report.doctor import examine, lines


def _dead_pid() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def _lines(path: Path, records: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


class Run:
    """A run folder of 40 steps with `done` lines of metrics."""

    def __init__(self, folder: Path, *, done: int = 12) -> None:
        self.folder = folder
        folder.mkdir()
        (folder / "config.toml").write_text("[train]\nsteps = 40\n")
        self.metrics = [
            {
                "step": step,
                "loss": 5.0 - 0.05 * step,
                "grad_norm": 1.0,
                "tokens": 100 * step,
                "tokens_per_second": 1000.0,
            }
            for step in range(1, done + 1)
        ]
        self.incidents: list[dict[str, Any]] = []
        self.event("started", "on 2 x cpu", step=0)

    def event(self, kind: str, message: str, *, step: int = 12) -> None:
        self.incidents.append({"step": step, "time": "2026-11-25T12:00:00", "kind": kind, "message": message})

    def lock(self, pid: int, host: str = socket.gethostname()) -> None:
        owner = {"pid": pid, "host": host, "since": "2026-11-25T11:00:00"}
        (self.folder / ".lock").write_text(json.dumps(owner))

    def examined(self) -> tuple[str, str, str]:
        """Cause, next step, and the details as one text."""
        _lines(self.folder / "metrics.jsonl", self.metrics)
        _lines(self.folder / "incidents.jsonl", self.incidents)
        _, found = examine(self.folder)
        return found.cause, found.next_step, "\n".join(found.details)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path / "run")


def test_a_finished_run(tmp_path):
    run = Run(tmp_path / "run", done=40)
    cause, following, _ = run.examined()
    assert cause == "it is finished"
    assert following.startswith("nothing")


@pytest.mark.parametrize(
    ("message", "following"),
    [
        ("PreemptedError: SIGTERM after 12 of 40 steps, all of them saved in x", "run the same command: it continues"),
        ("NumericError: step 13: loss nan", "lower optimizer.lr"),
        ("StorageError: cannot write x: [Errno 28] No space left on device", "free space"),
        ("RankStalledError: rank 1 stalled: no progress for 10 s", "look at the stacks"),
        ("RankFailedError: rank 1 was killed by SIGKILL in step 13", "look at the end of that rank's output"),
        ("rank 1 ended with exit code 1 in step 13", "look at the end of that rank's output"),
        ("torch.OutOfMemoryError: CUDA out of memory", "smaller train.micro_batch_size"),
        ("KeyError: 'planted'", "an unexpected error: its traceback"),
    ],
)
def test_an_error_has_its_next_step(run, message, following):
    run.event("error", message)
    cause, found, _ = run.examined()
    assert cause == f"{message} (2026-11-25T12:00:00)"
    assert following in found


def test_a_run_that_a_signal_has_stopped(run):
    run.event("stopped", "SIGINT after 12 of 40 steps, all of them saved in x")
    cause, found, _ = run.examined()
    assert cause == "SIGINT after 12 of 40 steps, all of them saved in x (2026-11-25T12:00:00)"
    assert found == "run the same command: it continues from the newest valid checkpoint"
    assert lines(*examine(run.folder))[0].endswith("step 12 of 40, stopped by a signal")


def test_an_error_before_a_later_start_is_not_the_cause(run):
    run.event("error", "NumericError: step 13: loss nan")
    run.event("resumed", "on 2 x cpu")
    assert run.examined()[0] == "it ended in order before its last step"


def test_an_error_that_comes_back_is_called_so(run):
    for _ in range(2):
        run.event("resumed", "on 2 x cpu")
        run.event("error", "NumericError: step 13: loss nan")
    assert "again: 2 starts ended with this error after step 12" in run.examined()[2]


def test_a_full_disk_names_the_free_space(run):
    run.event("error", "OSError: [Errno 28] No space left on device")
    _, following, details = run.examined()
    assert following.startswith("free space")
    assert "GiB free for" in details


def test_a_killed_run(run):
    run.lock(_dead_pid())
    cause, following, details = run.examined()
    assert "was killed, and logged nothing: SIGKILL" in cause
    assert following.startswith("run the same command")
    assert "steps: 12 finished, no checkpoint" in details


def test_a_run_on_another_host(run):
    run.lock(1, "elsewhere")
    cause, following, _ = run.examined()
    assert "on elsewhere runs it since 2026-11-25T11:00:00, or was killed there" in cause
    assert following.startswith("look for that process on elsewhere")


def test_a_run_in_progress_and_one_without_progress(run):
    run.lock(os.getpid())
    assert "the last step was logged 0 s ago" in run.examined()[0]
    old = (datetime.now(UTC) - timedelta(seconds=100)).timestamp()
    os.utime(run.folder / "metrics.jsonl", (old, old))
    _, found = examine(run.folder)
    assert "but logged no step for 100 s, and a step takes about 0.1 s" in found.cause


def test_a_loss_that_rises_and_a_gradient_that_explodes(run):
    for record in run.metrics[-3:]:
        record["loss"] = 9.0
    run.metrics[-1]["grad_norm"] = 50.0
    details = run.examined()[2]
    assert "it rises" in details
    assert "grad_norm: 50 in step 12, 1 usually" in details


def test_the_ranks_are_listed_with_the_longest_silence_first(run):
    file = HeartbeatFile.create(2)
    write_pointer(file, run.folder / "heartbeats")
    for rank, phase in ((1, "save"), (0, "step")):
        heartbeat = Heartbeat()
        heartbeat.move_to(file, rank)
        heartbeat.enter(phase)
        heartbeat.step = 13
    details = run.examined()[2].splitlines()
    assert details[-2:] == ["rank 1: step 13, save, computing", "rank 0: step 13, step, computing"]


def test_stacks_and_the_last_error_of_the_libraries_are_pointed_at(run):
    (run.folder / "stacks").mkdir()
    (run.folder / "stacks" / "rank-1.txt").write_text("File")
    (run.folder / "ranks.log").write_text("rank 1: NCCL WARN timeout\nrank 1: frame #0\n")
    details = run.examined()[2]
    assert "stacks: of 1 ranks in" in details
    assert "for example rank 1: NCCL WARN timeout" in details


def test_the_command_prints_few_lines_and_escapes_them(run, capsys):
    run.event("error", "DataError: \x1b[2J.bin is damaged")
    run.examined()
    assert main(["doctor", str(run.folder)]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[0].endswith("run: step 12 of 40, ended by an error")
    assert shown[1].startswith(r"cause: DataError: \x1b[2J.bin is damaged")
    assert shown[2].startswith("next: repair the file that the message names")
    assert len(shown) == 4


def test_a_folder_without_a_run_is_refused(tmp_path, capsys):
    assert main(["doctor", str(tmp_path)]) == 2
    assert "no run in this folder" in capsys.readouterr().err


def test_lines_begin_with_status_cause_and_next_step(run):
    run.examined()
    assert [line.partition(": ")[0] for line in lines(*examine(run.folder))[1:3]] == ["cause", "next"]
