"""Renamed config keys: refused in a user's file, with the present name; translated in files that a run saved."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import tomli_w

from megalin.__main__ import main
from megalin.checkpoint.config import CheckpointConfig
from megalin.config import RENAMED, Config, dumps, read_toml, translate_renamed
from megalin.errors import CheckpointError, ConfigError
from megalin.model.config import ModelConfig
from megalin.parallel.config import ParallelConfig
from megalin.parallel.process_group import process_group
from megalin.train.config import load_run_config
from megalin.train.open_run import open_run
from tests.model_runs import CPU, train_here, write_config
from tests.train.test_old_run import FIXTURE, assert_same_steps

TABLES: dict[str, type[Config]] = {"checkpoint": CheckpointConfig, "model": ModelConfig, "parallel": ParallelConfig}
REFUSED = [
    ("checkpoint.keep=2", "checkpoint.keep: unknown key; did you mean 'keep_latest'?"),
    ("parallel.pp_stages=2", "parallel.pp_stages: unknown key; did you mean 'pp_stages_per_rank'?"),
    ("parallel.tp_transfer=auto", "parallel.tp_transfer: unknown key; did you mean 'tp_overlap'?"),
    (
        "parallel.tp_transfer=copy",
        "parallel.tp_transfer: unknown key; did you mean 'tp_overlap' with the value 'symmetric_memory'?",
    ),
    (
        "parallel.tp_transfer=collective",
        "parallel.tp_transfer: unknown key; did you mean 'tp_overlap' with the value 'none'?",
    ),
    (
        "parallel.tp_overlap=collective",
        "parallel.tp_overlap = 'collective': input should be 'auto', 'symmetric_memory' or 'none'; did you mean "
        "'none'?",
    ),
    (
        "parallel.pp_transfer=copy",
        "parallel.pp_transfer = 'copy': input should be 'auto', 'symmetric_memory' or 'p2p'; did you mean "
        "'symmetric_memory'?",
    ),
    (
        "parallel.pp_transfer=send",
        "parallel.pp_transfer = 'send': input should be 'auto', 'symmetric_memory' or 'p2p'; did you mean 'p2p'?",
    ),
    (
        "parallel.cp_exchange=pipelined",
        "parallel.cp_exchange = 'pipelined': input should be 'auto', 'all_gather' or 'ring'; did you mean 'ring'?",
    ),
    (
        "model.output_init=depth",
        "model.output_init = 'depth': input should be 'plain' or 'scaled_by_depth'; did you mean 'scaled_by_depth'?",
    ),
]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_config(tmp_path_factory.mktemp("renamed"))


@pytest.fixture
def old_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run folder with former keys, in the folder that the paths of its config are relative to."""
    shutil.copytree(FIXTURE, tmp_path / "old")
    monkeypatch.chdir(tmp_path / "old")
    return Path("run")


@pytest.mark.parametrize(("override", "problem"), REFUSED)
def test_former_name_is_refused_with_the_present_one(path, tmp_path, override, problem):
    with pytest.raises(ConfigError) as raised:
        load_run_config(path, [override])
    assert str(raised.value) == f"{path}: 1 problem(s)\n  {problem}"
    values, (key, _, value) = read_toml(path), override.partition("=")
    table, name = key.split(".")
    values[table][name] = int(value) if value.isdigit() else value
    written = tmp_path / "config.toml"  # a user's file, because it is not in a run folder
    written.write_text(tomli_w.dumps(values))
    with pytest.raises(ConfigError) as raised:
        load_run_config(written, [])
    assert str(raised.value) == f"{written}: 1 problem(s)\n  {problem}"


def test_every_former_name_is_refused_and_every_present_one_known():
    for path, renamed in RENAMED.items():
        table, key = path.split(".")
        fields = TABLES[table].model_fields
        assert renamed.key in fields
        assert key == renamed.key or key not in fields
        allowed = set(getattr(fields[renamed.key].annotation, "__args__", ()))
        assert set(renamed.values.values()) <= allowed
        assert not renamed.values.keys() & allowed


@pytest.mark.parametrize(
    ("saved", "present"),
    [
        ({"checkpoint": {"every_steps": 1, "keep": 3}}, {"checkpoint": {"every_steps": 1, "keep_latest": 3}}),
        ({"model": {"output_init": "depth"}}, {"model": {"output_init": "scaled_by_depth"}}),
        ({"parallel": {"pp_stages": 2}}, {"parallel": {"pp_stages_per_rank": 2}}),
        ({"parallel": {"pp_transfer": "copy"}}, {"parallel": {"pp_transfer": "symmetric_memory"}}),
        ({"parallel": {"pp_transfer": "send"}}, {"parallel": {"pp_transfer": "p2p"}}),
        ({"parallel": {"cp_exchange": "pipelined"}}, {"parallel": {"cp_exchange": "ring"}}),
        ({"parallel": {"tp_transfer": "auto"}}, {"parallel": {"tp_overlap": "auto"}}),
        ({"parallel": {"tp_transfer": "copy"}}, {"parallel": {"tp_overlap": "symmetric_memory"}}),
        ({"parallel": {"tp_transfer": "collective"}}, {"parallel": {"tp_overlap": "none"}}),
        ({"model": 3, "logging": {"keep": 1}}, {"model": 3, "logging": {"keep": 1}}),
    ],
)
def test_former_name_that_a_run_saved_is_translated(saved, present):
    before = json.dumps(saved)
    assert translate_renamed(saved) == present
    assert json.dumps(saved) == before
    assert translate_renamed(present) == present


def test_config_of_a_run_folder_is_read_under_present_names(old_run):
    config = load_run_config(old_run / "config.toml", [])
    assert (config.checkpoint.keep_latest, config.model.output_init) == (2, "scaled_by_depth")
    parallel = config.parallel
    assert (parallel.pp_stages_per_rank, parallel.pp_transfer, parallel.tp_overlap) == (2, "p2p", "none")
    assert main(["params", str(old_run / "config.toml")]) == 0


def test_override_of_a_former_name_is_refused_with_a_run_folder_too(old_run):
    with pytest.raises(ConfigError, match=r"checkpoint\.keep: unknown key; did you mean 'keep_latest'\?"):
        load_run_config(old_run / "config.toml", ["checkpoint.keep=1"])


def test_users_file_with_present_names_goes_on_with_an_old_checkpoint(old_run):
    mine = Path("mine.toml")
    mine.write_text(dumps(load_run_config(old_run / "config.toml", [])))
    with process_group(CPU):
        train_here(mine, old_run, "train.stop_after_steps=8")
    assert_same_steps(old_run, json.loads((FIXTURE / "expected.json").read_text()))
    written = read_toml(old_run / "config.toml")
    assert translate_renamed(written) == written


def test_another_value_than_the_old_checkpoint_has_is_still_named(old_run):
    problem = r"model\.output_init: 'scaled_by_depth' in the checkpoint, 'plain' in the config"
    with pytest.raises(CheckpointError, match=problem):
        open_run(old_run, ["model.output_init=plain"])
