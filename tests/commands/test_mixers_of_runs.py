"""Mixers that files of a run name: no command and no function imports them unless the user names their package."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import megalin
from megalin.__main__ import main
from megalin.commands.arguments.groups import GROUPS
from megalin.errors import ConfigError, MegalinError
from megalin.layers.external_mixers import VARIABLE, external_module
from megalin.model.config import parse_model
from tests.downloaded_run import PACKAGE, TYPE, forge, planted

OPTION = f"--mixers {PACKAGE}"
READ_CHECKPOINTS = {
    "eval": "eval RUN",
    "eval of all": "eval RUN --all-steps --suite positions",
    "generate": "generate RUN --prompt a --max-tokens 2",
    "inspect": "inspect RUN --samples 1",
    "export": "export hf RUN OUT",
    "score": "data score RUN --input TEXT --output-prefix OUT --keep-quantile 0.5",
    "initial_weights": "train USER --folder OUT train.initial_weights=RUN",
    "branch_from": "train USER --folder OUT train.branch_from=RUN@2",
    "resume": "train USER --folder RUN",
}
READ_CONFIGS = {
    "report": "report RUN",
    "comparison": "report --compare OTHER RUN --output OUT",
    "fit": "fit RUN",
    "reproduce": "reproduce transnormerllm 1 --runs RUN",
    "config": "config RUN/config.toml",
    "base": "config BASED",
    "params": "params RUN/config.toml",
    "plan": "plan RUN/config.toml --gpus 1",
    "verify": "verify RUN/config.toml",
    "coordinate-check": "coordinate-check RUN/config.toml",
    "train": "train RUN/config.toml --folder OUT",
    "launch": "launch --nproc-per-node 1 RUN/config.toml --folder OUT",
}
WRAPPER = """
from typing import Literal

from megalin.layers.config import MixerConfig, SublayerConfig


class CONFIG(MixerConfig):
    type: Literal["downloaded.wrapper"] = "downloaded.wrapper"
    inner: list[SublayerConfig]
"""
FROM_USERS_CONFIG = ("initial_weights", "branch_from", "resume")
"""Commands that read the run's checkpoint, but not its config.toml."""
FUNCTIONS: dict[str, Callable[[Path], object]] = {
    "load": megalin.load,
    "build_model": lambda run: megalin.build_model(run / "config.toml"),
    "Trainer": lambda run: megalin.Trainer(run / "config.toml"),
}


