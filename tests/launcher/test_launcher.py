"""The launcher's ranks: their places, their ends and exit codes, their output, and their end with the launcher."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megalin.errors import ConfigError, DataError, KernelError, PreemptedError, RankFailedError, RankStalledError
from megalin.launch import adopt_launcher
from megalin.launcher.launcher import NO_LIMITS, launch
from megalin.launcher.outcome import GroupEnd, outcome
from megalin.launcher.output import RankOutput
from megalin.launcher.rank_process import Ending, ForkedProcess
from megalin.launcher.signals import RecordedSignals
from megalin.parallel.diagnosis import StallLimits
from megalin.parallel.heartbeat_copies import read_heartbeats
from megalin.parallel.heartbeats import VARIABLE, Heartbeat, HeartbeatFile
from megalin.parallel.process_group import process_group

SECONDS = 5.0
"""Longest time between the failure of a rank and the end of all."""


def _begin(folder: Path) -> None:
    """Begins the run, as the first rank does, and waits until the launcher has seen it."""
    folder.mkdir(exist_ok=True)
    (folder / "config.toml").write_text("")
    _wait_for(lambda: (folder / "heartbeats").exists())


def _wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 20.0
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def _beat(step: int) -> int:
    """Reports a step of this rank; returns the rank."""
    rank = int(os.environ["RANK"])
    heartbeat = Heartbeat()
    heartbeat.move_to(HeartbeatFile.open(os.environ[VARIABLE]), rank)
    heartbeat.enter("step")
    heartbeat.step = step
    return rank


@contextlib.contextmanager
def _no_process_left() -> Iterator[None]:
    started, before = time.monotonic(), _children()
    yield
    assert time.monotonic() - started < SECONDS
    assert _children() <= before


def _children() -> set[int]:
    """The children of this process, zombies included; other tests may have left a server of ranks."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            pid, _, fields = path.read_text().partition(" ")
            if int(fields.rpartition(")")[2].split()[1]) == os.getpid():
                found.add(int(pid))
    return found


def _launch(
    run: Callable[[], int], folder: Path, *, world_size: int = 2, restarts: int = 0, limits: StallLimits = NO_LIMITS
) -> int:
    with RecordedSignals() as signals:
        return launch(run, world_size, folder, signals=signals.received, max_restarts=restarts, limits=limits)


def test_ranks_meet_in_the_launchers_store(tmp_path, capfd):
    def run() -> int:
        place = adopt_launcher()
        assert os.environ["MASTER_ADDR"] == "127.0.0.1"
        with process_group(torch.device("cpu")):
            assert (dist.get_rank(), dist.get_world_size()) == (place.rank, 3)
        return 0

    assert _launch(run, tmp_path, world_size=3) == 0
    assert not list(tmp_path.iterdir())  # the run has not begun: the folder is as it was


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_a_rank_that_a_signal_ends_is_named_with_its_step(tmp_path, number):
    folder = tmp_path / "run"

    def run() -> int:
        rank = _beat(step=7)
        if rank == 0:
            _begin(folder)
        if rank == 1:
            _wait_for(lambda: (folder / "heartbeats").exists())
            os.kill(os.getpid(), number)
        time.sleep(60)
        return 0

    with (
        _no_process_left(),
        pytest.raises(
            RankFailedError, match=rf"^rank 1 was killed by {number.name}.* in step 7; .*same command"
        ) as raised,
    ):
        _launch(run, folder)
    assert raised.value.exit_code == 6
    assert '"message": "RankFailedError: rank 1 was killed' in (folder / "incidents.jsonl").read_text()
    assert read_heartbeats(folder / "heartbeats").slots()[1].step == 7


def test_a_rank_that_leaves_with_0_is_named(tmp_path):
    def run() -> int:
        if _beat(step=3) == 2:
            os._exit(0)
        time.sleep(60)
        return 0

    with (
        _no_process_left(),
        pytest.raises(RankFailedError, match=r"^rank 2 left before its end, with exit code 0 in step 3"),
    ):
        _launch(run, tmp_path, world_size=3)


