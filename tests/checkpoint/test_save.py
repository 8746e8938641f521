"""Saving: a checkpoint is published completely or not at all, on every rank."""

from __future__ import annotations

import errno
import logging
import os
import resource
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from megalin.checkpoint import publishing, storage
from megalin.checkpoint.load import load, newest
from megalin.checkpoint.manifest import file_problems, read_manifest
from megalin.checkpoint.save import save
from megalin.checkpoint.verification import VerifiedCheckpoints
from megalin.errors import StorageError
from megalin.files import FolderLock
from tests.checkpoint.saved import names, tensors, write, write_in_background
from tests.ranks import RankFailedError, run_ranks


def _assert_loads(root: Path, step: int) -> None:
    checkpoint = newest(root)
    assert checkpoint is not None
    assert checkpoint.step == step
    assert checkpoint.state() == {"step": step}
    targets = {name: torch.zeros_like(tensor) for name, tensor in tensors(step).items()}
    load(checkpoint, targets)
    for name, tensor in tensors(step).items():
        assert torch.equal(tensor, targets[name]), name


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    directory = write(tmp_path / "new" / "folders", 10)
    assert directory.name == "step-00000010"
    _assert_loads(directory.parent, 10)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.int64, torch.uint8, torch.bool])
def test_every_dtype_and_layout_comes_back(tmp_path: Path, dtype: torch.dtype) -> None:
    wide = torch.arange(2 * 3 * 5).reshape(2, 3, 5)
    saved = {
        "small": (wide[0, 0] > 1).to(dtype),
        "byte": torch.tensor([True]),
        "strided": wide.to(dtype).transpose(0, 2),
        "empty": torch.zeros(0, 3, dtype=dtype),
        "scalar": torch.tensor(1).to(dtype),
    }
    save(tmp_path, step=1, tensors=saved, state={})
    loaded = {name: torch.zeros_like(tensor) for name, tensor in saved.items()}
    load(newest(tmp_path), loaded)  # type: ignore[arg-type]
    assert all(torch.equal(saved[name], loaded[name]) for name in saved)


def test_files_stay_below_the_limit_whatever_the_tensors(tmp_path: Path) -> None:
    limit = 4096
    saved = {
        "rows": torch.randn(50, 7, 33),
        "one_row": torch.randn(1, 3, 4000),
        "flat": torch.randn(10_000, dtype=torch.float64),
        **{f"small.{n}": torch.randn(n + 1) for n in range(20)},
    }
    directory = save(tmp_path, step=1, tensors=saved, state={}, file_bytes=limit)
    sizes = [file.stat().st_size for file in directory.glob("*.safetensors")]
    assert max(sizes) <= limit
    assert len(sizes) < 2 * 2 * sum(tensor.nbytes for tensor in saved.values()) / limit
    loaded = {name: torch.zeros_like(tensor) for name, tensor in saved.items()}
    load(newest(tmp_path), loaded)  # type: ignore[arg-type]
    assert all(torch.equal(saved[name], loaded[name]) for name in saved)


def test_the_plan_of_a_file_takes_time_in_proportion_to_its_tensors(tmp_path: Path) -> None:
    saved = {f"small.{n}": torch.zeros(1) for n in range(200)}
    with patch.object(storage, "num_bytes", wraps=storage.num_bytes) as sizes:
        directory = save(tmp_path, step=1, tensors=saved, state={})
    assert len([*directory.glob("*.safetensors")]) == 1
    assert sizes.call_count <= 5 * len(saved)


def test_a_published_step_is_left_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    directory = write(tmp_path, 1)
    before = {file.name: file.stat().st_mtime_ns for file in directory.iterdir()}
    save(tmp_path, step=1, tensors=tensors(2), state={"step": 2})
    assert {file.name: file.stat().st_mtime_ns for file in directory.iterdir()} == before
    assert "exists already and is valid; it is left unchanged" in caplog.text
    _assert_loads(tmp_path, 1)


def test_a_broken_step_is_replaced(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (write(tmp_path, 1) / "index.json").unlink()
    write(tmp_path, 1)
    assert "will be replaced" in caplog.text
    assert names(tmp_path) == ["step-00000001"]
    _assert_loads(tmp_path, 1)


def test_a_link_in_the_place_of_a_step_is_replaced_not_followed(tmp_path: Path) -> None:
    other = write(tmp_path / "other", 1)
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "step-00000001").symlink_to(other)
    write(tmp_path / "runs", 1)
    assert not (tmp_path / "runs" / "step-00000001").is_symlink()
    _assert_loads(tmp_path / "other", 1)


