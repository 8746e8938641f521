"""Cleaning of a corpus: output and reports, equal for any number of workers and after a kill."""

import json
from pathlib import Path

import pytest

from megalin.data.corpus import batches, parts
from megalin.data.corpus.cleaning import CleanOptions, clean
from megalin.data.corpus.rules import RULES
from megalin.errors import ConfigError
from tools import clean_corpus as tool

DOCUMENTS = [
    {"text": "See www.a.org now!!! It is all about cats and dogs\u3002\u3002", "n": 1},
    {"text": "<p></p>"},
    {"text": "Nothing to do here.", "n": [2]},
    {"text": "Ceci est une phrase en français, sans aucun doute possible."},
]


def _options(folder, **values):
    defaults = {
        "json_key": "text",
        "output_prefix": str(folder / "out"),
        "rules": list(RULES),
        "preserve_markup": True,
        "languages": [],
        "least_characters": 1,
        "compression": "none",
        "workers": 1,
        "limit_bytes": 1 << 20,
        "resume": False,
    }
    return CleanOptions(**{**defaults, **values})


@pytest.fixture
def path(tmp_path):
    lines = [json.dumps(DOCUMENTS[k % 4]) if k % 7 else "bad" for k in range(280)]
    (tmp_path / "x.jsonl").write_text("\n".join(lines))
    return tmp_path / "x.jsonl"


def _lines(report):
    return [json.loads(line) for name in report.files for line in Path(name).read_text().splitlines()]


def test_each_rule_reports_what_it_did(tmp_path, path):
    report = clean([path], _options(tmp_path, rules=["urls", "repeated-punctuation", "html"], languages=["en"]))
    assert (report.documents, report.written_documents) == (240, 120)
    assert (report.too_short, report.other_language, report.bad_lines) == (0, 120, {"not JSON": 40})
    assert list(report.rules) == ["html", "urls", "repeated-punctuation"]
    assert [rule.documents for rule in report.rules.values()] == [60, 60, 60]
    assert report.rules["urls"].removed_bytes == 60 * len("www.a.org")
    assert report.rules["repeated-punctuation"].removed_bytes == 60 * len("!!\u3002".encode())
    assert report.rules["urls"].examples[0] == (
        str(path),
        5,
        "See www.a.org now!!! It is all about cats and dogs\u3002\u3002",
        "See  now!!! It is all about cats and dogs\u3002\u3002",
    )
    assert len(report.rules["urls"].examples) == 5
    assert _lines(report)[:2] == [
        {"text": "Nothing to do here.", "n": [2]},
        {"text": "See  now! It is all about cats and dogs\u3002", "n": 1},
    ]
    manifest = json.loads((tmp_path / "out.manifest.json").read_text())
    assert manifest["files"] == report.files
    assert manifest["rules"]["html"]["documents"] == 60


def test_documents_with_little_left_are_left_out(tmp_path, path):
    report = clean([path], _options(tmp_path, least_characters=30))
    assert report.too_short == 120
    assert not {line["text"] for line in _lines(report)} & {DOCUMENTS[1]["text"], DOCUMENTS[2]["text"]}


def test_output_is_the_same_for_any_number_of_workers_and_after_a_kill(tmp_path, path, monkeypatch):
    class StoppedError(Exception):
        pass

    def stop(progress):
        if progress.documents > 100:
            raise StoppedError

    monkeypatch.setattr(parts, "_LEAST_PART_BYTES", 3000)
    monkeypatch.setattr(batches, "_BATCH_LINES", 10)
    folders = [tmp_path / name for name in ("one", "two", "killed")]
    for folder in folders:
        folder.mkdir()
    reports = [clean([path], _options(folders[0])), clean([path], _options(folders[1], workers=2))]
    with pytest.raises(StoppedError):
        clean([path], _options(folders[2]), on_progress=stop)
    assert not list(folders[2].glob("out-*"))
    reports.append(clean([path], _options(folders[2], resume=True)))
    written = [[Path(name).read_bytes() for name in report.files] for report in reports]
    assert written[0] == written[1] == written[2]
    assert len(written[0]) > 2
    assert [len(rule.examples) for rule in reports[0].rules.values()] == [0, 0, 5, 5, 0, 5, 0, 5]
    assert reports[0][1:] == reports[1][1:] == reports[2][1:]


def test_unknown_rule_is_refused(tmp_path, path):
    with pytest.raises(
        ConfigError, match="--rules no-such: no such rule; choose from fix-text, special-characters, html"
    ):
        clean([path], _options(tmp_path, rules=["html", "no-such"]))


def test_unknown_language_is_refused_before_any_work(tmp_path, path):
    with pytest.raises(ConfigError, match="--languages eng: not a language"):
        clean([path], _options(tmp_path, languages=["eng"]))
    assert sorted(file.name for file in tmp_path.iterdir()) == ["x.jsonl"]


def test_other_fields_are_written_so_that_they_can_be_read(tmp_path):
    path = tmp_path / "x.jsonl"
    good = r'{"text":"fine","t":"\ud83d\ude42"}'
    path.write_text(good + "\n" + r'{"text":"fine","t":"\ud800"}' + "\n" + '{"text":"fine","t":1e999}\n')
    report = clean([path], _options(tmp_path))
    assert _lines(report) == [{"text": "fine", "t": "🙂"}]
    assert report.bad_lines == {"lone surrogate": 1, "not JSON": 1}


def test_finished_corpus_is_not_resumed(tmp_path, path):
    report = clean([path], _options(tmp_path))
    before = [Path(name).stat().st_mtime_ns for name in report.files]
    with pytest.raises(ConfigError, match=r"out-00000-of-00001\.jsonl exists; remove that corpus"):
        clean([path], _options(tmp_path, rules=["urls"], resume=True))
    assert [Path(name).stat().st_mtime_ns for name in report.files] == before


def test_run_stopped_after_its_manifest_goes_on(tmp_path, path, monkeypatch):
    class StoppedError(Exception):
        pass

    def stop(_):
        raise StoppedError

    with monkeypatch.context() as patch:
        patch.setattr("megalin.data.corpus.jsonl_output.discard", stop)
        with pytest.raises(StoppedError):
            clean([path], _options(tmp_path))
    written = {file.name: file.read_bytes() for file in tmp_path.glob("out*") if file.is_file()}
    assert len(written) == 2
    clean([path], _options(tmp_path, resume=True))
    assert {file.name: file.read_bytes() for file in tmp_path.glob("out*")} == written


def test_tool_reports_rules_with_an_example(tmp_path, path, capsys):
    arguments = ["--input", str(path), "--output-prefix", str(tmp_path / "out"), "--rules", "urls"]
    assert tool.main(arguments) == 0
    shown = capsys.readouterr()
    assert shown.out.startswith("urls: 60 documents, 540 bytes removed\n    'See www.a.org now!!! It")
    assert "240 of 240 documents (0 too short, 0 in other languages): 1 files" in shown.out
    assert "left out: 40 x not JSON" in shown.err
    assert tool.main(arguments) == 2
    assert "Error: --output-prefix " in capsys.readouterr().err
