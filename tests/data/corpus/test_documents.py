"""Reader of documents: every kind of bad line by file and line, byte limits, formats and spans."""

import bz2
import gzip
import json
import lzma
import re
from collections import Counter

import pyarrow
import pyarrow.feather
import pyarrow.ipc
import pyarrow.parquet
import pytest

from megalin.data.corpus import columnar, decompression, documents
from megalin.data.corpus.documents import BadLine, Reader, iterate_texts, lines_before
from megalin.data.corpus.inputs import split, whole
from megalin.errors import DataError

LIMIT = 1 << 20


def _parse(path, limit=LIMIT, keys=("text",), span=None):
    """The texts of each document, and the `BadLine`s unchanged."""
    items = Reader(span or whole(path), keys, limit_bytes=limit)
    return [item if isinstance(item, BadLine) else item.texts for item in items]


def _file(tmp_path, data, name="x.jsonl"):
    (tmp_path / name).write_bytes(data)
    return tmp_path / name


BAD = [
    (b"", "blank line", ""),
    (b" \t\r", "blank line", ""),
    (b'{"text": "\xff"}', "invalid UTF-8", "byte 10"),
    (b'\xef\xbb\xbf{"text": "a"}', "not JSON", "Unexpected UTF-8 BOM"),  # allowed on line 1 only
    (b'{"text": "a"', "not JSON", "Expecting"),
    (b"text", "not JSON", "Expecting value"),
    (b'{"text": "a", "score": NaN}', "not JSON", "NaN is not a JSON value"),
    (b'{"text": "a", "n": ' + b"9" * 5000 + b"}", "not JSON", "Exceeds the limit"),
    (b"[" * 200_000, "nested too deeply", ""),
    (b'{"text":' * 100_000, "nested too deeply", ""),
    (b'["text"]', "not an object", "found list"),
    (b"null", "not an object", "found NoneType"),
    (b'{"body": "a"}', "key missing", "'text'"),
    (b'{"text": null}', "not a string", "'text' is NoneType"),
    (b'{"text": ["a"]}', "not a string", "'text' is list"),
    (b'{"text": "a\\ud800"}', "lone surrogate", "character 1 of 'text'"),
    (b'{"text": "a", "n": "b\\uDFFF"}', "lone surrogate", "character 1 of 'n'"),
    (b'{"text": "a", "n": {"m": ["\\ud83d"]}}', "lone surrogate", "of 'n'"),
    (b'{"text": "a", "n\\ud83d": 1}', "lone surrogate", r"of 'n\ud83d'"),
    (b'{"text": "a", "n": 1e999}', "not JSON", "1e999 is beyond the largest number"),
    (b'{"text": "a", "n": [-' + b"9" * 400 + b".5]}", "not JSON", "-9999"),
    (b'{"text": "' + b"a" * LIMIT + b'"}', "too long", f"more than {LIMIT} bytes"),
]


@pytest.mark.parametrize(("line", "kind", "detail"), BAD, ids=range(len(BAD)))
def test_bad_line_is_reported_by_kind_and_place_and_the_next_is_read(tmp_path, line, kind, detail):
    path = _file(tmp_path, b'{"text": "first"}\n' + line + b'\n{"text": "last"}')
    first, bad, last = _parse(path)
    assert (first, last) == (("first",), ("last",))
    assert isinstance(bad, BadLine)
    assert (bad.path, bad.line, bad.kind) == (str(path), 2, kind)
    assert detail in bad.detail
    assert str(bad).startswith(f"{path}:2: {kind}")


@pytest.mark.parametrize("text", ["a\x00b", "\x1b[31m", "é日🙂", "\u2028", ""])
def test_control_characters_and_any_unicode_are_kept(tmp_path, text):
    assert _parse(_file(tmp_path, json.dumps({"text": text}).encode())) == [(text,)]


def test_escaped_surrogate_pairs_and_backslashes_are_kept(tmp_path):
    path = _file(tmp_path, b'{"text": "\\ud83d\\ude42", "n": "\\\\ud800", "m": [1.5, -2e30, 0]}')
    (document,) = Reader(whole(path), ["text"], limit_bytes=LIMIT)
    assert document.fields == {"text": "🙂", "n": "\\ud800", "m": [1.5, -2e30, 0]}


