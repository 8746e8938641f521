"""Metrics in W&B, through a stand-in for its library: resumption under one id, errors, and a missing library."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from megalin.errors import ConfigError
from megalin.parallel.process_group import process_group
from megalin.train.events import EventLog
from megalin.train.jsonl import read_records
from megalin.train.metrics import Metrics
from tests.model_runs import CPU, train_here, write_config
from tests.ranks import run_ranks


class StandIn(SimpleNamespace):
    """Stand-in for wandb that records every call."""

    class Error(Exception):
        pass

    def __init__(self) -> None:
        super().__init__(begun=[], logged=[], metrics=[], exit_codes=[], problem=None, failure=None)

    def init(self, **arguments: Any) -> StandIn:
        if self.problem is not None:
            raise self.Error(self.problem)
        self.begun.append(arguments)
        return self

    def define_metric(self, name: str, step_metric: str | None = None) -> None:
        self.metrics.append((name, step_metric))

    def log(self, values: dict[str, Any]) -> None:
        self.logged.append(values)
        if self.failure is not None:
            raise self.failure

    def finish(self, exit_code: int) -> None:
        self.exit_codes.append(exit_code)
        if self.failure is not None:
            raise self.failure


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    stand_in = StandIn()
    monkeypatch.setitem(sys.modules, "wandb", stand_in)
    monkeypatch.delenv("WANDB_NAME", raising=False)
    return stand_in


def _metrics(
    folder: Path, *, resumed_step: int = 0, project: str | None = "mine", event_log: EventLog | None = None
) -> Metrics:
    return Metrics(
        folder,
        total_steps=10,
        resumed_step=resumed_step,
        event_log=event_log,
        wandb_project=project,
        wandb_config={"train": {"steps": 10}},
        console=Console(file=io.StringIO()),
    )


def test_resumed_run_goes_on_under_its_id(tmp_path, wandb):
    folder = tmp_path / "run"
    folder.mkdir()
    for resumed_step in (0, 1, 0):
        with _metrics(folder, resumed_step=resumed_step) as metrics:
            metrics.write(resumed_step + 1, {"loss": 2.5})
    first, resumed, again = wandb.begun
    assert resumed == first
    assert again == first | {"id": again["id"]}
    assert len({first["id"], again["id"]}) == 2
    assert first["id"].isalnum()
    config = {"train": {"steps": 10}}
    assert first == {
        **{"project": "mine", "id": first["id"], "resume": "allow", "name": "run", "dir": folder, "config": config}
    }
    assert wandb.logged == [{"step": 1, "loss": 2.5}, {"step": 2, "loss": 2.5}, {"step": 1, "loss": 2.5}]
    assert wandb.metrics[:2] == [("step", None), ("*", "step")]
    assert wandb.exit_codes == [0, 0, 0]


def test_run_that_an_error_ends_has_failed(tmp_path, wandb):
    with pytest.raises(KeyboardInterrupt), _metrics(tmp_path):
        raise KeyboardInterrupt
    assert wandb.exit_codes == [1]


@pytest.mark.parametrize("failure", [Exception("the service has shut down"), BrokenPipeError(32, "Broken pipe")])
def test_error_in_mid_run_is_one_incident_and_the_run_goes_on(tmp_path, wandb, failure):
    wandb.failure = failure
    with EventLog(tmp_path / "incidents.jsonl") as event_log, _metrics(tmp_path, event_log=event_log) as metrics:
        for step in (1, 2, 3):
            metrics.write(step, {"loss": 2.5})
    assert [values["step"] for values in wandb.logged] == [1, 2, 3]  # tried again, because a network error may pass
    assert wandb.exit_codes == [0]
    (incident,) = read_records(tmp_path / "incidents.jsonl")
    what = f"{type(failure).__name__}: {failure}"
    assert incident["message"].startswith(
        f"W&B cannot be written ({what}); training continues, but steps are missing there"
    )
    assert (incident["step"], incident["kind"]) == (1, "warning")
    assert [record["step"] for record in read_records(tmp_path / "metrics.jsonl")] == [1, 2, 3]


def test_nothing_is_begun_unasked(tmp_path, wandb):
    with _metrics(tmp_path, project=None) as metrics:
        metrics.write(1, {"loss": 2.5})
    assert wandb.begun == []
    assert not (tmp_path / "wandb_id").exists()


def test_environment_names_the_run(tmp_path, wandb, monkeypatch):
    monkeypatch.setenv("WANDB_NAME", "theirs")
    _metrics(tmp_path).close()
    assert wandb.begun[0]["name"] == "theirs"


@pytest.mark.parametrize("module", [None, SimpleNamespace()], ids=["missing", "a folder named wandb"])
def test_missing_library_is_named_with_the_remedy(tmp_path, monkeypatch, module):
    monkeypatch.setitem(sys.modules, "wandb", module)
    message = r"logging.wandb_project = 'mine' needs the library wandb; install it: pip install 'megalin\[wandb\]'"
    with pytest.raises(ConfigError, match=message):
        _metrics(tmp_path)


def test_refusal_of_wandb_is_an_error(tmp_path, wandb):
    wandb.problem = "no API key configured"
    with pytest.raises(ConfigError, match=r"W&B cannot start a run \(no API key configured\); log in \(wandb login\)"):
        _metrics(tmp_path)


def _begin(folder: Path) -> int:
    stand_in = StandIn()
    sys.modules["wandb"] = stand_in  # type: ignore[assignment]
    with _metrics(folder) as metrics:
        metrics.write(1, {"loss": 2.5})
    assert len(stand_in.logged) == len(stand_in.begun)
    return len(stand_in.begun)


def test_first_rank_alone_meets_wandb(tmp_path):
    assert run_ranks(2, _begin, tmp_path) == [1, 0]


def test_key_of_the_config_asks_for_it(tmp_path, wandb):
    config = write_config(tmp_path)
    with process_group(CPU):
        train_here(
            config, tmp_path / "run", "logging.wandb_project=mine", "train.stop_after_steps=1", "data.validation=[]"
        )
    assert [(entry["project"], entry["config"]["train"]["steps"]) for entry in wandb.begun] == [("mine", 12)]
    assert [values["step"] for values in wandb.logged] == [1]