def test_the_newest_stay_and_later_steps_are_no_business_of_this_save(tmp_path: Path) -> None:
    write(tmp_path, 9)
    write(tmp_path, 1, 2, 3, 4, keep=2)
    assert names(tmp_path) == ["step-00000003", "step-00000004", "step-00000009"]


def test_a_damaged_checkpoint_does_not_count_among_those_to_keep(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path, 1)
    (write(tmp_path, 2) / "index.json").write_text("{}")
    write(tmp_path, 3, keep=2)
    assert names(tmp_path) == ["step-00000001", "step-00000002", "step-00000003"]
    assert "checkpoint not counted among the 2 to keep: " in caplog.text
    write(tmp_path, 4, keep=2)
    assert names(tmp_path) == ["step-00000003", "step-00000004"]


def test_a_checkpoint_is_hashed_once_until_a_file_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hashed = []

    def count(directory: Path, *args: Any, **options: Any) -> list[str]:
        hashed.append(directory.name)
        return file_problems(directory, *args, **options)

    monkeypatch.setattr("megalin.checkpoint.verification.file_problems", count)
    verified = VerifiedCheckpoints()
    for step in (1, 2, 3):
        save(tmp_path, step=step, tensors=tensors(step), state={}, keep_latest=2, verified=verified)
    save(tmp_path, step=4, tensors=tensors(4), state={}, keep_latest=2, verified=verified)
    assert hashed == [f"step-{step:08d}" for step in (3, 2, 4)]
    flipped = next((tmp_path / "step-00000004").glob("*.safetensors"))
    flipped.write_bytes(flipped.read_bytes()[:-1] + b"x")
    save(tmp_path, step=5, tensors=tensors(5), state={}, keep_latest=2, verified=verified)
    assert hashed[3:] == ["step-00000005", "step-00000004"]
    assert names(tmp_path) == [f"step-{step:08d}" for step in (3, 4, 5)]


def test_leftovers_of_dead_saves_are_removed_and_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / ".tmp-step-00000009-x").mkdir()
    (tmp_path / ".tmp-step-00000009-x" / "data").write_bytes(b"0")
    (tmp_path / ".tmp-link").symlink_to(tmp_path)
    write(tmp_path, 1)
    assert names(tmp_path) == ["step-00000001"]
    assert caplog.text.count("the leftover of an unfinished save") == 2


def test_an_old_checkpoint_that_cannot_go_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(path: Path) -> None:
        raise OSError("device busy")

    write(tmp_path, 1)
    monkeypatch.setattr("megalin.checkpoint.publishing.remove", refuse)
    write(tmp_path, 2, keep=1)
    assert "an old checkpoint could not be removed: device busy" in caplog.text
    _assert_loads(tmp_path, 2)


@pytest.mark.parametrize("value", [3, "text", None, torch.zeros(2, dtype=torch.complex64)])
def test_only_tensors_are_saved(tmp_path: Path, value: Any) -> None:
    with pytest.raises(TypeError, match="only tensors of a supported dtype can be saved"):
        save(tmp_path, step=1, tensors={**tensors(1), "extra": value}, state={})
    assert not names(tmp_path)


def test_two_savers_in_one_folder(tmp_path: Path) -> None:
    write(tmp_path, 1)
    (tmp_path / ".tmp-step-00000002-live").mkdir()
    lock = FolderLock(tmp_path / ".lock")
    with pytest.raises(StorageError, match=rf"pid {os.getpid()} on .* since .* is saving there"):
        write(tmp_path, 2)
    assert names(tmp_path) == [".tmp-step-00000002-live", "step-00000001"]
    lock.release()
    write(tmp_path, 2)
    _assert_loads(tmp_path, 2)


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="must be writable and on a file system that every rank shares"):
        write(tmp_path / "file" / "checkpoints", 1)


def test_a_full_disk_without_room_for_the_folder_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(publishing, "FolderLock", full)
    with pytest.raises(
        StorageError, match=r"No space left.*needs about [\d,]+ bytes and [\d,]+ bytes are free.*free space"
    ):
        write(tmp_path, 1)


