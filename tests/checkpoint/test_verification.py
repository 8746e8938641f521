"""Damaged checkpoints, skipped for the one before; forged ones, refused with the reason."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from megalin.checkpoint.index import Chunk, TensorRecord, coverage_problem, parse_index
from megalin.checkpoint.load import load, newest
from megalin.checkpoint.manifest import directory_step
from megalin.errors import CheckpointError
from tests.checkpoint.saved import edit_json, seal, tensors, write

_FILES = ["rank00000-00000.safetensors", "index.json", "train_state.json", "manifest.json"]


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x10
    path.write_bytes(data)


def _truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def _link(path: Path) -> None:
    target = path.with_name("elsewhere")
    path.rename(target)
    path.symlink_to(target)


def _fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize("name", _FILES)
@pytest.mark.parametrize("damage", [_flip, _truncate, Path.unlink, _link, _fifo])
def test_a_damaged_file_is_named_and_the_step_before_is_taken(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: Callable[[Path], None], name: str
) -> None:
    directory = write(tmp_path, 1, 2)
    damage(directory / name)
    checkpoint = newest(tmp_path)
    assert checkpoint is not None
    assert checkpoint.step == 1
    warnings = [record.getMessage() for record in caplog.records if "skipped" in record.getMessage()]
    assert len(warnings) == 1
    assert str(directory / name) in warnings[0]


def test_every_flipped_byte_is_seen(tmp_path: Path) -> None:
    path = write(tmp_path, 1) / _FILES[0]
    good = path.read_bytes()
    for position in range(len(good)):
        path.write_bytes(good[:position] + bytes([good[position] ^ 1]) + good[position + 1 :])
        with pytest.raises(CheckpointError, match=r"sha256 differs from manifest.json"):
            newest(tmp_path)


def test_a_file_of_another_step_is_seen(tmp_path: Path) -> None:
    directory = write(tmp_path, 1, 2)
    shutil.copy(tmp_path / "step-00000001" / _FILES[0], directory / _FILES[0])
    assert newest(tmp_path).step == 1  # type: ignore[union-attr]


def test_a_directory_under_another_steps_name_is_seen(tmp_path: Path) -> None:
    shutil.copytree(write(tmp_path, 1), tmp_path / "step-00000009")
    shutil.rmtree(tmp_path / "step-00000001")
    with pytest.raises(CheckpointError, match="is of step 1, which belongs in step-00000001"):
        newest(tmp_path)


def test_a_linked_directory_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "other", 5)
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "step-00000005").symlink_to(tmp_path / "other" / "step-00000005")
    with pytest.raises(CheckpointError, match="links are refused"):
        newest(tmp_path / "runs")


def test_no_checkpoint_is_none_but_only_broken_ones_are_an_error(tmp_path: Path) -> None:
    assert newest(tmp_path / "absent") is None
    assert newest(tmp_path) is None
    _flip(write(tmp_path, 3) / "index.json")
    with pytest.raises(CheckpointError, match="no valid checkpoint; restore one, or move these away"):
        newest(tmp_path)


@pytest.mark.parametrize("name", ["old-step-00000099", "step-00000099.tmp", "step-99", ".tmp-step-00000099-ab"])
def test_only_exact_names_are_checkpoints(tmp_path: Path, name: str) -> None:
    write(tmp_path, 1)
    (tmp_path / name).mkdir()
    assert newest(tmp_path).step == 1  # type: ignore[union-attr]
    assert directory_step("step-00000099\n") is None


@pytest.mark.parametrize(
    ("keys", "value", "message"),
    [
        (("files", "../outside"), {"size": 1, "sha256": "0" * 64}, "not a manifest"),
        (("files", "/etc/passwd"), {"size": 1, "sha256": "0" * 64}, "not a manifest"),
        (("files", "index.json", "size"), 2**70, "in manifest.json"),
        (("files", "index.json", "size"), -1, "not a manifest"),
        (("files", "index.json", "sha256"), "x", "not a manifest"),
        (("format",), 2, "not a manifest: format"),
        (("extra",), 2, "not a manifest: extra"),
    ],
)
def test_a_hostile_manifest_is_refused(tmp_path: Path, keys: tuple[str, ...], value: object, message: str) -> None:
    edit_json(write(tmp_path, 1) / "manifest.json", *keys, value=value)
    with pytest.raises(CheckpointError, match=message):
        newest(tmp_path)


def test_json_bombs_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = write(tmp_path, 1)
    (directory / "manifest.json").write_text("[" * 200_000)
    with pytest.raises(CheckpointError, match="not a manifest"):
        newest(tmp_path)
    monkeypatch.setattr("megalin.checkpoint.manifest.JSON_LIMIT_BYTES", 1000)
    with pytest.raises(CheckpointError, match="the limit for JSON"):
        newest(tmp_path)


@pytest.mark.parametrize("text", ["[" * 200_000, "{", "[1]"])
def test_a_state_that_is_no_object_is_refused(tmp_path: Path, text: str) -> None:
    directory = write(tmp_path, 1)
    (directory / "train_state.json").write_text(text)
    seal(directory)
    with pytest.raises(CheckpointError, match=r"not (JSON|a JSON object)"):
        newest(tmp_path).state()  # type: ignore[union-attr]


def test_a_file_changed_after_verification_is_seen(tmp_path: Path) -> None:
    directory = write(tmp_path, 1)
    checkpoint = newest(tmp_path)
    assert checkpoint is not None
    (directory / "train_state.json").write_text("{}")
    with pytest.raises(CheckpointError, match="changed since the checkpoint was verified"):
        checkpoint.state()


def _load(root: Path) -> None:
    checkpoint = newest(root)
    assert checkpoint is not None
    targets = {name: torch.full_like(tensor, 7.0) for name, tensor in tensors(1).items()}
    try:
        load(checkpoint, targets)
    finally:
        assert all(bool((target == 7.0).all()) for target in targets.values()), "a refused load changed a tensor"


_CHUNK = ("tensors", "embedding.weight", "chunks", "0")


@pytest.mark.parametrize(
    ("keys", "value", "message"),
    [
        ((*_CHUNK, "file"), "../outside.safetensors", "not a checkpoint index: tensors.embedding.weight"),
        ((*_CHUNK, "file"), "train_stat.json", "names files that are not in manifest.json: train_stat.json"),
        ((*_CHUNK, "file"), "train_state.json", "not a safetensors file"),
        ((*_CHUNK, "lengths"), [12, 2], "its chunks have 24 elements, but shape .12, 4. has 48"),
        ((*_CHUNK, "lengths"), [2**60, 4], "not a checkpoint index"),
        ((*_CHUNK, "offsets"), [-1, 0], "not a checkpoint index"),
        (
            ("tensors", "embedding.weight", "dtype"),
            "I32",
            "embedding.weight is F32 .12, 4., but I32 .12, 4. in the index",
        ),
        (("tensors", "embedding.weight", "dtype"), "OBJECT", "not a checkpoint index"),
    ],
)
def test_a_hostile_index_is_refused(tmp_path: Path, keys: tuple[str, ...], value: object, message: str) -> None:
    directory = write(tmp_path, 1)
    edit_json(directory / "index.json", *keys, value=value)
    seal(directory)
    with pytest.raises(CheckpointError, match=message):
        _load(tmp_path)


def test_a_manifest_without_its_index_is_refused(tmp_path: Path) -> None:
    directory = write(tmp_path, 1)
    manifest = json.loads((directory / "manifest.json").read_text())
    del manifest["files"]["index.json"]
    (directory / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match=r"index\.json is not in manifest\.json"):
        _load(tmp_path)


def _start(root: Path) -> None:
    checkpoint = newest(root)
    assert checkpoint is not None
    checkpoint.state()
    load(checkpoint, tensors(1))


class _Exploit:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.marker),)


def _header(document: object) -> bytes:
    text = json.dumps(document).encode()
    return struct.pack("<Q", len(text)) + text


_ENTRY = {"dtype": "F32", "shape": [12, 4], "data_offsets": [0, 192]}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "claims 0 bytes in a file of 0"),
        (struct.pack("<Q", 2**62) + b"{}", "claims 4611686018427387904 bytes"),
        (struct.pack("<Q", 200_000) + b"[" * 200_000, "not a safetensors file"),
        (_header([]), "not an object"),
        (_header({"embedding.weight": {**_ENTRY, "shape": [-12, -4]}}), "'embedding.weight' is malformed"),
        (_header({"embedding.weight": {**_ENTRY, "data_offsets": [0, 2**60]}}), "out of bounds"),
        (_header({"embedding.weight": {**_ENTRY, "data_offsets": [8, 192]}}) + b"0" * 192, "out of bounds"),
        (_header({"embedding.weight": _ENTRY}) + b"0" * 192, "head.weight is absent, but BF16"),
    ],
)
def test_a_hostile_tensor_file_is_refused(tmp_path: Path, data: bytes, message: str) -> None:
    directory = write(tmp_path, 1)
    (directory / _FILES[0]).write_bytes(data)
    seal(directory)
    with pytest.raises(CheckpointError, match=message):
        _load(tmp_path)


@pytest.mark.parametrize("name", _FILES)
def test_a_pickle_is_never_run(tmp_path: Path, name: str) -> None:
    directory = write(tmp_path, 1)
    marker = tmp_path / "ran"
    (directory / name).write_bytes(pickle.dumps(_Exploit(marker)))
    if name != "manifest.json":
        seal(directory)
    with pytest.raises(CheckpointError):
        _start(tmp_path)
    assert not marker.exists()


def _record(shape: list[int], *boxes: tuple[list[int], list[int]]) -> TensorRecord:
    chunks = [Chunk(offsets=offsets, lengths=lengths, file="f") for offsets, lengths in boxes]
    return TensorRecord(dtype="F32", shape=shape, chunks=chunks)


@pytest.mark.parametrize(
    ("record", "problem"),
    [
        (_record([4, 4], ([0, 0], [2, 4]), ([2, 0], [2, 2]), ([2, 2], [2, 2])), None),
        (_record([]), "its chunks have 0 elements"),
        (_record([], ([], [])), None),
        (_record([0, 3]), None),
        (_record([4, 4], ([0, 0], [2, 4])), "its chunks have 8 elements"),
        (_record([4, 4], ([0, 0], [2, 4]), ([1, 0], [2, 4])), "chunks at .0, 0. and .1, 0. overlap"),
        (_record([4, 4], ([0, 0], [4, 2]), ([0, 1], [4, 2])), "overlap"),
        (_record([4, 4], ([0, 0], [5, 4])), "exceeds shape"),
        (_record([4, 4], ([0, 0], [0, 4])), "is empty"),
        (_record([4, 4], ([0], [4])), "does not have the number of dims"),
    ],
)
def test_chunks_cover_a_tensor_once(record: TensorRecord, problem: str | None) -> None:
    found = coverage_problem(record)
    if problem is None:
        assert found is None
    else:
        with pytest.raises(CheckpointError, match=problem):
            parse_index(json.dumps({"tensors": {"w": record.model_dump()}}).encode(), "index.json")