def test_byte_order_mark_and_carriage_returns_are_dropped(tmp_path):
    path = _file(tmp_path, b'\xef\xbb\xbf{"text": "a"}\r\n{"text": "b"}\r\n')
    assert _parse(path) == [("a",), ("b",)]


def test_several_keys_are_taken_from_one_line(tmp_path):
    path = _file(tmp_path, b'{"b": "2", "a": "1"}\n{"a": "3"}')
    good, bad = _parse(path, keys=("a", "b"))
    assert good == ("1", "2")
    assert bad.kind == "key missing"


@pytest.mark.parametrize("end", [b"", b"\n", b"\r\n"])
@pytest.mark.parametrize("excess", [-1, 0, 1, 2, 3, 50, 64, 65, 66, 200])
def test_limit_counts_the_bytes_of_the_line_without_its_end(tmp_path, excess, end):
    limit = 64
    line = b'{"text": "' + b"a" * (limit - 12 + excess) + b'"}'
    parsed = _parse(_file(tmp_path, b'{"text": "first"}\n' + line + end + b'{"text": "z"}' * (end != b"")), limit)
    assert isinstance(parsed[1], BadLine) == (excess > 0)
    assert len(parsed) == (3 if end else 2)


def test_text_file_is_one_document(tmp_path):
    assert _parse(_file(tmp_path, b"one\n\ntwo\n", "x.txt")) == [("one\n\ntwo\n",)]
    assert _parse(_file(tmp_path, b"a" * 65, "x.txt"), 64)[0].kind == "too long"
    assert _parse(_file(tmp_path, b"a" * 64, "x.txt"), 64) == [("a" * 64,)]
    assert _parse(_file(tmp_path, b"a\xff", "x.txt"))[0].kind == "invalid UTF-8"
    assert _parse(_file(tmp_path, b"", "x.txt"))[0].kind == "blank line"


def test_texts_leave_bad_lines_out_and_count_them(tmp_path):
    bad_lines = Counter()
    path = _file(tmp_path, b'{"text": "a"}\nbad\n{"text": "b"}')
    assert list(iterate_texts([path], ["text"], limit_bytes=LIMIT, bad_lines=bad_lines)) == ["a", "b"]
    assert bad_lines == {"not JSON": 1}


def test_folder_is_refused(tmp_path):
    (tmp_path / "x.jsonl").mkdir()
    with pytest.raises(DataError, match="expected a regular file"):
        _parse(tmp_path / "x.jsonl")


def test_failing_read_names_the_file(tmp_path, monkeypatch):
    def fail(*_):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("megalin.data.corpus.documents._lines", fail)
    with pytest.raises(DataError, match=r"x\.jsonl: cannot be read: Input/output error"):
        _parse(_file(tmp_path, b"{}"))


def _texts(data):
    return [json.loads(line)["text"] for line in data.splitlines()]


