"""Reader of other systems' folders: config.json and safetensors, validated before tensors are read; never pickle."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

import safetensors
import torch
from torch import Tensor

from megalin.checkpoint.index import FILE_NAME_PATTERN
from megalin.checkpoint.manifest import read_json_bytes
from megalin.errors import CheckpointError
from megalin.structured_text import parse_json

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
FLOATS = ("F32", "BF16", "F16")
"""Dtypes that fp32 holds exactly, by their safetensors names."""
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


class Entry(NamedTuple):
    """File, dtype and shape of a tensor."""

    file: str
    dtype: str
    shape: list[int]


def read_json(path: Path) -> dict[str, Any]:
    """Reads a JSON object of at most 256 MiB; links are followed, because download caches consist of them.

    Raises:
        CheckpointError: unreadable, too large, or not a JSON object.
    """
    try:
        value = parse_json(read_json_bytes(path.resolve()))
    except ValueError as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{path}: not JSON: {error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: not a JSON object")
    return value


class Folder:
    """Tensors of a folder by name, from its files' headers; a context manager that keeps the files open.

    Attributes:
        tensors: file, dtype and shape of each; consistent with the index, if there is one.
    """

    def __init__(self, path: Path) -> None:
        """Reads the index and every header, but no tensor.

        Raises:
            CheckpointError: no folder, no safetensors files, an index with missing files or files outside of the
                folder, or headers that are corrupt or disagree with the index.
        """
        self.path = path
        self._open: dict[str, Any] = {}
        index = self._index()
        files = sorted(set(index.values())) if index is not None else [WEIGHTS_FILE]
        self.tensors: dict[str, Entry] = {}
        for file in files:
            self._read_header(file)
        if index is not None and (problems := self._disagreements(index)):
            raise CheckpointError(f"{path / INDEX_FILE} and its files disagree:\n  " + "\n  ".join(problems))

    def read(self, name: str) -> Tensor:
        """Reads one tensor, in its own dtype. Raises CheckpointError."""
        file = self.tensors[name].file
        try:
            tensor: Tensor = self._open[file].get_tensor(name)
        except (safetensors.SafetensorError, OSError) as error:
            raise CheckpointError(f"{self.path / file}: {name} cannot be read: {error}") from None
        return tensor

    def problems(self, expected: Mapping[str, list[int]], *, ignored: tuple[str, ...] = ()) -> list[str]:
        """Lists every tensor that is missing, has another shape or has a dtype that fp32 cannot represent, and every
        extra one whose name does not end with one of `ignored`."""
        problems = []
        for name, shape in expected.items():
            entry = self.tensors.get(name)
            if entry is None:
                problems.append(f"{name}: missing; expected shape {shape}")
            elif entry.shape != shape:
                problems.append(f"{name}: shape {entry.shape}, expected {shape}")
            elif entry.dtype not in FLOATS:
                problems.append(f"{name}: dtype {entry.dtype} is not supported; store it as {' or '.join(FLOATS)}")
        for name, entry in self.tensors.items():
            if name not in expected and not (ignored and name.endswith(ignored)):
                problems.append(f"{name}: unexpected tensor of shape {entry.shape}")
        return problems

    def _index(self) -> dict[str, str] | None:
        """The file of each tensor, or None if one file has them all."""
        if not self.path.is_dir():
            raise CheckpointError(f"{self.path}: not a folder; give one with config.json and *.safetensors")
        if not (self.path / INDEX_FILE).exists():
            if not (self.path / WEIGHTS_FILE).exists():
                raise self._no_weights()
            return None
        weight_map = read_json(self.path / INDEX_FILE).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise CheckpointError(f"{self.path / INDEX_FILE}: weight_map must be an object of tensor names and files")
        for name, file in weight_map.items():
            if not isinstance(file, str) or not re.fullmatch(FILE_NAME_PATTERN, file):
                raise CheckpointError(
                    f"{self.path / INDEX_FILE}: {name[:100]!r} is mapped to {str(file)[:200]!r}, which is not the name "
                    "of a file in this folder"
                )
        if missing := sorted(file for file in set(weight_map.values()) if not (self.path / file).exists()):
            raise CheckpointError(
                f"{self.path / INDEX_FILE}: these files are missing: {', '.join(missing)}; download them again"
            )
        return weight_map

    def _no_weights(self) -> CheckpointError:
        pickles = sorted(entry.name for entry in self.path.iterdir() if entry.suffix in _PICKLES)
        if pickles:
            return CheckpointError(
                f"{self.path}: has weights as pickles only ({', '.join(pickles[:4])}), which can run code and are "
                "never read; save the model as safetensors first"
            )
        return CheckpointError(f"{self.path}: has neither {WEIGHTS_FILE} nor {INDEX_FILE}")

    def _read_header(self, file: str) -> None:
        path = (self.path / file).resolve()
        try:
            if not path.is_file():
                raise OSError("not a regular file")
            opened = safetensors.safe_open(path, framework="pt")
            for name in opened.keys():  # noqa: SIM118 - not a dict
                header = opened.get_slice(name)
                self.tensors[name] = Entry(file, header.get_dtype(), list(header.get_shape()))
        except (safetensors.SafetensorError, OSError) as error:
            raise CheckpointError(f"{self.path / file}: not a safetensors file: {error}") from None
        self._open[file] = opened

    def _disagreements(self, index: Mapping[str, str]) -> list[str]:
        found = {name: entry.file for name, entry in self.tensors.items()}
        return [
            f"{name}: stored in {found.get(name, 'no file')}, but the index lists {index.get(name, 'no file')}"
            for name in sorted(found.keys() | index.keys())
            if found.get(name) != index.get(name)
        ]

    def close(self) -> None:
        """Closes the files."""
        self._open.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def equal(first: Tensor, second: Tensor) -> bool:
    """True if two tensors have the same shape and values."""
    return first.shape == second.shape and torch.equal(first.float(), second.float())
