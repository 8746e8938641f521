"""Searches of a sweep, its repetitions and evaluations: the order of the runs, their durations, tables and errors."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from megalin.errors import ConfigError
from megalin.sweep import runner
from megalin.sweep.config import SEARCH, EvaluationsConfig, Sweep
from megalin.sweep.order import all_cells, expected_seconds, external_mixers, make_cell, ordered_cells, read_sweep
from megalin.sweep.progress import Status
from megalin.sweep.results import RESULTS, Result, field_value
from megalin.sweep.runner import evaluate_command, run_sweep
from megalin.sweep.table import markdown, notes, search_table, table
from tests.mixers import decaying_sum
from tests.sweep.test_sweep import progress, record, write_sweep

GOAL = "evaluation_loss"
SEARCHED: dict[str, Any] = {
    "goal": GOAL,
    "better": "lower",
    "axes": {
        "model": {"A": ["train.seed=3"], "B": ["train.seed=4"]},
        "rate": {"0.1": ["optimizer.lr=0.1"], "0.2": ["optimizer.lr=0.2"]},
    },
    "search": {"axis": "rate", "overrides": ["train.steps=4"]},
    "repetitions": [{"of": {"model": "A"}, "runs": {"seed1": ["train.seed=1"]}}],
}


def searched(folder: Path, **fields: Any) -> Sweep:
    return read_sweep(write_sweep(folder, **SEARCHED | fields))


def result(sweep: Sweep, name: str, goal: float | None, status: Status = Status.COMPLETE, **fields: Any) -> Result:
    """A result by the name of its run, 10 tokens a second after 5 seconds of start."""
    model, rate, stage = [*name.split("-"), ""][:3]
    cell = make_cell(sweep, {"model": model, "rate": rate}, stage)
    tokens = 20 if stage == SEARCH else 200
    best = {} if goal is None else {"step": 4, GOAL: goal}
    made = Result(cell.values, cell.overrides, status, 4, tokens, 5 + tokens / 10, 10.0, best, stage=stage)
    return made._replace(**fields)


def results(sweep: Sweep, **goals: float | None) -> dict[str, Result]:
    """Results by name, with _ for - and for the point of a rate; without a goal, a failure."""
    names = {key: key.replace("_", "-").replace("0-", "0.") for key in goals}
    statuses = {key: Status.FAILED if goal is None else Status.COMPLETE for key, goal in goals.items()}
    return {names[key]: result(sweep, names[key], goal, statuses[key]) for key, goal in goals.items()}


def names(sweep: Sweep, found: dict[str, Result]) -> list[str]:
    """Names of the runs that have no result, ? for one whose search is not finished."""
    return [
        "?" if cell is None else cell.name
        for cell in ordered_cells(sweep, found)
        if cell is None or cell.name not in found
    ]


def test_short_runs_choose_the_value_that_trains_in_full(tmp_path):
    sweep = searched(tmp_path)
    short = ["B-0.1-search", "B-0.2-search", "?"]
    assert names(sweep, {}) == ["A-0.1-search", "A-0.2-search", "?", *short, "?"]
    found = results(sweep, A_0_1_search=3.0, A_0_2_search=2.0)
    assert names(sweep, found) == ["A-0.2", *short, "A-0.2-seed1"]
    (chosen,) = (cell for cell in ordered_cells(sweep, found) if cell is not None and cell.name == "A-0.2")
    assert chosen.overrides == ["train.seed=3", "optimizer.lr=0.2"]
    assert make_cell(sweep, chosen.values, SEARCH).overrides == [*chosen.overrides, "train.steps=4"]
    assert make_cell(sweep, chosen.values, "seed1").overrides == [*chosen.overrides, "train.seed=1"]


def test_search_goes_on_without_the_runs_that_failed(tmp_path):
    sweep = searched(tmp_path)
    assert names(sweep, results(sweep, A_0_1_search=3.0, A_0_2_search=None))[0] == "A-0.1"
    failed = results(sweep, A_0_1_search=None, A_0_2_search=None)
    assert names(sweep, failed) == ["B-0.1-search", "B-0.2-search", "?"]
    cut = failed | {"A-0.2-search": result(sweep, "A-0.2-search", 2.0, Status.CUT)}
    assert names(sweep, cut)[0] == "?"  # a new start goes on with it


def test_duration_is_that_of_the_same_combination_or_follows_from_its_short_run(tmp_path):
    sweep = searched(tmp_path)
    short, full = make_cell(sweep, {"model": "B", "rate": "0.2"}, SEARCH), {"model": "A", "rate": "0.1"}
    assert expected_seconds(sweep, short, {}) is None
    found = results(sweep, A_0_1_search=3.0, A_0_2_search=None)
    assert expected_seconds(sweep, short, found) == 7  # of the other model
    tokens = 12 * 4 * 36  # of the config of `write_config`
    assert expected_seconds(sweep, make_cell(sweep, full), found) == 7 + (tokens - 20) / 10
    found["B-0.2"] = result(sweep, "B-0.2", 2.0, evaluation_seconds=3.0)
    assert expected_seconds(sweep, make_cell(sweep, full), found) == 7 + (tokens - 20) / 10 + 3
    found["A-0.1"] = result(sweep, "A-0.1", 2.0, evaluation_seconds=1.0)
    assert expected_seconds(sweep, make_cell(sweep, full, "seed1"), found) == 26


def test_goal_that_falls_is_a_gain(tmp_path):
    lines = [record(1, **{GOAL: 3.0}), record(2, **{GOAL: 2.0}), record(3, **{GOAL: 2.5})]
    watched = progress(tmp_path, lines, goal=GOAL, better="lower", reached=2.0)
    assert (watched.best["step"], watched.status) == (2, Status.REACHED)
    assert progress(tmp_path, lines, goal=GOAL, better="lower", reached=1.9).status is None
    assert (
        progress(tmp_path, [*lines, record(4, **{GOAL: 3.0})], goal=GOAL, better="lower", patience=2).status
        is Status.STALLED
    )


def test_runs_within_twice_the_spread_share_a_rank(tmp_path):
    axes = SEARCHED["axes"] | {"model": {name: [] for name in "ABCD"}}
    sweep = searched(tmp_path, axes=axes)
    found = results(sweep, A_0_1=2.0, A_0_1_seed1=2.1, B_0_1=2.15, C_0_1=2.3, A_0_1_search=3.0, A_0_2_search=None)
    head, rows = table(sweep, list(found.values()))
    assert head == ["model", "rate", GOAL, "rank", "steps", "ended", "tokens/s"]
    assert [row[:4] for row in rows] == [
        ["A", "0.1 (1 not run)", "2", "1"],
        ["B", "0.1 (1 not run)", "2.15", "1"],
        ["C", "0.1 (1 not run)", "2.3", "2"],
        ["D", "not run", "", ""],
        ["A seed1", "0.1", "2.1", ""],
    ]
    assert search_table(sweep, list(found.values())) == (
        ["model", "0.1", "0.2"],
        [["A", "3", "failed"], *([name, "not run", "not run"] for name in "BCD")],
    )
    text = markdown(sweep, list(found.values()))
    assert text.startswith("| model | rate | evaluation_loss | rank | steps | ended | tokens/s |\n| --- | --- |")
    assert (
        "Spread of A 0.1 over 2 runs: 0.1; runs that differ by less than 0.2 in evaluation_loss share a rank." in text
    )
    assert notes(sweep, list(found.values()))[1].startswith("Not run: B-0.1-search")
    assert notes(sweep, list(found.values()))[-1] == "Failed: A-0.2-search."


def test_fields_with_a_star_are_means(tmp_path):
    made = result(searched(tmp_path), "A-0.1", 2.0, evaluations={"evaluations/x/bits": 1.0, "evaluations/y/bits": 2.0})
    assert field_value(made, "evaluations/*/bits") == 1.5
    assert field_value(made, "evaluations/y/bits") == 2.0
    assert field_value(made, GOAL) == 2.0
    assert field_value(made, "tasks/*") is None


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"search": {"axis": "lr", "overrides": []}}, "search.axis: 'lr' is no axis; use one of model, rate"),
        ({"best_over": ["rate"]}, "best_over: 'rate' is the axis of the search, of which one value trains in full"),
        ({"repetitions": [{"of": {}, "runs": {"s": []}}]}, r"repetitions.of = {}: give one value of each of model"),
        ({"repetitions": [{"of": {"model": "E"}, "runs": {"s": []}}]}, "repetitions.of: 'E' is no value of model"),
        ({"repetitions": [{"of": {"model": "A"}, "runs": {}}]}, "repetitions.runs is empty; add a name"),
        ({"repetitions": [{"of": {"model": "A"}, "runs": {"search": []}}]}, "use letters and digits, not 'search'"),
        ({"repetitions": SEARCHED["repetitions"] * 2}, r"repetitions.of = .* is given twice; put all runs into one"),
        ({"search": {"axis": "rate", "overrides": ["a.b=1"]}}, r"(?s)run A-0.1-search of .*a"),
        ({"evaluations": {"suites": ["losses"]}}, "suites: 'losses' is no suite; did you mean 'loss'"),
        ({"evaluations": {"suites": ["loss"], "data": "x"}}, "data has no effect without the suite choices; add it"),
        ({"evaluations": {"suites": ["loss"], "limit": 2}}, "limit has no effect on the suite loss; remove it or add"),
    ],
)
def test_bad_search_is_refused_before_any_run(tmp_path, fields, message):
    with pytest.raises(ConfigError, match=message):
        searched(tmp_path, **fields)


def test_evaluations_are_those_of_the_command():
    evaluations = EvaluationsConfig(suites=["loss", "choices"], tasks=["a"], limit=3, data="d")
    command = evaluate_command(Path("x"), evaluations, ["my.mixer"])
    assert command[2:] == [
        "megalin",
        "eval",
        "x",
        "--suite",
        "loss,choices",
        "--tasks",
        "a",
        "--limit",
        "3",
        "--data",
        "d",
        "--mixers=my.mixer",
    ]


def test_evaluations_import_the_mixers_of_the_users_config(tmp_path):
    toy = f'model.layers.0.sublayers.0={{type = "{decaying_sum.TYPE}"}}'
    sweep = searched(tmp_path, overrides=[toy])
    assert all(external_mixers(sweep, cell) == [decaying_sum.TYPE] for cell in all_cells(sweep))


RUN = """
import json, pathlib, sys
folder, lr, seed = pathlib.Path(sys.argv[1]), float(sys.argv[2]), sys.argv[3]
folder.mkdir(parents=True, exist_ok=True)
if seed == "3":
    sys.exit("no model A")
