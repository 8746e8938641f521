"""Import of another system's config into files: a TOML, and a JSON with the keys for DeepSpeed's engine."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from megalin.errors import ConfigError, StorageError
from megalin.files import FileTooLargeError, read_limited
from megalin.interop.configs.deepspeed import add_deepspeed, read_json
from megalin.interop.configs.flags import load_yaml
from megalin.interop.configs.imported import ImportedConfig
from megalin.interop.configs.megatron import add_script, add_yaml
from megalin.interop.configs.neox import add_neox, is_neox
from megalin.interop.configs.recognition import SUPPORTED, recognized_as, refuse_foreign
from megalin.structured_text import MAX_BYTES, parse_toml


def import_config(
    source: str,
    output: Path,
    *,
    variables: Mapping[str, str],
    deepspeed_config: Path | None = None,
    overrides: Sequence[str] = (),
) -> ImportedConfig:
    """Imports `source` as `output`; keys for DeepSpeed's engine go to `<output's stem>.deepspeed.json` next to it.

    Args:
        source: the path of a shell script, of a YAML of Megatron-LM or gpt-neox, or of a DeepSpeed JSON; a command;
            or "-" for a script on standard input.
        output: the TOML to write; it must not exist.
        variables: values of the script's variables, and of its arguments by number.
        deepspeed_config: the JSON of a Megatron-DeepSpeed command.
        overrides: `key=value` pairs that fill in or change keys.

    Raises:
        ConfigError: a source that is missing, unreadable or of another system, or an override that cannot be applied.
        StorageError: a file that exists or cannot be written.
    """
    text, name = _text(source)
    imported, rest = ImportedConfig(name), {}
    suffix = Path(name).suffix.lower()
    if suffix == ".toml":
        _refuse_toml(text, name)
    elif suffix == ".json":
        rest = _add_deepspeed(text, name, imported)
    else:
        if deepspeed_config is not None:
            rest = _add_deepspeed(_read(deepspeed_config), str(deepspeed_config), imported)
        if suffix in (".yaml", ".yml"):
            _add_yaml(text, imported)
        else:
            add_script(text, variables, imported)
    kept = output.with_suffix(".deepspeed.json")
    if rest:
        imported.set("train.deepspeed_config", str(kept), "keys that only DeepSpeed's engine reads")
    imported.override(overrides)
    imported.check()
    _write(output, imported.toml())
    if rest:
        _write(kept, json.dumps(rest, indent=2) + "\n")
    return imported


def _add_deepspeed(text: str, source: str, imported: ImportedConfig) -> dict[str, Any]:
    document = read_json(text, source)
    refuse_foreign(document, source)
    with recognized_as("DeepSpeed", imported, source, keys=len(document)):
        return add_deepspeed(document, imported)


def _add_yaml(text: str, imported: ImportedConfig) -> None:
    """Reads a YAML of gpt-neox or Megatron-LM, recognised by its keys."""
    values = load_yaml(text, imported.source)
    refuse_foreign(values, imported.source)
    if is_neox(values):
        add_neox(values, imported)
    else:
        add_yaml(values, imported)


def _refuse_toml(text: str, source: str) -> NoReturn:
    try:
        values = parse_toml(text)
    except ValueError as error:
        raise ConfigError(f"{source}: invalid TOML: {error}") from None
    refuse_foreign(values, source)
    raise ConfigError(f"{source}: a TOML of no known system; import-config reads {SUPPORTED}")


def _text(source: str) -> tuple[str, str]:
    """The text of a source and its name in messages."""
    if source == "-":
        try:
            text = sys.stdin.read()
            text.encode()  # bytes outside of UTF-8 may be read as half surrogates
        except UnicodeError as error:
            raise ConfigError(f"standard input: not UTF-8: {error}; convert the script") from None
        return text, "standard input"
    if " " in source.strip() and "--" in source:
        return source, "the command line"
    return _read(Path(source)), source


def _read(path: Path) -> str:
    try:
        return read_limited(path, limit_bytes=MAX_BYTES, follow_links=True).decode("utf-8")
    except FileTooLargeError:
        raise ConfigError(f"{path}: more than {MAX_BYTES} bytes, too large for a config; give the config") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not a readable text file: {error}; give a path, or a command in quotes") from None


def _write(path: Path, text: str) -> None:
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise StorageError(f"{path}: exists already; remove it or give another name") from None
    except OSError as error:
        raise StorageError(f"{path}: cannot be written: {error}") from None
