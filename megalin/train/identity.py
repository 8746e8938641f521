"""Identity of a run: the values that decide its numbers, by name, each with the consequence of another value.

A run compares them between its ranks at the start, and with the record of the checkpoint from which it goes on. A key
of the config declares its consequence in its class (`Config.on_change`, `OnChange`); the others are declared here.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import json
import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch

import megalin
from megalin.config import Change, Config, OnChange, translate_renamed
from megalin.data.sources import Dataset, Training, sample_digest
from megalin.data.tokenizers.huggingface import HuggingFaceTokenizer
from megalin.data.tokenizers.tokenizer import Tokenizer
from megalin.errors import ConfigError, DataError, MegalinError
from megalin.model.config import AnyModelConfig, StackConfig
from megalin.parallel.agreement import equal_over_ranks, on_every_rank
from megalin.parallel.mesh import Mesh
from megalin.train.config import RunConfig
from megalin.train.environment import device_name, versions
from megalin.train.identity_file import value_text

_SOURCES = (".py", ".cu", ".cuh", ".cpp", ".h", ".toml")
_KERNEL_MODULES = ("triton", "megalin._C", "apex")
_EXTENSIONS = {"_index": "csrc/cpu", "_C": "csrc/cuda"}
"""Folder of the sources of each extension in a checkout."""
_NOT_COMPARED = ("MEGALIN_CACHE", "MEGALIN_HEARTBEATS", "MEGALIN_MIXERS")  # change no number
_EVERY_STEP = 10**12  # the most that a run may have
_MOST_LINES = 8


class IdentityEntry(NamedTuple):
    """A value of the identity."""

    value: Any
    """JSON."""
    change: Change
    """Consequence of another value where the run goes on."""


class Difference(NamedTuple):
    """A value that differs from the recorded one."""

    name: str
    recorded: Any
    found: Any
    change: Change


def config_entries(config: RunConfig) -> dict[str, IdentityEntry]:
    """Every key of a run's config under its dotted name; the blocks of the model are written out."""
    return dict(_entries("", config, None))


def model_entries(model: AnyModelConfig) -> dict[str, IdentityEntry]:
    """The keys of `config_entries` for the model alone."""
    return dict(_entries("model", model, None))


def _entries(name: str, value: Any, change: Change | None) -> Iterator[tuple[str, IdentityEntry]]:
    if isinstance(value, Config):
        for key, field in type(value).model_fields.items():
            own = next((mark.change for mark in field.metadata if isinstance(mark, OnChange)), type(value).on_change)
            if key == "layers" and isinstance(value, StackConfig):
                blocks = [block.sublayers for _, block in value.blocks()]
                yield from _entries(f"{name}.blocks", blocks, own)
            else:
                yield from _entries(f"{name}.{key}" if name else key, getattr(value, key), own)
    elif isinstance(value, list) and value and isinstance(value[0], Config | list):
        assert change is not None, name
        yield name, IdentityEntry(len(value), change)
        for number, item in enumerate(value):
            yield from _entries(f"{name}.{number}", item, change)
    else:
        assert change is not None, f"{name}: declare the consequence of another value, by Config.on_change or OnChange"
        yield name, IdentityEntry(value, change)


