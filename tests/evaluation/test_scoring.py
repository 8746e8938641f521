"""Perplexity of documents against a forward of the full text, for any grouping and subset; and the selection."""

import copy
import html.parser
import json
import math
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from megalin.data.corpus import batches, parts
from megalin.data.corpus.score_selection import SelectOptions, check_selection, read_perplexities, select
from megalin.data.tokenizers.tokenizer import BytePairTrainer, ByteTokenizer, HuggingFaceTokenizer
from megalin.errors import ConfigError, DataError
from megalin.evaluation import forward_groups, scoring
from megalin.evaluation.scoring import ScoringModel, score_corpus, score_texts
from megalin.generation import cast_weights
from megalin.model.config import ModelConfig
from megalin.model.language_model import LanguageModel
from megalin.parallel.initialisation import init_weights
from tests.model_runs import model_table

TEXTS = ["", "a", "the quick brown fox " * 20, "é日本🙂", "abc" * 100, "zz top\n" * 7, "the quick brown fox"]


@pytest.fixture(scope="module")
def scorer():
    model = LanguageModel(ModelConfig(**model_table()))
    model.to_empty(device=torch.device("cpu"))
    init_weights(model, 0)
    return ScoringModel(model, ByteTokenizer())


@torch.no_grad()
def _direct(scorer, text):
    ids = torch.tensor([[256, *text.encode()]])
    logits = scorer.model(ids).logits.double()
    chosen = logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])
    return -chosen.sum().item(), ids.shape[1] - 1


@pytest.mark.parametrize(("piece", "at_once"), [(4096, 16384), (7, 20), (64, 1)])
def test_scores_are_those_of_each_text_alone(scorer, monkeypatch, piece, at_once):
    monkeypatch.setattr(scoring, "_PIECE_TOKENS", piece)
    monkeypatch.setattr(forward_groups, "_TOKENS_AT_ONCE", at_once)
    expected = [_direct(scorer, text) for text in TEXTS]
    np.testing.assert_allclose(score_texts(scorer, TEXTS), expected, rtol=1e-4)
    assert score_texts(scorer, []).shape == (0, 2)


def test_states_of_the_documents_scored_together_are_bounded(scorer, monkeypatch):
    monkeypatch.setattr(forward_groups, "_STATES_BYTES", 3 * scorer.model.state_bytes() + 1)
    losses = Mock(wraps=scoring._losses)
    monkeypatch.setattr(scoring, "_losses", losses)
    scores = score_texts(scorer, ["abc"] * 8)
    assert [len(call.args[1]) for call in losses.call_args_list] == [3, 3, 2]
    np.testing.assert_allclose(scores, [_direct(scorer, "abc")] * 8, rtol=1e-4)
    monkeypatch.setattr(forward_groups, "_STATES_BYTES", 1)  # less than one state
    np.testing.assert_allclose(score_texts(scorer, ["abc"] * 2), scores[:2], rtol=1e-4)


def in_bf16(scorer):
    model = copy.deepcopy(scorer.model)
    cast_weights(model, torch.bfloat16)
    return scorer._replace(model=model)


def test_scores_in_bf16_are_those_in_fp32_but_for_rounding(scorer):
    scores, exact = score_texts(in_bf16(scorer), TEXTS), score_texts(scorer, TEXTS)
    np.testing.assert_allclose(scores, exact, rtol=5e-3)
    assert (scores != exact).any()


def test_scores_of_another_dtype_are_not_resumed(scorer, corpus, tmp_path):
    _score(scorer, corpus[0], tmp_path / "p", parts.PartSubset(0, 3))
    with pytest.raises(DataError, match=r"made with another dtype: .*bfloat16"):
        _score(in_bf16(scorer), corpus[0], tmp_path / "p", parts.PartSubset(1, 3))


