"""Diagnosis of ranks that died or stalled, and the watchdogs of processes that are stopped, killed or stuck."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from megalin.parallel.diagnosis import RankView, StallLimits, diagnose
from megalin.parallel.heartbeats import Heartbeat, HeartbeatFile, LaunchedOp, RankSlot, current
from megalin.parallel.process_state import ProcessState
from megalin.parallel.watchdog import Watchdog, WatchdogReport
from tests.ranks import fork_context

LIMITS = StallLimits(hang=10.0, phase=60.0)


def view(
    rank: int, state: str = "computing", idle: float = 0.0, process: str = "running", phase: str = "step", **more: Any
) -> RankView:
    sequence, note, end = more.pop("sequence", 5), more.pop("note", ""), more.pop("end", "")
    slot = RankSlot(rank, 100 + rank, phase, 3, sequence, 0.0, state, 1, **more)  # type: ignore[arg-type]
    last = LaunchedOp(sequence, f"op of {rank}", "data", (2, rank), 3, slot.phase, 1)
    return RankView(slot, idle, ProcessState(process, end), last, note)  # type: ignore[arg-type]


ROWS: dict[str, tuple[list[RankView], tuple[int, tuple[int, ...], str] | None]] = {
    "all work": ([view(0, idle=9.9), view(1, "waiting", 50.0)], None),
    "one computes too long": (
        [view(0, "waiting", 10.5), view(1, idle=10.4)],
        (
            7,
            (1,),
            r"rank 1 stalled: no progress for 10 s in step 3 \(phase: step\); it computes.*op of 1 \[2, 1\].* "
            r"rank 0 waits in op of 0",
        ),
    ),
    "others wait in a collective of a library": (
        [view(0, "blocked", 10.5, note="barrier, called by save"), view(1, idle=10.4)],
        (7, (1,), r"rank 1 stalled: .*; it computes.* rank 0 waits in barrier, called by save"),
    ),
    "other collectives, of a library": (
        [view(0, "blocked", 11, note="barrier"), view(1, "waiting", 12)],
        (7, (0, 1), r"rank 0: barrier; rank 1: op of 1 \[2, 1\].*same order"),
    ),
    "a stopped one comes first": (
        [view(0, idle=11), view(1, "waiting", 12, "stopped"), view(2, "waiting", 11)],
        (7, (1,), "rank 1 stalled.*state T"),
    ),
    "a stopped one in an evaluation": (
        [view(0, "waiting", 11, phase="evaluation"), view(1, "computing", 11, "stopped", "evaluation")],
        (7, (1,), "phase: evaluation"),
    ),
    "a long evaluation": ([view(0, idle=59, phase="evaluation"), view(1, "waiting", 59, phase="evaluation")], None),
    "too long an evaluation": (
        [view(0, idle=61, phase="evaluation"), view(1, "waiting", 61, phase="evaluation")],
        (7, (0,), "rank 0 stalled"),
    ),
    "samples may come a little later": ([view(0, "waiting", 11), view(1, "reading", 11)], None),
    "no samples": ([view(0, "waiting", 12.5), view(1, "reading", 12.5)], (7, (1,), "rank 1 stalled.*samples")),
    "all wait for the device": (
        [view(0, idle=11, sequence=9), view(1, idle=11, sequence=8), view(2, idle=11, sequence=9)],
        (7, (1,), "rank 1 stalled"),
    ),
    "other collectives": (
        [view(0, "waiting", 11), view(1, "waiting", 12)],
        (7, (0, 1), r"rank 0: op of 0 \[2, 0\] on data, launch 5; rank 1: op of 1 \[2, 1\].*same order"),
    ),
    "died": (
        [view(0, "waiting"), view(1, process="dead", end="SIGKILL")],
        (6, (1,), r"rank 1 died \(SIGKILL\) in step 3 .*op of 1"),
    ),
    "left early": ([view(0), view(1, process="dead", end="exit code 0")], (6, (1,), "rank 1 left before the end")),
    "left with an error": (
        [view(0), view(1, "failed", process="dead", note="DataError: x")],
        (6, (1,), "rank 1 left in step 3 .*: DataError: x"),
    ),
    "the cause, not those that left because of it": (
        [view(0, "failed", process="dead"), view(1, process="dead"), view(2)],
        (6, (1,), "rank 1 died in step 3"),
    ),
    "done": ([view(0), view(1, "done", process="dead"), view(2, "absent", 99)], None),
    "an error that all have is no verdict while they leave": ([view(0, "failed", 99), view(1)], None),
    "the others have decided": (
        [view(0, "waiting", 1, verdict=7, accused=2), view(1, "waiting", 1), view(2, idle=1)],
        (7, (2,), "rank 2 stalled"),
    ),
    "the others have decided on a rank of another host": (
        [view(0, "waiting", 1, verdict=7, accused=2), view(1, "waiting", 1)],
        (7, (2,), "rank 2 of another host stalled or died"),
    ),
    "a host does not answer, in an evaluation": (
        [view(0, "waiting", 11, phase="evaluation"), view(1, "computing", 11, "silent", "evaluation")],
        (7, (1,), "rank 1 stalled: .*; its host does not answer.* rank 0 waits in op of 0"),
    ),
    "the others have found different collectives": (
        [view(0, "waiting", 1, verdict=7, accused=0), view(1, "waiting", 1)],
        (7, (0, 1), "rank 0: op of 0 .*; rank 1: op of 1 .*same order"),
    ),
}


@pytest.mark.parametrize("row", ROWS)
def test_diagnosis_names_the_ranks(row):
    views, expected = ROWS[row]
    verdict = diagnose(views, LIMITS)
    assert (verdict is None) == (expected is None), verdict
    if verdict is not None and expected is not None:
        assert verdict[:2] == expected[:2]
        assert verdict.error().exit_code == expected[0]
        assert re.search(expected[2], verdict.message), verdict.message


@pytest.mark.parametrize(
    ("launches", "steps", "named"),
    [
        ((20, 20, 9, 8), (3, 3, 3, 3), (3,)),
        ((20, 19, 9, 8), (3, 3, 3, 3), (1, 3)),
        ((20, 20, 9, 9), (3, 3, 3, 3), (0, 1, 2, 3)),
        ((20, 20, 9, 9), (3, 3, 4, 4), (0, 1)),
    ],
)
def test_launches_are_compared_within_a_pipeline_stage(launches, steps, named):
    """Two stages of two ranks; the second one launches fewer ops in each step."""
    views = [view(rank, idle=11, sequence=launches[rank]) for rank in range(4)]
    views = [each._replace(slot=each.slot._replace(step=step)) for each, step in zip(views, steps, strict=True)]
    verdict = diagnose(views, LIMITS, ranks_per_stage=2)
    assert verdict is not None
    assert verdict.ranks == named
    assert ("Which of them the others wait for is not known" in verdict.message) == (len(named) > 1)


def test_first_step_which_compiles_does_not_raise_the_limit_for_long(tmp_path):
    file, report = HeartbeatFile.create(1), WatchdogReport(print, print)
    watchdog = Watchdog(file, Heartbeat(), 0, LIMITS, tmp_path, report)
    medians = [watchdog.median_step_seconds]
    for seconds in (40.0, 1.0, 2.0, 3.0):
        watchdog.add_step(seconds)
        medians.append(watchdog.median_step_seconds)
    assert medians == [0.0, 40.0, 1.0, 1.5, 2.0]


def _rank(path: Path, folder: Path, rank: int, fault: str, start: Any) -> None:
    """A rank of a step in which rank 1 is stopped, killed or stuck, or its device is stuck. Its standard error is a
    file; that of rank 3, where rank 1 is stopped, is a pipe that nobody reads."""
    reader, writer = os.pipe()
    os.close(reader)
    if (fault, rank) != ("SIGSTOP", 3):
        writer = os.open(folder / f"stderr {rank}", os.O_WRONLY | os.O_CREAT)
    os.dup2(writer, 2)
    file, heartbeat = HeartbeatFile.open(path), current()
    heartbeat.move_to(file, rank)
    heartbeat.step = 4
    report = WatchdogReport(print, lambda verdict: (folder / "reported").write_text(f"{rank}: {verdict.message}"))
    with Watchdog(file, heartbeat, rank, StallLimits(2.0, 60.0), folder / "stacks", report).running() as watchdog:
        if rank == 0:
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        start.wait()  # none is late because its start took longer
        heartbeat.enter("step")
        if fault == "C call" and rank == 1:
            ctypes.PyDLL(None).sleep(60)  # keeps Python's lock
        while fault == "replay":  # the hosts wait for their devices, of which that of rank 1 waits for no other
            heartbeat.pending = (lambda: "") if rank == 1 else (lambda: "all_gather of weights [8] on shard")
            time.sleep(60)
        while rank == 1:
            heartbeat.record("op", "data", (1,))
            time.sleep(0.05)
        heartbeat.start_wait("all_reduce", "data", (3,))
        if fault != "SIGKILL" or rank == 2:
            time.sleep(60)
        watchdog.verdict(60.0)
        if rank == 3:
            ctypes.PyDLL(None).sleep(60)
    time.sleep(60)  # the process group's shutdown waits for kernels


@pytest.mark.parametrize("fault", ["SIGSTOP", "C call", "SIGKILL", "replay"])
def test_watchdogs_end_all_processes(tmp_path, fault):
    count, context = 3 if fault in ("C call", "replay") else 4, fork_context()
    file = HeartbeatFile.create(count)
    start = context.Barrier(count + 1, timeout=60.0)
    ranks = [
        context.Process(target=_rank, args=(file.path, tmp_path, rank, fault, start), daemon=True)
        for rank in range(count)
    ]
    for rank in ranks:
        rank.start()
    start.wait()
    started = time.monotonic()
    if fault.startswith("SIG"):
        os.kill(ranks[1].pid, signal.Signals[fault])
    for rank in ranks:
        rank.join(max(0.0, started + 10.0 - time.monotonic()))
    codes = [rank.exitcode for rank in ranks]
    for rank in ranks:
        rank.kill()
    assert None not in codes, codes
    code = 6 if fault == "SIGKILL" else 7
    if fault == "SIGKILL":  # by a thread without Python's lock, which a C call keeps
        assert codes[3] == 1
    elif fault == "SIGSTOP":  # nobody reads its error
        assert codes[3] == 7
    assert [codes[0], codes[2]] == [code, code]
    # The signal for the stacks ends that sleep early: then this rank reads the others' verdict and leaves by itself.
    assert codes[1] in ((-9,) if fault.startswith("SIG") else (-9, 7))
    what = "rank 1 died" if fault == "SIGKILL" else "rank 1 stalled: no progress for "
    assert (tmp_path / "reported").read_text().startswith(f"0: {what}")
    texts = [(tmp_path / f"stderr {rank}").read_text() for rank in range(3)]
    for rank in (0, 2):
        assert what in texts[rank]
        assert "in _rank" in (tmp_path / "stacks" / f"rank-{rank}.txt").read_text()
    if fault == "replay":
        assert "rank 0 waits in all_gather of weights [8] on shard" in texts[2]
    if fault == "C call":
        assert "in _rank" in (tmp_path / "stacks" / "rank-1.txt").read_text()
    assert file.note(2) == texts[2].strip().partition("Error: ")[2]
