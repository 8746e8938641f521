"""Ladders that run: locks, results, resumption after a kill, two workers at once, and the fit of what they made."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from megalin.__main__ import main
from megalin.errors import ConfigError, DataError
from megalin.ladder import worker
from megalin.ladder.config import parse_ladder
from megalin.ladder.lock import Owner, RungLock, live_owner
from megalin.ladder.plan import make_rungs
from megalin.ladder.state import finished_runs
from megalin.ladder.worker import LOCK, last_record, run_ladder
from megalin.scaling_laws.runs import read_runs
from tests.ladder.ladders import write_ladder
from tests.model_runs import checkpoint_tensors, metrics

SEARCH = {"factors": [0.5, 2.0], "tokens": 2.0}
FAST = 0.02
"""Seconds between polls of a worker in the tests."""


def write_lock(path: Path, *, host: str, age: float) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"host": host, "pid": 7, "heartbeat": time.time() - age}))


def test_lock_has_one_owner_and_is_free_once_released(tmp_path):
    path = tmp_path / "rung" / LOCK
    lock = RungLock.take(path)
    assert isinstance(lock, RungLock)
    with lock:
        second = RungLock.take(path)
        assert isinstance(second, Owner)
        assert (second.host, second.pid) == (socket.gethostname(), os.getpid())
        assert str(second) == f"pid {os.getpid()} on {socket.gethostname()}"
    assert live_owner(path) is None
    third = RungLock.take(path)
    assert isinstance(third, RungLock)
    third.release()


@pytest.mark.parametrize(
    ("host", "age", "is_free"),
    [("another", 60.0, False), ("another", 601.0, True), (socket.gethostname(), 1.0, True)],
    ids=["other host", "dead on another host", "dead here"],
)
def test_lock_of_a_dead_worker_is_taken(tmp_path, host, age, is_free):
    """After ten minutes without a heartbeat; here at once, since the kernel has released the file."""
    write_lock(path := tmp_path / LOCK, host=host, age=age)
    lock = RungLock.take(path)
    assert isinstance(lock, RungLock) == is_free
    if isinstance(lock, RungLock):
        lock.release()


def test_lock_that_another_worker_took_is_lost(tmp_path):
    """The thread that renews the heartbeat sees the file of the other, and release leaves it there."""
    lock = RungLock.take(path := tmp_path / LOCK, stale_seconds=0.2)
    assert isinstance(lock, RungLock)
    first = json.loads(path.read_text())["heartbeat"]
    while json.loads(path.read_text())["heartbeat"] == first:
        time.sleep(0.01)
    path.unlink()
    write_lock(path, host="another", age=0.0)
    while not lock.lost:
        time.sleep(0.01)
    lock.release()
    assert json.loads(path.read_text())["host"] == "another"


RUN = """
import json, pathlib, shutil, sys
sys.path[:0] = {path!r}
import tomllib
config, folder = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2])
values = tomllib.loads(config.read_text())
if "fail" in config.read_text() or (config.parents[2] / "broken").exists():
    sys.exit("no such luck")
