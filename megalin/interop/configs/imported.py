"""Result of importing another system's config: the tables of a run, and a note for each key without a counterpart."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import tomli_w

from megalin.config import apply_overrides, parse
from megalin.errors import ConfigError
from megalin.model.presets import expand_preset
from megalin.train.config import RunConfig
from megalin.train.launch_checks import EVALUATION_KEYS, check_launch

Verdict = Literal["fill in", "differs", "not available", "no effect", "unknown"]
"""fill in: missing in the config. differs: the config has a substitute. not available: megalin lacks the feature.
no effect: megalin needs no such key. unknown: as far as is known, the other system has no such key either."""

_TITLES: dict[Verdict, str] = {
    "fill in": "Fill in before the config loads",
    "differs": "Substituted: not the same run",
    "not available": "Not available",
    "no effect": "No effect: nothing to set",
    "unknown": "Unknown",
}


_LOST: tuple[Verdict, ...] = ("differs", "not available", "unknown")
"""Verdicts of settings that the config does not have."""
_SOURCE = "config"
_HINTS = 100
_PLACEHOLDER = re.compile(r"\$\{(\w+)[^}]*\}|\$\(|`")


class Note(NamedTuple):
    """Outcome of one key of the other system."""

    verdict: Verdict
    key: str
    text: str
    answer: str = ""
    """megalin's dotted key whose override removes the note; empty if no override does."""


