"""Strict configs: TOML input and output, dotted overrides, and errors that list all problems at once."""

from __future__ import annotations

import ast
import difflib
import functools
import inspect
import itertools
import sys
import types
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple, TypeVar, get_args, get_origin

import pydantic
import tomli_w

from megalin.errors import ConfigError
from megalin.files import read_limited
from megalin.structured_text import MAX_BYTES, MAX_DEPTH, parse_toml

Change = Literal["refused", "reported", "silent"]
"""Consequence of another value where a run goes on: an error, a line that names both values, or nothing."""


class OnChange(NamedTuple):
    """Mark of a key whose consequence differs from its table's, as in `Annotated[int, OnChange("silent")]`."""

    change: Change


REFUSED, REPORTED, SILENT = OnChange("refused"), OnChange("reported"), OnChange("silent")


class Config(pydantic.BaseModel):
    """Base of every config: unknown keys are errors, values are never coerced between types, instances are frozen."""

    on_change: ClassVar[Change | None] = None
    """Consequence of another value of the table's keys in a run that goes on; None: each key has an `OnChange`, or the
    table is no part of a run's config."""

    # defer_build: the validator of a table is built with that of the run, or at its first use.
    model_config = pydantic.ConfigDict(
        extra="forbid", frozen=True, strict=True, protected_namespaces=(), defer_build=True
    )

    @pydantic.model_validator(mode="before")
    @classmethod
    def _leave_out_nulls(cls, values: Any) -> Any:
        """Leaves out optional keys with None: a field with a default that may be None is None by default, as TOML has
        no null."""
        if not isinstance(values, Mapping):
            return values
        optional = {name for name, field in cls.model_fields.items() if not field.is_required()}
        return {key: value for key, value in values.items() if value is not None or key not in optional}


ConfigT = TypeVar("ConfigT", bound=Config)
_MOST_PROBLEMS = 50
_LONGEST_VALUE = 200


class Renamed(NamedTuple):
    """The present name of a config key, and the present names of its renamed or replaced values."""

    key: str
    values: Mapping[str, str]


RENAMED: Mapping[str, Renamed] = {
    "checkpoint.keep": Renamed("keep_latest", {}),
    "model.output_init": Renamed("output_init", {"depth": "scaled_by_depth"}),
    "parallel.cp_exchange": Renamed("cp_exchange", {"pipelined": "ring"}),
    "parallel.pp_stages": Renamed("pp_stages_per_rank", {}),
    "parallel.pp_transfer": Renamed("pp_transfer", {"copy": "symmetric_memory", "send": "p2p"}),
    "parallel.tp_transfer": Renamed("tp_overlap", {"copy": "symmetric_memory", "collective": "none"}),
}
"""Renamed keys by their former `table.key`. `parse` rejects former names and suggests the present ones;
`translate_renamed` translates a run's saved config."""


def translate_renamed(values: Mapping[str, Any]) -> dict[str, Any]:
    """Copies a run's saved config with former keys and values under their present names."""
    result = _copy(values)
    for path, renamed in RENAMED.items():
        name, key = path.split(".")
        table = result.get(name)
        if isinstance(table, dict) and key in table and (key == renamed.key or renamed.key not in table):
            value = table.pop(key)
            table[renamed.key] = renamed.values.get(value, value) if isinstance(value, str) else value
    return result


def parse(cls: type[ConfigT], values: Mapping[str, Any], source: str, *, context: object = None) -> ConfigT:
    """Validates `values` as a `cls`.

    Args:
        context: passed to the validators; that of mixers reads it (megalin/layers/config.py).

    Raises:
        ConfigError: one line per problem (field, value, rule, remedy), after `source`, the origin of the values.
    """
    try:
        return cls.model_validate(dict(values), context=context)
    except pydantic.ValidationError as error:
        lines = problems(cls, error)
        shown = [f"  {line}" for line in lines[:_MOST_PROBLEMS]]
        if len(lines) > len(shown):
            shown.append(f"  ... and {len(lines) - len(shown)} more")
        raise ConfigError("\n".join([f"{source}: {len(lines)} problem(s)", *shown])) from None


