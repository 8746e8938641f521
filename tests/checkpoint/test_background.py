"""Saving in the background: the bytes of a foreground save, one outcome on all ranks, and no thread that is waited for
for ever."""

from __future__ import annotations

import errno
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from megalin.checkpoint import storage
from megalin.checkpoint.background import BackgroundSaver
from megalin.checkpoint.load import load, newest
from megalin.checkpoint.publishing import prepare
from megalin.checkpoint.save import save
from megalin.checkpoint.tensors import training_tensors
from megalin.errors import HostMemoryError, MegalinError, NumericError, RankStalledError, StorageError
from megalin.parallel.agreement import on_every_rank, rank, sum_over_ranks
from megalin.parallel.store_channel import StoreChannel
from tests.checkpoint.saved import names, tensors, write
from tests.checkpoint.sharded_model import Layout, build, step
from tests.ranks import run_ranks

STALL_SECONDS = 60.0
LIMIT = 4096
"""Bytes of a file: several files, and tensors in pieces."""


@pytest.fixture
def saver() -> Iterator[BackgroundSaver]:
    saver = BackgroundSaver(STALL_SECONDS)
    with saver.completing():
        yield saver


@contextmanager
def changed_writes(change: Callable[[Path], object]) -> Iterator[None]:
    """Calls `change` before each file of tensors is written."""
    write_file = storage.write_file

    def changed(path: Path, parts: Any) -> Any:
        change(path)
        return write_file(path, parts)

    storage.write_file = changed
    try:
        yield
    finally:
        storage.write_file = write_file


def start(saver: BackgroundSaver, root: Path, number: int, saved: dict[str, torch.Tensor], **options: Any) -> None:
    publication = prepare(root, step=number, tensors=saved, state={"step": number}, **options)
    assert saver.start(publication, saved, file_bytes=LIMIT) is None


def contents(root: Path) -> dict[str, bytes]:
    return {str(file.relative_to(root)): file.read_bytes() for file in root.glob("step-*/*")}


def all_kinds() -> dict[str, torch.Tensor]:
    wide = torch.arange(2 * 3 * 5).reshape(2, 3, 5)
    return {
        **{f"{dtype}"[6:]: (wide > 7).to(dtype).transpose(0, 2) for dtype in (torch.float64, torch.int8, torch.bool)},
        "cut": torch.randn(50, 7, 33),
        "half": torch.randn(1, 3, 400).bfloat16(),
        "empty": torch.zeros(0, 3),
        "scalar": torch.tensor(1.0),
        **{f"small.{number}": torch.randn(number + 1) for number in range(20)},
    }


def test_files_are_those_of_a_foreground_save_of_the_state_at_the_start(tmp_path: Path, saver: BackgroundSaver) -> None:
    state, released = all_kinds(), threading.Event()
    for number in (1, 2, 3):
        save(tmp_path / "front", step=number, tensors=state, state={"step": number}, keep_latest=2, file_bytes=LIMIT)
        released.clear()
        with changed_writes(lambda _: released.wait()):
            start(saver, tmp_path / "back", number, state, keep_latest=2)
            assert not saver.has_ended()
            for tensor in state.values():
                tensor.copy_(tensor == 0)
            released.set()
            finished = saver.finish()
        assert finished is not None
        assert finished.step == number
    assert names(tmp_path / "back") == ["step-00000002", "step-00000003"]
    assert contents(tmp_path / "back") == contents(tmp_path / "front")
    buffer = saver._buffer._memory
    assert buffer is not None
    assert buffer.numel() <= 1.2 * sum(tensor.nbytes for tensor in state.values())


def test_memory_is_reserved_once(tmp_path: Path, saver: BackgroundSaver) -> None:
    saver.reserve(tmp_path, tensors(0), file_bytes=LIMIT)
    places = {saver._buffer._memory.data_ptr()}  # type: ignore[union-attr]
    assert names(tmp_path) == []
    for number in (1, 2):
        start(saver, tmp_path, number, tensors(number))
        saver.finish()
        places.add(saver._buffer.reserve(saver._buffer._memory.numel(), locked=False).data_ptr())  # type: ignore[union-attr]
    assert len(places) == 1


