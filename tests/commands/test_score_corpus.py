"""tools/score_corpus.py with a trained run: the kept documents, the output and the files."""

import json
from pathlib import Path

from megalin.commands.data import score
from tests.model_runs import documents
from tools import score_corpus


def test_likely_documents_are_kept(trained, tmp_path, capsys):
    """Half of the documents resemble the training data of the run; the others are noise."""
    known = [bytes(ids[:-1]).decode() for ids in documents(800, seed=5)]
    values = [{"text": text, "known": True} for text in known]
    values += [{"text": text[::-1].translate({k: 255 - k for k in range(128)}), "known": False} for text in known]
    (tmp_path / "x.jsonl").write_text("\n".join([*map(json.dumps, values), "bad"]))
    arguments = [str(trained), "--input", str(tmp_path / "x.jsonl"), "--output-prefix", str(tmp_path / "out")]
    options = ["--keep-quantile", "0.5", "--log-interval", str(len(values)), "--dtype", "bfloat16"]
    assert score_corpus.main([*arguments, *options]) == 0
    written = [json.loads(line) for path in tmp_path.glob("out-*.jsonl") for line in path.read_text().splitlines()]
    assert len(written) == len(known)
    assert all(value["known"] for value in written)
    shown = capsys.readouterr()
    assert f"{len(known)} of {len(values)} documents kept, of a perplexity of at most" in shown.out
    assert "left out: 1 x not JSON" in shown.err
    for title in ("scoring (rank 0 of 1)", "selecting"):
        assert f"{title}: {len(values)} documents" in shown.err
    assert Path(f"{tmp_path}/out.review.html").read_text().count("<article") == 40
    assert not list(tmp_path.glob("*.parts"))


def test_invalid_arguments_are_refused(trained, tmp_path, capsys):
    (tmp_path / "x.jsonl").write_text('{"text": "a"}')
    arguments = ["--input", str(tmp_path / "x.jsonl"), "--output-prefix", str(tmp_path / "out")]
    assert score_corpus.main([str(trained), *arguments]) == 2
    assert "give either --max-perplexity or --keep-quantile" in capsys.readouterr().err
    assert score_corpus.main([str(tmp_path), *arguments, "--max-perplexity", "9"]) != 0
    assert capsys.readouterr().err.startswith("ConfigError: ")


def test_ranks_after_the_first_show_no_progress(trained, tmp_path, capsys, monkeypatch):
    for name in ("x", "y"):
        (tmp_path / f"{name}.jsonl").write_text('{"text": "a"}')
    monkeypatch.setenv("FORCE_COLOR", "1")  # a bar, as on a terminal
    monkeypatch.setattr(score, "world_size", lambda: 2)
    monkeypatch.setattr(score, "rank", lambda: 1)
    arguments = [str(trained), "--input", str(tmp_path / "*.jsonl"), "--output-prefix", str(tmp_path / "out")]
    assert score_corpus.main([*arguments, "--max-perplexity", "9"]) == 0
    assert len(list(tmp_path.glob("out.parts/scores/*.scores"))) == 1
    assert "scoring" not in capsys.readouterr().err
