"""Flags of a Megatron-LM run, read from a command, a script or YAML; flags that no reader uses are reported."""

from __future__ import annotations

import functools
import math
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources
from typing import Any, NamedTuple

from megalin.errors import ConfigError
from megalin.interop.configs.imported import ImportedConfig, Verdict, variable_hint
from megalin.interop.configs.shell import read_script
from megalin.structured_text import parse_yaml

_PROGRAM_INSIDE = re.compile(r"\.py\s")
_NUMBER = re.compile(r"-?\.?\d")
_YAML_NAMES = {
    "layernorm_epsilon": "norm-epsilon",
    "layernorm_zero_centered_gamma": "apply-layernorm-1p",
    "add_bias_linear": "bias-linear",
    "add_position_embedding": "position-embedding",
    "bias_activation_fusion": "bias-gelu-fusion",
    "num_moe_experts": "num-experts",
    "fp8": "fp8-format",
    "apply_rope_fusion": "rope-fusion",
    "perform_initialization": "initialization",
    "enable_one_logger": "one-logger",
    "virtual_pipeline_model_parallel_size": "num-virtual-stages-per-pipeline-rank",
}
"""Flags by the fields of Megatron-LM's config classes, where the names differ."""


class TrainingCommand(NamedTuple):
    """Training command: the launcher's words before the program, the program, and the flags after it."""

    launcher: list[str]
    program: str
    flags: dict[str, list[str]]


class Reason(NamedTuple):
    """Explanation of a Megatron-LM flag without a megalin key of its own."""

    verdict: Verdict
    text: str


@functools.cache
def reasons() -> Mapping[str, Reason]:
    """Megatron-LM's flags without a megalin key of their own, by name, dashes included."""
    text = (resources.files("megalin") / "interop/configs/megatron_flags.toml").read_text(encoding="utf-8")
    groups = tomllib.loads(text)["flags"]
    return {
        f"--{name}": Reason(group["verdict"], group["reason"]) for group in groups for name in group["names"].split()
    }


def read_command(text: str, variables: Mapping[str, str], imported: ImportedConfig) -> TrainingCommand:
    """The training command of a shell script, or of a line of flags alone; skipped parts become notes.

    Raises:
        ConfigError: a script that cannot be read, or without a command that passes flags to a Python program.
    """
    script = read_script(text, variables)
    for line, skipped in script.notes:
        imported.note("differs", f"line {line} of the script", skipped)
    commands = [command for words in script.commands if (command := _command(words)) is not None]
    if not commands:
        raise ConfigError(
            f"{imported.source}: no command passes flags to a Python program; give the script that starts "
            "pretrain_gpt.py, its command, or its flags"
        )
    for other in commands[:-1]:
        imported.note("differs", other.program or "flags", "ignored; only the last command of a script is read")
    return commands[-1]


def _command(words: Sequence[str]) -> TrainingCommand | None:
    """The command if it has flags for a Python program, also inside one word as in `srun bash -c "..."`."""
    if inner := next((word for word in words if _is_command(word)), None):
        words = next((inside for inside in read_script(inner, {}).commands if _program(inside) is not None), [])
    start = _program(words)
    if start is None:
        alone = bool(words) and words[0].startswith("--")
        return TrainingCommand([], "", parse_flags(words)) if alone else None
    flags = parse_flags(words[start + 1 :])
    return TrainingCommand(list(words[:start]), words[start], flags) if flags else None


def _is_command(word: str) -> bool:
    program = _PROGRAM_INSIDE.search(word)
    return program is not None and "--" in word[program.end() :]


def _program(words: Sequence[str]) -> int | None:
    return next((index for index, word in enumerate(words) if word.endswith(".py")), None)