class NestedConfigError(ValueError):
    """Problems of a table with a class chosen during validation; each line starts with a field of that table."""

    def __init__(self, lines: Sequence[str]) -> None:
        super().__init__("\n".join(lines))
        self.lines = list(lines)


def problems(cls: type[Config], error: pydantic.ValidationError) -> list[str]:
    """One line per problem of `error`, raised by the validation of a `cls`."""
    return [line for detail in error.errors() for line in _describe(cls, detail)]


def read_toml(path: str | Path) -> dict[str, Any]:
    """Reads a TOML file as a dict. Raises ConfigError if it is missing, unreadable, not TOML or beyond the limits of
    structured_text.py."""
    try:
        return parse_toml(read_limited(Path(path), limit_bytes=MAX_BYTES, follow_links=True).decode("utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such config file; give the path of a .toml file") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: not a readable TOML file: {error}") from None


def dumps(config: Config) -> str:
    """The config as TOML, without None values; `parse(type(config), tomllib.loads(dumps(config)))` equals it."""
    return tomli_w.dumps(config.model_dump(mode="json", exclude_none=True))


def apply_overrides(values: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Returns `values` with each `dotted.key=value` applied; a value that is not TOML is a string.

    A list element is addressed by its index (`model.layers.0.repeat=3`). The value `null` takes the key out of its
    table, so that its default holds; a key that is not there becomes None, which `parse` refuses if it is unknown.
    The text is `"null"`.

    Raises:
        ConfigError: an override has no `=`, an empty key, or a path through something that is not a table.
    """
    result = _copy(values)
    for override in overrides:
        key, separator, text = override.partition("=")
        if not separator or not all(part.strip() for part in key.split(".")):
            raise ConfigError(f"override {override!r} is not of the form key=value, for example train.steps=100")
        if key.count(".") > MAX_DEPTH:
            raise ConfigError(f"override {override[:80]!r}...: its key has more than {MAX_DEPTH} parts")
        _assign(result, [part.strip() for part in key.split(".")], _read_value(text), override)
    return result


def _read_value(text: str) -> Any:
    if text.strip() == "null":
        return None
    try:
        return parse_toml(f"value = {text}")["value"]
    except ValueError:
        return text


def _assign(table: Any, path: list[str], value: Any, override: str) -> None:
    for depth, part in enumerate(path):
        last = depth == len(path) - 1
        if isinstance(table, list):
            if not part.isdecimal() or int(part) >= len(table):
                raise ConfigError(f"override {override!r}: {part!r} is not an index into {len(table)} elements")
            index: Any = int(part)
        elif isinstance(table, dict):
            index = part
        else:
            raise ConfigError(f"override {override!r}: {'.'.join(path[:depth])} is a value, not a table")
        if last and value is None and isinstance(table, dict) and index in table:
            del table[index]
        elif last:
            table[index] = value
        elif value is None and isinstance(table, dict) and index not in table:
            table[index] = None
            return
        elif isinstance(table, dict):
            table = table.setdefault(index, {})
        else:
            table = table[index]


def _copy(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _copy(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_copy(item) for item in value]
    return value


def field_docstrings(cls: type[Config]) -> dict[str, str]:
    """The docstrings of a config's fields, those of its bases included, by name.

    Read from the source where they are printed. With pydantic's `use_attribute_docstrings` every command would parse
    the source of every class.
    """
    found: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if issubclass(base, Config):
            found |= _docstrings_in(base.__module__).get(base.__qualname__, {})
    return {name: text for name, text in found.items() if name in cls.model_fields}


@functools.cache
def _docstrings_in(module: str) -> dict[str, dict[str, str]]:
    """The texts below annotated names of a module's classes, by class and name."""
    classes = [
        node for node in ast.parse(inspect.getsource(sys.modules[module])).body if isinstance(node, ast.ClassDef)
    ]
    return {node.name: dict(_docstrings(node)) for node in classes}


def _docstrings(node: ast.ClassDef) -> Iterator[tuple[str, str]]:
    for statement, below in itertools.pairwise(node.body):
        match statement, below:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                yield name, inspect.cleandoc(text)


def suggest(name: str, known: Sequence[str]) -> str:
    """'did you mean X?' for a near miss, else the list of known names."""
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    return f"did you mean {close[0]!r}?" if close else f"known: {', '.join(sorted(known))}"


def _describe(cls: type[Config], detail: Any) -> Iterator[str]:
    """Yields one line per problem in pydantic's `detail`: dotted field, value, rule, remedy."""
    location = [part for part in detail["loc"] if not _is_type_tag(part)]
    field = ".".join(str(part) for part in location)
    kind, value = detail["type"], detail["input"]
    if kind == "extra_forbidden":
        yield f"{field}: unknown key; {_key_hint(_owner(cls, location[:-1]), str(location[-1]), value)}"
    elif kind == "missing":
        yield f"{field}: required, but missing; set it in the file or as an override"
    elif kind == "value_error" and isinstance(detail["ctx"]["error"], NestedConfigError):
        yield from (f"{field}.{line}" for line in detail["ctx"]["error"].lines)
    elif kind == "value_error":
        for line in str(detail["ctx"]["error"]).splitlines():
            yield f"{field}: {line}" if field else line
    else:
        hint = ""
        if kind == "literal_error" and (present := _present_value(_owner(cls, location[:-1]), location[-1], value)):
            hint = f"; did you mean {present!r}?"
        yield f"{field} = {_shortened(repr(value))}: {detail['msg'][:1].lower()}{detail['msg'][1:]}{hint}"


def _shortened(text: str) -> str:
    return text if len(text) <= _LONGEST_VALUE else f"{text[:_LONGEST_VALUE]}... ({len(text):,} characters)"


def _key_hint(owner: type[Config] | None, key: str, value: Any) -> str:
    """The remedy for an unknown key of `owner`: the present name of a renamed key, else the key in a table of
    `owner`, else a near miss."""
    if owner is None:
        return "remove it"
    present = [renamed.key for path, renamed in RENAMED.items() if path.rpartition(".")[2] == key]
    if not present or present[0] not in owner.model_fields:
        tables = {name: _config_in(field.annotation) for name, field in owner.model_fields.items()}
        for name, table in tables.items():
            if isinstance(table, type) and issubclass(table, Config) and key in table.model_fields:
                return f"did you mean '{name}.{key}'?"
        return suggest(key, list(owner.model_fields))
    new_value = _present_value(owner, present[0], value)
    return f"did you mean {present[0]!r}" + (f" with the value {new_value!r}?" if new_value else "?")


def _present_value(owner: type[Config] | None, key: Any, value: Any) -> str | None:
    """The present name of a renamed value of the field `key` of `owner`; None for any other value."""
    if owner is None or key not in owner.model_fields or not isinstance(value, str):
        return None
    return next((renamed.values.get(value) for renamed in RENAMED.values() if renamed.key == key), None)


def _is_type_tag(part: Any) -> bool:
    # pydantic puts names of union branches and of wrap validators into a location; they are not keys of the file.
    return isinstance(part, str) and ("[" in part or "(" in part)


def _owner(cls: type[Config], location: Sequence[Any]) -> type[Config] | None:
    """The Config class of the table at `location`, or None if it is inside a list of mixed classes."""
    current: Any = cls
    for part in location:
        if isinstance(part, int):
            continue
        if not (isinstance(current, type) and issubclass(current, Config)) or part not in current.model_fields:
            return None
        current = _config_in(current.model_fields[part].annotation)
    return current if isinstance(current, type) and issubclass(current, Config) else None


def _config_in(annotation: Any) -> Any:
    """The Config class inside `X`, `X | None`, `list[X]` and `tuple[X, ...]`."""
    origin = get_origin(annotation)
    if origin is None or origin is Literal:
        return annotation
    candidates = [_config_in(item) for item in get_args(annotation) if item not in (types.NoneType, ...)]
    found = [item for item in candidates if isinstance(item, type) and issubclass(item, Config)]
    return found[0] if found else None
