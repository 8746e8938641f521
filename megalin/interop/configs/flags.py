"""Flags of a Megatron-LM run: read from a command, a script or YAML, and which of them a reader has taken."""

from __future__ import annotations

import difflib
import functools
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources
from typing import Any, NamedTuple

import yaml

from megalin.errors import ConfigError
from megalin.interop.configs.imported import ImportedConfig, Verdict, variable_hint
from megalin.interop.configs.shell import read_script

_INSIDE = re.compile(r"\.py\s.*--", re.DOTALL)
_NUMBER = re.compile(r"-?\.?\d")
_YAML_NAMES = {
    "layernorm_epsilon": "norm-epsilon",
    "layernorm_zero_centered_gamma": "apply-layernorm-1p",
    "add_bias_linear": "bias-linear",
    "add_position_embedding": "position-embedding",
    "num_moe_experts": "num-experts",
    "fp8": "fp8-format",
    "apply_rope_fusion": "rope-fusion",
    "perform_initialization": "initialization",
    "enable_one_logger": "one-logger",
    "virtual_pipeline_model_parallel_size": "num-virtual-stages-per-pipeline-rank",
}
"""Fields of Megatron-LM's config classes whose flags have other names."""


class TrainingCommand(NamedTuple):
    """A training command: the words before its program (the launcher's), the program, and the flags behind it."""

    launcher: list[str]
    program: str
    flags: dict[str, list[str]]


class Reason(NamedTuple):
    """Why a flag of Megatron-LM becomes no key by itself."""

    verdict: Verdict
    text: str


@functools.cache
def reasons() -> Mapping[str, Reason]:
    """The flags of Megatron-LM that become no key by themselves, by name, dashes included."""
    text = (resources.files("megalin") / "interop/configs/megatron_flags.toml").read_text(encoding="utf-8")
    groups = tomllib.loads(text)["flags"]
    return {
        f"--{name}": Reason(group["verdict"], group["reason"]) for group in groups for name in group["names"].split()
    }


def read_command(text: str, variables: Mapping[str, str], imported: ImportedConfig) -> TrainingCommand:
    """The training command of a shell script, or of a line with nothing but flags; parts left out become notes.

    Raises:
        ConfigError: a script that cannot be read, or in which no command has flags behind a Python program.
    """
    script = read_script(text, variables)
    for line, left_out in script.notes:
        imported.note("differs", f"line {line} of the script", left_out)
    commands = [command for words in script.commands if (command := _command(words)) is not None]
    if not commands:
        raise ConfigError(
            f"{imported.source}: no command of it gives flags to a Python program; give the script that starts "
            "pretrain_gpt.py, its command, or its flags"
        )
    for other in commands[:-1]:
        imported.note("differs", other.program or "flags", "another command of the script; the last one is read")
    return commands[-1]


def _command(words: Sequence[str]) -> TrainingCommand | None:
    """The command where it has flags for a Python program, also inside one word as `srun bash -c "..."` has it."""
    if inner := next((word for word in words if _INSIDE.search(word)), None):
        words = next((inside for inside in read_script(inner, {}).commands if _program(inside) is not None), [])
    start = _program(words)
    if start is None:
        alone = bool(words) and words[0].startswith("--")
        return TrainingCommand([], "", parse_flags(words)) if alone else None
    flags = parse_flags(words[start + 1 :])
    return TrainingCommand(list(words[:start]), words[start], flags) if flags else None


def _program(words: Sequence[str]) -> int | None:
    return next((index for index, word in enumerate(words) if word.endswith(".py")), None)


def parse_flags(words: Iterable[str]) -> dict[str, list[str]]:
    """`--name value ...` and `--name=value` by name; the last one of a name counts, as for argparse."""
    flags: dict[str, list[str]] = {}
    name = ""
    for word in words:
        if word.startswith("-") and not _NUMBER.match(word):
            name, separator, value = word.partition("=")
            flags[name] = [value] if separator else []
        elif name:
            flags[name].append(word.strip("'\"") if " " not in word else word)
    return flags


