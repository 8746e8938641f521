"""Merging and splitting of shards: the same tokens and documents, and no partial output."""

from __future__ import annotations

import hashlib
import itertools
import json
from pathlib import Path
from unittest.mock import Mock, call

import numpy as np
import pytest

from megalin.data.shards import merging
from megalin.data.shards.indexed_dataset import Shard, ShardWriter
from megalin.data.shards.merging import concatenate, merge_shards, split_shard
from megalin.errors import ConfigError, DataError
from tests.data.shard_files import assert_mask_is_sealed, index_bytes, mask_bytes, write_by_hand
from tools import merge_shards as tool


def _contents(prefix: Path) -> list[list[list[int]]]:
    """The shard's documents, as lists of sequences of token ids."""
    with Shard(prefix) as shard:
        sequences = [
            shard.read(shard.first_token(k), int(length)).tolist() for k, length in enumerate(shard.lengths.tolist())
        ]
        ends = shard.documents.tolist()
        return [sequences[first:end] for first, end in itertools.pairwise(ends)]


def _manifest(prefix: Path, digest: str, tokens: int) -> None:
    manifest = {"tokens": tokens, "tokenizer": {"digest": digest, "source": "bytes"}}
    Path(f"{prefix}.manifest.json").write_text(json.dumps(manifest))


@pytest.fixture
def shards(tmp_path: Path) -> list[Path]:
    """Shards with two sequences in a document, an empty document, no document, an empty sequence, a long document."""
    return [
        write_by_hand(tmp_path / "a", [[1, 2], [3], [4, 5, 6]], [0, 2, 2, 3]),
        write_by_hand(tmp_path / "none", [], [0]),
        write_by_hand(tmp_path / "b", [[], [7]], [0, 1, 2]),
        write_by_hand(tmp_path / "c", [list(range(100))]),
    ]


def test_merged_shard_holds_the_documents_in_order(shards: list[Path], tmp_path: Path, monkeypatch):
    monkeypatch.setattr(merging, "_COPY_TOKENS", 7)
    written = merge_shards(shards, tmp_path / "all")
    assert _contents(tmp_path / "all") == [document for shard in shards for document in _contents(shard)]
    assert written == (str(tmp_path / "all"), 6, 6, 107)
    lengths, documents = [2, 1, 3, 0, 1, 100], [0, 2, 2, 3, 4, 5, 6]
    assert (tmp_path / "all.idx").read_bytes() == index_bytes(lengths, documents)
    assert (tmp_path / "all.bin").read_bytes() == b"".join(Path(f"{x}.bin").read_bytes() for x in shards)
    assert not list(tmp_path.glob("*.tmp"))


def test_shards_are_concatenated_as_they_are_merged_and_each_is_opened_once(shards, tmp_path, monkeypatch):
    merge_shards(shards, tmp_path / "all")
    opened = Mock(wraps=Shard)
    monkeypatch.setattr(merging, "Shard", opened)
    concatenate(shards, tmp_path / "again", np.dtype("uint16"), {"documents": 6})
    assert opened.call_args_list == [call(prefix) for prefix in shards]
    for suffix in ("bin", "idx"):
        assert (tmp_path / f"again.{suffix}").read_bytes() == (tmp_path / f"all.{suffix}").read_bytes()
    concatenate([shards[1]], tmp_path / "empty", np.dtype("uint16"), {})
    assert (tmp_path / "empty.idx").read_bytes() == index_bytes([], [0])
    assert not list(tmp_path.glob("*.tmp"))


def test_parts_of_a_split_make_the_whole(tmp_path: Path):
    whole = write_by_hand(tmp_path / "whole", [[k] * (k % 5) for k in range(1000)])
    parts = [tmp_path / f"part{k}" for k in range(3)]
    written = split_shard(whole, parts, [969, 30, 1])
    assert [shard.documents for shard in written] == [969, 30, 1]
    assert [document for part in parts for document in _contents(part)] == _contents(whole)
    merge_shards(parts, tmp_path / "again")
    for suffix in (".bin", ".idx"):
        assert Path(f"{tmp_path}/again{suffix}").read_bytes() == Path(f"{whole}{suffix}").read_bytes()