record = {"step": 1, "tokens": 20, "tokens_per_second": 10.0, "evaluation_loss": 1 - lr}
(folder / "metrics.jsonl").write_text(json.dumps(record) + "\\n")
"""
EVALUATE = """
import json, pathlib, sys
path = pathlib.Path(sys.argv[1]) / "evaluations" / "step-1.json"
path.parent.mkdir()
suites = {"loss": {"validation": {"loss": 2.5, "bits": None}}, "choices": {"t": {"metrics": {"acc": {"value": 0.5}}}}}
path.write_text(json.dumps({"step": 1, "suites": suites}))
"""


@pytest.fixture
def stub(monkeypatch):
    def command(config: Path, folder: Path, overrides: list[str]) -> list[str]:
        values = dict(override.split("=") for override in overrides)
        return [sys.executable, "-S", "-c", RUN, str(folder), values["optimizer.lr"], values["train.seed"]]

    monkeypatch.setattr(runner, "train_command", command)
    monkeypatch.setattr(runner, "evaluate_command", lambda run, *_: [sys.executable, "-S", "-c", EVALUATE, str(run)])


@pytest.mark.usefixtures("stub")
def test_sweep_searches_evaluates_and_goes_on_from_its_results_alone(tmp_path):
    evaluations = {"evaluations": {"suites": ["loss"]}, "columns": {"loss": "evaluations/loss/validation/loss"}}
    sweep, folder, left = searched(tmp_path, **evaluations), tmp_path / "runs", []
    # A full run of B would take 1,728 tokens at 10 a second.
    first = run_sweep(sweep, folder, processes=2, time_limit=60, on_result=lambda _, count, __: left.append(count))
    assert [(each.name, each.status) for each in first] == [
        ("A-0.1-search", Status.FAILED),
        ("A-0.2-search", Status.FAILED),
        ("B-0.1-search", Status.COMPLETE),
        ("B-0.2-search", Status.COMPLETE),
    ]
    assert left[-1] == 1
    (copied := tmp_path / "copied").mkdir()
    (copied / RESULTS).write_bytes((folder / RESULTS).read_bytes())
    second = run_sweep(sweep, copied, processes=1)
    assert [each.name for each in second][-1] == "B-0.2"
    assert second[-1].evaluations == {"evaluations/loss/validation/loss": 2.5, "evaluations/choices/t/acc": 0.5}
    assert second[2:4] == first[2:]
    assert table(sweep, second)[1][1][:3] == ["B", "0.2", "2.5"]
    assert not (copied / "B-0.1-search").exists()
    assert json.loads((copied / RESULTS).read_text())["results"][-1]["stage"] == ""


@pytest.mark.usefixtures("stub")
def test_failed_evaluation_is_an_error_of_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr(
        runner, "evaluate_command", lambda *_: [sys.executable, "-S", "-c", "raise SystemExit('no data')"]
    )
    axes = {"rate": {"0.2": ["optimizer.lr=0.2"]}, "seed": {"a": ["train.seed=1"]}}
    sweep = read_sweep(write_sweep(tmp_path, goal=GOAL, axes=axes, evaluations={"suites": ["loss"]}))
    (failed,) = run_sweep(sweep, tmp_path / "runs", processes=1)
    assert (failed.status, failed.error, failed.best[GOAL]) == (Status.FAILED, "exit code 1\nno data", 0.8)