def read_yaml(text: str, imported: ImportedConfig) -> dict[str, list[str]]:
    """Flags of Megatron-LM's YAML: fields of its config classes in tables, or `MODEL_ARGS` with flags as keys.

    Raises:
        ConfigError: no YAML, or no table.
    """
    try:
        values = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{imported.source}: not readable YAML: {error}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{imported.source}: holds no table; give Megatron-LM's YAML of a run")
    flags: dict[str, list[str]] = {}
    tables = values.get("MODEL_ARGS")
    _add_table(tables if isinstance(tables, dict) else values, flags)
    return flags


def _add_table(table: Mapping[Any, Any], flags: dict[str, list[str]]) -> None:
    for key, value in table.items():
        if isinstance(value, dict):
            _add_table(value, flags)
            continue
        name = str(key).lstrip("-")
        name = _YAML_NAMES.get(name, name.replace("_", "-"))
        if value is True or value is False:
            name = _boolean(name, value)
            if name:
                flags[name] = []
        elif value is not None and value != "":
            items = value if isinstance(value, list) else str(value).split() if "path" in name else [value]
            flags[f"--{name}"] = [str(item) for item in items]


def _boolean(name: str, value: bool) -> str:
    """The flag that says `name` is `value`; empty where that is what no flag says."""
    off = _negative().get(f"--{name}")
    if off is None or f"--{name}" in reasons():
        return f"--{name}" if value else ""
    return "" if value else off


_NEGATIVE = ("--disable-bias-linear", "--no-position-embedding", "--torch-fsdp2-no-reshard-after-forward")
"""Flags that a reader takes and that turn off what is on without them."""


@functools.cache
def _negative() -> Mapping[str, str]:
    """Flags that turn something off, by the flag that would turn it on."""
    known = [*reasons(), *_NEGATIVE]
    return {on: name for name in known if (on := re.sub("-(no|disable)-", "-", name, count=1)) != name}


class Flags:
    """The flags of a run while they are read; what nobody took is told at the end."""

    def __init__(self, given: Mapping[str, list[str]], imported: ImportedConfig) -> None:
        self._given, self._imported = given, imported
        self._asked: dict[str, None] = {}

    def has(self, name: str) -> bool:
        """Whether the flag is given."""
        self._asked[name] = None
        return name in self._given

    def given(self, *names: str) -> str:
        """Those of the flags that are given, for people; empty where none is."""
        return ", ".join(name for name in names if self.has(name))

    def words(self, name: str) -> list[str]:
        """What stands behind the flag; empty where it is not given."""
        self._asked[name] = None
        return self._given.get(name, [])

    def text(self, name: str, default: str = "") -> str:
        """The value of the flag, or `default`."""
        words = self.words(name)
        return " ".join(words) if words else default

    def number(self, name: str, key: str = "") -> float | None:
        """The value as a number; None where the flag is not given.

        One that is no number is told, but where an override gives megalin's dotted `key`, which it is read for.
        """
        text = self.text(name)
        if not text:
            return None
        try:
            return float(text.replace("_", ""))
        except ValueError:
            hint = variable_hint(text)
            self._imported.note("fill in", name, f"{text!r} is no number" + (f"; {hint}" if hint else ""), answer=key)
            return None

    def integer(self, name: str, key: str = "") -> int | None:
        """The value as an integer, likewise."""
        number = self.number(name, key)
        if number is not None and number != int(number):
            self._imported.note("fill in", name, f"{number} is no whole number", answer=key)
            return None
        return None if number is None else int(number)

    def report_rest(self) -> None:
        """Notes every flag that nobody asked for, with the reason."""
        for name, words in self._given.items():
            if name in self._asked:
                continue
            key = " ".join([name, *words])
            one = words == ["1"] and name.endswith(("-parallel-size", "-instances"))
            if name in reasons():
                off = one or words in (["0"], ["0.0"])
                verdict, text = Reason("no effect", "it is off") if off else reasons()[name]
                self._imported.note(verdict, key, text)
            else:
                close = difflib.get_close_matches(name, [*reasons(), *self._asked], n=1, cutoff=0.75)
                hint = f"; did you mean {close[0]}?" if close else "; a fork's or an older one's?"
                self._imported.note("unknown", key, f"Megatron-LM has no such flag{hint}")
