"""Plan of a corpus in parts, and the records of finished parts."""

import json
from unittest.mock import Mock, call

import pytest

from megalin.data.corpus import parts
from megalin.optional import require


@pytest.fixture
def corpus(tmp_path, monkeypatch):
    """A parquet file of seven row groups and a jsonl file."""
    monkeypatch.setattr(parts, "_LEAST_PART_BYTES", 300)
    arrow, parquet = require("pyarrow", "this test"), require("pyarrow.parquet", "this test")
    texts = [f"document {k}" * 5 for k in range(70)]
    parquet.write_table(arrow.table({"text": texts}), tmp_path / "x.parquet", row_group_size=10)
    (tmp_path / "y.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return [tmp_path / "x.parquet", tmp_path / "y.jsonl"]


def test_sizes_of_the_parts_add_up_to_their_file(corpus):
    planned = parts.plan(corpus)
    for path in corpus:
        mine = [part.size_bytes for part in planned if part.span.path == str(path)]
        assert len(mine) > 3
        assert sum(mine) == path.stat().st_size


def _record_nothing(job, part, folder, report):
    return {"job": job}


def _run(folder, planned):
    return parts.run_parts(_record_nothing, 7, planned, parts.Run(folder, {}, 1, False, None, lambda _: None))


def test_record_holds_the_result_of_the_work_and_the_progress(corpus, tmp_path):
    planned = parts.plan(corpus)
    assert _run(tmp_path / "p", planned)
    assert list(parts.records(tmp_path / "p", planned)) == [
        {"job": 7, "progress": [0, 0, part.size_bytes, 0]} for part in planned
    ]


def test_inputs_are_identified_once_a_file(corpus, tmp_path, monkeypatch):
    identity = Mock(wraps=parts._identity)
    monkeypatch.setattr(parts, "_identity", identity)
    _run(tmp_path / "p", parts.plan(corpus))
    assert identity.call_args_list == [call(str(path)) for path in corpus]
