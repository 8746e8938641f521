"""Ownership of a run folder by one run at a time, with the same error on every rank."""

from __future__ import annotations

import errno
import json
import os
import signal
import tempfile
from pathlib import Path
from typing import Any

import pytest

from megalin.errors import ConfigError, StorageError
from megalin.train.run_folder import RunFolder
from tests.ranks import RankFailedError, run_ranks


def test_a_folder_is_made_and_reused(tmp_path: Path) -> None:
    with RunFolder(tmp_path / "runs" / "one") as folder:
        assert folder.checkpoints.is_dir()
        assert folder.tensorboard.is_dir()
        assert {folder.metrics.name, folder.config.name, folder.loss_curve.name} == {
            "metrics.jsonl",
            "config.toml",
            "loss.png",
        }
        folder.write_text(folder.config, "seed = 1\n")
        folder.write_text(folder.config, "seed = 2\n")
        folder.write_json(folder.path / "result.json", {"loss": 1.5})
    with RunFolder(folder.path) as again:
        assert again.config.read_text() == "seed = 2\n"
        assert json.loads((again.path / "result.json").read_text()) == {"loss": 1.5}
        assert not list(again.path.glob(".*.tmp"))


def test_a_folder_in_use_names_its_owner(tmp_path: Path) -> None:
    with (
        RunFolder(tmp_path),
        pytest.raises(ConfigError, match=rf"is in use by pid {os.getpid()} on '.+' since '\d{{4}}-.*another folder"),
    ):
        RunFolder(tmp_path)
    RunFolder(tmp_path).close()


def test_an_owner_without_a_name_is_an_owner(tmp_path: Path) -> None:
    with RunFolder(tmp_path):
        (tmp_path / ".lock").write_text("[[")
        with pytest.raises(ConfigError, match="a process that did not leave its name"):
            RunFolder(tmp_path)


def _claim_and_die(path: Path) -> None:
    RunFolder(path)
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_dead_owner_is_taken_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(RankFailedError):
        run_ranks(1, _claim_and_die, tmp_path)
    RunFolder(tmp_path).close()
    assert "taken over from pid" in caplog.text


def _claim_with_a_worker(path: Path) -> None:
    RunFolder(path)
    if os.fork() == 0:
        os.open(path / "end", os.O_RDONLY)  # blocks until the test opens the other end
        os._exit(0)
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_worker_that_outlives_the_run_does_not_keep_the_folder(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "end")
    with pytest.raises(RankFailedError):
        run_ranks(1, _claim_with_a_worker, tmp_path)
    try:
        RunFolder(tmp_path).close()
    finally:
        os.close(os.open(tmp_path / "end", os.O_WRONLY))


def _claim_on_ranks(path: Path) -> str:
    with RunFolder(path):
        pass
    try:
        RunFolder(path / "file" / "run")
    except StorageError as error:
        return str(error)
    return ""


def test_every_rank_raises_what_rank_zero_met(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    first, second = run_ranks(2, _claim_on_ranks, tmp_path)
    assert first == second
    assert first.startswith(f"cannot write run folder {tmp_path / 'file' / 'run'}: ")


@pytest.mark.parametrize(
    "name", ["loss.png", "tensorboard", "checkpoints", "metrics.jsonl.tmp", "config.toml", "cache"]
)
@pytest.mark.parametrize("kind", ["symbolic link", "named pipe"])
def test_links_and_pipes_among_the_files_of_a_run_are_refused(tmp_path: Path, name: str, kind: str) -> None:
    (tmp_path / "outside").mkdir()
    if kind == "named pipe":
        os.mkfifo(tmp_path / name)
    else:
        (tmp_path / name).symlink_to(tmp_path / "outside")
    with pytest.raises(StorageError, match=rf"{name} is a {kind}.*; a run writes only files and folders of its own"):
        RunFolder(tmp_path)
    assert not list((tmp_path / "outside").iterdir())
    (tmp_path / name).unlink()
    with RunFolder(tmp_path):
        pass


@pytest.mark.parametrize("name", ["", "checkpoints"])
def test_a_folder_on_a_read_only_mount_is_refused_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    create = tempfile.TemporaryFile

    def refuse(*, dir: Path) -> Any:
        if dir == tmp_path / name:
            raise OSError(errno.EROFS, "Read-only file system", str(dir))
        return create(dir=dir)

    monkeypatch.setattr("megalin.train.run_folder.tempfile.TemporaryFile", refuse)
    with pytest.raises(StorageError, match=rf"Read-only file system: '{tmp_path / name}'"):
        RunFolder(tmp_path)


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("in the way")
    with pytest.raises(StorageError, match="choose a folder that you may create and write"):
        RunFolder(tmp_path)
    (tmp_path / "checkpoints").unlink()
    with RunFolder(tmp_path) as folder:
        folder.config.mkdir()
        with pytest.raises(StorageError, match=r"cannot write .*config\.toml: .*; free space or fix the permissions"):
            folder.write_text(folder.config, "seed = 1\n")
        assert not list(tmp_path.glob("*.tmp"))
