"""Token files of other systems, written here with struct: their documents, and files that are damaged or hostile."""

from __future__ import annotations

import itertools
import resource
import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from megalin.__main__ import data_command
from megalin.data.shards.indexed_dataset import Shard
from megalin.data.shards.manifest import read_manifest
from tests.data.shard_files import assert_mask_is_sealed

END = 50256
DOCUMENTS = [[5, 6, 7, END], [END], [8, 9, END], [50000]]
TOKENS = [token for document in DOCUMENTS for token in document]
run = data_command("import-tokens")


def words(values: Sequence[int], code: str = "H") -> bytes:
    return struct.pack(f"<{len(values)}{code}", *values)


def llm_c(values: Sequence[int], *, magic: int = 20240520, version: int = 1, count: int | None = None) -> bytes:
    """The header of 256 int32 and the tokens."""
    header = [magic, version, len(values) if count is None else count, *[0] * 253]
    return words(header, "i") + words(values, "I" if magic == 20240801 else "H")


def npy(values: Sequence[int], *, kind: str = "<u2", code: str = "H", shape: str | None = None) -> bytes:
    """Version 1.0: magic, version, length of the header, a Python dict padded to 64 bytes, the values."""
    shape = shape or f"({len(values)},)"
    text = f"{{'descr': '{kind}', 'fortran_order': False, 'shape': {shape}, }}"
    text = text.ljust(-(-(len(text) + 11) // 64) * 64 - 11) + "\n"
    return b"\x93NUMPY\x01\x00" + words([len(text)]) + text.encode() + words(values, code)


def documents_of(prefix: Path) -> list[list[int]]:
    with Shard(prefix) as shard:
        firsts = [shard.first_token(int(sequence)) for sequence in shard.documents]
        return [shard.read(a, b - a).tolist() for a, b in itertools.pairwise(firsts)]


def convert(folder: Path, *options: object, out: str = "out") -> int:
    return run(["--output-prefix", str(folder / out), *map(str, options)])


WHOLE = [TOKENS]
STARTS = [[5, 6, 7], [END], [END, 8, 9], [END, 50000]]
LARGE = [token if token < END else 128001 for token in TOKENS]
FILES: dict[str, tuple[str, bytes, list[object], list[list[int]], str]] = {
    "nanogpt": ("train.bin", words(TOKENS), ["--eod-id", END], DOCUMENTS, "uint16"),
    "nanogpt of characters": ("train.bin", words(TOKENS), ["--one-document"], WHOLE, "uint16"),
    "raw of 32 bits": (
        "a.npy.raw",
        words(TOKENS, "I"),
        ["--eod-id", END, "--format", "raw", "--dtype", "uint32"],
        DOCUMENTS,
        "int32",
    ),
    "llm.c": ("fineweb_train_000001.bin", llm_c(TOKENS), ["--bos-id", END], STARTS, "uint16"),
    "llm.c of llama 3": (
        "fineweb.bin",
        llm_c(LARGE, magic=20240801, version=7),
        ["--bos-id", 128001],
        [[token if token != END else 128001 for token in document] for document in STARTS],
        "int32",
    ),
    "npy": ("tokens.npy", npy(TOKENS), ["--eod-id", END], DOCUMENTS, "uint16"),
    "npy of int64 with a vocabulary": (
        "tokens.npy",
        npy(TOKENS, kind="<i8", code="q"),
        ["--eod-id", END, "--vocab-size", 50257],
        DOCUMENTS,
        "uint16",
    ),
}


@pytest.mark.parametrize("name", list(FILES))
def test_files_become_the_documents_of_a_shard(name: str, tmp_path: Path):
    file, data, options, documents, dtype = FILES[name]
    (tmp_path / file).write_bytes(data)
    assert convert(tmp_path, "--input", tmp_path / file, *options) == 0
    assert documents_of(tmp_path / "out") == documents
    with Shard(tmp_path / "out") as shard:
        assert shard.dtype.name == dtype
        manifest = read_manifest(shard)
    assert manifest is not None
    assert manifest.tokenizer is None
    assert [entry["path"] for entry in manifest.entries["inputs"]] == [str(tmp_path / file)]


def write_datatrove(folder: Path, code: str, metadata: str | None) -> Path:
    """A .ds file with its index, as datatrove and nanotron write it; the second document is empty."""
    path = folder / "00000_00000_shuffled.ds"
    path.write_bytes(words(TOKENS, code))
    Path(f"{path}.index").write_bytes(words([4, 4, 5, 8, 9], "Q"))
    if metadata is not None:
        Path(f"{path}.metadata").write_text(metadata)
    return path


@pytest.mark.parametrize(("code", "metadata"), [("H", "gpt2|2\n9\n9 T"), ("I", "my|tokenizer|4\n9\n9 T"), ("I", None)])
def test_datatrove_files_have_an_index(code: str, metadata: str | None, tmp_path: Path):
    path = write_datatrove(tmp_path, code, metadata)
    assert convert(tmp_path, "--input", path) == 0
    assert documents_of(tmp_path / "out") == [DOCUMENTS[0], [], *DOCUMENTS[1:]]


def test_loss_of_datatrove_becomes_a_label_mask(tmp_path: Path):
    path, loss = write_datatrove(tmp_path, "H", None), [0, 0, 1, 1, 1, 0, 1, 1, 0]
    Path(f"{path}.loss").write_bytes(bytes(loss))
    assert convert(tmp_path, "--input", path) == 0
    with Shard(tmp_path / "out") as shard:
        assert shard.read_label_mask(0, 9).tolist() == [value == 1 for value in loss]
        manifest = read_manifest(shard)
    assert manifest is not None
    assert manifest.label_tokens == 5
    assert_mask_is_sealed(tmp_path / "out")


def test_empty_files_of_datatrove_are_passed_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path, empty = write_datatrove(tmp_path, "H", None), tmp_path / "empty.ds"
    for name in (empty, Path(f"{empty}.index")):
        name.touch()
    assert convert(tmp_path, "--input", empty, path) == 0
    assert documents_of(tmp_path / "out") == [DOCUMENTS[0], [], *DOCUMENTS[1:]]
    assert convert(tmp_path, "--input", empty, out="other") == 3
    assert "empty.ds: no tokens in 1 file(s); check --input" in capsys.readouterr().err


def test_documents_continue_in_the_next_file(tmp_path: Path):
    names = [tmp_path / "1.bin", tmp_path / "2.bin"]
    for name, part in zip(names, (TOKENS[:2], TOKENS[2:]), strict=True):
        name.write_bytes(llm_c(part))
    assert convert(tmp_path, "--input", *names, "--eod-id", END) == 0
    assert documents_of(tmp_path / "out") == DOCUMENTS


def test_any_number_of_files_is_joined(tmp_path: Path):
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    for number in range(40):
        (tmp_path / f"{number:02}.bin").write_bytes(words([number, END]))
    opened = len(list(Path("/proc/self/fd").iterdir()))
    resource.setrlimit(resource.RLIMIT_NOFILE, (opened + 20, hard))
    try:
        assert convert(tmp_path, "--input", *sorted(tmp_path.glob("*.bin")), "--eod-id", END) == 0
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert documents_of(tmp_path / "out") == [[number, END] for number in range(40)]


def test_blocks_do_not_change_the_documents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "train.bin").write_bytes(words(TOKENS))
    for size in (1, 2, 4):
        monkeypatch.setattr("megalin.data.shards.importing._BLOCK_TOKENS", size)
        for option, expected in (("--eod-id", DOCUMENTS), ("--bos-id", STARTS)):
            assert convert(tmp_path, "--input", tmp_path / "train.bin", option, END) == 0
            assert documents_of(tmp_path / "out") == expected


def test_a_document_longer_than_a_sequence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr("megalin.data.shards.importing._MAX_LENGTH", 8)
    (tmp_path / "train.bin").write_bytes(words(TOKENS))
    assert convert(tmp_path, "--input", tmp_path / "train.bin", "--one-document") == 3
    assert "a document of 9 tokens; a sequence has at most 8" in capsys.readouterr().err


def test_a_tokenizer_gives_its_vocabulary_and_stands_in_the_manifest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    np.array([72, 105, 256], np.uint16).tofile(tmp_path / "train.bin")
    options = ("--input", tmp_path / "train.bin", "--tokenizer-model", "bytes", "--eod-id", 256)
    assert convert(tmp_path, *options) == 0
    with Shard(tmp_path / "out") as shard:
        manifest = read_manifest(shard)
    assert manifest is not None
    assert manifest.tokenizer is not None
    assert manifest.tokenizer.entry["vocab_size"] == 257
    np.array([72, 300, 256], np.uint16).tofile(tmp_path / "train.bin")
    assert convert(tmp_path, *options, out="other") == 3
    assert "train.bin: token id 300 at position 1; expected ids from 0 to 256" in capsys.readouterr().err


BIN, EOD = "train.bin", ["--eod-id", END]
REFUSED: dict[str, tuple[str, bytes, list[object], int, str]] = {
    "odd": (BIN, words(TOKENS) + b"\0", EOD, 3, "a multiple of 2 bytes, for tokens of uint16; found 19 bytes"),
    "empty": (BIN, b"", EOD, 3, "expected tokens; found none in 0 bytes"),
    "torch.save": (
        BIN,
        b"PK\x03\x04" + bytes(60),
        ["--one-document"],
        3,
        "begins as a zip archive, as torch.save writes",
    ),
    "gzip": (
        BIN,
        b"\x1f\x8b\x08\x00" + bytes(60),
        ["--one-document"],
        3,
        "begins as a gzip file, not as raw tokens; give",
    ),
    "no boundaries": (BIN, words(TOKENS), [], 2, "has no index of its documents; give --eod-id or --bos-id"),
    "another end": (BIN, words(TOKENS), ["--eod-id", 3], 3, "the token 3 does not occur; is it the id of"),
    "negative": (BIN, words(TOKENS), ["--eod-id", -1], 2, "--eod-id -1: must be a token id, at least 0"),
    "large": (BIN, words(TOKENS), [*EOD, "--vocab-size", 50000], 3, "token id 50256 at position 3; expected ids from"),
    "vocabulary": (BIN, words(TOKENS), [*EOD, "--vocab-size", 0], 2, "--vocab-size 0: must be from 1 to 2^31"),
    "both": (BIN, words(TOKENS), [*EOD, "--vocab-size", 9, "--tokenizer-model", "bytes"], 2, "leave one out"),
    "dtype": ("a.npy", npy(TOKENS), [*EOD, "--dtype", "int32"], 2, "format npy has its own dtype; leave --dtype int32"),
    "name": ("tokens", words(TOKENS), EOD, 2, "neither .bin nor .ds, .npy or llm.c's; name its format with --format"),
    "signed": ("t.npy", npy([1, -1], kind="<i2", code="h"), EOD, 3, "token id -1 at position 1"),
    "header": (BIN, words([20240520, 1], "i"), EOD, 3, "expected a header of 1024 bytes; found a file of 8 bytes"),
    "version": (BIN, llm_c(TOKENS, version=2), EOD, 3, "expected version 1 of the format 20240520; found 2"),
    "truncated": (BIN, llm_c(TOKENS)[:-2], EOD, 3, "expected 1042 bytes for 9 tokens of uint16, as its header says"),
    "count": (BIN, llm_c(TOKENS, count=-9), EOD, 3, "for -9 tokens of uint16"),
    "evaluation": (BIN, llm_c(TOKENS, magic=20240522), EOD, 3, "an evaluation file of llm.c"),
    "no llm.c": (BIN, bytes(2048), [*EOD, "--format", "llm.c"], 3, "expected the magic 20240520 or 20240801; found 0"),
    "npy, floats": ("t.npy", npy([1], kind="<f2"), EOD, 3, "expected integers of one dimension"),
    "npy, objects": ("t.npy", npy([1], kind="|O"), EOD, 3, "expected integers of one dimension"),
    "npy, matrix": ("t.npy", npy([1, 2], shape="(1, 2)"), EOD, 3, "array.reshape(-1) has; found uint16 [1, 2]"),
    "npy, huge": ("t.npy", npy([1], shape="(4611686018427387904,)"), EOD, 3, "truncated, or damaged"),
    "npy, cut": ("t.npy", npy(TOKENS)[:40], EOD, 3, "not a .npy file, or damaged"),
    "npy, code": ("t.npy", npy([1], shape="exit()"), EOD, 3, "not a .npy file, or damaged"),
    "npy, nested": ("t.npy", npy([1], shape="(" * 9000), EOD, 3, "not a .npy file, or damaged"),
    "npy, version": ("t.npy", b"\x93NUMPY\x03\x00" + bytes(64), EOD, 3, "expected version 1.0 or 2.0 of the .npy"),
}


@pytest.mark.parametrize("name", list(REFUSED))
def test_damaged_files_and_wrong_options_are_refused(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file, data, options, code, message = REFUSED[name]
    (tmp_path / file).write_bytes(data)
    assert convert(tmp_path, "--input", tmp_path / file, *options) == code
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == [file], "nothing is left behind"


DATATROVE: dict[str, tuple[str, bytes | None, list[object], int, str]] = {
    "no index": (".index", None, [], 3, "no such file; it has the documents' ends"),
    "cut index": (".index", words([9], "Q")[:-1], [], 3, "expected 8 bytes a document"),
    "short index": (".index", words([4, 8], "Q"), [], 3, "expected 2 or 4 bytes for each of the 8 tokens"),
    "huge index": (".index", words([2**64 - 1], "Q"), [], 3, "expected 2 or 4 bytes for each of the 18446744073709551"),
    "descending": (".index", words([2**63, 4, 9], "Q"), [], 3, "ends in ascending order"),
    "metadata": (".metadata", b"gpt2|4\n9\n9 T", [], 3, "expected 2 bytes a token and 9 tokens"),
    "other metadata": (".metadata", b"\xff", [], 3, "expected 2 bytes a token and 9 tokens"),
    "loss": (".loss", bytes(8), [], 3, "expected 9 bytes, one a token"),
    "boundaries": (".metadata", b"gpt2|2\n9\n9 T", EOD, 2, "has an index of its documents; leave --eod-id"),
}


@pytest.mark.parametrize("name", list(DATATROVE))
def test_datatrove_files_that_disagree_are_refused(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    suffix, data, options, code, message = DATATROVE[name]
    path = write_datatrove(tmp_path, "H", None)
    Path(f"{path}{suffix}").unlink(missing_ok=True)
    if data is not None:
        Path(f"{path}{suffix}").write_bytes(data)
    assert convert(tmp_path, "--input", path, *options) == code
    assert message in capsys.readouterr().err


def test_a_shard_of_megatron_is_no_input(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    for suffix in ("bin", "idx"):
        (tmp_path / f"text.{suffix}").write_bytes(words(TOKENS))
    assert convert(tmp_path, "--input", tmp_path / "text.bin", *EOD) == 3
    assert "so it is a Megatron shard already; give its prefix to data.train" in capsys.readouterr().err
    (tmp_path / "text.idx").unlink()
    assert convert(tmp_path, "--input", tmp_path / "text.bin", *EOD, out="text") == 2
    assert "text.bin is an input; choose another prefix" in capsys.readouterr().err