def test_ranks_that_are_all_stopped_are_named_by_the_launcher(tmp_path, monkeypatch):
    monkeypatch.setattr("megalin.launcher.stall_watch._LATER_SECONDS", 0.0)

    def run() -> int:
        _beat(step=4)
        os.kill(os.getpid(), signal.SIGSTOP)
        return 0

    with _no_process_left(), pytest.raises(RankStalledError, match=r"^rank 0 stalled.* in step 4.*SIGSTOP.*rank 1"):
        _launch(run, tmp_path, limits=StallLimits(1.0, 1.0))


def test_a_rank_that_is_stopped_before_its_first_heartbeat_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr("megalin.launcher.stall_watch._LATER_SECONDS", 0.0)

    def run() -> int:
        if os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(60)
        return 0

    with _no_process_left(), pytest.raises(RankStalledError, match=r"^rank 1 stalled.* in the phase start.*SIGSTOP"):
        _launch(run, tmp_path, limits=StallLimits(1.0, 50.0))


def test_an_exception_shows_its_traceback_once_and_last(tmp_path, capfd):
    def run() -> int:
        if _beat(step=2) == 1:
            raise KeyError("planted")
        time.sleep(60)
        return 0

    with _no_process_left():
        assert _launch(run, tmp_path) == 1
    shown = capfd.readouterr().err
    assert shown.count("KeyError: 'planted'") == 1
    assert shown.splitlines()[-2:] == [
        "rank 1: KeyError: 'planted'",
        "rank 1 ended with exit code 1 in step 2; the same command resumes from the newest valid checkpoint",
    ]


@pytest.mark.parametrize("error", [ConfigError, DataError, KernelError, PreemptedError])
def test_an_error_of_all_ranks_is_shown_once_and_not_restarted(tmp_path, capfd, error):
    def run() -> int:
        if os.environ["RANK"] == "0":
            time.sleep(0.2)
        raise error("planted")

    with _no_process_left():
        assert _launch(run, tmp_path, restarts=3) == error.exit_code
    assert capfd.readouterr().err == f"{error('planted').line()}\n"


def test_ranks_start_again_until_they_succeed(tmp_path, capfd):
    starts = tmp_path / "starts"
    starts.mkdir()

    def run() -> int:
        (starts / f"{os.getpid()}").touch()
        _wait_for(lambda: len(list(starts.iterdir())) % 2 == 0)
        if len(list(starts.iterdir())) < 6:
            os.kill(os.getpid(), signal.SIGKILL)
        return 0

    with _no_process_left():
        assert _launch(run, tmp_path / "run", restarts=3) == 0
    assert len(list(starts.iterdir())) == 6
    assert "restart 2 of 3" in capfd.readouterr().err


def test_text_of_libraries_is_kept_and_ours_is_shown(tmp_path, capfd):
    folder = tmp_path / "run"

    def run() -> int:
        rank = int(os.environ["RANK"])
        os.write(2, b"frame #0: c10::Error\x1b[2J\nRankStalledError: rank 7 stalled\n")
        print("WARNING \x1b[2J of both ranks", file=sys.stderr)
        if rank == 1:
            print("of rank 1 alone", file=sys.stderr)
        else:
            _begin(folder)
        return 0

    assert _launch(run, folder) == 0
    assert sorted(capfd.readouterr().err.splitlines()) == [
        "RankStalledError: rank 7 stalled",
        r"WARNING \x1b[2J of both ranks",
        "rank 1: of rank 1 alone",
    ]
    kept = (folder / "ranks.log").read_bytes().splitlines()
    assert kept.count(b"rank 1: frame #0: c10::Error\x1b[2J") == 1
    assert len(kept) == 7


