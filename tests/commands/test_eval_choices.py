"""`megalin eval --suite choices`: results in the run folder, resuming, checkpoints by step, and bad input."""

from __future__ import annotations

import io
import json
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from megalin.__main__ import main
from megalin.commands import eval as eval_command
from megalin.data.tokenizers.tokenizer import ByteTokenizer
from megalin.evaluation import forward_groups
from megalin.evaluation.choices import scoring
from megalin.evaluation.choices.encoding import encode_task
from megalin.evaluation.choices.metrics import choice_metrics
from megalin.evaluation.choices.requests import EvaluationData
from megalin.evaluation.choices.suite import ChoiceOptions, ChoiceSuite
from megalin.evaluation.suite import TaskResult
from megalin.evaluation.suites import EvalOptions, evaluate_checkpoints
from megalin.generation import load_for_generation
from megalin.launch import Launch
from megalin.parallel.config import ParallelConfig
from megalin.parallel.mesh import Mesh
from tests.evaluation.choice_data import make_data
from tests.evaluation.test_choice_scores import Killed, killed, often, scores_alone
from tests.model_runs import CPU
from tests.ranks import run_ranks


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of evaluation data."""
    return make_data(tmp_path_factory.mktemp("data"))


def output(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    assert main([str(argument) for argument in arguments]) == 0
    return capsys.readouterr().out


def stored(run: Path, step: int) -> dict[str, Any]:
    """The suites in the file of a step."""
    values = json.loads((run / f"evaluations/step-{step}.json").read_text())
    assert values["step"] == step
    return values["suites"]


def test_results_are_those_of_each_request_alone_and_in_the_run_folder(run, data, capsys):
    """The questions with the model that `generate` loads, one request at a time."""
    task = EvaluationData(data).read("colours/rc_0shot")
    encoded = encode_task(task, ByteTokenizer(), max_tokens=36)
    model, _ = load_for_generation(run, CPU)
    expected = choice_metrics(task, scores_alone(model, encoded.requests, 257))
    arguments = ["eval", run, "--suite", "choices,loss", "--data", data, "--tasks", "colours/rc_0shot", "ending"]
    printed = json.loads(output(capsys, *arguments, "--json"))
    assert list(printed) == ["12"]
    result = printed["12"]["choices"]["colours/rc_0shot"]
    for name, metric in expected.items():
        assert result["metrics"][name]["value"] == pytest.approx(metric.value, rel=1e-4), name
    assert (result["num_questions"], result["num_requests"], result["method"]) == (3, 16, "carried_state")
    assert result["num_truncated"] == encoded.num_truncated == 1
    assert set(printed["12"]["choices"]["ending/bpb_0shot"]["metrics"]) == {"bits_per_byte", "greedy_match"}
    in_file = stored(run, 12)
    assert in_file["loss"] == {"validation": printed["12"]["loss"]}
    assert result.items() <= in_file["choices"]["colours/rc_0shot"].items()
    assert in_file["choices"]["colours/rc_0shot"]["settings"]["sha256"] == task.sha256


def test_finished_tasks_are_not_run_again(run, data, capsys):
    arguments = ["eval", run, "--suite", "choices", "--data", data, "--json", "--tasks"]
    first = json.loads(output(capsys, *arguments, "which"))
    ran, real = [], ChoiceSuite.run

    def record(self, name, *rest, **more):
        ran.append(name)
        return real(self, name, *rest, **more)

    with patch.object(ChoiceSuite, "run", record):
        assert json.loads(output(capsys, *arguments, "which")) == first
        assert ran == []
        both = json.loads(output(capsys, *arguments, "ending", "which"))["12"]["choices"]
        assert ran == ["ending/bpb_0shot"]
        assert list(both) == ["ending/bpb_0shot", "which/rc_0shot"]
        output(capsys, *arguments, "which", "--limit", 1)
        output(capsys, *arguments, "which", "--step", 10)
        output(capsys, "eval", run, "data.sequence_length=37", *arguments[2:], "which")
        assert ran[1:] == ["which/rc_0shot[:1]", "which/rc_0shot", "which/rc_0shot"]
    assert set(stored(run, 12)["choices"]) == {"ending/bpb_0shot", "which/rc_0shot", "which/rc_0shot[:1]"}
    assert set(stored(run, 10)["choices"]) == {"which/rc_0shot"}


def test_killed_evaluation_keeps_its_finished_tasks(run, data):
    class Killed(BaseException):
        pass

    real = ChoiceSuite.run

    def dies(self, name, *rest, **more):
        if name.startswith("which"):
            raise Killed
        return real(self, name, *rest, **more)

    arguments = ["eval", run, "--suite", "choices", "--data", data, "--tasks", "ending", "which"]
    with patch.object(ChoiceSuite, "run", dies), pytest.raises(Killed):
        main([str(argument) for argument in arguments])
    assert set(stored(run, 12)["choices"]) == {"ending/bpb_0shot"}


def test_killed_evaluation_goes_on_within_a_task(run, data, capsys, caplog):
    command = ["eval", str(run), "--suite", "choices", "--data", str(data), "--tasks", "colours/rc_0shot", "--json"]
    path = run / "evaluations/step-12-colours-rc_0shot.partial.json"

    def batches(after: int | None = None, *more: str) -> list[int]:
        with (
            often(),
            patch.object(scoring, "EVERY_BATCHES", 1),
            patch.object(forward_groups, "_STATES_BYTES", 1),
            killed(after) as ended,
            suppress(Killed),
        ):
            assert main([*command, *more]) == 0
        return ended

    def metrics() -> dict[str, Any]:
        (run / "evaluations/step-12.json").unlink()
        return json.loads(capsys.readouterr().out)["12"]["choices"]["colours/rc_0shot"]["metrics"]

    whole = batches()
    assert len(whole) > 3
    assert not path.exists()
    expected = metrics()
    assert batches(3) == [1, 2, 3]
    assert not (run / "evaluations/step-12.json").exists()
    written = path.read_text()
    assert batches() == whole[2:]
    assert metrics() == expected
    assert not path.exists()
    path.write_text(written)
    assert batches(None, "data.sequence_length=40")[0] == 1  # another length: another result
    metrics()
    for damaged in (
        "[",
        written.replace('"batches": 2', '"batches": 9'),
        written.replace('"nats": [', '"nats": [0.0, '),
    ):
        assert damaged != written
        path.write_text(damaged)
        assert batches() == whole
        assert metrics() == expected
        assert "not partial scores" in caplog.text
        caplog.clear()
    path.mkdir()  # cannot be replaced by a file
    assert batches() == whole
    assert metrics() == expected
    assert "the partial scores are not kept" in caplog.text


def test_table_names_limits_and_truncated_requests(run, data, capsys):
    arguments = ["eval", run, "--suite", "choices", "--data", data, "--tasks", "colours/rc_0shot", "ending"]
    text = output(capsys, *arguments, "--limit", 1)
    assert text.startswith("step 12\n")
    assert "colours/rc_0shot[:1]" in text
    assert "1 of 3" in text
    assert "1 of 6" in text  # truncated
    assert "greedy match" in text


def test_table_counts_answers_that_merge_with_their_prompts():
    result = TaskResult({}, 4, 4, 8, 0, "packed", 0.1, num_merged=3)
    assert TaskResult.from_values(result.values()) == result
    earlier = {name: value for name, value in result.values().items() if name != "num_merged"}
    assert TaskResult.from_values(earlier).num_merged == 0
    table = eval_command._table("choices", {"a/b": result, "c/d": result._replace(num_merged=0)})
    assert [str(column.header) for column in table.columns] == ["task", "questions", "merged"]
    assert list(table.columns[2].cells) == ["3 of 8", "0 of 8"]


def test_every_checkpoint_is_evaluated(run, capsys):
    values = json.loads(output(capsys, "eval", run, "--all-steps", "--json"))
    assert list(values) == ["2", "4", "6", "8", "10", "12"]
    losses = [values[step]["loss"]["loss"] for step in values]
    assert losses == sorted(losses, reverse=True)
    assert json.loads(output(capsys, "eval", run, "--step", 4, "--json"))["loss"] == losses[1]
    assert stored(run, 4)["loss"]["validation"]["loss"] == losses[1]
    assert "step 2\nloss " in output(capsys, "eval", run, "--all-steps")


def _choices(folder: Path, axes: dict[str, int], data: Path, folder_of_results: Path) -> dict[str, Any]:
    options = EvalOptions(None, ChoiceOptions(data, ["colours/rc_0shot", "ending"]))
    overrides = ["data.sequence_length=48"]
    results = evaluate_checkpoints(folder, Mesh(ParallelConfig(**axes), CPU), overrides, options, lambda *_: None)
    return results[12].values()["choices"]


@pytest.mark.parametrize(
    ("world_size", "axes"),
    [(3, {"cp": 3}), *(pytest.param(2, axes, marks=pytest.mark.slow) for axes in ({}, {"tp": 2}))],
)
def test_results_do_not_depend_on_the_mesh(run, data, world_size, axes):
    (expected,) = run_ranks(1, _choices, run, {}, data, run)
    (run / "evaluations").rename(run / "of_one_process")
    for results in run_ranks(world_size, _choices, run, axes, data, run):
        for task, result in results.items():
            assert result["method"] == ("carried_state" if axes == {"tp": 2} else "packed")
            for name, metric in result["metrics"].items():
                assert metric["value"] == pytest.approx(expected[task]["metrics"][name]["value"], rel=1e-5), name


@pytest.mark.parametrize(
    ("code", "arguments", "message"),
    [
        (2, ["--tasks", "a"], "--tasks has no effect without the suite choices; add --suite choices"),
        (2, ["--limit", "3"], "--limit has no effect without the suite choices"),
        (2, ["--suite", "choice"], "--suite choice: no such suite; did you mean 'choices'?"),
        (2, ["--suite", "choices", "--limit", "0"], "limit = 0 leaves no question; use at least 1"),
        (2, ["--suite", "choices", "--tasks", "colour"], "task 'colour': not in the evaluation data; did you mean"),
        (4, ["--step", "7"], "no checkpoint of step 7; nearest are 6 and 8"),
        (3, ["data.sequence_length=3", "--suite", "choices", "--tasks", "which"], "an answer has 9 tokens, more than"),
        (3, ["--suite", "choices", "--data", "none"], "none/manifest.json: no such file; get the data with: megalin"),
        (3, ["--suite", "choices", "evaluation.data=no", "--data"], "no/manifest.json: no such file; get the data"),
    ],
)
def test_bad_input_is_refused(run, data, fails, code, arguments, message):
    if arguments[-1] == "--data":  # left out: the run's own
        arguments = arguments[:-1]
    elif "--suite" in arguments and "--data" not in arguments:
        arguments = [*arguments, "--data", data]
    assert message in fails(code, "eval", run, *arguments)


def test_run_without_tokenizer_has_no_choice_tasks(run, data, fails):
    text = (run / "config.toml").read_text()
    (run / "config.toml").write_text(text.replace('tokenizer = "bytes"', ""))
    message = fails(2, "eval", run, "--suite", "choices", "--data", data)
    assert "choice tasks need data.tokenizer, which is not set" in message
    assert main(["eval", str(run), "--suite", "loss"]) == 0


def test_damaged_results_are_refused(run, data, fails):
    (run / "evaluations").mkdir()
    path = run / "evaluations/step-12.json"
    arguments = ["eval", run, "--suite", "choices", "--data", data, "--tasks", "which"]
    for content in ("{", '{"step": 11, "suites": {}}', '{"step": 12, "suites": {"choices": 3}}'):
        path.write_text(content)
        assert "not a file of results" in fails(3, *arguments)
    path.unlink()
    assert main([str(argument) for argument in arguments]) == 0
    values = json.loads(path.read_text())
    del values["suites"]["choices"]["which/rc_0shot"]["metrics"]
    path.write_text(json.dumps(values))
    assert "not a result of a task: KeyError('metrics')" in fails(3, *arguments)


def test_results_that_cannot_be_kept_are_printed_with_a_warning(run, data, capsys, caplog):
    (run / "evaluations").write_text("a file in the way")
    assert "loss  " in output(capsys, "eval", run)
    assert "the result of validation is not kept" in caplog.text


def test_progress_bars_are_shown_on_the_terminal_of_rank_zero_alone(run, data, monkeypatch, capsys):
    arguments = ["eval", run, "--suite", "choices,loss", "--data", data, "--tasks", "which"]
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    output(capsys, *arguments)
    assert "which/rc_0shot" in terminal.getvalue()
    assert "validation" in terminal.getvalue()
    assert "4/4" in terminal.getvalue()  # requests
    monkeypatch.setattr(sys, "stderr", other := Terminal())
    monkeypatch.setattr(eval_command, "launched", lambda: Launch(1, 2, 1))
    output(capsys, *arguments)
    assert other.getvalue() == ""


class Terminal(io.StringIO):
    """A terminal that keeps its output."""

    def isatty(self) -> bool:
        return True
