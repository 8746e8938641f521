"""Reading text: every kind of bad line by file and line, byte limits, and which files a pattern means."""

import json

import pytest

from megalin.data.corpus import BadLine, Documents, expand_inputs, iterate_texts, parse_raw, read_raw
from megalin.errors import DataError

LIMIT = 1 << 20


def _parse(path, limit=LIMIT, keys=("text",)):
    return [parse_raw(raw, keys, limit_bytes=limit) for raw in read_raw(path, limit_bytes=limit)]


def _file(tmp_path, data, name="x.jsonl"):
    (tmp_path / name).write_bytes(data)
    return tmp_path / name


BAD = [
    (b"", "blank line", ""),
    (b" \t\r", "blank line", ""),
    (b'{"text": "\xff"}', "invalid UTF-8", "byte 10"),
    (b'\xef\xbb\xbf{"text": "a"}', "not JSON", "Unexpected UTF-8 BOM"),  # only line 1 may have it
    (b'{"text": "a"', "not JSON", "Expecting"),
    (b"text", "not JSON", "Expecting value"),
    (b'{"text": "a", "score": NaN}', "not JSON", "NaN is no JSON value"),
    (b'{"text": "a", "n": ' + b"9" * 5000 + b"}", "not JSON", "Exceeds the limit"),
    (b"[" * 200_000, "nested too deeply", ""),
    (b'{"text":' * 100_000, "nested too deeply", ""),
    (b'["text"]', "not an object", "found list"),
    (b"null", "not an object", "found NoneType"),
    (b'{"body": "a"}', "key missing", "'text'"),
    (b'{"text": null}', "not a string", "'text' is NoneType"),
    (b'{"text": ["a"]}', "not a string", "'text' is list"),
    (b'{"text": "a\\ud800"}', "lone surrogate", "character 1 of 'text'"),
    (b'{"text": "' + b"a" * LIMIT + b'"}', "too long", f"more than {LIMIT} bytes"),
]


@pytest.mark.parametrize(("line", "kind", "detail"), BAD, ids=range(len(BAD)))
def test_bad_line_is_told_by_kind_and_place_and_the_next_is_read(tmp_path, line, kind, detail):
    path = _file(tmp_path, b'{"text": "first"}\n' + line + b'\n{"text": "last"}')
    first, bad, last = _parse(path)
    assert (first, last) == (Documents(("first",)), Documents(("last",)))
    assert isinstance(bad, BadLine)
    assert (bad.path, bad.line, bad.kind) == (str(path), 2, kind)
    assert detail in bad.detail
    assert str(bad).startswith(f"{path}:2: {kind}")


@pytest.mark.parametrize("text", ["a\x00b", "\x1b[31m", "é日🙂", "\u2028", ""])
def test_control_characters_and_any_unicode_are_kept(tmp_path, text):
    assert _parse(_file(tmp_path, json.dumps({"text": text}).encode())) == [Documents((text,))]


def test_byte_order_mark_and_carriage_returns_are_dropped(tmp_path):
    path = _file(tmp_path, b'\xef\xbb\xbf{"text": "a"}\r\n{"text": "b"}\r\n')
    assert _parse(path) == [Documents(("a",)), Documents(("b",))]


def test_several_keys_are_taken_from_one_line(tmp_path):
    path = _file(tmp_path, b'{"b": "2", "a": "1"}\n{"a": "3"}')
    good, bad = _parse(path, keys=("a", "b"))
    assert good == Documents(("1", "2"))
    assert bad.kind == "key missing"


@pytest.mark.parametrize("end", [b"", b"\n", b"\r\n"])
@pytest.mark.parametrize("excess", [-1, 0, 1, 2, 3, 50, 64, 65, 66, 200])
def test_limit_counts_the_bytes_of_the_line_without_its_end(tmp_path, excess, end):
    limit = 64
    line = b'{"text": "' + b"a" * (limit - 12 + excess) + b'"}'
    parsed = _parse(_file(tmp_path, b'{"text": "first"}\n' + line + end + b'{"text": "z"}' * (end != b"")), limit)
    assert isinstance(parsed[1], Documents if excess <= 0 else BadLine)
    assert len(parsed) == (3 if end else 2)


def test_text_file_is_one_document(tmp_path):
    assert _parse(_file(tmp_path, b"one\n\ntwo\n", "x.txt")) == [Documents(("one\n\ntwo\n",))]
    assert _parse(_file(tmp_path, b"a" * 65, "x.txt"), 64)[0].kind == "too long"
    assert _parse(_file(tmp_path, b"a" * 64, "x.txt"), 64) == [Documents(("a" * 64,))]
    assert _parse(_file(tmp_path, b"a\xff", "x.txt"))[0].kind == "invalid UTF-8"
    assert _parse(_file(tmp_path, b"", "x.txt"))[0].kind == "blank line"


def test_texts_leave_bad_lines_out(tmp_path):
    path = _file(tmp_path, b'{"text": "a"}\nbad\n{"text": "b"}')
    assert list(iterate_texts([path], ["text"], limit_bytes=LIMIT)) == ["a", "b"]


def test_patterns_expand_in_order_and_once(tmp_path):
    for name in ("b.jsonl", "a.jsonl", "c.txt", "[d].json"):
        (tmp_path / name).touch()
    patterns = [f"{tmp_path}/c.txt", f"{tmp_path}/*.jsonl", f"{tmp_path}/a.jsonl", f"{tmp_path}/[d].json"]
    assert [path.name for path in expand_inputs(patterns)] == ["c.txt", "a.jsonl", "b.jsonl", "[d].json"]


def test_pattern_without_a_match_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"--input .*none\*: no such file, and no file matches it as a glob"):
        expand_inputs([f"{tmp_path}/none*"])


@pytest.mark.parametrize("name", ["x.jsonl.gz", "x.parquet", "x"])
def test_unknown_kind_of_file_is_refused(tmp_path, name):
    (tmp_path / name).touch()
    with pytest.raises(DataError, match=rf"{name}: expected \.jsonl or \.json .* or \.txt .*; convert or decompress"):
        expand_inputs([str(tmp_path / name)])


def test_folder_is_refused(tmp_path):
    (tmp_path / "x.jsonl").mkdir()
    with pytest.raises(DataError, match="expected a regular file"):
        _parse(tmp_path / "x.jsonl")


def test_failing_read_names_the_file(tmp_path, monkeypatch):
    def fail(*_):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("megalin.data.corpus._lines", fail)
    with pytest.raises(DataError, match=r"x\.jsonl: cannot be read: Input/output error"):
        _parse(_file(tmp_path, b"{}"))
