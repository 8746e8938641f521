"""Deduplication: planted duplicates are removed and other texts kept, for any number of workers and parts."""

import itertools
import json
import os
from pathlib import Path

import numpy as np
import pytest

from megalin.data.corpus import deduplication, duplicates, parts
from megalin.data.corpus.deduplication import DeduplicateOptions, deduplicate
from megalin.data.corpus.documents import Reader
from megalin.data.corpus.duplicates import matching_pairs
from megalin.data.corpus.inputs import whole
from megalin.data.corpus.signatures import scheme
from megalin.errors import ConfigError, DataError
from tools import deduplicate as tool


def _options(folder, **values):
    defaults = {
        "json_key": "text",
        "output_prefix": str(folder / "out"),
        "level": "document",
        "how": scheme("minhash", 0.7),
        "least_characters": 5,
        "compression": "none",
        "workers": 1,
        "memory_bytes": 1 << 20,
        "limit_bytes": 1 << 20,
        "resume": False,
    }
    return DeduplicateOptions(**{**defaults, **values})


def _jsonl(path, values):
    path.write_text("".join(json.dumps(value) + "\n" for value in values))
    return path


def _written(report):
    found = [Reader(whole(name), ["text"], limit_bytes=1 << 20) for name in report.files]
    return [document.fields for document in itertools.chain(*found)]


@pytest.fixture(scope="module")
def planted():
    """900 texts of 100 words and 300 copies of some with 1 to 6 words changed, shuffled; and the Jaccard index of each
    copy and its text."""
    rng = np.random.default_rng(0)
    texts = [[f"w{n}" for n in rng.integers(0, 3000, 100)] for _ in range(900)]
    jaccard = {}
    for k in range(300):
        copy = list(texts[k])
        for place in rng.choice(100, k % 6 + 1, replace=False):
            copy[place] = f"x{rng.integers(0, 3000)}"
        one, other = ({tuple(words[i : i + 5]) for i in range(96)} for words in (texts[k], copy))
        jaccard[k] = len(one & other) / len(one | other)
        texts.append(copy)
    order = rng.permutation(len(texts)).tolist()
    return [{"text": " ".join(texts[k]), "id": k} for k in order], jaccard


@pytest.fixture(scope="module")
def results(planted, tmp_path_factory):
    """Reports of a run with one worker and one part, and of one with two workers, many parts and several passes."""
    folder = tmp_path_factory.mktemp("planted")
    path = _jsonl(folder / "x.jsonl", planted[0])
    found = []
    with pytest.MonkeyPatch.context() as patch:
        for workers, least, entry in ((1, 1 << 20, 64), (2, 150_000, 1 << 11)):
            patch.setattr(parts, "_LEAST_PART_BYTES", least)
            patch.setattr(duplicates, "_ENTRY_BYTES", entry)
            patch.setattr(deduplication, "_TEXTS_AT_ONCE", 500)
            (folder / str(workers)).mkdir()
            found.append(deduplicate([path], _options(folder / str(workers), workers=workers)))
    return found


def test_planted_duplicates_are_found_and_little_else(planted, results):
    values, jaccard = planted
    kept = {value["id"] for value in _written(results[0])}
    lost = {k for k in jaccard if not {k, 900 + k} <= kept}  # the later text of each pair is removed
    similar = {k for k, value in jaccard.items() if value >= 0.8}
    assert len(similar) > 50
    assert len(lost & similar) / len(similar) >= 0.95
    assert all(jaccard[k] >= 0.55 for k in lost)  # three standard errors below the threshold
    assert len(kept) == len(values) - len(lost) == results[0].written_documents
    first = {}
    for place, value in enumerate(values):
        first.setdefault(value["id"] % 900, place)
    assert all(values[first[k]]["id"] in kept for k in lost)
    assert results[0].removed_texts == len(lost)
    assert (results[0].documents, results[0].texts) == (1200, 1200)


def test_result_is_the_same_for_any_number_of_workers_parts_and_passes(results):
    one, other = results
    assert _written(one) == _written(other)
    assert len(other.files) > len(one.files) == 1
    assert one[1:] == other[1:]
    assert not list(Path(one.files[0]).parent.glob("*.parts"))


def test_equal_lines_are_left_out_after_the_first_and_short_ones_stay(tmp_path):
    values = [
        {"text": "first line\nshared line\n\nok", "n": 1},
        {"text": "shared  line\nok"},
        {"text": "shared line"},
        {"text": "own line\nfirst line\nown line"},
    ]
    path = _jsonl(tmp_path / "x.jsonl", values)
    with path.open("a") as file:
        file.write("bad\n")
    report = deduplicate([path], _options(tmp_path, level="line", how=scheme("exact", 1.0)))
    expected = [{"text": "first line\nshared line\n\nok", "n": 1}, {"text": "ok"}, {"text": "own line"}]
    assert _written(report) == expected
    assert (report.texts, report.removed_texts, report.written_documents, report.documents) == (7, 4, 3, 4)
    assert report.removed_bytes == len("shared  line" + "shared line" + "first line" + "own line")
    assert report.bad_lines == {"not JSON": 1}
    manifest = json.loads((tmp_path / "out.manifest.json").read_text())
    assert (manifest["removed_texts"], manifest["files"]) == (4, report.files)


