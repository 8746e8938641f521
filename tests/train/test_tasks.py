"""Choice tasks during training: on every mesh the results of `megalin eval` of the same step, and no other training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megalin.__main__ import main
from megalin.errors import ConfigError
from megalin.evaluation.choices.suite import ChoiceOptions
from megalin.evaluation.in_loop import LoopTaskRunner
from megalin.evaluation.suites import EvalOptions, SuiteOptions, evaluate_checkpoints
from megalin.parallel.config import ParallelConfig
from megalin.parallel.mesh import Mesh
from megalin.parallel.process_group import process_group
from megalin.parallel.tensor_parallel import local
from megalin.report.page import write_report
from megalin.train.config import load_run_config
from megalin.train.loop import train
from megalin.train.tasks import task_lines
from tests.evaluation.choice_data import make_data
from tests.model_runs import CPU, late_results, metrics, train_here, write_config
from tests.ranks import run_ranks

TASKS = 'evaluation.tasks=["which", "ending", "positions"]'


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A config of 6 steps with a data folder beside it."""
    folder = tmp_path_factory.mktemp("tasks")
    data = str(make_data(folder))
    train = {"steps": 6, "micro_batch_size": 1}
    return write_config(
        folder, train=train, schedule={"warmup_steps": 0}, evaluation={"data": data}, checkpoint={"every_steps": 2}
    )


def _train(config: Path, folder: Path, *overrides: str) -> dict[str, float]:
    run_config = load_run_config(config, list(overrides))
    tasks = LoopTaskRunner() if run_config.evaluation.tasks else None
    return train_here(config, folder, *overrides, tasks=tasks).tasks


def _lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def _evaluated(folder: Path, data: str, step: int) -> dict[str, float]:
    """The results of `megalin eval` in one process."""
    choices = ChoiceOptions(Path(data), ["which", "ending"])
    options = EvalOptions(None, choices, step, SuiteOptions(["positions"]))
    with process_group(CPU):
        results = evaluate_checkpoints(folder, Mesh(ParallelConfig(), CPU), [], options, lambda *_: None)
    return {
        f"positions/{task}/{name}" if suite == "positions" else f"{task}/{name}": metric.value
        for suite, tasks in results[step].tasks.items()
        for task, result in tasks.items()
        for name, metric in result.metrics.items()
    }


SLOW_MESHES: list[tuple[int, list[str]]] = [
    (1, []),
    (2, ["parallel.tp=2"]),
    (2, []),
    (2, ["train.engine=deepspeed", "parallel.zero=3"]),
    (3, ["parallel.cp=3"]),
    (4, ["parallel.pp=2", "parallel.tp=2"]),
]


@pytest.mark.parametrize(
    ("world_size", "axes"),
    [(2, ["parallel.pp=2"]), *(pytest.param(*mesh, marks=pytest.mark.slow) for mesh in SLOW_MESHES)],
)
def test_tasks_in_the_loop_are_those_of_eval_and_change_nothing(config, tmp_path, world_size, axes):
    data = load_run_config(config, []).evaluation.data
    run_ranks(world_size, _train, config, tmp_path / "plain", *axes)
    tasks = [TASKS, "evaluation.every_steps=4"]
    results = run_ranks(world_size, _train, config, tmp_path / "run", *axes, *tasks)
    assert metrics(tmp_path / "run") == metrics(tmp_path / "plain")
    lines = {line["step"]: line for line in _lines(tmp_path / "run")}
    found = {step: {name: line[name] for name in line if name.startswith("tasks/")} for step, line in lines.items()}
    assert [step for step in found if found[step]] == [4, 6]
    for step in (4, 6):
        expected = _evaluated(tmp_path / "run", data, step)
        assert found[step] == pytest.approx({f"tasks/{name}": value for name, value in expected.items()}, rel=1e-5)
    for of_rank in results:
        assert {f"tasks/{name}": value for name, value in of_rank.items()} == found[6]


class _Weights:
    """A runner whose result is the sum of the weights."""

    def describe_problems(self, _config: object) -> list[str]:
        return []

    def run(self, model: Any, _mesh: object, *, step: int) -> dict[str, float]:
        return {"sum/of/weights": sum(local(parameter).double().sum().item() for parameter in model.parameters())}


def test_tasks_read_the_weights_of_their_step_also_where_results_are_late(config, tmp_path):
    overrides = [TASKS, "evaluation.every_steps=4", "checkpoint.every_steps=50"]
    with process_group(CPU):
        train_here(config, tmp_path / "at once", *overrides, tasks=_Weights())
    with process_group(CPU), late_results():
        train_here(config, tmp_path / "late", *overrides, tasks=_Weights())
    sums = [[line.get("tasks/sum/of/weights") for line in _lines(tmp_path / name)] for name in ("at once", "late")]
    assert [value is not None for value in sums[0]] == [False, False, False, True, False, True]
    assert sums[1] == sums[0]