def parse_flags(words: Iterable[str]) -> dict[str, list[str]]:
    """Flags `--name value ...` and `--name=value` by name; the last one of a name wins, as in argparse."""
    flags: dict[str, list[str]] = {}
    name = ""
    for word in words:
        if word.startswith("-") and not _NUMBER.match(word):
            name, separator, value = word.partition("=")
            flags[name] = [value] if separator else []
        elif name:
            flags[name].append(word.strip("'\"") if " " not in word else word)
    return flags


def load_yaml(text: str, source: str) -> dict[Any, Any]:
    """The table of a YAML. Raises ConfigError for invalid YAML, or no table."""
    try:
        values = parse_yaml(text)
    except ValueError as error:
        raise ConfigError(f"{source}: invalid YAML: {error}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{source}: not a table; give the YAML of a run of Megatron-LM or gpt-neox")
    return values


def yaml_flags(values: Mapping[Any, Any]) -> dict[str, list[str]]:
    """Flags of Megatron-LM's YAML: fields of its config classes in tables, or `MODEL_ARGS` with flags as keys."""
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
    """The flag that sets `name` to `value`; empty if that is the default."""
    off = _negative().get(f"--{name}")
    if off is None or f"--{name}" in reasons():
        return f"--{name}" if value else ""
    return "" if value else off


_NEGATIVE = ("--disable-bias-linear", "--no-position-embedding", "--torch-fsdp2-no-reshard-after-forward")
"""Flags with a megalin key that turn off a default."""


@functools.cache
def _negative() -> Mapping[str, str]:
    """Flags that turn something off, by the flag that turns it on."""
    known = [*reasons(), *_NEGATIVE]
    return {on: name for name in known if (on := re.sub("-(no|disable)-", "-", name, count=1)) != name}


class Flags:
    """The flags of a run; records which ones are read, to report the rest."""

    def __init__(self, given: Mapping[str, list[str]], imported: ImportedConfig) -> None:
        self._given, self._imported = given, imported
        self._read: dict[str, None] = {}

    def has(self, name: str) -> bool:
        """True if the flag is given."""
        self._read[name] = None
        return name in self._given

    def given(self, *names: str) -> str:
        """The given ones of the flags, as text for messages; empty if there are none."""
        return ", ".join(name for name in names if self.has(name))

    def words(self, name: str) -> list[str]:
        """The values after the flag; empty if it is not given."""
        self._read[name] = None
        return self._given.get(name, [])

    def text(self, name: str, default: str = "") -> str:
        """The value of the flag, or `default`."""
        words = self.words(name)
        return " ".join(words) if words else default

    def number(self, name: str, key: str = "") -> float | None:
        """The value as a number; None if the flag is not given.

        Another value is noted as something to fill in, until an override sets megalin's dotted `key`.
        """
        text = self.text(name)
        if not text:
            return None
        try:
            number = float(text.replace("_", ""))
        except ValueError:
            number = math.nan
        if not math.isfinite(number):
            hint = variable_hint(text)
            self._imported.note(
                "fill in", name, f"{text!r} is not a number" + (f"; {hint}" if hint else ""), answer=key
            )
            return None
        return number

    def integer(self, name: str, key: str = "") -> int | None:
        """The value as an integer, handled as in `number`."""
        number = self.number(name, key)
        if number is not None and number != int(number):
            self._imported.note("fill in", name, f"{number} is not an integer", answer=key)
            return None
        return None if number is None else int(number)

    def report_unread(self) -> None:
        """Notes every flag that was not read, with the reason."""
        for name, words in self._given.items():
            if name in self._read:
                continue
            key = " ".join([name, *words])
            one = words == ["1"] and name.endswith(("-parallel-size", "-instances"))
            if name in reasons():
                off = one or words in (["0"], ["0.0"])
                verdict, text = Reason("no effect", "it is off") if off else reasons()[name]
                self._imported.note(verdict, key, text)
            else:
                close = self._imported.nearest(name, [*reasons(), *self._read])
                hint = f"; did you mean {close}?" if close else "; is it a fork's, or an older version's?"
                self._imported.note("unknown", key, f"Megatron-LM has no such flag{hint}")