def _stored(folder, name, data):
    """Writes `data` (lines) in the format of the file's suffix; returns the path."""
    path = folder / name
    if name.endswith(".parquet"):
        texts = _texts(data)
        table = pyarrow.table({"text": texts, "other": list(range(len(texts)))})
        pyarrow.parquet.write_table(table, path, row_group_size=7)
    elif name.endswith(".gz"):
        path.write_bytes(gzip.compress(data[: len(data) // 2]) + gzip.compress(data[len(data) // 2 :]))
    elif name.endswith(".bz2"):
        path.write_bytes(bz2.compress(data[: len(data) // 2]) + bz2.compress(data[len(data) // 2 :]))
    elif name.endswith(".xz"):
        path.write_bytes(lzma.compress(data[: len(data) // 2]) + lzma.compress(data[len(data) // 2 :]))
    elif name.endswith((".arrow", ".feather")):
        table = pyarrow.table({"other": list(range(data.count(b"\n"))), "text": _texts(data)})
        if name.endswith(".feather"):
            pyarrow.feather.write_feather(table, path, chunksize=7, compression="zstd")
        else:
            with pyarrow.ipc.new_stream(path, table.schema) as stream:
                stream.write_table(table, max_chunksize=7)
    elif name.endswith(".zst"):
        with pyarrow.output_stream(str(path), compression="zstd") as file:
            file.write(data)
    else:
        path.write_bytes(data)
    return path


@pytest.mark.parametrize(
    "name",
    ["x.jsonl", "x.jsonl.gz", "x.jsonl.bz2", "x.jsonl.xz", "x.json.zst", "x.parquet", "x.arrow", "x.feather"],
)
def test_any_cut_of_any_format_gives_each_document_once(tmp_path, name):
    rng_lengths = [3, 0, 50, 1, 1, 200, 7, 0, 90] * 5
    texts = [f"{k} é日" * n for k, n in enumerate(rng_lengths)]
    data = "".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts).encode()
    path = _stored(tmp_path, name, data)
    for part_bytes in (1, 10, 64, 1000, 10**6):
        spans = split(path, part_bytes=part_bytes)
        assert (len(spans) > 1) == (part_bytes < 10**6 and name in ("x.jsonl", "x.parquet"))
        found = [document for span in spans for document in Reader(span, ["text"], limit_bytes=LIMIT)]
        assert [document.texts for document in found] == [(text,) for text in texts]


@pytest.mark.parametrize("name", ["x.jsonl", "x.parquet"])
def test_lines_of_any_span_are_numbered_as_in_the_file(tmp_path, name):
    data = b"".join(b'{"text": "%d%s"}\n' % (number, b"a" * (number % 40)) for number in range(1, 60))
    path = _stored(tmp_path, name, data)
    for part_bytes in range(1, 200, 9):
        for span in split(path, part_bytes=part_bytes):
            for document in Reader(span, ["text"], limit_bytes=LIMIT):
                assert lines_before(span) + document.line == int(document.texts[0].rstrip("a"))


@pytest.mark.parametrize(
    "name",
    ["x.jsonl.gz", "x.jsonl.bz2", "x.jsonl.xz", "x.jsonl.zst", "x.txt.gz", "x.parquet", "x.arrow", "x.feather"],
)
def test_truncated_file_is_refused_and_not_taken_for_a_whole_one(tmp_path, name):
    data = "".join(json.dumps({"text": f"document {k * k * 7919 % 1000}"}) + "\n" for k in range(5000)).encode()
    path = _stored(tmp_path, name, data)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(
        DataError, match=rf"{name}: (cannot be read: .* \(at byte \d+\); check|not an? (parquet|Arrow) file)"
    ):
        _parse(path)


def test_damaged_xz_is_refused(tmp_path):
    path = _stored(tmp_path, "x.jsonl.xz", b'{"text": "a"}\n' * 20)
    path.write_bytes(path.read_bytes()[:30] + bytes(20) + path.read_bytes()[50:])
    with pytest.raises(DataError, match=r"x\.jsonl\.xz: cannot be read: Corrupt input data"):
        _parse(path)


@pytest.mark.parametrize("data", [b"0" * (10 << 20), (b"0" * 1023 + b"\n") * (10 << 10)], ids=["line", "lines"])
def test_file_that_expands_without_end_is_refused(tmp_path, monkeypatch, data):
    monkeypatch.setattr(decompression, "_EXPANSION_FREE_BYTES", 1 << 16)
    path = _stored(tmp_path, "x.jsonl.gz", data)
    message = r"x\.jsonl\.gz: expands to \d+ bytes from \d+, more than 256 to 1, which is not text"
    with pytest.raises(DataError, match=message) as caught:
        _parse(path, 1 << 12)
    assert int(re.search(r"expands to (\d+)", str(caught.value))[1]) < 7 << 20  # of 10 MiB


def test_parquet_rows_without_text_are_reported_by_row(tmp_path):
    column = pyarrow.array([b"good", b"\xff", None, b"a" * 65], pyarrow.binary())
    pyarrow.parquet.write_table(pyarrow.table({"text": column}), tmp_path / "x.parquet")
    good, *bad = _parse(tmp_path / "x.parquet", limit=64)
    assert good == ("good",)
    assert [(line.line, line.kind) for line in bad] == [(2, "invalid UTF-8"), (3, "key missing"), (4, "too long")]


TEXTS = ["first", None, "", "日本", "first", "x" * 300, None]
COLUMNS = {
    "string": pyarrow.array(TEXTS),
    "large string": pyarrow.array(TEXTS, pyarrow.large_string()),
    "string view": pyarrow.array(TEXTS, pyarrow.string_view()),
    "binary": pyarrow.array(TEXTS, pyarrow.string()).cast(pyarrow.binary()),
    "large binary": pyarrow.array(TEXTS, pyarrow.string()).cast(pyarrow.large_binary()),
    "binary view": pyarrow.array(TEXTS, pyarrow.string()).cast(pyarrow.binary_view()),
    "categorical": pyarrow.array(TEXTS).dictionary_encode(),
    "categorical of views": pyarrow.DictionaryArray.from_arrays(
        pyarrow.array([0, None, 1, 2, 0, 3, None], pyarrow.int8()),
        pyarrow.array(["first", "", "日本", "x" * 300], pyarrow.string_view()),
    ),
    "categorical with a null": pyarrow.DictionaryArray.from_arrays(
        pyarrow.array([1, 0, 2, 3, 1, 4, 0]), pyarrow.array([None, "first", "", "日本", "x" * 300])
    ),
}


NOT_IN_PARQUET = ("categorical of views", "categorical with a null")


@pytest.mark.parametrize(
    ("name", "suffix"),
    [
        (name, suffix)
        for name in COLUMNS
        for suffix in ("parquet", "arrow", "feather")
        if suffix != "parquet" or name not in NOT_IN_PARQUET
    ],
)
def test_every_type_of_text_gives_the_same_documents(tmp_path, name, suffix):
    table, path = pyarrow.table({"title": TEXTS[::-1], "text": COLUMNS[name]}), tmp_path / f"x.{suffix}"
    if suffix == "parquet":
        pyarrow.parquet.write_table(table, path, row_group_size=3)
    elif suffix == "feather":
        pyarrow.feather.write_feather(table, path)
    else:
        with pyarrow.ipc.new_stream(path, table.schema) as stream:
            stream.write_table(table, max_chunksize=3)
    assert [item.texts[0] if isinstance(item, documents.Document) else item.kind for item in _items(path)] == [
        "key missing" if text is None else text for text in TEXTS
    ]
    pairs = [pair for pair in zip(TEXTS, TEXTS[::-1], strict=True) if None not in pair]
    both = _items(path, ["text", "title"])
    assert [item.texts for item in both if isinstance(item, documents.Document)] == pairs


def _items(path, keys=("text",)):
    return list(Reader(whole(path), keys, limit_bytes=LIMIT))


@pytest.mark.parametrize("suffix", ["parquet", "feather"])
def test_a_column_without_any_text_counts_as_missing_keys(tmp_path, suffix):
    path = tmp_path / f"x.{suffix}"
    table = pyarrow.table({"n": [1, 2], "text": pyarrow.nulls(2)})
    (pyarrow.parquet.write_table if suffix == "parquet" else pyarrow.feather.write_feather)(table, path)
    assert [(item.kind, item.line, item.detail) for item in _items(path)] == [
        ("key missing", 1, "'text' is null"),
        ("key missing", 2, "'text' is null"),
    ]


def test_repeated_entries_of_a_dictionary_are_decoded_a_few_at_a_time(tmp_path, monkeypatch):
    monkeypatch.setattr(columnar, "_BATCH_BYTES", 8 << 20)
    text, path = "a" * (2 << 20), tmp_path / "x.parquet"
    table = pyarrow.table({"text": pyarrow.array([text] * 64)})
    pyarrow.parquet.write_table(table, path, compression="zstd", dictionary_pagesize_limit=1 << 30)
    del table
    assert path.stat().st_size < 2000
    before, peak, count = pyarrow.total_allocated_bytes(), 0, 0
    for document in Reader(whole(path), ["text"], limit_bytes=4 << 20):
        peak = max(peak, pyarrow.total_allocated_bytes() - before)
        count += len(document.texts[0]) == len(text)
    assert count == 64
    assert peak < 32 << 20  # of 128 MiB


def test_a_column_that_expands_without_end_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(columnar, "_EXPANSION_FREE_BYTES", 1 << 20)
    path, table = tmp_path / "x.parquet", pyarrow.table({"text": ["a" * (4 << 20)]})
    pyarrow.parquet.write_table(table, path, compression="zstd")
    with pytest.raises(
        DataError, match=r"x\.parquet: column 'text' of row group 0 expands to \d+ bytes from \d+, more"
    ):
        _items(path)
    encoded = pyarrow.table({"text": table["text"].combine_chunks().dictionary_encode()})
    for number, content in enumerate((table, encoded)):
        path = tmp_path / f"{number}.feather"
        pyarrow.feather.write_feather(content, path, compression="zstd")
        with pytest.raises(DataError, match=r"\d\.feather: batch or dictionary 1 expands to 41943\d\d bytes from \d+"):
            list(Reader(whole(path), ["text"], limit_bytes=8 << 20))
        pyarrow.feather.write_feather(content, path, compression="uncompressed")
        assert [len(item.texts[0]) for item in Reader(whole(path), ["text"], limit_bytes=8 << 20)] == [4 << 20]


def test_damaged_messages_of_arrow_are_one_error(tmp_path):
    path = _stored(tmp_path, "x.feather", b'{"text": "some text"}\n' * 20)
    data, refused = path.read_bytes(), 0
    for place in range(8, len(data) - 8, 3):
        path.write_bytes(data[:place] + b"\xff\x7f" + data[place + 2 :])
        try:
            _items(path)
        except DataError:
            refused += 1
    assert refused > 20


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("body", r"x\.parquet: has no column 'body', only text, n, title; change"),
        ("n", "column 'n' has type int64, not string"),
        ("title", r"x\.parquet: has 2 columns 'title'; rename all but one, or change --json-keys"),
    ],
)
def test_parquet_without_a_column_of_text_is_refused(tmp_path, key, message):
    columns = [pyarrow.array(values) for values in (["a"], [1], ["b"], ["c"])]
    table = pyarrow.Table.from_arrays(columns, ["text", "n", "title", "title"])
    pyarrow.parquet.write_table(table, tmp_path / "x.parquet")
    with pytest.raises(DataError, match=message):
        _parse(tmp_path / "x.parquet", keys=(key,))


def test_offsets_of_arrow_are_checked(tmp_path):
    table = pyarrow.table({"text": ["first", "second"]})
    with pyarrow.ipc.new_file(tmp_path / "x.arrow", table.schema) as file:
        file.write_table(table)
    data = (tmp_path / "x.arrow").read_bytes()
    offsets = b"".join(number.to_bytes(4, "little") for number in (0, 5, 11))
    assert data.count(offsets) == 1
    (tmp_path / "x.arrow").write_bytes(data.replace(offsets, offsets[:4] + b"\xff\xff\xff\x7f" + offsets[8:]))
    with pytest.raises(DataError, match=r"x\.arrow: not an Arrow file, or damaged: .*[Oo]ffset"):
        _parse(tmp_path / "x.arrow")


def test_a_stream_that_ends_between_two_batches_is_refused(tmp_path):
    path = _stored(tmp_path, "x.arrow", b'{"text": "a"}\n' * 20)
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(DataError, match=r"x\.arrow: not an Arrow file, or damaged: no end of the stream"):
        _parse(path)


def test_old_feather_files_are_named(tmp_path):
    (tmp_path / "x.feather").write_bytes(b"FEA1" + bytes(100))
    with pytest.raises(DataError, match=r"x\.feather: Feather version 1; write it again with version 2"):
        _parse(tmp_path / "x.feather")


def test_all_fields_of_a_line_come_with_its_text(tmp_path):
    (document,) = Reader(whole(_file(tmp_path, b'{"n": 1, "text": "a"}')), ["text"], limit_bytes=LIMIT)
    assert (document.line, document.fields) == (1, {"n": 1, "text": "a"})
