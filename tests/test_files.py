"""Opening, publishing and locking of files: regular files only, size limits, one writer, atomic writes."""

import errno
import fcntl
import os
from pathlib import Path

import pytest

from megalin.errors import DataError, StorageError
from megalin.files import (
    FileTooLargeError,
    FolderInUseError,
    FolderLock,
    NotRegularFileError,
    open_input,
    open_regular,
    open_temporary,
    publish,
    read_input,
    read_limited,
    read_range,
    write_atomically,
    write_new,
    write_text,
)

REMEDY = "check --input"


@pytest.mark.parametrize("follow_links", [False, True])
@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_pipes_and_folders_are_refused_at_once(tmp_path, make, follow_links):
    make(tmp_path / "x")
    with pytest.raises(NotRegularFileError, match="expected a regular file, found a folder, pipe or device"):
        open_regular(tmp_path / "x", follow_links=follow_links)
    with pytest.raises(DataError, match="x: expected a regular file, found a folder, pipe or device; check --input"):
        open_input(tmp_path / "x", remedy=REMEDY)


def test_links_are_followed_only_where_asked(tmp_path):
    (tmp_path / "x").write_bytes(b"abc")
    (tmp_path / "link").symlink_to(tmp_path / "x")
    assert read_input(tmp_path / "link", limit_bytes=3, remedy=REMEDY) == b"abc"
    with pytest.raises(OSError, match="symbolic links"):
        read_limited(tmp_path / "link", limit_bytes=3, follow_links=False)


@pytest.mark.parametrize(
    ("number", "problem"),
    [
        (errno.EACCES, "Permission denied; check --input"),
        (errno.EMFILE, r"Too many open files; raise its limit \(ulimit -n\), or merge files"),
    ],
)
def test_missing_and_unreadable_files_are_named_with_the_remedy(tmp_path, monkeypatch, number, problem):
    def deny(*_):
        raise OSError(number, os.strerror(number))

    with pytest.raises(DataError, match="x: no such file; check --input"):
        read_input(tmp_path / "x", limit_bytes=3, remedy=REMEDY)
    (tmp_path / "x").touch(0o640)
    monkeypatch.setattr("os.open", deny)
    with pytest.raises(DataError, match=rf"x: cannot be read by user \d+ \(mode 640, owner \d+\): {problem}$"):
        read_input(tmp_path / "x", limit_bytes=3, remedy=REMEDY)


def test_files_over_the_limit_are_refused_unread(tmp_path):
    with (tmp_path / "x").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(FileTooLargeError):
        read_limited(tmp_path / "x", limit_bytes=4, follow_links=False)
    with pytest.raises(DataError, match=f"x: expected at most 4 bytes, found {1 << 40}; check --input"):
        read_input(tmp_path / "x", limit_bytes=4, remedy=REMEDY)


def test_file_that_grows_past_the_limit_is_refused(tmp_path, monkeypatch):
    (tmp_path / "x").write_bytes(b"12345")
    fstat = os.fstat

    def earlier(descriptor):
        fields = list(fstat(descriptor))
        fields[6] = 4  # st_size
        return os.stat_result(fields)

    monkeypatch.setattr("os.fstat", earlier)
    with pytest.raises(FileTooLargeError):
        read_limited(tmp_path / "x", limit_bytes=4, follow_links=False)


@pytest.mark.parametrize("old", [None, b"old"])
def test_failed_write_leaves_the_old_content_and_nothing_else(tmp_path, monkeypatch, old):
    def full(_):
        raise OSError(errno.ENOSPC, "No space left on device")

    path = tmp_path / "x"
    if old is not None:
        path.write_bytes(old)
    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space left on device"):
        write_atomically(path, b"new")
    with pytest.raises(StorageError, match="x: cannot be written: No space left on device; check the folder"):
        write_text(path, "new")
    assert {entry.name: entry.read_bytes() for entry in tmp_path.iterdir()} == ({} if old is None else {"x": old})


def test_content_is_on_the_disk_before_its_name_and_the_name_before_the_end(tmp_path, monkeypatch):
    operations = []
    fsync, replace = os.fsync, os.replace

    def record_fsync(descriptor):
        operations.append(f"sync {Path(os.readlink(f'/proc/self/fd/{descriptor}')).name}")
        fsync(descriptor)

    def record_replace(source, target):
        operations.append(f"rename {source.name} to {target.name}")
        replace(source, target)

    monkeypatch.setattr("os.fsync", record_fsync)
    monkeypatch.setattr("os.replace", record_replace)
    write_atomically(tmp_path / "x", b"new")
    assert operations == ["sync x.tmp", "rename x.tmp to x", f"sync {tmp_path.name}"]
    assert (tmp_path / "x").read_bytes() == b"new"