def test_generated_tasks_in_the_loop_are_those_of_eval(config, tmp_path, capsys):
    """With choice tasks before and after them, whose order is kept."""
    names = 'evaluation.tasks=["ending", "state-tracking:s5", "choices:which", "state-tracking:pa*"]'
    overrides = [names, "evaluation.limit=2", "train.steps=2", "data.sequence_length=130"]
    with process_group(CPU):
        result = _train(config, tmp_path / "run", *overrides)
    tasks = list(dict.fromkeys(name.rpartition("/")[0] for name in result))
    assert tasks == ["ending/bpb_0shot", "which/rc_0shot", "s5", "parity", "palindrome"]
    capsys.readouterr()
    selected = ["--tasks", "state-tracking:s5", "state-tracking:pa*"]
    assert main(["eval", str(tmp_path / "run"), *selected, "--limit", "2", "--json"]) == 0
    suites = json.loads(capsys.readouterr().out)["2"]
    assert list(suites) == ["state-tracking"]
    printed = suites["state-tracking"]
    assert list(printed) == ["s5[:2]", "parity[:2]", "palindrome[:2]"]
    assert {name: value for name, value in result.items() if "_0shot" not in name} == {
        f"{task.removesuffix('[:2]')}/{name}": pytest.approx(metric["value"], rel=1e-5)
        for task, found in printed.items()
        for name, metric in found["metrics"].items()
    }


def test_report_and_progress_show_the_tasks(config, tmp_path, capsys):
    with process_group(CPU):
        result = _train(config, tmp_path / "run", TASKS, "evaluation.limit=1", "train.steps=2")
    printed = capsys.readouterr().out
    for line in task_lines(result):
        assert f"step 2  {line}" in printed
    assert task_lines({"a/b/acc": 0.5, "a/b/acc_norm": 0.25, "c/d/acc": 1.0}) == [
        "a/b: acc 0.5000, acc norm 0.2500",
        "c/d: acc 1.0000",
    ]
    write_report(tmp_path / "run", tmp_path / "report.html")
    text = (tmp_path / "report.html").read_text()
    assert "Tasks during training" in text
    assert "which/rc_0shot" in text
    assert f"{result['which/rc_0shot/bits_per_byte']:.4f}" in text


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (['evaluation.tasks=["wich"]'], r"evaluation.tasks = \['wich'\]:\n  task 'wich': not in the .* mean 'which'"),
        (
            ['evaluation.tasks=["recall"]'],
            "no task of the suite recall fits the run:\n.*its examples have up to 64 ids",
        ),
        (
            ['evaluation.tasks=["needle"]'],
            "the suite needle does not run during training; evaluate the run's checkpoints with: megalin eval RUN",
        ),
        (['evaluation.tasks=["recal:mqar"]'], "task 'recal:mqar': 'recal' is no suite with tasks; .* mean 'recall'"),
        (
            ['evaluation.tasks=["state-tracking:parity", "state-tracking:paritty"]'],
            "task 'paritty': not in the suite state-tracking; did you mean 'parity'",
        ),
        (['evaluation.tasks=["choices:wich"]'], "task 'wich': not in the evaluation data; did you mean 'which'"),
        (['evaluation.tasks=["recall:"]'], "task 'recall:': no task after the colon; use recall:TASK"),
        ([TASKS, "evaluation.data=none"], "none/manifest.json: no such file; get the data with"),
        ([TASKS, "data.sequence_length=6"], "an answer has 9 tokens, more than the 6 of data.sequence_length"),
    ],
)
def test_tasks_that_cannot_be_evaluated_are_refused_before_the_run(config, tmp_path, overrides, message):
    with process_group(CPU), pytest.raises(ConfigError, match=message):
        _train(config, tmp_path / "run", *overrides)
    assert not (tmp_path / "run").exists()


def test_tasks_without_a_runner_are_refused(config, tmp_path):
    with process_group(CPU), pytest.raises(ConfigError, match="no runner evaluates them here; train with `megalin"):
        train(load_run_config(config, [TASKS]), CPU, tmp_path / "run")


def test_keys_without_tasks_are_refused(config):
    with pytest.raises(ConfigError) as error:
        load_run_config(config, ["evaluation.every_steps=5", "evaluation.limit=3"])
    assert "evaluation.every_steps = 5 has no effect without evaluation.tasks" in str(error.value)
    assert "evaluation.limit = 3 has no effect without evaluation.tasks" in str(error.value)
    with pytest.raises(ConfigError, match="greater than or equal to 1"):
        load_run_config(config, [TASKS, "evaluation.limit=0"])
