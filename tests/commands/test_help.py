"""The command line's help: fast, in groups, with examples, and with the library's values of each option."""

from __future__ import annotations

import resource
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest

from megalin import __version__
from megalin.__main__ import main
from megalin.commands.arguments import choices
from megalin.commands.arguments.command import Command
from megalin.commands.arguments.groups import DATA, GROUPS
from megalin.commands.arguments.parser import build_parser

_HELP_CPU_SECONDS = 0.5
ROOT = Path(__file__).parents[2]


def _commands() -> Iterator[tuple[list[str], Command]]:
    for words, groups in (([], GROUPS), (["data"], DATA)):
        for group in groups.values():
            for command in group:
                yield [*words, command.name], command


def _help(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit, match="0"):
        main([*words, "--help"])
    return capsys.readouterr().out


def test_megalin_alone_lists_the_commands_in_groups(capsys: pytest.CaptureFixture[str]):
    assert main([]) == 0
    shown = capsys.readouterr().out
    for title, group in GROUPS.items():
        assert f"\n{title}:\n" in shown
        assert all(f"\n  {command.name} " in shown and command.help in shown for command in group)
    assert "\n  data " in shown
    assert main(["data"]) == 0
    listed = capsys.readouterr().out
    assert all(f"\n  {command.name} " in listed for group in DATA.values() for command in group)


def test_version_is_printed(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == f"megalin {__version__}\n"


def test_each_command_is_described_with_examples_that_parse(capsys: pytest.CaptureFixture[str]):
    for words, command in _commands():
        examples = _help(words, capsys).replace("\\\n", " ").partition("examples:\n")[2].partition("\n\n")[0]
        assert examples, words
        for line in examples.splitlines():
            _, _, arguments = line.partition("megalin ")
            parsed, rest = build_parser().parse_known_args(_split(arguments))
            assert parsed.command is command, line
            assert not any(word.startswith("-") for word in rest), line


def _split(line: str) -> list[str]:
    return shlex.split(line.partition(" > ")[0])


def test_missing_arguments_are_named_after_the_usage(capsys: pytest.CaptureFixture[str]):
    for words, missing in ((["train"], "config"), (["data", "inspect"], "prefix")):
        with pytest.raises(SystemExit, match="2"):
            main(words)
        error = capsys.readouterr().err
        name = f"megalin {' '.join(words)}"
        assert error.startswith(f"usage: {name} [-h] ")
        assert error.endswith(f"{name}: error: the following arguments are required: {missing}\n")


def test_an_unknown_word_after_a_group_of_commands_is_refused(capsys: pytest.CaptureFixture[str]):
    for words in (["data", "--nothing"], ["--nothing"]):
        with pytest.raises(SystemExit, match="2"):
            main(words)
        assert "unrecognized arguments: --nothing" in capsys.readouterr().err


def test_help_takes_less_than_half_a_second_of_cpu():
    def seconds() -> float:
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        return used.ru_utime + used.ru_stime

    before = seconds()
    subprocess.run([sys.executable, "-m", "megalin", "train", "--help"], check=True, capture_output=True)
    assert seconds() - before < _HELP_CPU_SECONDS


def test_no_command_imports_a_library_for_its_help():
    program = "import sys, megalin.__main__ as m; m.build_parser(); print({'torch', 'numpy', 'rich'} & {*sys.modules})"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout == "set()\n"


def _modules_after(*arguments: str, status: int = 0) -> set[str]:
    """The modules that are imported when a command has ended with this exit code."""
    program = (
        "import contextlib, io, sys\nfrom megalin.__main__ import main\n"
        "with contextlib.redirect_stdout(io.StringIO()):\n    status = main(sys.argv[1:])\n"
        "print(*sys.modules, sep='\\n')\nsys.exit(status)"
    )
    ended = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True)
    assert ended.returncode == status, ended.stderr
    return set(ended.stdout.split())


def test_schema_of_configs_is_shown_without_torch():
    """It imports the classes of configs alone: with torch, which the checks of a config need, it would take seconds."""
    modules = _modules_after("config", "--schema")
    assert {"pydantic", "megalin.train.config"} <= modules
    assert not {"torch", "numpy", "rich", "matplotlib"} & modules


def test_models_are_counted_without_the_modules_of_a_run():
    """torch itself is half of the two seconds that a count may take."""
    modules = _modules_after("params", "tnl-3b")
    assert {"torch", "megalin.layers.mixers.tnl"} <= modules
    of_runs = ("torch._dynamo", "torch.distributed.fsdp", "torch.distributed.tensor", "torch.distributed.pipelining")
    assert not {*of_runs, "torch.distributed.checkpoint", "sympy", "matplotlib", "megalin.parallel.mesh"} & modules


def test_an_unknown_preset_is_refused_without_torch():
    assert "torch" not in _modules_after("params", "tnl-3bb", status=2)


def test_choices_are_those_of_the_library():
    from megalin.commands.data.preprocess import TOKENIZERS
    from megalin.commands.eval import SUITES
    from megalin.data.config import SPLITS
    from megalin.data.corpus.rules import RULES
    from megalin.data.shards.token_files import RAW_DTYPES, Format
    from megalin.evaluation.choices.suite import DEFAULT_TASKS
    from megalin.evaluation.generated.haystack import HAYSTACKS
    from megalin.evaluation.generated.retrieval import NUM_DEPTHS
    from megalin.evaluation.tasks.mqar import MQAR_SETTINGS
    from megalin.interop.weights.layouts import FORMATS
    from megalin.planner.hardware import HARDWARE
    from megalin.train.compute_dtypes import COMPUTE_DTYPES

    assert tuple(sorted(COMPUTE_DTYPES)) == choices.DTYPES
    assert choices.SPLITS == SPLITS
    assert choices.SUITES == SUITES
    assert (choices.CHOICE_TASKS,) == DEFAULT_TASKS
    assert choices.NUM_DEPTHS == NUM_DEPTHS
    assert choices.HAYSTACKS == HAYSTACKS
    assert tuple(FORMATS) == choices.EXPORT_FORMATS
    assert tuple(HARDWARE) == choices.GPUS
    assert tuple(RULES) == choices.RULES
    assert tuple(MQAR_SETTINGS) == choices.MQAR_SETTINGS
    assert tuple(TOKENIZERS) == choices.TOKENIZERS
    assert get_args(Format) == choices.TOKEN_FORMATS
    assert choices.RAW_DTYPES == RAW_DTYPES
