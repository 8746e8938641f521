"""Verification of shards at a run's start: changes between starts, and between ranks, are refused by name."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from megalin.data.shards.indexed_dataset import Shard
from megalin.data.shards.supervised import write_supervised_shard
from megalin.data.shards.verification import sample_blocks
from megalin.errors import DataError, MegalinError
from megalin.parallel.agreement import rank
from megalin.train.shard_check import verify_shards
from megalin.train.step_data import StepData, StepReader
from tests.data.shard_files import write_by_hand
from tests.model_runs import steps_saved, train_here, write_config
from tests.ranks import run_ranks

BLOCK = 64


def _small_blocks(patch: pytest.MonkeyPatch) -> None:
    for name in ("digests", "indexed_dataset", "verification"):
        patch.setattr(f"megalin.data.shards.{name}.BLOCK_BYTES", BLOCK)


@pytest.fixture
def _blocks_of_64_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    _small_blocks(monkeypatch)


def _flip(path: Path, byte: int) -> None:
    data = bytearray(path.read_bytes())
    data[byte] ^= 1
    path.write_bytes(data)


def _shard(folder: Path, *, manifest: bool) -> Path:
    """100 blocks of 64 bytes, with a label mask."""
    prefix = folder / "x"
    folder.mkdir(exist_ok=True)
    write_supervised_shard(prefix, [([k % 9] * 32, [k % 2 == 0] * 32) for k in range(100)], vocab_size=9)
    if not manifest:
        Path(f"{prefix}.manifest.json").unlink()
    return prefix


def _verify(prefix: Path, mode: str, earlier: Path) -> None:
    with Shard(prefix) as shard:
        earlier.write_text(json.dumps(verify_shards([shard], mode, earlier).kept))


@pytest.mark.usefixtures("_blocks_of_64_bytes")
@pytest.mark.parametrize("manifest", [True, False])
@pytest.mark.parametrize("mode", ["full", "sample"])
def test_changes_since_the_shard_was_written_or_first_read_are_named(tmp_path, manifest, mode):
    prefix, earlier = _shard(tmp_path, manifest=manifest), tmp_path / "shard_digests.json"
    earlier.write_text("{}")
    _verify(prefix, mode, earlier)
    assert earlier.read_text() == "{}" if manifest else str(prefix) in earlier.read_text()
    with Shard(prefix) as shard:
        inside = {block.number for block in sample_blocks([shard])}
    outside = {*range(100)} - inside
    assert (len(inside), len(outside)) == (64, 36)
    where = "x.manifest.json has" if manifest else "shard_digests.json, from an earlier start of this run, has"
    for number in (min(inside), min(outside)):
        _flip(tmp_path / "x.bin", number * BLOCK + 5)
        if number in outside and mode == "sample":
            _verify(prefix, mode, earlier)
        else:
            block = rf"x\.bin: block {number} \(bytes {number * BLOCK} to {number * BLOCK + BLOCK}\) has sha256 \w+"
            with pytest.raises(DataError, match=rf"{block}, but .*{re.escape(where)} \w+ \(1 of the"):
                _verify(prefix, mode, earlier)
        _flip(tmp_path / "x.bin", number * BLOCK + 5)
    for byte in {16, 25, os.path.getsize(tmp_path / "x.mask.bin") - 1}:
        _flip(tmp_path / "x.mask.bin", byte)
        with pytest.raises(
            DataError, match=rf"x\.mask\.bin: has sha256 \w+, but .*{re.escape(where)} \w+: the file was"
        ):
            _verify(prefix, mode, earlier)
        _flip(tmp_path / "x.mask.bin", byte)
    _flip(tmp_path / "x.idx", os.path.getsize(tmp_path / "x.idx") - 16)  # moves a document boundary
    with pytest.raises(DataError, match=rf"x\.idx: has sha256 \w+, but .*{re.escape(where)} \w+: the file was changed"):
        _verify(prefix, mode, earlier)
    _verify(prefix, "off", earlier)


def test_damaged_record_of_earlier_starts_is_refused(tmp_path):
    (tmp_path / "earlier").write_text('{"x": {"idx": 1}}')
    with pytest.raises(DataError, match="earlier: not a record of shards"):
        _verify(_shard(tmp_path, manifest=True), "sample", tmp_path / "earlier")


@pytest.mark.usefixtures("_blocks_of_64_bytes")
def test_sample_takes_turns_between_shards_within_its_budget(tmp_path, monkeypatch):
    monkeypatch.setattr("megalin.data.shards.verification.SAMPLE_BYTES", 5 * BLOCK)
    prefixes = [write_by_hand(tmp_path / name, [[1] * size]) for name, size in (("a", 320), ("b", 32), ("c", 640))]
    shards = [Shard(prefix) for prefix in prefixes]
    assert [block.shard for block in sample_blocks(shards)] == [0, 1, 2, 0, 2]
    assert len({*sample_blocks(shards)}) == 5


def _ranks(folder: Path, case: str) -> list[str]:
    """Verifies shards of which rank 2's may differ; returns the errors and the numbers of blocks that a rank read."""
    with pytest.MonkeyPatch.context() as patch:
        _small_blocks(patch)
        own = folder / ("other" if rank() == 2 else "same")
        if rank() == 2 and case in ("bin", "idx"):
            _flip(own / f"x.{case}", 70 if case == "bin" else os.path.getsize(own / "x.idx") - 16)
        reads: list[int] = []
        real = Shard.block_digest

        def count(shard: Shard, number: int) -> str:
            if case == "EIO" and rank() == 1:
                raise DataError("x.bin: cannot be read")
            reads.append(number)
            return real(shard, number)

        patch.setattr(Shard, "block_digest", count)
        with Shard(own / "x") as shard:
            try:
                verify_shards([shard], "full", folder / "none")
            except DataError as error:
                return [re.sub(r"\S*/(same|other)/", "", str(error))]
        return [str(len(reads))]


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("same", r""),
        (
            "bin",
            r"x\.bin: block 1 \(bytes 64 to 128\) has sha256 \w+ on rank 2, but \w+ on rank [01]; give all 3",
        ),
        ("idx", r"rank 2 \(\S+\) has x\.idx of shard 0 = sha256 \w+\.\.\., rank 0"),
        ("EIO", r"rank 1: x\.bin: cannot be read"),
    ],
)
def test_ranks_with_other_bytes_are_named_and_equal_files_are_read_once(tmp_path, case, message):
    for name in ("same", "other"):
        _shard(tmp_path / name, manifest=False)
    found = run_ranks(3, _ranks, tmp_path, case)
    if case == "same":
        assert found == [["50"], ["50"], ["100"]]
    else:
        assert len({error for (error,) in found}) == 1
        assert re.search(message, found[0][0]), found[0]