def test_leftover_of_a_killed_writer_is_replaced_and_a_link_is_not_followed(tmp_path):
    (tmp_path / "x.tmp").write_bytes(b"a longer leftover")
    write_atomically(tmp_path / "x", b"new")
    assert (tmp_path / "x").read_bytes() == b"new"
    (tmp_path / "x.tmp").symlink_to(tmp_path / "x")
    with pytest.raises(StorageError, match=r"x\.tmp: cannot be written: .*symbolic links"):
        open_temporary(tmp_path / "x")
    assert (tmp_path / "x").read_bytes() == b"new"


def test_two_writers_of_one_file_are_refused(tmp_path):
    path = tmp_path / "x"
    with open_temporary(path) as first:
        first.write(b"first")
        with pytest.raises(StorageError, match=r"x\.tmp: another process is writing it; wait for it to end or"):
            open_temporary(path)
        with pytest.raises(StorageError, match="x: another process is writing it; wait for it to end or"):
            write_text(path, "second")
        publish(first, path)
    assert path.read_bytes() == b"first"


@pytest.mark.parametrize("begun_again", [False, True])
def test_writer_whose_temporary_file_was_published_by_another_is_refused(tmp_path, monkeypatch, begun_again):
    def lock(file, _):
        (tmp_path / "x.tmp").rename(tmp_path / "x")
        if begun_again:
            (tmp_path / "x.tmp").touch()

    monkeypatch.setattr("fcntl.flock", lock)
    with pytest.raises(StorageError, match="another process is writing it"):
        open_temporary(tmp_path / "x")


def test_file_systems_without_locks_still_work(tmp_path, monkeypatch):
    def unsupported(*_):
        raise OSError(errno.ENOTSUP, "Operation not supported")

    monkeypatch.setattr("fcntl.flock", unsupported)
    write_text(tmp_path / "x", "new")
    assert (tmp_path / "x").read_text() == "new"


def test_folder_without_a_name_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(StorageError, match=r"^\.: cannot be written"):
        write_text(Path(), "new")
    assert not list(tmp_path.iterdir())


def test_new_file_is_never_written_over(tmp_path):
    write_new(tmp_path / "x", b"first")
    with pytest.raises(FileExistsError):
        write_new(tmp_path / "x", b"second")
    assert (tmp_path / "x").read_bytes() == b"first"


def test_lock_of_a_live_owner_names_it_and_an_orderly_release_leaves_no_owner(tmp_path):
    lock = FolderLock(tmp_path / ".lock")
    with pytest.raises(FolderInUseError, match=rf"pid {os.getpid()} on .* since "):
        FolderLock(tmp_path / ".lock")
    lock.release()
    lock.release()
    again = FolderLock(tmp_path / ".lock")
    assert again.previous_owner is None
    again.close()  # as when the process dies
    assert FolderLock(tmp_path / ".lock").previous_owner.startswith(f"pid {os.getpid()} on ")


def test_lock_file_that_its_owner_removes_meanwhile_is_refused(tmp_path, monkeypatch):
    def after_removal(descriptor, operation):
        (tmp_path / ".lock").unlink()
        flock(descriptor, operation)

    flock = fcntl.flock
    monkeypatch.setattr("megalin.files.fcntl.flock", after_removal)
    with pytest.raises(FolderInUseError, match="has just removed it"):
        FolderLock(tmp_path / ".lock")


def test_lock_file_that_is_a_link_is_refused(tmp_path):
    (tmp_path / ".lock").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="symbolic links"):
        FolderLock(tmp_path / ".lock")
    assert not (tmp_path / "elsewhere").exists()


def test_read_goes_on_after_two_input_output_errors(tmp_path, monkeypatch, caplog):
    real, errors = os.preadv, [errno.EIO, errno.EIO]

    def fail_twice(*arguments):
        if errors:
            raise OSError(errors.pop(), "Input/output error")
        return real(*arguments)

    path = tmp_path / "x.bin"
    path.write_bytes(b"0123456789")
    monkeypatch.setattr("megalin.files._RETRY_SECONDS", (0, 0))
    monkeypatch.setattr("os.preadv", fail_twice)
    with open_input(path, remedy="") as file:
        assert read_range(file, path, 2, 3, file_bytes=10) == b"234"
    assert caplog.text.count("x.bin: cannot be read at byte 2: Input/output error; trying again") == 2