folder.mkdir(parents=True)
shutil.copy(config, folder / "config.toml")
steps, rate = values["train"]["steps"], values["optimizer"]["lr"]
tokens = steps * values["train"]["global_batch_size"] * 64
record = {{"step": steps, "tokens": tokens, "evaluation_loss": 1.0 + rate + 1e4 / tokens}}
(folder / "metrics.jsonl").write_text(json.dumps(record) + "\\n")
"""


@pytest.fixture
def stub(monkeypatch):
    """Runs that write one line of metrics, with a loss that grows with the rate."""
    script = RUN.format(path=[])
    monkeypatch.setattr(
        worker, "train_command", lambda config, folder, _: [sys.executable, "-S", "-c", script, config, folder]
    )
    monkeypatch.setattr(worker, "_POLL_SECONDS", FAST)


def run(path: Path, folder: Path, **options: Any) -> tuple[list[str], list[str]]:
    """Runs a ladder; names of the results in order, and the printed lines."""
    ladder, lines = parse_ladder(path), list[str]()
    results = run_ladder(ladder, make_rungs(ladder), folder, processes=1, on_line=lines.append, **options)
    return [f"{each.rung}/{each.run}" for each in results], lines


@pytest.mark.usefixtures("stub")
def test_ladder_searches_runs_the_largest_first_and_goes_on(tmp_path, capsys):
    """Results have the chosen rate; a failed trunk leaves its branches out until the next start; a finished ladder has
    nothing left; fit reads the mixers by their names, and branches with their trunk."""
    path, folder = write_ladder(tmp_path, rate_search=SEARCH, mixers={"A": [], "B": []}), tmp_path / "runs"
    (tmp_path / "runs").mkdir()
    (folder / "broken").touch()
    names, lines = run(path, folder)
    assert names == ["search/A/0.5", "search/A/2", "search/B/0.5", "search/B/2"]
    assert lines[1] == "search/A/0.5: failed, exit code 1\nno such luck"
    assert lines[-1] == "B-20k: left out, as no rate of its search trains"
    with pytest.raises(ConfigError, match="no run of this ladder has ended yet"):
        read_runs([folder])
    (folder / "broken").unlink()
    names, lines = run(path, folder)
    trials = ["search/A/0.5", "search/A/2", "search/B/0.5", "search/B/2"]
    assert names == [
        *trials,
        *(f"{mixer}-{size}/{run}" for size in ("60k", "20k") for mixer in "AB" for run in ("4x", "2x")),
    ]
    assert "search/A: rates times 0.5" in lines
    assert run(path, folder)[0] == []
    rates = {each.name: each.learning_rate for each in make_rungs(parse_ladder(path))}
    made = json.loads((folder / "A-60k" / "2x.json").read_text())
    assert made["learning_rate"] == pytest.approx(rates["A-60k"] / 2)
    assert made["loss"] == pytest.approx(1 + made["learning_rate"] + 1e4 / made["tokens"])
    found = read_runs([folder])
    assert [each.mixer for each in found] == ["A"] * 4 + ["B"] * 4
    assert [len({each.points[0].run for each in found[index : index + 2]}) for index in (0, 2)] == [1, 1]
    assert found[0].points[0].flops == json.loads((folder / "A-20k" / "2x.json").read_text())["flops"]
    assert main(["ladder", str(path), "--folder", str(folder), "--status", "--mixer", "A"]) == 0
    printed = capsys.readouterr().out
    assert "A: rates times 0.5" in printed
    assert printed.count("done") == 6


@pytest.mark.usefixtures("stub")
def test_failed_trunk_is_named_and_its_branches_wait(tmp_path, capsys):
    path, folder = write_ladder(tmp_path, mixers={"A": []}, sizes=[20e3]), tmp_path / "runs"
    folder.mkdir()
    (folder / "broken").touch()
    where = ["ladder", str(path), "--folder", str(folder)]
    assert main(where) == 1
    assert main([*where, "--status"]) == 0
    printed = capsys.readouterr().out
    assert "A-20k/4x failed: exit code 1\nno such luck" in printed
    assert printed.count("waiting") == 1
    assert finished_runs(folder) == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{}", "not the plan of a ladder, which has a table ladder.mixers; remove it, or restore"),
        ('{"ladder": 3}', "not the plan of a ladder"),
        ('{"ladder": {"mixers": ["A"]}}', "not the plan of a ladder"),
        ("[1]", "not a JSON object; remove it, or restore"),
        pytest.param("[" * 100_000, "not a JSON object", id="deep"),
    ],
)
def test_runs_of_a_folder_with_another_plan_are_refused(tmp_path, text, message):
    (tmp_path / "ladder.json").write_text(text)
    with pytest.raises(DataError, match=rf"ladder\.json: {message}"):
        read_runs([tmp_path])


@pytest.mark.usefixtures("stub")
def test_rung_of_another_host_is_waited_for_until_its_heartbeat_is_old(tmp_path):
    path, folder = write_ladder(tmp_path, mixers={"A": []}, sizes=[20e3]), tmp_path / "runs"
    write_lock(folder / "A-20k" / LOCK, host="another", age=0.0)
    names, lines = run(path, folder, stale_seconds=0.5)
    assert lines[:2] == ["A-20k: held by pid 7 on another", "A-20k: starts"]
    assert names == ["A-20k/4x", "A-20k/2x"]


@pytest.mark.usefixtures("stub")
def test_ladder_that_changed_after_it_began_is_refused(tmp_path):
    path, folder = write_ladder(tmp_path, mixers={"A": []}, sizes=[20e3]), tmp_path / "runs"
    run(path, folder)
    write_ladder(tmp_path, mixers={"A": []}, sizes=[20e3], decay=0.3, base={"optimizer": {"weight_decay": 0.5}})
    with pytest.raises(
        ConfigError, match=r"(?s)changed after the ladder in .* began; restore it, or give another"
    ) as e:
        run(path, folder)
    assert "ladder.decay: 0.2 before, 0.3 now" in str(e.value)
    assert "config.optimizer.weight_decay: null before, 0.5 now" in str(e.value)
    assert main(["ladder", str(path), "--folder", str(folder), "--status"]) == 2


def start(path: Path, folder: Path, *options: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "megalin", "ladder", str(path), "--folder", str(folder), *options]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def wait_for(condition: Any, seconds: float = 120.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "timed out"
        time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_killed_ladder_with_two_workers_ends_as_an_undisturbed_one(tmp_path):
    """A SIGKILL in the middle of a trunk, then two workers at once, on rungs of 20k to 200k parameters. No run is
    trained by both, and weights and losses equal those of a ladder of one worker bit for bit."""
    fields = {"sizes": [20e3, 60e3, 200e3], "tokens": [1.0, 2.0, 4.0], "mixers": {"TNL": []}, "num_tokens": 200_000}
    path = write_ladder(tmp_path, **fields, base={"checkpoint": {"every_steps": 10, "keep_latest": 2}})
    plain, folder = tmp_path / "plain", tmp_path / "killed"
    killed = start(path, folder)
    trunk = folder / "TNL-200k" / "4x"
    wait_for(lambda: (trunk / "checkpoints" / "step-00000020").exists())
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    before = len(metrics(trunk))
    workers = [start(path, folder), start(path, folder)]
    printed = [each.communicate(timeout=600)[0].decode() for each in workers]
    assert [each.returncode for each in workers] == [0, 0], printed
    assert before < len(metrics(trunk))
    starts = [line for text in printed for line in text.splitlines() if line.endswith(": starts")]
    assert sorted(starts) == ["TNL-200k: starts", "TNL-20k: starts", "TNL-60k: starts"]
    undisturbed = start(path, plain)
    text = undisturbed.communicate(timeout=600)[0].decode()
    assert undisturbed.returncode == 0, text
    for name in ("TNL-20k", "TNL-60k", "TNL-200k"):
        for run_name in ("4x", "2x", "1x"):
            one, other = plain / name / run_name, folder / name / run_name
            assert metrics(one)[-1] == metrics(other)[-1]
            actual, wanted = checkpoint_tensors(other), checkpoint_tensors(one)
            assert [key for key in wanted if not actual[key].equal(wanted[key])] == []
    assert [len(found.points) for found in read_runs([folder])] == [1] * 9


@pytest.mark.slow
@pytest.mark.usefixtures("stub")
def test_fit_reads_a_ladder(tmp_path, capsys):
    path = write_ladder(tmp_path, sizes=[20e3, 60e3, 200e3], tokens=[2.0, 4.0, 8.0])
    run(path, folder := tmp_path / "runs")
    assert main(["fit", str(folder), "--json", "--resamples", "20"]) == 0
    fitted = json.loads(capsys.readouterr().out)["mixers"]
    assert list(fitted) == ["LLaMA", "TNL"]
    assert fitted["TNL"]["leave_largest_out"] is None  # two smaller sizes are too few


@pytest.mark.slow
def test_sigterm_saves_the_run_in_progress(tmp_path):
    path = write_ladder(tmp_path, mixers={"TNL": []}, sizes=[200e3], num_tokens=200_000)
    work, trunk = start(path, folder := tmp_path / "runs"), folder / "TNL-200k" / "4x"
    wait_for(lambda: last_record(trunk / "metrics.jsonl").get("step", 0) > 3)
    work.terminate()
    assert work.wait(timeout=60) == 75
    assert list((folder / "TNL-200k" / "4x" / "checkpoints").glob("step-*"))
    assert live_owner(folder / "TNL-200k" / LOCK) is None
    assert not (folder / "TNL-200k" / "4x.json").exists()