def test_published_step_is_left_unchanged(tmp_path: Path, saver: BackgroundSaver) -> None:
    write(tmp_path, 1)
    before = contents(tmp_path)
    start(saver, tmp_path, 1, tensors(2))
    assert not saver.has_ended()
    assert saver.finish() is None
    assert contents(tmp_path) == before
    write(tmp_path, 2)  # the lock is free


def _fail(error: BaseException) -> Callable[[Path], None]:
    def change(_: Path) -> None:
        raise error

    return change


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (
            OSError(errno.ENOSPC, "No space left on device"),
            StorageError,
            r"cannot save to .*: \[Errno 28\] No space left on device; the checkpoint needs about 244 bytes and [\d,]+ "
            "bytes are free there; earlier checkpoints are untouched",
        ),
        (ZeroDivisionError("a bug"), MegalinError, "ZeroDivisionError: a bug"),
    ],
)
def test_failed_write_is_raised_and_the_next_save_works(
    tmp_path: Path, saver: BackgroundSaver, error: Exception, kind: type[MegalinError], message: str
) -> None:
    write(tmp_path, 1)
    with changed_writes(_fail(error)):
        start(saver, tmp_path, 2, tensors(2))
        with pytest.raises(kind, match=message) as raised:
            saver.finish()
    assert type(raised.value) is kind
    assert names(tmp_path)[-1] == "step-00000001"
    start(saver, tmp_path, 3, tensors(3))
    saver.finish()
    assert names(tmp_path) == ["step-00000001", "step-00000003"]