@pytest.fixture
def mark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The mark of the payload, which lies in the current folder; it is not on the search path."""
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [each for each in sys.path if each])
    monkeypatch.delenv(VARIABLE, raising=False)
    with planted(folder) as mark:
        yield mark


def command(text: str, run: Path, other: Path, user: Path, folder: Path) -> list[str]:
    (folder / "middle.toml").write_text(f'base = "{run}/config.toml"\n')
    (folder / "based.toml").write_text('base = "middle.toml"\n[train]\nseed = 3\n')
    (folder / "text.jsonl").write_text('{"text": "abc"}\n')
    places = {
        "RUN": run,
        "OTHER": other,
        "BASED": folder / "based.toml",
        "USER": user,
        "OUT": folder / "out",
        "TEXT": folder / "text.jsonl",
    }
    for name, path in (places | {"BASED": folder / "based.toml"}).items():
        text = text.replace(name, str(path))
    return text.split()


@pytest.mark.parametrize("on_path", [False, True])
@pytest.mark.parametrize("forged", ["config", "state"])
def test_no_command_imports_what_a_run_names(
    forged: str, on_path: bool, config: Path, trained: Path, tmp_path: Path, mark: Path, capsys, monkeypatch
) -> None:
    if on_path:
        monkeypatch.syspath_prepend(str(mark.parent))
    run = forge(trained, tmp_path / "run", config=forged == "config", state=forged == "state")
    commands = READ_CHECKPOINTS if forged == "state" else READ_CHECKPOINTS | READ_CONFIGS
    for name, text in commands.items():
        if forged == "config" and name in FROM_USERS_CONFIG:
            continue
        code, path = main(command(text, run, trained, config, tmp_path)), list(sys.path)
        error = capsys.readouterr().err
        assert not mark.exists(), name
        expected = (4 if forged == "state" else 2, True, True)
        assert (code, TYPE in error, OPTION in error) == expected, f"{name}: {error}"
        assert path == sys.path, name
    for function in FUNCTIONS.values() if forged == "config" else [megalin.load]:
        with pytest.raises(MegalinError, match=OPTION):
            function(run)
    assert main(["doctor", str(run)]) == 0  # reads no model
    assert not mark.exists()


@pytest.mark.parametrize(
    ("text", "in_environment"),
    [
        ("generate RUN --prompt a --max-tokens 2", False),
        ("eval RUN", True),
        ("report RUN", False),
        ("params RUN/config.toml", False),
    ],
)
def test_the_user_names_the_package(text, in_environment, config, trained, tmp_path, mark, monkeypatch):
    words = command(text, forge(trained, tmp_path / "run"), trained, config, tmp_path)
    if in_environment:
        monkeypatch.setenv(VARIABLE, f"other, {PACKAGE}")
    assert main(words if in_environment else [*words, "--mixers", PACKAGE]) == 0
    assert mark.exists()
    assert sys.path[-1] == str(mark.parent)


def test_every_command_with_the_option_is_tried_here():
    tried = {text.partition(" RUN")[0].split()[0] for text in (READ_CHECKPOINTS | READ_CONFIGS).values()}
    tried |= {"lm-eval"}  # tests/commands/test_lm_eval.py
    reads_users_files_alone = {"sweep"}
    taking = {command.name for group in GROUPS.values() for command in group if command.takes_mixers}
    assert taking - reads_users_files_alone == tried - {"data"}


def test_a_program_names_the_package(trained, tmp_path, mark):
    run = forge(trained, tmp_path / "run")
    with pytest.raises(ConfigError, match=OPTION):
        megalin.load(run, mixers=["download", "downloaded.other"])
    model = megalin.load(run, mixers=[PACKAGE])
    assert mark.exists()
    mark.unlink()
    again = megalin.load(run)  # nothing to import
    assert str(again) == str(model)
    assert not mark.exists()


def test_the_users_own_config_names_the_module(config, trained, tmp_path, mark, capsys):
    user = tmp_path / "user.toml"
    user.write_text(config.read_text().replace('type = "glu"', f'type = "{TYPE}"'))
    assert main(["train", str(user), "--folder", str(forge(trained, tmp_path / "run"))]) == 0
    assert "nothing left to do" in capsys.readouterr().out
    assert mark.exists()


def test_a_command_line_names_the_module(config, mark):
    assert main(["config", str(config), f"model.layers.0.sublayers.1.type={TYPE}"]) == 0
    assert mark.exists()


@pytest.mark.parametrize("name", ["../downloaded", "downloaded-1", "."])
def test_names_that_are_no_packages_are_refused(name, trained, fails):
    assert f"{name!r} is no name of a package" in fails(2, "report", trained, "--mixers", name)
    assert VARIABLE not in os.environ


@pytest.mark.parametrize(("name", "problem"), [(".x", "dotted name"), ("a..b", "dotted name"), ("torch.nn", "")])
def test_only_modules_of_mixers_are_types(name, problem, config, fails):
    expected = f"not the {problem} of a module" if problem else "this module has no CONFIG"
    assert f"type = '{name}': {expected}" in fails(2, "config", config, f"model.layers.0.sublayers.1.type={name}")


def test_a_module_is_imported_under_the_names_given_alone(mark):
    for names in ([], ["downloade"], ["payload"], ["downloaded.payload.x"], ["other"]):
        with pytest.raises(ConfigError, match=OPTION):
            external_module(TYPE, names)
    assert not mark.exists()
    assert external_module(TYPE, [TYPE]).__name__ == TYPE


def test_a_mixer_inside_a_named_mixer_is_not_imported(mark):
    """Wrappers hold sub-layers in lists; the names given hold at every depth."""
    (mark.parent / PACKAGE / "wrapper.py").write_text(WRAPPER)
    outer = {"type": f"{PACKAGE}.wrapper", "inner": [{"type": "glu", "intermediate_size": 8}]}
    outer["inner"].append(outer | {"inner": [{"type": TYPE, "intermediate_size": 8}]})
    table = {"vocab_size": 8, "hidden_size": 8, "layers": [{"sublayers": [outer]}]}
    with pytest.raises(ConfigError, match=rf"sublayers\.0\.inner\.1\.inner\.0\.type = '{TYPE}': .*{OPTION}"):
        parse_model(table, "a run", [f"{PACKAGE}.wrapper"])
    assert not mark.exists()
    parse_model(table, "a run", [PACKAGE])
    assert mark.exists()