class ImportedConfig:
    """Tables of a run, filled from the keys of another system.

    Attributes:
        values: the config as TOML tables.
        notes: one for each key that does not map to a megalin key one to one.
        mapped: (megalin's key, its value, the other system's keys) in the order of reading.
    """

    def __init__(self, source: str) -> None:
        """`source` names the imported config at the top of the TOML file."""
        self.source = source
        self.values: dict[str, Any] = {}
        self.notes: list[Note] = []
        self.mapped: list[tuple[str, Any, str]] = []
        self._hints: dict[str, str] = {}
        self._missing: list[tuple[str, Note]] = []

    def set(self, key: str, value: Any, source: str) -> None:
        """Sets megalin's dotted `key` from `source`; keeps and notes another value that was set before."""
        table = self.values
        *tables, name = key.split(".")
        for part in tables:
            table = table.setdefault(part, {})
        if name in table and table[name] != value:
            self.note("differs", source, f"gives {key} = {value!r}, but {table[name]!r} was set before and is kept")
            return
        table[name] = value
        self.mapped.append((key, value, source))

    def get(self, key: str) -> Any:
        """The value of a dotted key; None if it is not set."""
        value: Any = self.values
        for part in key.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        return value

    def note(self, verdict: Verdict, key: str, text: str, answer: str = "") -> None:
        """Adds a note, unless it is there already."""
        note = Note(verdict, key, text, answer)
        if note not in self.notes:
            self.notes.append(note)

    def override(self, overrides: Sequence[str]) -> None:
        """Applies `key=value` overrides to the tables, and drops the notes that they answer.

        Raises:
            ConfigError: an override that is not of this form.
        """
        self.values = apply_overrides(self.values, overrides)
        for override in overrides:
            key = ".".join(part.strip() for part in override.partition("=")[0].split("."))
            self.notes = [note for note in self.notes if not f"{note.answer}.".startswith(f"{key}.")]

    def hint(self, key: str, text: str) -> None:
        """Registers an explanation for `check` to add if megalin's dotted `key` is missing."""
        self._hints[key] = text

    def missing(self, key: str, source: str, text: str) -> None:
        """Registers a "fill in" note on `source` for `check` to add if megalin's dotted `key` is still unset."""
        self._missing.append((key, Note("fill in", source, text)))

    def check(self) -> None:
        """Validates the tables as a run, mesh sizes included, and notes each problem as something to fill in."""
        values = dict(self.values)
        for key, note in self._missing:
            if self.get(key) is None:
                self.note(*note)
        for key, text in _texts(values):
            if hint := variable_hint(text):
                self.note("fill in", f"{key} = {text!r}", hint)
        try:
            if isinstance(values.get("model"), dict):
                values["model"] = expand_preset(values["model"])
            config = parse(RunConfig, values, _SOURCE)
            if not config.data.has("validation"):
                self._drop_evaluations()
            # DeepSpeed's JSON is written after this check.
            train = config.train.model_copy(update={"deepspeed_config": None})
            check_launch(config.model_copy(update={"train": train}), None)
        except ConfigError as error:
            lines = str(error).splitlines()
            has_title = lines[0].startswith(f"{_SOURCE}:") or lines[0].endswith(" problems")
            for line in lines[1:] if has_title else lines:
                key, _, problem = line.strip().partition(": ")
                known = self._hints.get(key.split(" = ")[0])
                self.note("fill in", key, f"{problem} ({known})" if known else problem)

    def _drop_evaluations(self) -> None:
        """Drops the imported keys of evaluations, for a run without a validation split: Megatron-LM ignores its flags
        there, and megalin refuses the keys."""
        for entry in [*self.mapped]:
            key, value, source = entry
            table, _, name = key.partition(".")
            if table == "train" and name in EVALUATION_KEYS and self.get(key) == value:
                del self.values["train"][name]
                self.mapped.remove(entry)
                self.note("no effect", source, "the run has no validation split to evaluate", key)

    def nearest(self, key: str, known: Iterable[str]) -> str:
        """The known key that is spelled like an unknown one; empty for none, and after the first 100 unknown keys."""
        close = difflib.get_close_matches(key, known, n=1, cutoff=0.75) if self.num_unknown < _HINTS else []
        return close[0] if close else ""

    @property
    def num_unknown(self) -> int:
        """Number of keys that, as far as is known, the other system does not have."""
        return sum(note.verdict == "unknown" for note in self.notes)

    @property
    def complete(self) -> bool:
        """True if nothing is left to fill in; valid after `check`."""
        return not any(note.verdict == "fill in" for note in self.notes)

    def outcome(self) -> tuple[int, str]:
        """Exit code and a line of text; valid after `check`. 0: the same run. 1: incomplete, or settings were lost."""
        if not self.complete:
            return 1, "values are missing; see above"
        lost = sum(note.verdict in _LOST for note in self.notes)
        if lost:
            return 1, f"a complete config, but not the same run; settings substituted, not available or unknown: {lost}"
        return 0, "a complete config"

    def report(self) -> list[str]:
        """All notes as lines of text, grouped by verdict; keys with the same text share a line."""
        lines = []
        for verdict, title in _TITLES.items():
            keys: dict[str, list[str]] = {}
            for note in self.notes:
                if note.verdict == verdict:
                    keys.setdefault(note.text, []).append(note.key)
            if keys:
                lines += [f"{title}:", *(f"  {', '.join(names)}: {text}" for text, names in keys.items()), ""]
        return lines

    def toml(self) -> str:
        """The config as a TOML file, with the report as comments at the top."""
        head = [f"From {self.source}.", "", *self.report()]
        comments = "\n".join(f"# {line}".rstrip() for line in head[:-1])
        return f"{comments}\n\n{tomli_w.dumps(_without_nulls(self.values))}"


def variable_hint(text: str) -> str:
    """Remedy for an unset shell variable in `text`; empty if there is none."""
    match = _PLACEHOLDER.search(text)
    if match is None:
        return ""
    name = match[1]
    return (
        f"give --variable {name}=VALUE, or write the value" if name else "only a shell can evaluate it; write the value"
    )


def _without_nulls(value: Any) -> Any:
    """The value without keys that are None, which an override with null leaves and TOML does not have."""
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def _texts(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """All strings in a table, with their dotted keys."""
    if isinstance(value, str):
        yield key, value
    elif isinstance(value, dict | list):
        for name, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _texts(item, f"{key}.{name}".lstrip("."))
