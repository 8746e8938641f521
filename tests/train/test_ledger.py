"""The ledger of a run: written step by step, truncated on resume, compared, and a full disk."""

import errno
import json
from contextlib import nullcontext

import pytest
import torch

from megalin.errors import DataError, StorageError
from megalin.train.ledger import Ledger, compare_ledgers


def _write(path, digests, *, resumed_step=0):
    path.parent.mkdir(exist_ok=True)
    ledger = Ledger(path, resumed_step=resumed_step)
    for step, digest in enumerate(digests, start=resumed_step + 1):
        ledger.write(step, torch.tensor([digest, -digest]))
    ledger.close()
    return path


def test_line_of_a_step_is_its_digest_in_hex(tmp_path):
    path = _write(tmp_path / "ledger.jsonl", [1, 255])
    assert path.read_text().splitlines() == [
        '{"step": 1, "digest": "0000000000000001ffffffffffffffff"}',
        '{"step": 2, "digest": "00000000000000ffffffffffffffff01"}',
    ]


def test_resumed_run_replaces_the_steps_that_it_does_again(tmp_path):
    path = _write(tmp_path / "ledger.jsonl", [1, 2, 3, 4])
    _write(path, [7], resumed_step=2)
    assert [line.split('"')[-2][:16] for line in path.read_text().splitlines()] == [f"{n:016x}" for n in (1, 2, 7)]


def test_comparison_names_the_first_step_of_other_samples(tmp_path):
    first = _write(tmp_path / "a" / "ledger.jsonl", [1, 2, 3, 4, 5])
    _write(tmp_path / "b" / "ledger.jsonl", [1, 2, 9, 9])
    assert compare_ledgers(first, tmp_path / "b") == (4, 3, 1, 0)
    assert compare_ledgers(tmp_path / "a", first) == (5, None, 0, 0)


def test_files_that_are_no_ledgers_are_refused(tmp_path):
    good = _write(tmp_path / "a" / "ledger.jsonl", [1])
    with pytest.raises(DataError, match=r"none: cannot be read \(No such file or directory\); give a ledger"):
        compare_ledgers(good, tmp_path / "none")
    for text in ("{}", "[1]", "x", '{"step": "one", "digest": 2}', "\udcff"):
        (tmp_path / "bad").write_text(f"{good.read_text()}{text}\n", errors="surrogateescape")
        with pytest.raises(DataError, match="bad: line 2 is not a ledger record"):
            compare_ledgers(good, tmp_path / "bad")
    later = _write(tmp_path / "later", [1], resumed_step=5)
    with pytest.raises(DataError, match="have no step in common"):
        compare_ledgers(good, later)


def test_ledger_that_cannot_be_opened_is_named(tmp_path):
    with pytest.raises(StorageError, match=r"none/ledger\.jsonl: cannot be written"):
        Ledger(tmp_path / "none" / "ledger.jsonl", resumed_step=0)


def test_full_disk_is_warned_about_once(tmp_path, monkeypatch, caplog):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    ledger = Ledger(tmp_path / "ledger.jsonl", resumed_step=0)
    monkeypatch.setattr("megalin.train.jsonl.os.write", full)
    for step in (1, 2):
        ledger.write(step, torch.zeros(2, dtype=torch.int64))
    ledger.close()
    assert len(caplog.messages) == 1
    assert "cannot be written (No space left on device); training continues, but steps are missing" in caplog.text


def test_lines_that_a_full_disk_did_not_take_follow_when_it_does(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    ledger = Ledger(tmp_path / "ledger.jsonl", resumed_step=0)
    with monkeypatch.context() as patch:
        patch.setattr("megalin.train.jsonl.os.write", full)
        ledger.write(1, torch.tensor([1, 1]))
        ledger.write(2, torch.tensor([2, 2]))
    ledger.write(3, torch.tensor([3, 3]))
    assert [line[:10] for line in (tmp_path / "ledger.jsonl").read_text().splitlines()] == [
        f'{{"step": {step}' for step in (1, 2, 3)
    ]
    synced = []
    monkeypatch.setattr("megalin.train.jsonl.os.fsync", synced.append)
    ledger.sync()
    assert len(synced) == 1
    ledger.close()


def test_a_rollback_removes_the_lines_of_later_steps_also_those_that_a_full_disk_did_not_take(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    ledger = Ledger(tmp_path / "ledger.jsonl", resumed_step=0)
    ledger.write(1, torch.tensor([1, 1]))
    ledger.write(2, torch.tensor([2, 2]))
    with monkeypatch.context() as patch:
        patch.setattr("megalin.train.jsonl.os.write", full)
        ledger.write(3, torch.tensor([3, 3]))
    ledger.rewind(1)
    ledger.write(2, torch.tensor([9, 9]), batch=4)
    ledger.close()
    lines = [json.loads(line) for line in (tmp_path / "ledger.jsonl").read_text().splitlines()]
    assert lines == [{"step": 1, "digest": f"{1:016x}" * 2}, {"step": 2, "digest": f"{9:016x}" * 2, "batch": 4}]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([1, 2, 3], r"1 of the 4 finished steps of the checkpoint are missing, from step 4 to 4; restore the file, or"),
        ([1, 4], "2 of the 4 .* from step 2 to 3"),
        ([3], "1 of the 4 .* from step 4 to 4"),
        ([], "4 of the 4 .* from step 1 to 4"),
        ([1, 2, 3, 4, 5], None),
        ([3, 4], None),
        ([5, 6], None),
    ],
)
def test_ledger_with_a_gap_is_refused(tmp_path, lines, message):
    path = tmp_path / "ledger.jsonl"
    path.write_text("".join(f'{{"step": {step}, "digest": "0"}}\n' for step in lines))
    with nullcontext() if message is None else pytest.raises(DataError, match=message):
        Ledger(path, resumed_step=4).close()


@pytest.mark.parametrize("is_branch", [True, False])
def test_missing_ledger_is_named_where_the_run_had_one(tmp_path, caplog, is_branch):
    Ledger(tmp_path / "ledger.jsonl", resumed_step=4, is_branch=is_branch).close()
    assert ("missing; the run continues with a new one, from step 5 on" in caplog.text) != is_branch