def test_copy_that_does_not_fit_into_host_memory_is_refused(
    tmp_path: Path, saver: BackgroundSaver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setattr("megalin.checkpoint.snapshot.available_bytes", lambda: 500)
    with pytest.raises(HostMemoryError, match=r"rank 0: checkpoint\.background needs 0\.00 GiB of host memory"):
        start(saver, tmp_path, 1, tensors(1))
    assert names(tmp_path) == []
    monkeypatch.setattr("megalin.checkpoint.snapshot.available_bytes", lambda: 10**6)
    start(saver, tmp_path, 1, tensors(1))
    saver.finish()


def _start_and_fail(saver: BackgroundSaver, root: Path) -> None:
    with saver.completing():
        start(saver, root, 1, tensors(1))
        raise NumericError("loss")


def test_save_in_flight_is_published_before_an_error_is_raised(tmp_path: Path) -> None:
    with changed_writes(lambda _: time.sleep(0.2)), pytest.raises(NumericError, match="loss"):
        _start_and_fail(BackgroundSaver(STALL_SECONDS), tmp_path)
    checkpoint = newest(tmp_path)
    assert checkpoint is not None
    loaded = {name: torch.zeros_like(tensor) for name, tensor in tensors(1).items()}
    load(checkpoint, loaded)
    assert all(torch.equal(tensor, loaded[name]) for name, tensor in tensors(1).items())


def test_failed_save_in_flight_is_a_warning_at_an_error(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with changed_writes(_fail(OSError("broken"))), pytest.raises(NumericError, match="loss"):
        _start_and_fail(BackgroundSaver(STALL_SECONDS), tmp_path)
    assert "the checkpoint of step 1, in flight at the error, is not published: cannot save to" in caplog.text


def test_thread_without_progress_is_given_up(tmp_path: Path) -> None:
    saver, released = BackgroundSaver(0.2), threading.Event()
    with changed_writes(lambda _: released.wait()):
        start(saver, tmp_path, 1, tensors(1))
        while not saver.has_ended():
            time.sleep(0.01)
        with pytest.raises(RankStalledError) as raised:
            saver.finish()
        released.set()
    assert "rank 0 stalled: writing the checkpoint of step 1 to " in str(raised.value)
    assert "(limit: train.phase_timeout_seconds = 0.2)" in str(raised.value)


def _raised(call: Callable[[], object]) -> str:
    with pytest.raises(MegalinError) as raised:
        call()
    return f"{type(raised.value).__name__}: {raised.value}"


def _save_while_training(root: Path) -> bool:
    """Saves a sharded state in the foreground, and in the background during collectives of this group; returns whether
    all of these came before the end of the save."""
    model, optimizer = build(Layout(1, 2), seed=1)
    step(model, optimizer)
    state, saver, released = training_tensors(model, optimizer), BackgroundSaver(STALL_SECONDS), threading.Event()
    save(root / "front", step=1, tensors=state, state={"step": 1}, keep_latest=1, file_bytes=LIMIT)
    with saver.completing(), changed_writes(lambda _: released.wait()):
        start(saver, root / "back", 1, state, keep_latest=1)
        for _ in range(5):
            step(model, optimizer)
            sum_over_ranks(torch.ones(1))
        is_late = on_every_rank(saver.has_ended) == [False, False]
        released.set()
        saver.finish()
        start(saver, root / "back", 2, state, keep_latest=1)
        saver.finish()
    save(root / "front", step=2, tensors=state, state={"step": 2}, keep_latest=1, file_bytes=LIMIT)
    return is_late


def _outcomes(root: Path) -> dict[str, Any]:
    """Saves of which rank 1 fails one; the outcomes on this rank."""
    outcomes: dict[str, Any] = {"late": _save_while_training(root)}
    on_rank_one, saver = rank() == 1, BackgroundSaver(STALL_SECONDS)
    full = OSError(errno.ENOSPC, "No space left on device")
    with saver.completing(), changed_writes(_fail(full) if on_rank_one else lambda _: None):
        start(saver, root, 3, all_kinds())
        outcomes["full"] = _raised(saver.finish)
    with changed_writes(lambda _: time.sleep(0.1 * rank())):
        outcomes["error"] = _raised(lambda: _start_and_fail(BackgroundSaver(STALL_SECONDS), root))
    saver = BackgroundSaver(STALL_SECONDS)
    with saver.completing(), patch.object(StoreChannel, "gather", _lost) if on_rank_one else nullcontext():
        start(saver, root, 5, all_kinds())
        outcomes["lost"] = _raised(saver.finish)
    saver = BackgroundSaver(0.3)
    with saver.completing(), changed_writes(lambda _: time.sleep(1.0 * rank())):
        start(saver, root, 6, all_kinds())
        while not saver.has_ended():
            time.sleep(0.01)
        outcomes["stalled"] = _raised(saver.finish)
    return outcomes


def _lost(*_: object) -> None:
    raise RuntimeError("connection reset")


def test_all_ranks_have_one_outcome(tmp_path: Path) -> None:
    outcomes = run_ranks(2, _outcomes, tmp_path)
    assert outcomes[0] == outcomes[1]
    (outcome, _) = outcomes
    assert outcome["late"]
    assert contents(tmp_path / "back") == contents(tmp_path / "front")
    assert names(tmp_path / "back") == ["step-00000002"]
    assert re.fullmatch(
        rf"StorageError: cannot save to {tmp_path}: rank 1: \[Errno 28\] No space left on device; the checkpoint needs "
        r"about [\d,]+ bytes and .*",
        outcome["full"],
    )
    assert outcome["error"] == "NumericError: loss"
    assert outcome["lost"] == "MegalinError: rank 1: writing the checkpoint of step 5 failed: connection reset"
    assert outcome["stalled"].startswith("RankStalledError: rank 1 stalled: writing the checkpoint of step 6 to ")
    assert [name for name in names(tmp_path) if name.startswith("step")] == ["step-00000001"]