def test_the_time_for_a_line_does_not_grow_with_the_lines_before(capsys):
    output, start = RankOutput(), time.process_time()
    for number in range(12_000):
        output.add(1 + number % 2, b"line %d\n" % (number // 2), number / 1000, shown=True)
        if number % 100 == 0:
            output.show(number / 1000)
    output.show(12.0, rest=True)
    assert time.process_time() - start < 2.0
    assert capsys.readouterr().err.splitlines() == [f"rank 1: line {number}" for number in range(6_000)]
    output.show(1e3)  # after the time of the same line
    assert not output._recent_ranks


def test_a_signal_is_passed_on_and_ranks_that_save_end_with_75(tmp_path, capfd):
    ready = tmp_path / "ready"

    def run() -> int:
        received: list[str] = []
        signal.signal(signal.SIGINT, lambda *_: received.append("SIGINT"))
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(75 if received else 1))
        if os.environ["RANK"] == "1":
            ready.touch()
        else:
            _wait_for(ready.exists)
            os.kill(os.getppid(), signal.SIGINT)
        time.sleep(60)
        return 0

    with _no_process_left():
        assert _launch(run, tmp_path) == 75
    assert capfd.readouterr().err == ""


def test_a_signal_before_the_first_step_ends_the_ranks_with_75(tmp_path):
    def run() -> int:
        os.kill(os.getppid(), signal.SIGTERM)
        time.sleep(60)
        return 0

    with _no_process_left(), pytest.raises(PreemptedError, match=r"^SIGTERM before the first step; the same command"):
        _launch(run, tmp_path, world_size=1)


def test_sigterm_to_one_rank_at_the_start_ends_all_with_75(tmp_path):
    def run() -> int:
        if os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)
        return 0

    with _no_process_left(), pytest.raises(PreemptedError):
        _launch(run, tmp_path)


def test_a_second_signal_ends_ranks_that_do_not_react_at_once(tmp_path, capfd):
    def run() -> int:
        signal.signal(signal.SIGTERM, lambda *_: os.kill(os.getppid(), signal.SIGINT))
        os.kill(os.getppid(), signal.SIGTERM)
        while True:
            time.sleep(60)

    with _no_process_left():
        assert _launch(run, tmp_path, world_size=1) == 128 + signal.SIGINT
    assert capfd.readouterr().err.startswith("SIGINT again: the ranks were ended before they had saved")


def test_ranks_die_with_a_killed_launcher(tmp_path):
    pids = tmp_path / "pids"
    pids.mkdir()

    def run() -> int:
        (pids / str(os.getpid())).touch()
        time.sleep(60)
        return 0

    launcher = ForkedProcess(lambda: _launch(run, tmp_path / "run"))
    _wait_for(lambda: len(list(pids.iterdir())) == 2)
    launcher.end()
    _wait_for(lambda: not any(_is_running(int(path.name)) for path in pids.iterdir()))


def _is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _ending(code: int, rank: int = 0, *, finished: bool = False) -> Ending:
    return Ending(rank, code, finished)


@pytest.mark.parametrize(
    ("endings", "expected"),
    [
        ([_ending(0, finished=True)] * 2, GroupEnd(0, None)),
        ([_ending(75), _ending(-15)], GroupEnd(75, None)),
        ([_ending(6), _ending(3, 1)], GroupEnd(3, _ending(3, 1))),
        ([_ending(7, 1), _ending(6)], GroupEnd(7, _ending(7, 1))),
        ([_ending(-9, 2), _ending(7, 1), _ending(7)], GroupEnd(7, _ending(7, 1))),
        ([_ending(75), _ending(-9, 1)], GroupEnd(6, _ending(-9, 1))),
        ([_ending(0, finished=True), _ending(0, 1)], GroupEnd(6, _ending(0, 1))),
    ],
)
def test_the_outcome_is_that_of_the_rank_that_failed_by_itself(endings, expected):
    assert outcome(endings) == expected