def test_bugs_and_interrupts_are_not_storage_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(error: BaseException) -> None:
        def _raise(file: object) -> None:
            raise error

        monkeypatch.setattr("megalin.checkpoint.storage.sync", _raise)

    fail(ZeroDivisionError("a bug"))
    with pytest.raises(RuntimeError, match=r"failed(.|\n)*a bug"):
        write(tmp_path, 1)
    fail(KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path, 1)
    assert not names(tmp_path)


def _save_with_little_space(root: Path, rank_without_space: int) -> str:
    saved = {"w": torch.ones(40_000), "v": torch.ones(40_000)}  # 160 kB on each of two ranks
    if torch.distributed.get_rank() == rank_without_space:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
    with pytest.raises(StorageError) as caught:
        save(root, step=2, tensors=saved, state={})
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    save(root, step=3, tensors=saved, state={})
    return str(caught.value)


@pytest.mark.parametrize("rank", [0, 1])
def test_one_rank_without_room_stops_every_rank_with_one_message(tmp_path: Path, rank: int) -> None:
    write(tmp_path, 1)
    first, second = run_ranks(2, _save_with_little_space, tmp_path, rank)
    assert first == second
    assert f"cannot save to {tmp_path}: rank {rank}: " in first
    assert "File too large" in first
    assert "the checkpoint needs about 320,000 bytes and" in first
    assert names(tmp_path) == ["step-00000001", "step-00000003"]


_OPERATIONS = ["mkdir", "fsync", "rename", "unlink", "rmdir"]


def _save_and_die(root: Path, save_step: Callable[..., object], dying_rank: int, operation_number: int) -> None:
    """Saves on this rank; `dying_rank` kills itself before its n-th call that changes the file system."""
    count = 0

    def wrap(original: Any) -> Any:
        def counted(*args: Any, **kwargs: Any) -> Any:
            nonlocal count
            count += 1
            if count == operation_number:
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*args, **kwargs)

        return counted

    logging.disable()
    if torch.distributed.get_rank() == dying_rank:
        for name in _OPERATIONS:
            setattr(os, name, wrap(getattr(os, name)))
    save_step(root, 2, keep=1)


@pytest.mark.parametrize(
    ("world_size", "dying_rank", "save_step"),
    [
        (1, 0, write),
        (2, 1, write),
        pytest.param(1, 0, write_in_background, marks=pytest.mark.slow),
        pytest.param(2, 0, write_in_background, marks=pytest.mark.slow),
        pytest.param(2, 1, write_in_background, marks=pytest.mark.slow),
    ],
)
def test_killed_at_any_moment_the_old_or_the_new_checkpoint_is_there(
    tmp_path: Path, world_size: int, dying_rank: int, save_step: Callable[..., object]
) -> None:
    published = []
    for number in range(1, 40):
        root = tmp_path / str(number)
        write(root, 1)
        try:
            run_ranks(world_size, _save_and_die, root, save_step, dying_rank, number)
        except RankFailedError:
            checkpoint = newest(root)
            assert checkpoint is not None
            _assert_loads(root, checkpoint.step)
            published.append(checkpoint.step)
            write(root, 3)
            for name in names(root):
                assert not file_problems(root / name, read_manifest(root / name)), "a leftover was not removed"
        else:
            break
    assert 1 in published
    assert published == sorted(published)
    if dying_rank == 0:
        assert 2 in published, "no kill came after the rename"


def test_everything_is_on_the_disk_before_the_rename(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    operations: list[str] = []
    fsync, rename = os.fsync, os.rename

    def record_fsync(descriptor: int) -> None:
        operations.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        fsync(descriptor)

    def record_rename(source: Path, target: Path) -> None:
        operations.append(f"rename to {target.name}")
        rename(source, target)

    monkeypatch.setattr(os, "fsync", record_fsync)
    monkeypatch.setattr(os, "rename", record_rename)
    directory = write(tmp_path, 1)
    *files, manifest, temporary, renamed, root = operations
    assert {*files, manifest} == {file.name for file in directory.iterdir()}
    assert manifest == "manifest.json"
    assert temporary.startswith(".tmp-step-00000001-")
    assert renamed == "rename to step-00000001"
    assert root == tmp_path.name
