"""Files of --input: globs, lists and suffixes; and missing libraries."""

import sys

import pyarrow
import pyarrow.parquet
import pytest

from megalin.data.corpus.inputs import expand_inputs, split, whole
from megalin.errors import ConfigError, DataError
from megalin.optional import require


def test_patterns_expand_in_order_and_once(tmp_path):
    for name in ("b.jsonl", "a.jsonl", "c.txt.zst", "[d].json", "e.parquet"):
        (tmp_path / name).touch()
    patterns = [f"{tmp_path}/c.txt.zst", f"{tmp_path}/*.jsonl", f"{tmp_path}/a.jsonl", f"{tmp_path}/[d].json"]
    expected = ["c.txt.zst", "a.jsonl", "b.jsonl", "[d].json"]
    assert [path.name for path in expand_inputs(patterns)] == expected
    (tmp_path / "list").write_text("\n".join([*patterns, "", f"  {tmp_path}/e.parquet"]))
    assert [path.name for path in expand_inputs([f"@{tmp_path}/list"])] == [*expected, "e.parquet"]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"@{}\n", "lists are nested deeper than 4; does one refer to itself"),
        (b"\xff", "not UTF-8; give @FILE, a list"),
        (b"/none/x.jsonl", "--input /none/x.jsonl: no such file, and no file matches it as a glob"),
    ],
)
def test_list_that_names_no_files_is_refused(tmp_path, data, message):
    (tmp_path / "list").write_bytes(data.replace(b"{}", str(tmp_path / "list").encode()))
    with pytest.raises(DataError, match=message):
        expand_inputs([f"@{tmp_path}/list"])


@pytest.mark.parametrize("name", ["x.jsonl.lz4", "x.parquet.gz", "x.arrow.xz", "x", "x.gz"])
def test_unknown_kind_of_file_is_refused(tmp_path, name):
    (tmp_path / name).touch()
    with pytest.raises(
        DataError, match=rf"{name}: expected \.jsonl or \.json .*, or \.parquet, \.arrow or \.feather; convert it first"
    ):
        expand_inputs([str(tmp_path / name)])


def test_file_without_content_is_one_span(tmp_path):
    (tmp_path / "x.jsonl").touch()
    pyarrow.parquet.write_table(pyarrow.table({"text": pyarrow.array([], pyarrow.string())}), tmp_path / "x.parquet")
    for name in ("x.jsonl", "x.parquet"):
        assert len(split(tmp_path / name, part_bytes=10)) == 1


def test_file_that_is_no_parquet_is_refused(tmp_path):
    (tmp_path / "x.parquet").write_bytes(b"PAR1" + bytes(50) + b"PAR1")
    with pytest.raises(DataError, match=r"x\.parquet: not a parquet file, or damaged"):
        whole(tmp_path / "x.parquet")


def test_missing_library_is_named_with_the_remedy(monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(
        ConfigError, match=r"x\.zst needs the library pyarrow; install it: pip install 'megalin\[data\]'"
    ):
        require("pyarrow", "x.zst")