def _starts(config: Path, folder: Path, prefix: Path) -> list[str]:
    """Errors of a run's starts with other tokens, without the manifest, and without verification; then it goes on with
    its own tokens, not verified."""
    train_here(config, folder, "train.stop_after_steps=2")
    tokens, found = Path(f"{prefix}.bin"), []
    own = tokens.read_bytes()
    tokens.write_bytes(bytes(len(own)))
    for overrides in ([], [], ["data.verify=off"]):
        try:
            train_here(config, folder, "train.stop_after_steps=3", *overrides)
        except MegalinError as error:
            found.append(str(error))
        Path(f"{prefix}.manifest.json").unlink(missing_ok=True)
    tokens.write_bytes(own)
    train_here(config, folder, "train.stop_after_steps=3", "data.verify=off")
    return found


def test_resumed_run_refuses_other_bytes(tmp_path):
    config, folder = write_config(tmp_path), tmp_path / "run"
    ((manifest, checkpoint, samples),) = run_ranks(1, _starts, config, folder, tmp_path / "data" / "train")
    assert re.search(r"train\.bin: block 0 \(bytes 0 to \d+\) has .*, but .*train\.manifest\.json has", manifest)
    assert re.search(r"train\.bin: block 0 .*, but .*checkpoints/\S+ has \w+ .*trained on other bytes", checkpoint)
    events = (folder / "incidents.jsonl").read_text()
    assert "not compared with those that the run read before: data.verify = off" in events
    assert "some samples of the sources, by sha256: " in samples


def _overwritten_in_mid_run(config: Path, root: Path, prefix: Path) -> list[tuple[str, list[int]]]:
    """Runs whose shard rank 0 overwrites in place before batch 7: the message and the saved steps, by data.verify."""
    read, tokens, found = StepReader.read, Path(f"{prefix}.bin"), list[tuple[str, list[int]]]()
    content = tokens.read_bytes()

    def reading(reader: StepReader, batch: int, **options: Any) -> StepData:
        if batch == 7 and rank() == 0:
            with tokens.open("r+b") as file:
                file.write(bytes(len(content)))
        return read(reader, batch, **options)

    for mode in ("sample", "off"):
        with patch.object(StepReader, "read", reading):
            try:
                train_here(config, root / mode, f"data.verify={mode}")
                message = ""
            except DataError as error:
                message = str(error)
        found.append((message, steps_saved(root / mode)))
        if rank() == 0:
            tokens.write_bytes(content)
        torch.distributed.barrier()
    train_here(config, root / "sample")
    return found


def test_a_shard_that_is_overwritten_while_the_run_reads_it_ends_the_run_before_the_next_checkpoint(tmp_path):
    config = write_config(tmp_path, train={"steps": 12}, checkpoint={"every_steps": 4}, data={"validation": []})
    first, second = run_ranks(2, _overwritten_in_mid_run, config, tmp_path, tmp_path / "data" / "train")
    assert first == second
    (sample, saved), (off, saved_off) = first
    assert re.search(r"train\.bin: block 0 \(.*but \S+train\.manifest\.json has \w+ .*while the run read it", sample)
    assert re.search(r"train\.bin: was written while the run reads it, and 1 of its blocks have no known digest", off)
    assert saved == saved_off == [4]