def test_masks_are_copied_across_the_borders_of_bytes(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(merging, "_COPY_TOKENS", 7)
    rng = np.random.default_rng(0)
    for number in range(20):
        folder = tmp_path / str(number)
        folder.mkdir()
        shards, bits = [], []
        for shard in range(4):
            sequences = [[7] * length for length in rng.integers(0, 9, 5).tolist()]
            shards.append(write_by_hand(folder / f"s{shard}", sequences))
            own = (rng.random(sum(map(len, sequences))) < 0.5).tolist()
            if shard == 1 or rng.random() < 0.5:
                Path(f"{shards[-1]}.mask.bin").write_bytes(mask_bytes(own))
            else:
                own = [True] * len(own)
            bits += own
        merge_shards(shards, folder / "all")
        assert (folder / "all.mask.bin").read_bytes() == mask_bytes(bits)
        concatenate(shards, folder / "again", np.dtype("uint16"), {}, label_mask=True)
        assert (folder / "again.mask.bin").read_bytes() == mask_bytes(bits)
        assert_mask_is_sealed(folder / "again")
        split_shard(folder / "all", [folder / "p0", folder / "p1", folder / "p2"], [3, 4, 5])
        merge_shards([folder / "p0", folder / "p1", folder / "p2"], folder / "whole")
        assert (folder / "whole.mask.bin").read_bytes() == mask_bytes(bits)
        assert not list(folder.glob("*.tmp"))


def test_shards_without_masks_give_none(shards: list[Path], tmp_path: Path):
    merge_shards(shards, tmp_path / "all")
    assert not list(tmp_path.glob("*.mask.bin"))


def test_manifest_has_the_tokenizer_where_all_have_one(shards: list[Path], tmp_path: Path):
    for prefix, tokens in ((shards[0], 6), (shards[2], 1)):
        _manifest(prefix, "d1", tokens)
    merge_shards([shards[0], shards[2]], tmp_path / "known")
    manifest = json.loads((tmp_path / "known.manifest.json").read_text())
    assert manifest["tokenizer"] == {"digest": "d1", "source": "bytes"}
    assert (manifest["tokens"], manifest["documents"], manifest["dtype"]) == (7, 5, "uint16")
    assert manifest["parts"] == [[str(shards[0]), 0, 3], [str(shards[2]), 0, 2]]
    Path(f"{shards[2]}.mask.bin").write_bytes(mask_bytes([False]))
    merge_shards([shards[0], shards[2]], tmp_path / "masked")
    sealed = manifest["digests"] | {"mask": hashlib.sha256(mask_bytes([True] * 6 + [False])).hexdigest()}
    expected = manifest | {"label_tokens": 6, "digests": sealed}
    assert json.loads((tmp_path / "masked.manifest.json").read_text()) == expected
    merge_shards([shards[0], shards[3]], tmp_path / "unknown")
    assert "tokenizer" not in json.loads((tmp_path / "unknown.manifest.json").read_text())


def test_other_tokenizer_is_refused_and_nothing_is_left(shards: list[Path], tmp_path: Path):
    _manifest(shards[0], "d1", 6)
    _manifest(shards[2], "d2", 1)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(DataError, match=r"b\.manifest\.json: made by the tokenizer with sha256 d2, but .*a by d1"):
        merge_shards([shards[0], shards[2]], tmp_path / "all")
    assert sorted(tmp_path.iterdir()) == before


def test_other_dtype_is_refused(shards: list[Path], tmp_path: Path):
    with ShardWriter(tmp_path / "wide", np.dtype("int32")) as writer:
        writer.add_sequence([70000])
        writer.end_document()
        writer.publish()
    with pytest.raises(DataError, match=r"wide: tokens of int32, but .*a has uint16"):
        merge_shards([shards[0], tmp_path / "wide"], tmp_path / "all")


def test_more_sequences_than_can_be_numbered_are_refused(shards: list[Path], tmp_path: Path, monkeypatch):
    monkeypatch.setattr(merging, "MAX_SEQUENCES", 5)
    with pytest.raises(DataError, match=r"all: 6 sequences; a shard holds at most 5: write several"):
        merge_shards(shards, tmp_path / "all")


def test_names_that_meet_are_refused(shards: list[Path], tmp_path: Path):
    with pytest.raises(ConfigError, match="no shard to read"):
        merge_shards([], tmp_path / "all")
    with pytest.raises(ConfigError, match=r"a: named more than once, or also an input"):
        merge_shards(shards, tmp_path / "x" / ".." / "a")
    with pytest.raises(ConfigError, match=r"y: named more than once"):
        split_shard(shards[0], [tmp_path / "y", tmp_path / "y"], [1, 1])


@pytest.mark.parametrize("weights", [[1.0], [1.0, 0.0], [1.0, float("nan")], [1.0, float("inf")]])
def test_bad_weights_are_refused(shards: list[Path], tmp_path: Path, weights: list[float]):
    with pytest.raises(ConfigError, match="for 2 parts; give a positive weight for each"):
        split_shard(shards[0], [tmp_path / "y", tmp_path / "z"], weights)


def test_part_without_documents_is_refused_before_anything_is_written(shards: list[Path], tmp_path: Path):
    with pytest.raises(DataError, match=r"z: would get none of the 3 documents of .*a"):
        split_shard(shards[0], [tmp_path / "y", tmp_path / "z"], [1, 0.01])
    assert not list(tmp_path.glob("[yz].*"))


def test_tool_merges_a_folder_and_splits(shards: list[Path], tmp_path: Path, capsys):
    assert tool.main(["--input", str(tmp_path), "--output-prefix", f"{tmp_path}/all"]) == 0
    assert capsys.readouterr().out == f"{tmp_path}/all: 6 documents, 6 sequences, 107 tokens\n"
    assert tool.main(["--input", f"{tmp_path}/all", "--output-prefix", f"{tmp_path}/p", "--split", "2,1"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2
    assert _contents(tmp_path / "p_0") + _contents(tmp_path / "p_1") == _contents(tmp_path / "all")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--input", "{}/empty"], "no .idx file in this folder; give prefixes"),
        (["--input", "{}/a", "{}/b", "--split", "1,1"], "--split needs a single shard, but --input names 2"),
        (["--input", "{}/a", "--split", "1,x"], "--split 1,x: give comma-separated numbers"),
        (["--input", "{}/missing"], "no such file"),
    ],
)
def test_tool_reports_bad_arguments(shards: list[Path], tmp_path: Path, capsys, arguments: list[str], message: str):
    (tmp_path / "empty").mkdir()
    full = [argument.format(tmp_path) for argument in arguments]
    assert tool.main([*full, "--output-prefix", f"{tmp_path}/out"]) != 0
    assert message in capsys.readouterr().err


def test_failed_copy_leaves_nothing(shards: list[Path], tmp_path: Path, monkeypatch):
    before = sorted(tmp_path.iterdir())

    def fail(*_: object) -> None:
        raise DataError("shrank")

    Path(f"{shards[0]}.mask.bin").write_bytes(mask_bytes([True] * 6))
    before.append(Path(f"{shards[0]}.mask.bin"))
    monkeypatch.setattr(Shard, "read", fail)
    with pytest.raises(DataError, match="shrank"):
        merge_shards(shards, tmp_path / "all")
    assert sorted(tmp_path.iterdir()) == sorted(before)