@pytest.fixture
def corpus(tmp_path, monkeypatch):
    monkeypatch.setattr(parts, "_LEAST_PART_BYTES", 2000)
    monkeypatch.setattr(batches, "_BATCH_LINES", 7)
    values = [{"text": TEXTS[k % 7] + "x" * (k // 7), "n": k} for k in range(140)]
    lines = [json.dumps(value) for value in values]
    (tmp_path / "x.jsonl").write_text("\n".join([*lines[:50], "bad", *lines[50:]]))
    return parts.plan([tmp_path / "x.jsonl"]), values


def _score(scorer, planned, folder, subset=None, **more):
    score_corpus(scorer, planned, folder, json_key="text", limit_bytes=1 << 20, resume=False, subset=subset, **more)


def _options(folder, **values):
    defaults = {
        "max_perplexity": None,
        "keep_quantile": None,
        "json_key": "text",
        "output_prefix": str(folder / "out"),
        "compression": "none",
        "workers": 1,
        "limit_bytes": 1 << 20,
        "samples": 5,
        "seed": 0,
    }
    return SelectOptions(**{**defaults, **values})


def test_scores_are_the_same_for_any_number_of_subsets(scorer, corpus, tmp_path):
    planned, _ = corpus
    assert len(planned) > 3
    _score(scorer, planned, tmp_path / "one")
    for number in range(3):
        _score(scorer, planned, tmp_path / "three", parts.PartSubset(number, 3))
    one, three = ([read_perplexities(tmp_path / name, part.number) for part in planned] for name in ("one", "three"))
    np.testing.assert_array_equal(np.concatenate(one), np.concatenate(three))


def test_fraction_of_the_likeliest_documents_is_kept_with_its_perplexity(scorer, corpus, tmp_path):
    planned, values = corpus
    _score(scorer, planned, tmp_path / "p" / "scores")
    report = select(planned, tmp_path / "p" / "scores", _options(tmp_path, keep_quantile=0.25))
    written = [json.loads(line) for name in report.files for line in Path(name).read_text().splitlines()]
    direct = {value["n"]: _direct(scorer, value["text"]) for value in values}
    expected = {n: np.exp(loss / tokens) for n, (loss, tokens) in direct.items() if tokens}
    least = sorted(expected, key=expected.get)[: -(-len(expected) // 4)]
    assert {value["n"] for value in written} >= set(least)
    assert report.kept_documents == len(written) <= len(least) + 20  # equal texts have equal perplexity
    for value in written:
        assert value["perplexity"] == pytest.approx(expected[value["n"]], rel=1e-3)
        assert value["text"] == values[value["n"]]["text"]
    manifest = json.loads((tmp_path / "out.manifest.json").read_text())
    assert manifest["documents"] == report.documents == 140
    assert manifest["bad_lines"] == report.bad_lines == {"not JSON": 1}


def test_progress_counts_bad_lines_in_both_passes(scorer, corpus, tmp_path):
    seen = []
    (tmp_path / "p").mkdir()
    _score(scorer, corpus[0], tmp_path / "p" / "scores", on_progress=seen.append)
    select(corpus[0], tmp_path / "p" / "scores", _options(tmp_path, max_perplexity=1e9), on_progress=seen.append)
    size = (tmp_path / "x.jsonl").stat().st_size
    ends = [state for state in seen if state.documents == 140 and state.read_bytes == size]
    assert [state.bad_lines for state in ends] == [1, 1]


def test_page_runs_nothing_and_shows_hostile_text_as_text(scorer, tmp_path):
    hostile = "<script>alert(1)</script>&amp;\x1b[31m\u202e'\""
    (tmp_path / "x.jsonl").write_text("\n".join(json.dumps({"text": f"{hostile}{k}"}) for k in range(20)))
    planned = parts.plan([tmp_path / "x.jsonl"])
    _score(scorer, planned, tmp_path / "p" / "scores")
    options = _options(tmp_path, max_perplexity=1e9, samples=3)
    page = Path(select(planned, tmp_path / "p" / "scores", options).page).read_text()
    tags, data = [], []

    class Page(html.parser.HTMLParser):
        def handle_starttag(self, tag, attrs):
            tags.append(tag)
            assert not {name for name, _ in attrs} & {"src", "href", "onerror", "onload"}

        def handle_data(self, text):
            data.append(text)

    Page().feed(page)
    assert set(tags) == {"html", "head", "meta", "title", "style", "body", "h1", "p", "article", "h2", "pre"}
    assert tags.count("article") == 3
    assert sum("<script>alert(1)</script>&amp;\ufffd[31m\ufffd'\"" in text for text in data) == 3
    assert "default-src 'none'" in page


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "give either --max-perplexity or --keep-quantile"),
        ({"max_perplexity": 5.0, "keep_quantile": 0.5}, "give either --max-perplexity or --keep-quantile"),
        ({"max_perplexity": 0.0}, "--max-perplexity 0.0: must be positive and finite"),
        ({"max_perplexity": math.inf}, "--max-perplexity inf: must be positive and finite"),
        ({"keep_quantile": 1.5}, "--keep-quantile 1.5: must be above 0 and at most 1"),
        ({"keep_quantile": 0.5, "samples": -1}, "--samples -1: must be at least 0"),
    ],
)
def test_selection_that_cannot_work_is_refused(tmp_path, values, message):
    with pytest.raises(ConfigError, match=message):
        check_selection(_options(tmp_path, **values))


def test_corpus_without_a_token_has_no_quantile(scorer, tmp_path):
    (tmp_path / "x.jsonl").write_text('{"text": ""}\n')
    planned = parts.plan([tmp_path / "x.jsonl"])
    _score(scorer, planned, tmp_path / "p" / "scores")
    with pytest.raises(DataError, match="empty corpus: no document has a token to score"):
        select(planned, tmp_path / "p" / "scores", _options(tmp_path, keep_quantile=0.5))


def test_tokenizer_of_another_model_is_refused(scorer, corpus, tmp_path):
    BytePairTrainer(300).train(["the quick brown fox " * 20]).save(tmp_path / "t.json")
    tokenizer = HuggingFaceTokenizer(tmp_path / "t.json")
    with pytest.raises(ConfigError, match=r"the tokenizer has \d+ ids, but the model only 257; use the run's own"):
        _score(ScoringModel(scorer.model, tokenizer), corpus[0], tmp_path / "p")
