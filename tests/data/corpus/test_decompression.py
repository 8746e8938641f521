"""Compressed files: every concatenation, padding and damage gives what was compressed, or an error."""

import bz2
import gzip
import io
import json
import lzma
import random
import shutil
import subprocess
import zlib

import pyarrow
import pytest

from megalin.data.corpus.decompression import DAMAGE, decompress
from megalin.data.corpus.documents import Reader
from megalin.data.corpus.inputs import whole
from megalin.errors import DataError

KINDS = ("gz", "bz2", "xz", "zst")
TOOLS = {"gz": "gzip", "bz2": "bzip2", "xz": "xz", "zst": "zstd"}
TEXT = b"".join(b'{"text": "%d"}\n' % (number * 7919 % 1000) for number in range(10))


def _compressed(kind, data):
    if kind == "zst":
        return pyarrow.Codec("zstd").compress(data, asbytes=True)
    return {"gz": gzip, "bz2": bz2, "xz": lzma}[kind].compress(data)


def _content(kind, data):
    """The content, or None for an error."""
    try:
        return decompress(io.BytesIO(data), kind, "x").read()
    except DAMAGE:
        return None


def _padded(kind):
    """A file of two streams with zero bytes around them -> its content, by the rules of the formats' own tools."""
    stream = _compressed(kind, TEXT)
    for between in (0, 1, 3, 4, 8, 70_000):
        for after in (0, 2, 4, 12, 131_072):
            inside = not between or (kind == "xz" and between % 4 == 0)
            end = not after or kind == "gz" or (kind == "xz" and after % 4 == 0)
            yield stream + bytes(between) + stream + bytes(after), TEXT * 2 if inside and end else None
    yield bytes(4) + stream, None
    yield stream + b"garbage\n", None
    yield stream + stream[:1], None
    yield stream + b"\xff" + stream[1:], None
    yield bytes(8), None
    yield b"", None
    yield _compressed(kind, b""), b""
    yield _compressed(kind, b"") + stream, TEXT


@pytest.mark.parametrize("kind", KINDS)
def test_streams_follow_one_another_with_padding_as_in_the_formats_tool(kind):
    for number, (data, content) in enumerate(_padded(kind)):
        assert _content(kind, data) == content, number


@pytest.mark.parametrize("kind", KINDS)
def test_every_truncation_is_an_error_or_ends_between_two_streams(kind):
    first, second = _compressed(kind, TEXT), _compressed(kind, TEXT[:60])
    data = first + second
    whole_ones = {len(first): TEXT, len(data): TEXT + TEXT[:60]}
    for cut in range(len(data) + 1):
        assert _content(kind, data[:cut]) == whole_ones.get(cut), cut


@pytest.mark.parametrize("kind", KINDS)
def test_every_bit_flip_is_an_error_or_changes_nothing(kind):
    data = bytearray(_compressed(kind, TEXT) * 2)
    for place in range(len(data)):
        data[place] ^= 1 << place % 8
        # zstd's frames have no digest as Arrow writes them.
        assert _content(kind, bytes(data)) in (None, TEXT * 2) or kind == "zst", place
        data[place] ^= 1 << place % 8


@pytest.mark.parametrize("kind", KINDS)
def test_content_is_that_of_the_formats_tool_or_an_error_where_it_complains(kind, tmp_path):
    if shutil.which(TOOLS[kind]) is None:
        pytest.skip(f"{TOOLS[kind]} is not installed")
    flipped = bytearray(_compressed(kind, TEXT) * 2)
    files = [data for data, _ in _padded(kind)]
    for place in random.Random(1).sample(range(len(flipped)), 20):
        flipped[place] ^= 4
        files.append(bytes(flipped))
        flipped[place] ^= 4
    path = tmp_path / f"x.{kind}"
    for number, data in enumerate(files):
        path.write_bytes(data)
        found = subprocess.run([TOOLS[kind], "-dc", path], capture_output=True, check=False)
        silent = found.returncode == 0 and not found.stderr
        assert _content(kind, data) == (found.stdout if silent else None), number


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [1, 1 << 16, (1 << 20) + 1])
def test_large_content_is_read_in_pieces_of_any_size(kind, size):
    data = random.Random(2).randbytes(1 << 17) + bytes(3 << 20)
    file, pieces = decompress(io.BytesIO(_compressed(kind, data) * 2), kind, "x"), []
    while piece := file.read(size if len(pieces) < 100 else -1):
        pieces.append(piece)
    assert b"".join(pieces) == data * 2


def test_padded_xz_streams_give_all_documents_and_a_damaged_header_names_the_file(tmp_path):
    path = tmp_path / "x.jsonl.xz"
    path.write_bytes(lzma.compress(TEXT) + bytes(8) + lzma.compress(TEXT))
    texts = [document.texts[0] for document in Reader(whole(path), ["text"], limit_bytes=1000)]
    assert texts == [json.loads(line)["text"] for line in TEXT.splitlines()] * 2
    for name, module in (("x.jsonl.xz", lzma), ("y.jsonl.bz2", bz2)):
        (tmp_path / name).write_bytes(module.compress(TEXT) + b"\x00" + module.compress(TEXT)[1:])
        with pytest.raises(DataError, match=rf"{name}: cannot be read: .* \(at byte \d+\); check the disk"):
            list(Reader(whole(tmp_path / name), ["text"], limit_bytes=1000))


def test_a_dictionary_of_gigabytes_is_refused():
    data = lzma.compress(b"a", filters=[{"id": lzma.FILTER_LZMA2, "dict_size": 1 << 26}])
    assert _content("xz", data) == b"a"
    header = bytearray(data[12:20])  # of a block, before its digest
    assert header[4] == 28, header.hex()  # 64 MiB, the dictionary's size; 34 is 512 MiB
    header[4] = 34
    with pytest.raises(lzma.LZMAError, match="Memory usage limit"):
        decompress(
            io.BytesIO(data[:12] + header + zlib.crc32(header).to_bytes(4, "little") + data[24:]), "xz", "x"
        ).read()