@pytest.mark.parametrize("compression", ["gz", "zst"])
def test_killed_run_goes_on_and_compressed_output_is_the_same(tmp_path, planted, monkeypatch, compression):
    class StoppedError(Exception):
        pass

    path = _jsonl(tmp_path / "x.jsonl", planted[0][:300])
    monkeypatch.setattr(parts, "_LEAST_PART_BYTES", 20_000)
    (tmp_path / "one").mkdir()
    one = deduplicate([path], _options(tmp_path / "one", compression=compression))
    (tmp_path / "two").mkdir()
    options = _options(tmp_path / "two", compression=compression, resume=True)
    work, calls = deduplication._filter_part, []

    def stop(job, part, folder, report):
        calls.append(part.number)
        if len(calls) == 3:
            raise StoppedError
        return work(job, part, folder, report)

    monkeypatch.setattr(deduplication, "_filter_part", stop)
    with pytest.raises(StoppedError):
        deduplicate([path], options)
    assert not list((tmp_path / "two").glob("out-*"))
    two = deduplicate([path], options)
    assert calls == [0, 1, 2, *range(2, len(two.files))]
    assert [Path(name).read_bytes() for name in one.files] == [Path(name).read_bytes() for name in two.files]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"how": scheme("minhash", 1.5)}, "--threshold 1.5: must be above 0 and at most 1"),
        ({"memory_bytes": 5}, "--memory 0: must be at least 1 MiB"),
    ],
)
def test_options_that_cannot_work_are_refused(tmp_path, values, message):
    with pytest.raises(ConfigError, match=message):
        deduplicate([], _options(tmp_path, **values))


def test_existing_corpus_is_not_overwritten(tmp_path, capsys):
    path = _jsonl(tmp_path / "x.jsonl", [{"text": "a"}, {"text": "a"}])
    arguments = ["--input", str(path), "--output-prefix", str(tmp_path / "out"), "--method", "exact"]
    assert tool.main(arguments) == 0
    assert capsys.readouterr().out == "1 of 2 documents; 1 of 2 documents and 1 bytes left out: 1 files\n"
    assert tool.main(arguments) == 2
    assert "exists; remove that corpus or give another prefix" in capsys.readouterr().err


def test_each_pass_shows_its_progress(tmp_path, capsys):
    path = _jsonl(tmp_path / "x.jsonl", [{"text": f"text {k}"} for k in range(5)])
    arguments = ["--input", str(path), "--output-prefix", str(tmp_path / "out"), "--method", "exact"]
    assert tool.main([*arguments, "--log-interval", "5"]) == 0
    shown = capsys.readouterr().err
    assert shown.index("signing: 5 documents (") < shown.index("writing: 5 documents (")


def _end_abruptly(task):
    os._exit(1)


def test_worker_that_dies_while_texts_are_clustered_is_reported(tmp_path, monkeypatch):
    monkeypatch.setattr(duplicates, "_links_in_band", _end_abruptly)
    path = _jsonl(tmp_path / "x.jsonl", [{"text": "a"}])
    with pytest.raises(DataError, match=r"a worker process died .*; use fewer --workers or lower --memory"):
        deduplicate([path], _options(tmp_path, workers=2))


def test_texts_unlike_the_first_of_their_band_find_each_other():
    """Texts of equal hash are duplicates if the last digits of their ids are equal."""
    ids = np.arange(40)
    hashes = np.repeat(np.array([7, 9], np.uint64), 20)
    pairs = matching_pairs(hashes, ids, lambda one, other: one % 10 == other % 10)
    assert sorted(map(tuple, pairs.tolist())) == [(k, k + 10) for k in (*range(10), *range(20, 30))]


def test_texts_that_are_left_after_the_last_round_have_no_pair(monkeypatch):
    monkeypatch.setattr(duplicates, "_ROUNDS", 3)
    pairs = matching_pairs(np.zeros(20, np.uint64), np.arange(20), lambda one, other: one % 10 == other % 10)
    assert sorted(map(tuple, pairs.tolist())) == [(0, 10), (1, 11), (2, 12)]


def test_clusters_keep_their_first_text_over_chains():
    rng = np.random.default_rng(0)
    nodes = rng.permutation(1000)
    pairs = np.sort(np.stack((nodes[:-1], nodes[1:]), axis=1), axis=1)[rng.random(999) < 0.9]
    removed = duplicates._all_but_first(pairs)
    roots = list(range(1000))

    def root(node):
        return node if roots[node] == node else root(roots[node])

    for one, other in pairs.tolist():
        low, high = sorted((root(one), root(other)))
        roots[high] = low
    assert removed.tolist() == [node for node in range(1000) if root(node) != node]