def _leaves(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """A recorded config under the names of `config_entries`."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _leaves(f"{name}.{key}" if name else key, item)
    elif isinstance(value, list) and value and isinstance(value[0], dict):
        yield name, len(value)
        for number, item in enumerate(value):
            yield from _leaves(f"{name}.{number}", item)
    else:
        yield name, value


def program_entries() -> dict[str, IdentityEntry]:
    """The installation of this process, so far as it changes what is computed: code, versions, extensions, kernels."""
    found = {f"version of {name}": str(version) for name, version in versions().items()}
    found |= {
        name: value for name, value in os.environ.items() if name.startswith("MEGALIN_") and name not in _NOT_COMPARED
    }
    found |= {f"{name} for kernels": "installed" for name in _KERNEL_MODULES if importlib.util.find_spec(name)}
    found |= {f"sources of megalin.{name}": built for name in _EXTENSIONS if (built := _built_from(name)) is not None}
    if torch.cuda.is_available():
        found["compute capability"] = ".".join(map(str, torch.cuda.get_device_capability()))
    found["code of megalin"] = code_digest()
    return {name: IdentityEntry(value, "reported") for name, value in found.items()}


def run_entries(tokenizer: Tokenizer | None, validation: Dataset[Any] | None, mesh: Mesh) -> dict[str, IdentityEntry]:
    """The values of a run besides its config and training samples: program, mesh, device, ids of the tokenizer, and the
    validation split."""
    found = program_entries()
    axes = f"tp {mesh.tp.size}, cp {mesh.cp.size}, pp {mesh.pp.size}, dp {mesh.samples.size}"
    found |= {"mesh": IdentityEntry(axes, "reported"), "device": IdentityEntry(device_name(mesh.device), "reported")}
    if tokenizer is not None:
        found["ids of the tokenizer"] = IdentityEntry(tokenizer_digest(tokenizer), "refused")
    if validation is not None:
        found["some samples of the validation split"] = IdentityEntry(sample_digest(validation), "reported")
    return found


def tokenizer_digest(tokenizer: Tokenizer) -> str:
    """sha256, in hex, of vocabulary, special tokens, normalizer and end of document: equal for files that differ in
    form alone."""
    content = tokenizer.definition if isinstance(tokenizer, HuggingFaceTokenizer) else tokenizer.digest
    return hashlib.sha256(json.dumps([content, tokenizer.eod_id]).encode()).hexdigest()


def check_same_inputs(inputs: Mapping[str, IdentityEntry], data: Training) -> None:
    """Compares `run_entries`, but the names of GPUs, and the training samples over the ranks: hosts may have different
    disks.

    Raises:
        DataError: on every rank, if they differ; names ranks, hosts and both values.
    """
    own = {name: entry for name, entry in inputs.items() if name != "device"}
    check_same_over_ranks({**values_of(own), **data.identity(_EVERY_STEP)}, DataError)


def check_same_start(config: RunConfig) -> None:
    """Compares the installation and the config over the ranks.

    Raises:
        ConfigError: on every rank, if they differ; names ranks, hosts and both values.
    """
    check_same_over_ranks(values_of({**program_entries(), **config_entries(config)}), ConfigError)


def values_of(entries: Mapping[str, IdentityEntry]) -> dict[str, Any]:
    """The values alone."""
    return {name: entry.value for name, entry in entries.items()}


def check_same_over_ranks(values: Mapping[str, Any], error: type[MegalinError]) -> None:
    """Compares values by name over all ranks: one all-reduce of 64 bytes, and a message where they differ.

    Raises:
        MegalinError: `error`, on every rank, if they differ; names ranks, hosts and both values.
    """
    if equal_over_ranks(json.dumps(values, sort_keys=True).encode()):
        return
    found = on_every_rank(lambda: (socket.gethostname(), dict(values)), tuple[str, dict[str, Any]])
    first_host, first = found[0]
    changed = [
        (number, host, name, own.get(name))
        for number, (host, own) in enumerate(found)
        for name in sorted({*first, *own})
        if own.get(name) != first.get(name)
    ]
    lines = [
        f"rank {number} ({host}) has {name} = {value_text(value)}, rank 0 ({first_host}) {value_text(first.get(name))}"
        for number, host, name, value in changed
    ]
    raise error(
        "ranks differ in what decides the run's numbers; give all of them the same installation, environment, config "
        "and files:\n" + _cut(lines)
    )


def differences(recorded: Mapping[str, Any], entries: Mapping[str, IdentityEntry]) -> list[Difference]:
    """The entries with another value than the recorded one. Names that only one version of megalin has are left out,
    but not those of a table that only one of the two has."""
    found = []
    for name, entry in entries.items():
        if name in recorded:
            if recorded[name] != entry.value:
                found.append(Difference(name, recorded[name], entry.value, entry.change))
        elif any(parent in recorded and recorded[parent] is None for parent in _parents(name)):
            found.append(Difference(name, None, entry.value, entry.change))
    for name in recorded.keys() - entries.keys():
        left_out = [entries[parent] for parent in _parents(name) if parent in entries and entries[parent].value is None]
        if left_out and recorded[name] is not None:
            found.append(Difference(name, recorded[name], None, left_out[0].change))
    return sorted(found)


def recorded_entries(config: Mapping[str, Any], model: AnyModelConfig) -> dict[str, Any]:
    """The keys of a recorded config, which an earlier version may have written, under the names of `config_entries`.

    Args:
        model: its model.
    """
    leaves = dict(_leaves("", translate_renamed(config)))
    others = {name: value for name, value in leaves.items() if not name.startswith("model.")}
    return others | {name: entry.value for name, entry in model_entries(model).items()}


def refusal(found: list[Difference]) -> str:
    """The differences that are refused, a line each."""
    return _cut(
        [f"{each.name}: {value_text(each.recorded)} in the checkpoint, {value_text(each.found)} now" for each in found]
    )


def _parents(name: str) -> Iterator[str]:
    while name := name.rpartition(".")[0]:
        yield name


def _cut(lines: list[str]) -> str:
    more = [f"and {len(lines) - _MOST_LINES} more"] if len(lines) > _MOST_LINES else []
    return "\n".join(f"  {line}" for line in [*lines[:_MOST_LINES], *more])


@functools.cache
def _built_from(extension: str) -> str | None:
    """sha256 of the sources that an extension was compiled from; None where it is not installed. Raises ConfigError if
    those of a checkout, where they can be read, are others."""
    if importlib.util.find_spec(f"megalin.{extension}") is None:
        return None
    built: str = importlib.import_module(f"megalin.{extension}").sources
    folder = Path(megalin.__file__).resolve().parents[1] / _EXTENSIONS[extension]
    with suppress(FileNotFoundError, PermissionError):
        contents = b"".join(path.read_bytes() for path in sorted(folder.iterdir()))  # as in setup.py
        if hashlib.sha256(contents).hexdigest() != built:
            raise ConfigError(
                f"megalin.{extension} was compiled from other sources than {folder} has; compile it: make install"
            )
    return built


@functools.cache
def code_digest() -> str:
    """sha256, in hex, of the names and contents of megalin's source files."""
    root, state = os.path.dirname(megalin.__file__), hashlib.sha256()
    for folder, folders, names in os.walk(root, followlinks=True):
        folders.sort()
        for name in sorted(names):
            if name.endswith(_SOURCES):
                path = os.path.join(folder, name)
                state.update(f"{os.path.relpath(path, root)}\0".encode())
                with open(path, "rb") as file:
                    state.update(hashlib.sha256(file.read()).digest())
    return state.hexdigest()
