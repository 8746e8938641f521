"""`megalin launch` as a command: its refusals, whole runs, and runs whose ranks or launcher are killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from megalin.__main__ import main
from tests.model_runs import losses, steps_saved, write_config


@pytest.mark.parametrize(
    ("arguments", "environment", "message"),
    [
        (["--nproc-per-node", "0"], {}, "use at least 1 rank and 0 restarts"),
        (["--nproc-per-node", "2", "--max-restarts", "-1"], {}, "--max-restarts -1: use at least 1 rank"),
        (["--nproc-per-node", "2", "parallel.tp=3"], {}, "start a multiple of 3 ranks"),
        (
            ["--nproc-per-node", "2"],
            {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"},
            "a launcher started 2 of it; run it once",
        ),
    ],
)
def test_what_no_rank_could_do_is_refused_before_the_fork(
    tmp_path, capsys, monkeypatch, arguments, environment, message
):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    config = write_config(tmp_path)
    assert main(["launch", str(config), "--folder", str(tmp_path / "run"), *arguments]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_config(tmp_path_factory.mktemp("config"), train={"steps": 40}, checkpoint={"every_steps": 2})


def _command(config: Path, folder: Path, *arguments: str) -> list[str]:
    launch = [sys.executable, "-m", "megalin", "launch", "--nproc-per-node", "2", str(config)]
    return [*launch, "--folder", str(folder), *arguments]


def _start(config: Path, folder: Path, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        _command(config, folder, *arguments), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )


def _wait_for(condition: Callable[[], bool], seconds: float = 120.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def _done(folder: Path) -> int:
    ledger = folder / "ledger.jsonl"
    return len(ledger.read_text().splitlines()) if ledger.exists() else 0


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.fixture(scope="module")
def expected(config: Path, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Losses of an undisturbed run."""
    folder = tmp_path_factory.mktemp("expected") / "run"
    subprocess.run(_command(config, folder), check=True, stdout=subprocess.DEVNULL)
    return losses(folder)


@pytest.mark.slow
def test_a_killed_rank_is_named_and_restarted(config, expected, tmp_path):
    folder = tmp_path / "run"
    launcher = _start(config, folder, "--max-restarts", "1")
    _wait_for(lambda: _done(folder) >= 5)
    _, *ranks = _children(launcher.pid)
    assert len(ranks) == 2
    os.kill(ranks[1], signal.SIGKILL)
    error = launcher.communicate(timeout=120)[1]
    assert launcher.returncode == 0
    assert "rank 1 was killed by SIGKILL" in error
    assert "restart 1 of 1" in error
    assert losses(folder) == expected


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_and_the_same_command_resumes(config, expected, tmp_path, number):
    folder = tmp_path / "run"
    launcher = _start(config, folder)
    _wait_for(lambda: _done(folder) >= 5)
    launcher.send_signal(number)
    error = launcher.communicate(timeout=60)[1]
    assert launcher.returncode == 75
    assert error.startswith(f"stopped: {number.name} after ")
    assert len(error.splitlines()) == 1
    assert steps_saved(folder)[-1] == _done(folder) < 40
    subprocess.run(_command(config, folder), check=True, stdout=subprocess.DEVNULL)
    assert losses(folder) == expected


@pytest.mark.slow
def test_a_killed_launcher_leaves_no_rank_and_a_free_folder(config, expected, tmp_path):
    folder = tmp_path / "run"
    launcher = _start(config, folder)
    _wait_for(lambda: _done(folder) >= 5)
    ranks = _children(launcher.pid)
    launcher.kill()
    launcher.communicate()
    _wait_for(lambda: not any(map(_is_running, ranks)), seconds=5.0)
    subprocess.run(_command(config, folder), check=True, stdout=subprocess.DEVNULL)
    assert losses(folder) == expected


@pytest.mark.slow
def test_a_run_without_the_launcher_outlives_its_shell(config, tmp_path):
    folder = tmp_path / "run"
    train = f"{sys.executable} -m megalin train {config} --folder {folder} >{tmp_path}/out 2>&1 & echo $!"
    shell = subprocess.Popen(["bash", "-c", f"{train}; sleep 100"], stdout=subprocess.PIPE, text=True)
    assert shell.stdout is not None
    pid = int(shell.stdout.readline())
    _wait_for(lambda: _done(folder) >= 1)
    shell.kill()
    shell.communicate()
    _wait_for(lambda: not _is_running(pid))
    assert steps_saved(folder)[-1] == 40
