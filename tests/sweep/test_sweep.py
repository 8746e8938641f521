"""Sweeps: their cells, the rule that ends a run, and runs that complete, are ended, cut or fail and then go on."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
from pathlib import Path
from typing import Any, Literal

import pytest
import tomli_w

from megalin.__main__ import main
from megalin.errors import ConfigError, DataError, StorageError
from megalin.sweep import runner
from megalin.sweep.config import SweepConfig
from megalin.sweep.order import all_cells, read_sweep
from megalin.sweep.progress import Progress, Status, remove_unsaved_steps
from megalin.sweep.results import RESULTS, write_results
from megalin.sweep.runner import run_sweep
from megalin.sweep.table import table
from megalin.train.config import load_run_config
from tests.model_runs import write_config

GOAL, LOSS = "tasks/recall/accuracy", "tasks/recall/loss"


def write_sweep(folder: Path, **fields: Any) -> Path:
    """A sweep of two rates and two seeds over the config of a small run."""
    write_config(folder)
    values = {
        "config": "tiny.toml",
        "goal": GOAL,
        "axes": {
            "rate": {"0.1": ["optimizer.lr=0.1"], "0.2": ["optimizer.lr=0.2"]},
            "seed": {"a": ["train.seed=1"], "b": ["train.seed=2"]},
        },
    }
    path = folder / "sweep.toml"
    path.write_text(tomli_w.dumps(values | fields))
    return path


def record(step: int, **metrics: float | None) -> str:
    values = {"step": step, "tokens": 10 * step, "tokens_per_second": 5.0 * step}
    return json.dumps(values | {key.replace("__", "/"): value for key, value in metrics.items()}) + "\n"


def progress(
    folder: Path, lines: list[str], *, goal: str = GOAL, better: Literal["higher", "lower"] = "higher", **stop: Any
) -> Progress:
    config = SweepConfig(config="x", goal=goal, better=better, axes={"rate": {"1": []}}, stop=stop)
    path = folder / "metrics.jsonl"
    path.write_text("".join(lines))
    watched = Progress(config, {"rate": "1"}, path)
    watched.update()
    return watched


def evaluations(*pairs: tuple[float, float]) -> list[str]:
    """A record per evaluation, and one without between them."""
    lines = []
    for number, (accuracy, loss) in enumerate(pairs):
        lines += [record(2 * number + 1), record(2 * number + 2, **{GOAL: accuracy, LOSS: loss})]
    return lines


def test_last_axis_varies_fastest(tmp_path):
    cells = list(all_cells(read_sweep(write_sweep(tmp_path, overrides=["train.steps=7"]))))
    assert [cell.name for cell in cells] == ["0.1-a", "0.1-b", "0.2-a", "0.2-b"]
    assert cells[1].overrides == ["train.steps=7", "optimizer.lr=0.1", "train.seed=2"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"axes": {}}, "axes is empty; add a table such as"),
        ({"axes": {"rate": {}}}, "axes.rate has no values; add some or remove it"),
        ({"axes": {"rate": {"1/2": []}}}, "axes: '1/2' is part of a folder's name; use letters, digits"),
        ({"best_over": ["lr"]}, "best_over: 'lr' is no axis; use some of rate, seed"),
        ({"columns": {"x": "tasks/{task}/loss"}}, "'tasks/{task}/loss': 'task' is no axis; use some of rate, seed"),
        ({"stop": {"loss": "{x}"}}, "'{x}': 'x' is no axis"),
        ({"overrides": ["train.stepz=3"]}, r"(?s)run 0.1-a of .*: .*did you mean 'steps'"),
        (
            {"overrides": ["data.validation=[]", "train.evaluate_every_steps=2"]},
            "run 0.1-a of .*: train.evaluate_every_steps = 2: no effect without a validation split",
        ),
        ({"overrides": ["parallel.tp=2"]}, "run 0.1-a of .*: parallel.tp = 2 does not divide the number of ranks, 1"),
    ],
)
def test_bad_sweep_is_refused_before_any_run(tmp_path, fields, message):
    with pytest.raises(ConfigError, match=message):
        read_sweep(write_sweep(tmp_path, **fields))


def test_run_ends_at_the_goal(tmp_path):
    watched = progress(tmp_path, evaluations((0.2, 1.0), (0.95, 0.5), (0.99, 0.4)), reached=0.95)
    assert watched.status is Status.REACHED
    assert watched.best["step"] == 4
    assert (watched.steps, watched.tokens, watched.tokens_per_second()) == (6, 60, 17.5)


@pytest.mark.parametrize(
    ("pairs", "status"),
    [
        ([(0.2, 3.0), (0.2, 3.0), (0.19, 3.1)], Status.STALLED),
        ([(0.2, 3.0), (0.2, 2.9), (0.19, 2.8)], None),
        ([(0.2, 3.0), (0.2, 3.0), (0.22, 3.1)], None),
        ([(0.2, 3.0), (0.206, 3.0), (0.212, 3.0), (0.218, 3.0)], None),
        ([(0.2, 3.0), (0.204, 2.99), (0.208, 2.98)], Status.STALLED),
    ],
    ids=["nothing", "loss_falls", "goal_rises", "small_steps_add_up", "gains_too_small"],
)
def test_run_ends_after_evaluations_without_a_gain(tmp_path, pairs, status):
    stop = {"patience": 2, "min_gain": 0.01, "loss": LOSS, "min_loss_gain": 0.02}
    assert progress(tmp_path, evaluations(*pairs), **stop).status is status


def test_metrics_are_read_as_they_grow_and_again_after_a_resumed_run_truncates_them(tmp_path):
    lines = evaluations((0.2, 1.0), (0.3, 1.0))
    watched, path = progress(tmp_path, lines[:3]), tmp_path / "metrics.jsonl"
    with path.open("a") as file:
        file.write(lines[3][:20])
        file.flush()
        watched.update()
        assert (watched.steps, watched.best[GOAL]) == (3, 0.2)
        file.write(lines[3][20:])
    watched.update()
    assert (watched.steps, watched.best[GOAL]) == (4, 0.3)
    path.write_text("".join([*evaluations((0.1, 1.0))[:2], *[record(step) for step in range(3, 9)]]))
    watched.update()
    assert (watched.steps, watched.best[GOAL]) == (8, 0.1)


def test_resumed_run_with_shorter_lines_is_read_again(tmp_path):
    path = tmp_path / "metrics.jsonl"
    watched = progress(tmp_path, [record(step).rstrip().ljust(159) + "\n" for step in (1, 2)])
    path.write_text("".join(record(step).rstrip().ljust(79) + "\n" for step in range(1, 9)))
    watched.update()
    assert (watched.steps, watched.tokens_per_second()) == (8, 22.5)


def test_loss_that_is_not_finite_is_no_gain(tmp_path):
    lines = [record(1, **{GOAL: 0.2, LOSS: 1.0}), *(record(step, **{GOAL: 0.2, LOSS: None}) for step in (2, 3))]
    assert progress(tmp_path, lines, loss=LOSS, patience=3).status is None
    assert progress(tmp_path, lines, loss=LOSS, patience=2).status is Status.STALLED


def test_torn_and_foreign_lines_are_skipped(tmp_path):
    torn, foreign = record(2)[:9] + "\n", ["\xff\n", "[1]\n", "3\n", '{"step": 2, "tokens": 20}\n', '{"tokens": 20}\n']
    lines = [record(1), torn, *foreign, record(2, **{GOAL: 0.2}), "\n", record(3)[:9]]
    watched, path = progress(tmp_path, lines), tmp_path / "metrics.jsonl"
    assert (watched.steps, watched.best[GOAL], watched.tokens_per_second()) == (2, 0.2, 7.5)
    with path.open("a") as file:  # a killed writer's torn line, and the run that goes on behind it
        file.write("\n" + record(3, **{GOAL: 0.3}))
    watched.update()
    assert (watched.steps, watched.best[GOAL], watched.tokens_per_second()) == (3, 0.3, 10.0)


def test_metrics_of_a_branch_begin_after_the_steps_of_its_trunk(tmp_path):
    watched, path = progress(tmp_path, [record(11), record(12, **{GOAL: 0.2})]), tmp_path / "metrics.jsonl"
    assert (watched.steps, watched.best[GOAL]) == (12, 0.2)
    with path.open("a") as file:
        file.write(record(13, **{GOAL: 0.3}))
    watched.update()
    assert (watched.steps, watched.best[GOAL], watched.tokens_per_second()) == (13, 0.3, 60.0)


RUN = """
import json, os, pathlib, signal, sys, time
folder, lr, seed = pathlib.Path(sys.argv[1]), float(sys.argv[2]), sys.argv[3]
signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
folder.mkdir(parents=True, exist_ok=True)
(folder / "session").write_text(str(os.getsid(0)))
if seed == "2" and not (folder / "again").exists():
    (folder / "again").touch()
    print("Error: the first start fails")
    sys.exit(1)
