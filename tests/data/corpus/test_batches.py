"""Batches of a corpus: order, sizes and counts of read bytes."""

import itertools
import json

from megalin.data.corpus import batches
from megalin.data.corpus.documents import Reader
from megalin.data.corpus.inputs import whole


def _read(path):
    reader = Reader(whole(path), ["text"], limit_bytes=1 << 20)
    return list(reader), list(batches.batches(reader))


def test_batches_hold_the_corpus_in_its_order(tmp_path, monkeypatch):
    monkeypatch.setattr(batches, "_BATCH_BYTES", 1000)
    monkeypatch.setattr(batches, "_BATCH_LINES", 10)
    monkeypatch.setattr("megalin.data.corpus.documents._BUFFER_BYTES", 512)
    lines = [json.dumps({"text": "x" * (k % 50 * 10)}) if k % 7 else "bad" for k in range(200)]
    (tmp_path / "x.jsonl").write_text("\n".join([*lines, *["bad"] * 25]))
    items, found = _read(tmp_path / "x.jsonl")
    read = list(itertools.chain(*(sorted([*b.documents, *b.bad_lines], key=lambda item: item.line) for b in found)))
    assert read == items
    assert max(len(batch.documents) + len(batch.bad_lines) for batch in found) == 10
    sizes = [[document.size_bytes for document in batch.documents] for batch in found]
    assert max(sum(size[:-1]) for size in sizes) < 1000 <= max(map(sum, sizes))
    size = (tmp_path / "x.jsonl").stat().st_size
    assert min(batch.read_bytes for batch in found) >= 0
    assert 0.8 * size < sum(batch.read_bytes for batch in found) <= size


def test_empty_corpus_has_no_batch(tmp_path):
    (tmp_path / "x.jsonl").write_text("")
    assert _read(tmp_path / "x.jsonl") == ([], [])