with (folder / "metrics.jsonl").open("w") as file:
    for step in range(1, 4):
        record = {"step": step, "tokens": step, "tokens_per_second": 1.0, "tasks/recall/accuracy": lr * step}
        file.write(json.dumps(record) + "\\n")
        file.flush()
    while lr == 0.2 and not (folder / "again").exists():
        (folder / "cut").touch()
        time.sleep(0.05)
"""
"""A run of three steps; with seed 2 its first start fails, with lr 0.2 it goes on until it is ended."""


@pytest.fixture
def stub(monkeypatch):
    def command(config: Path, folder: Path, overrides: list[str]) -> list[str]:
        values = dict(override.split("=") for override in overrides)
        return [sys.executable, "-c", RUN, str(folder), values["optimizer.lr"], values["train.seed"]]

    monkeypatch.setattr(runner, "train_command", command)


@pytest.mark.usefixtures("stub")
def test_sweep_goes_on_with_runs_that_failed_or_were_cut(tmp_path):
    sweep, folder = read_sweep(write_sweep(tmp_path, best_over=["rate"])), tmp_path / "runs"
    seen = []
    first = run_sweep(sweep, folder, processes=2, time_limit=6, on_result=lambda *values: seen.append(values))
    assert [(each.values["rate"], each.values["seed"], each.status) for each in first] == [
        ("0.1", "a", Status.COMPLETE),
        ("0.1", "b", Status.FAILED),
        ("0.2", "a", Status.CUT),
        ("0.2", "b", Status.FAILED),
    ]
    assert first[1].error == "exit code 1\nError: the first start fails"
    assert seen[-1][1] == 0
    saved = json.loads((folder / RESULTS).read_text())["results"]
    assert [result["status"] for result in saved] == [each.status for each in [result for result, *_ in seen]]
    (folder / "0.2-a" / "again").touch()
    second = run_sweep(sweep, folder, processes=1)
    assert [each.status for each in second] == [Status.COMPLETE] * 4
    assert second[0] == first[0]  # was not run again
    head, rows = table(sweep, second)
    assert head == ["seed", "rate", GOAL, "steps", "ended", "tokens/s"]
    assert rows == [["a", "0.2", "0.6", "3", "complete", "1"], ["b", "0.2", "0.6", "3", "complete", "1"]]
    assert table(sweep, second[:1])[1] == [
        ["a", "0.1 (1 not run)", "0.3", "3", "complete", "1"],
        ["b", "not run", "", "", "", ""],
    ]


@pytest.mark.usefixtures("stub")
def test_run_is_ended_at_its_goal(tmp_path):
    axes = {"rate": {"0.2": ["optimizer.lr=0.2"]}, "seed": {"a": ["train.seed=1"]}}
    sweep = read_sweep(write_sweep(tmp_path, axes=axes, stop={"reached": 0.5}))
    (result,) = run_sweep(sweep, tmp_path / "runs", processes=4)
    assert (result.status, result.steps) == (Status.REACHED, 3)


@pytest.mark.usefixtures("stub")
def test_bad_arguments_are_refused(tmp_path):
    sweep = read_sweep(write_sweep(tmp_path))
    with pytest.raises(ConfigError, match="processes = 0: use at least 1"):
        run_sweep(sweep, tmp_path / "runs", processes=0)
    with pytest.raises(ConfigError, match="time limit = 0: use a positive number of seconds"):
        run_sweep(sweep, tmp_path / "runs", processes=1, time_limit=0)
    (tmp_path / "runs").mkdir()
    for text in ("", "[]", "{}", '{"results": [{"status": "complete"}]}'):
        (tmp_path / "runs" / RESULTS).write_text(text)
        with pytest.raises(DataError, match=r"results\.json: not the results of a sweep: .*; move it away: the runs"):
            run_sweep(sweep, tmp_path / "runs", processes=1)
    (tmp_path / "runs" / RESULTS).unlink()
    (tmp_path / "runs" / RESULTS).mkdir()
    with pytest.raises(StorageError, match=r"results\.json: cannot be written: .*; check the folder"):
        write_results(tmp_path / "runs", {})


@pytest.mark.usefixtures("stub")
def test_results_of_other_overrides_are_not_taken(tmp_path):
    axes = {"rate": {"0.1": ["optimizer.lr=0.1"]}, "seed": {"a": ["train.seed=1"]}}
    (result,) = run_sweep(read_sweep(write_sweep(tmp_path, axes=axes)), tmp_path / "runs", processes=1)
    assert result.status is Status.COMPLETE
    more = axes | {"seed": {"a": ["train.seed=1"], "c": ["train.seed=3"]}}
    assert len(run_sweep(read_sweep(write_sweep(tmp_path, axes=more)), tmp_path / "runs", processes=1)) == 2
    axes["seed"] = {"a": ["train.seed=4"]}
    with pytest.raises(ConfigError, match=r'runs.0.1-a.1: "train.seed=1" before, "train.seed=4" now'):
        run_sweep(read_sweep(write_sweep(tmp_path, axes=axes)), tmp_path / "runs", processes=1)


EDITS = {
    "base": ("base.toml", "lr = 0.01", "lr = 0.02", "config.optimizer.lr: 0.01 before, 0.02 now"),
    "better": ("sweep.toml", 'better = "higher"', 'better = "lower"', 'settings.better: "higher" before, "lower" now'),
    "stop": ("sweep.toml", "reached = 9.0", "reached = 8.0", "settings.stop.reached: 9.0 before, 8.0 now"),
    "override": ("sweep.toml", '"train.seed=1"', '"train.seed=3"', 'runs.0.1-a.1: "train.seed=1" before'),
}


@pytest.mark.usefixtures("stub")
@pytest.mark.parametrize("edit", EDITS)
def test_edited_files_are_refused_or_restart_what_they_change(tmp_path, edit):
    name, before, now, message = EDITS[edit]
    axes = {"rate": {"0.1": ["optimizer.lr=0.1"]}, "seed": {"a": ["train.seed=1"]}}
    path = write_sweep(tmp_path, axes=axes, better="higher", stop={"reached": 9.0})
    config = path.parent / read_sweep(path).config.config
    config.rename(tmp_path / "base.toml")
    config.write_text('base = "base.toml"\n')
    folder = tmp_path / "runs"
    run_sweep(read_sweep(path), folder, processes=1)
    marker = folder / "0.1-a/marker"
    marker.touch()
    target = path if name == "sweep.toml" else tmp_path / name
    assert before in target.read_text()
    target.write_text(target.read_text().replace(before, now))
    with pytest.raises(ConfigError, match=re.escape(message)):
        run_sweep(read_sweep(path), folder, processes=1)
    assert marker.exists()
    run_sweep(read_sweep(path), folder, processes=1, restart_changed=True)
    assert not marker.exists()
    assert run_sweep(read_sweep(path), folder, processes=1)[0].status is Status.COMPLETE


def test_runs_read_a_copy_of_their_config(tmp_path, monkeypatch):
    seen = []

    def command(config: Path, folder: Path, overrides: list[str]) -> list[str]:
        seen.append(config)
        return [sys.executable, "-c", RUN, str(folder), "0.1", "1"]

    monkeypatch.setattr(runner, "train_command", command)
    axes = {"rate": {"0.1": ["optimizer.lr=0.1"]}, "seed": {"a": ["train.seed=1"]}}
    sweep = read_sweep(write_sweep(tmp_path, axes=axes))
    run_sweep(sweep, tmp_path / "runs", processes=1)
    assert seen == [tmp_path / "runs/sweep-config.toml"]
    assert load_run_config(seen[0], []) == load_run_config(sweep.run_config, [])


def test_steps_after_the_newest_checkpoint_of_a_killed_run_do_not_count(tmp_path):
    run = tmp_path / "run"
    (run / "checkpoints/step-00000002").mkdir(parents=True)
    (run / "checkpoints/step-00000002/manifest.json").touch()
    (run / "checkpoints/step-00000003").mkdir()
    (run / "metrics.jsonl").write_text("".join(record(step, **{GOAL: 0.1 * step}) for step in range(1, 5)))
    remove_unsaved_steps(run)
    watched = progress(tmp_path, (run / "metrics.jsonl").read_text().splitlines(keepends=True), reached=0.3)
    assert (watched.steps, watched.status) == (2, None)
    remove_unsaved_steps(tmp_path / "none")


@pytest.mark.usefixtures("stub")
def test_runs_have_ended_when_the_sweep_is_interrupted(tmp_path):
    folder = tmp_path / "runs"
    axes = {"rate": {"0.2": ["optimizer.lr=0.2"], "0.1": ["optimizer.lr=0.1"]}, "seed": {"a": ["train.seed=1"]}}
    running = {}

    def interrupt(*_: object) -> None:
        while not (folder / "0.2-a" / "cut").exists():
            time.sleep(0.01)
        running["session"] = int((folder / "0.2-a" / "session").read_text())
        os.kill(running["session"], 0)  # its leader lives
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_sweep(read_sweep(write_sweep(tmp_path, axes=axes)), folder, processes=2, on_result=interrupt)
    assert running["session"] != os.getsid(0)  # the terminal's Ctrl-C does not reach it
    with pytest.raises(ProcessLookupError):
        os.kill(running["session"], 0)


@pytest.mark.usefixtures("stub")
def test_sigterm_cuts_the_runs_in_progress(tmp_path):
    axes = {"rate": {"0.2": ["optimizer.lr=0.2"], "0.1": ["optimizer.lr=0.1"]}, "seed": {"a": ["train.seed=1"]}}
    sweep = read_sweep(write_sweep(tmp_path, axes=axes))
    results = run_sweep(
        sweep, tmp_path / "runs", processes=2, on_result=lambda *_: os.kill(os.getpid(), signal.SIGTERM)
    )
    assert [each.status for each in results] == [Status.CUT, Status.COMPLETE]


@pytest.mark.usefixtures("stub")
def test_runs_without_the_goal_are_said_to_have_none(tmp_path):
    axes = {"rate": {"0.1": ["optimizer.lr=0.1"]}, "seed": {"a": ["train.seed=1"]}}
    sweep = read_sweep(write_sweep(tmp_path, axes=axes, goal="tasks/other"))
    results = run_sweep(sweep, tmp_path / "runs", processes=1)
    assert table(sweep, results)[1] == [["0.1", "a", "no goal", "", "", ""]]


@pytest.mark.slow
def test_command_trains_the_runs_and_prints_their_table(tmp_path, capsys):
    axes = {"seed": {"a": ["train.seed=1"], "b": ["train.seed=2"]}}
    overrides = ["train.evaluate_every_steps=2", "train.steps=4"]
    path = write_sweep(tmp_path, goal="validation_loss", axes=axes, overrides=overrides)
    assert main(["sweep", str(path), "--folder", str(tmp_path / "runs"), "--processes", "2"]) == 0
    printed = capsys.readouterr().out
    assert "a: complete, 4 steps in" in printed
    assert "0 left" in printed
    assert (tmp_path / "runs" / "b" / "checkpoints").is_dir()
