"""Suites of generated tasks: accuracies against plain forwards, needles against given answers, ranks and bad input."""

from __future__ import annotations

import json
import os
import re
import zlib
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from megalin.__main__ import main
from megalin.data.shards.indexed_dataset import bin_path
from megalin.data.tokenizers.tokenizer import ByteTokenizer
from megalin.errors import ConfigError, DataError
from megalin.evaluation.choices.metrics import RequestScores
from megalin.evaluation.generated import retrieval
from megalin.evaluation.generated.heat_map import write_heat_map
from megalin.evaluation.generated.retrieval import NeedleSuite, RulerSuite, default_lengths
from megalin.evaluation.generated.sequences import SequenceSuite, recall_tasks, state_tracking_tasks
from megalin.evaluation.needle import niah_score, weighted_average
from megalin.evaluation.suite import TaskResult
from megalin.evaluation.suites import EvalOptions, SuiteOptions, evaluate_checkpoints
from megalin.evaluation.tasks.mqar import MQAR
from megalin.evaluation.tasks.sequence_task import split_seed
from megalin.generation import Completion
from megalin.parallel.agreement import on_rank_zero
from megalin.parallel.config import ParallelConfig
from megalin.parallel.mesh import Mesh
from megalin.parallel.process_group import process_group
from megalin.train.build import build_model
from megalin.train.config import RunConfig, load_run_config
from tests.cases import HYBRID, LENGTH, VOCAB_SIZE, build
from tests.model_runs import CPU, train_here, write_config, write_shard
from tests.ranks import RankFailedError, run_ranks

RECALL = MQAR(sequence_length=24, num_pairs=4, vocab_size=40)


@pytest.fixture(scope="module")
def config_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_config(tmp_path_factory.mktemp("suites"))


@pytest.fixture
def config(config_file: Path) -> RunConfig:
    """A run of byte tokens with samples of 36 tokens."""
    return load_run_config(config_file, [])


def _recall(config: RunConfig) -> RunConfig:
    """The config with the model of the tests' hybrid, whose samples have LENGTH tokens."""
    data = config.data.model_copy(update={"sequence_length": LENGTH})
    return config.model_copy(update={"model": HYBRID.model, "data": data})


def _on_mesh(config: RunConfig, axes: dict[str, Any]) -> TaskResult:
    mesh = Mesh(ParallelConfig(**axes), CPU)
    dtype = torch.float64
    model: Any = build_model(
        config.model, mesh, compute_dtype=dtype, recompute=False, compile_blocks=False, seed=0, length=LENGTH
    )
    suite = SequenceSuite("recall", config, {"mqar/24x4": RECALL}, limit=7)
    return suite.run("mqar/24x4[:7]", model, mesh)


def _alone(config: RunConfig) -> dict[str, float]:
    """The metrics by a plain forward of each example."""
    model, right, nats, whole = build(HYBRID.model), [], [], []
    for number in range(7):
        tokens, mask = RECALL.example(split_seed(0, "test"), number)
        with torch.no_grad():
            logits = model(torch.tensor(tokens[None].astype(np.int64))).logits[0, :-1, :VOCAB_SIZE]
        answers = torch.tensor(tokens[1:].astype(np.int64))[torch.tensor(mask[1:])]
        logits = logits[torch.tensor(mask[1:])]
        assert len(answers) == 4
        right += (logits.argmax(-1) == answers).tolist()
        whole.append(bool((logits.argmax(-1) == answers).all()))
        nats.append(-logits.log_softmax(-1).gather(-1, answers[:, None]).mean().item())
    return {"accuracy": np.mean(right), "exact_match": np.mean(whole), "loss": np.mean(nats)}


@pytest.mark.parametrize(("ranks", "axes"), [(1, {}), (3, {"cp": 3})])
def test_accuracy_is_that_of_each_example_alone(config, ranks, axes):
    config = _recall(config)
    expected = _alone(config)
    for result in run_ranks(ranks, _on_mesh, config, axes):
        assert {name: metric.value for name, metric in result.metrics.items()} == pytest.approx(expected, rel=1e-9)
        assert result.num_questions == 7


def test_recall_counts_answers(monkeypatch, config):
    """Scores of a model that is right at every third answer."""
    config = _recall(config)
    suite = SequenceSuite("recall", config, {"mqar/24x4": RECALL}, limit=3)
    found = {}

    def score(_model, requests, *_, **__):
        found["labels"] = [request.labels().tolist() for request in requests]
        count = np.array([request.num_answer_tokens for request in requests])
        return RequestScores(np.array([-4.0, -8.0, -2.0]), np.array([4, 1, 0]), count)

    monkeypatch.setattr("megalin.evaluation.generated.sequences.score_packed", score)
    metrics = suite.run("mqar/24x4[:3]", None, None).metrics
    assert [metrics[name].value for name in ("accuracy", "exact_match", "loss")] == pytest.approx(
        [5 / 12, 1 / 3, 7 / 6]
    )
    for number, labels in enumerate(found["labels"]):
        tokens, mask = RECALL.example(split_seed(0, "test"), number)
        assert [label for label in labels if label != -100] == tokens[mask].tolist()


def test_tasks_that_do_not_fit_are_left_out(config, caplog):
    suite = SequenceSuite("recall", _recall(config), {"short": RECALL, "long": MQAR(vocab_size=40)}, limit=2)
    assert suite.result_names() == ["short[:2]"]
    assert "left out of the suite recall: long: its examples have up to 64 ids" in caplog.text
    with pytest.raises(ConfigError, match=r"no task of the suite recall fits the run:\n.*mqar/64x4: its examples have"):
        SequenceSuite("recall", config, recall_tasks(config), limit=2)
    tiny = config.model_copy(update={"model": config.model.model_copy(update={"vocab_size": 7})})
    with pytest.raises(ConfigError, match=r"it has 40 ids, more than model\.vocab_size = 7"):
        SequenceSuite("recall", tiny, {"short": RECALL}, limit=2)
    with pytest.raises(ConfigError, match="limit = 0 leaves no example"):
        SequenceSuite("recall", config, {"short": RECALL}, limit=0)


def test_the_vocabulary_of_recall_is_the_models(config):
    assert {task.num_ids for name, task in recall_tasks(config).items() if "x256" not in name} == {256, 258}
    assert len(state_tracking_tasks()) == 5


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A stand-in for the model: it repeats the prompt's numbers where `found(prompt)` says so."""
    given: dict[str, Any] = {"found": lambda text: True, "batches": []}

    def generate(_model, prompts, *, max_tokens, batch_size, **_):
        given["batches"].append([len(prompt) for prompt in prompts])
        assert len(prompts) == batch_size
        for number, prompt in enumerate(prompts):
            text = bytes(prompt).decode()
            numbers = re.findall(r"\d{7}", text) if given["found"](text) else ["none"]
            yield Completion(number, list(" ".join(numbers).encode())[:max_tokens], False)

    monkeypatch.setattr(retrieval, "generate_batches", generate)
    return given


_ONE = SimpleNamespace(size=1)


class _Model(torch.nn.Module):
    def __init__(self, *_: Any) -> None:
        super().__init__()

    def state_bytes(self) -> int:
        return 1234


def _run(suite: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> TaskResult:
    monkeypatch.setattr(retrieval, "LanguageModel", _Model)
    with process_group(CPU):
        return suite.run(name, _Model(), Mesh(ParallelConfig(), CPU))


def test_needles_are_scored_by_depth_and_length(config, answers, monkeypatch, tmp_path):
    """Needles in the first half of a context are found, and all of the shortest contexts."""
    suite = NeedleSuite(config, lengths=[400, 512, 1024], depths=4)
    assert suite.result_names() == ["needle/easy", "needle/standard", "needle/multi"]
    answers["found"] = lambda text: len(text) <= 400 or text.index("secret number of") < len(text) / 2
    result = _run(suite, "needle/standard", monkeypatch)
    success = np.array(result.details["success"])
    assert success.tolist() == [[True, True, True], [True, True, True], [True, False, False], [True, False, False]]
    assert result.metrics["accuracy"].value == pytest.approx(success.mean())
    assert result.metrics["weighted_average"].value == pytest.approx(weighted_average(success))
    assert result.metrics["niah_score"].value == pytest.approx(niah_score(success))
    assert result.details["state_bytes"] == 1234
    assert result.details["accuracy_at_length"] == pytest.approx(success.mean(axis=0))
    assert sum(map(len, answers["batches"])) == 12
    write_heat_map(result.details, "needles", tmp_path / "map.png")
    assert (tmp_path / "map.png").read_bytes().startswith(b"\x89PNG")


def test_needles_are_hidden_in_held_out_documents(config, answers, monkeypatch, tmp_path):
    """Three documents, each text of which is a letter of its own; the id that ends them stands in no prompt."""
    shard = write_shard(tmp_path / "letters", [[letter] * 150 + [256] for letter in b"xyz"])
    config = config.model_copy(update={"data": config.data.model_copy(update={"validation": [str(shard)]})})
    suite = NeedleSuite(config, lengths=[320, 400], depths=3, haystack="documents")
    noise = NeedleSuite(config, lengths=[256], depths=2)
    name = "needle/standard-documents"
    assert suite.result_names() == ["needle/easy-documents", name, "needle/multi-documents"]
    contexts, starts = [], set()
    for request in suite._requests[name]:
        assert 256 not in request.prompt
        text = bytes(request.prompt).decode()
        assert len(text) == request.length - request.new_tokens
        body = text.partition("Remember them.\n")[2].rpartition("\nQuestion:")[0]
        before, after = re.split(r"\nThe secret number of \w+ is \d{7}\.\n", body)
        assert len(before) == round(request.depth * len(before + after))
        documents = [part for part in (before + after).split("\n\n") if part]
        assert [len(part) for part in documents[:-1]] == [150] * (len(documents) - 1)
        order = "".join(part[0] for part in documents)
        assert order in "xyzxyz"
        contexts.append(before + after)
        starts.add(order[0])
    assert len(starts) == 1  # the same text at every depth and length
    assert len({len(context) for context in contexts}) == 2
    assert _run(suite, name, monkeypatch).details["haystack"] == "documents of the validation split"
    assert _run(noise, "needle/standard", monkeypatch).details["haystack"] == "generated noise"
    before = suite.settings(name)
    os.utime(bin_path(shard), ns=(0, 1))
    assert suite.settings(name) != before


def test_haystacks_without_text_are_refused(config):
    with pytest.raises(ConfigError, match=r"a haystack of documents reads data\.test, which the run does not have"):
        NeedleSuite(config, lengths=[256], haystack="documents", split="test")
    with pytest.raises(
        DataError, match=r"data\.validation: the documents of the haystack have \d+ tokens, .* or use --haystack noise"
    ):
        NeedleSuite(config, lengths=[1024], haystack="documents")


def test_ranks_divide_the_requests(config, answers, monkeypatch):
    """Rank 1 of 2, each of which has two ranks of tensor parallelism; rank 0 finds the needles of shallow places alone,
    as the whole does above."""
    suite = NeedleSuite(config, lengths=[512], depths=4)
    answers["found"] = lambda text: text.index("secret number of") < len(text) / 2
    mesh = SimpleNamespace(samples=SimpleNamespace(rank=1, size=2), **dict.fromkeys(("tp", "cp", "pp"), _ONE))
    own: list[tuple[int, list[float]]] = []

    def on_both(make):
        own.append(make())
        return [(0, [1.0, 0.0])] * 2 + own * 2

    monkeypatch.setattr(retrieval, "LanguageModel", _Model)
    monkeypatch.setattr(retrieval, "on_every_rank", on_both)
    success = suite.run("needle/standard", _Model(), mesh).details["success"]
    assert own == [(1, [1.0, 0.0])]  # depths 1/3 and 1
    assert success == [[True], [True], [False], [False]]


def test_several_needles_must_all_be_found(config, answers, monkeypatch):
    suite = NeedleSuite(config, lengths=[512], depths=2, tasks=["multi"])
    assert suite.result_names() == ["needle/multi"]
    assert _run(suite, "needle/multi", monkeypatch).metrics["accuracy"].value == 1.0
    answers["found"] = lambda text: False
    assert _run(suite, "needle/multi", monkeypatch).metrics["accuracy"].value == 0.0


def test_needles_are_left_out_of_the_lengths_that_they_do_not_fit(config, answers, monkeypatch, caplog):
    suite = NeedleSuite(config, lengths=[128, 256, 320], depths=3, limit=2)
    fitting = {"easy": [256, 320], "standard": [256, 320], "multi": [320]}
    assert suite.result_names() == [f"needle/{kind}[:2]" for kind in fitting]
    assert "left out of the suite needle: needle/multi[:2]: context_length = 256" in caplog.text
    for kind, lengths in fitting.items():
        name = f"needle/{kind}[:2]"
        answers["found"] = lambda text: len(text) < 256
        found = _run(suite, name, monkeypatch)
        assert suite.settings(name)["lengths"] == found.details["lengths"] == lengths
        assert found.details["success"] == [[length == 256 for length in lengths]] * 3
        assert found.num_questions == 2 * 3 * len(lengths)


def test_ruler_tasks_are_scored_at_every_length(config, answers, monkeypatch, caplog):
    suite = RulerSuite(config, lengths=[512, 4096], limit=3)
    names = suite.result_names()
    assert {"niah_single_1/512[:3]", "niah_single_1/4096[:3]", "common_words/4096[:3]"} <= set(names)
    chosen = RulerSuite(config, lengths=[512, 4096], limit=3, tasks=["niah_multikey_2", "*/4096"]).result_names()
    assert chosen[:3] == ["niah_multikey_2/512[:3]", "niah_multikey_2/4096[:3]", "niah_single_1/4096[:3]"]
    assert "left out of the suite ruler: common_words/512[:3]: context_length = 512" in caplog.text
    result = _run(suite, "niah_single_1/512[:3]", monkeypatch)
    assert result.metrics["score"].value == result.metrics["exact_match"].value == 1.0


def test_default_lengths_are_those_of_the_run():
    assert default_lengths(8192) == [2048, 4096, 8192]
    assert default_lengths(512) == [256, 512]
    assert default_lengths(100) == [100]


def _number_of(text: str, _references: Any) -> float:
    """A number in [0, 1) that differs from answer to answer."""
    return zlib.crc32(text.encode()) / 2**32


def _on_ranks(folder: Path, meshes: list[dict[str, int]]) -> list[dict[str, float]]:
    """For each mesh, the mean number of a task's answers."""
    found = []
    for axes in meshes:
        mesh = Mesh(ParallelConfig(**axes), CPU)
        on_rank_zero(partial((folder / "evaluations/step-1.json").unlink, missing_ok=True))
        options = EvalOptions(None, None, "newest", SuiteOptions(["ruler"], limit=3, lengths=[256]))
        with patch.object(retrieval, "fraction_found", _number_of):
            (results,) = evaluate_checkpoints(folder, mesh, [], options, lambda *_: None).values()
        found.append({name: result.metrics["score"].value for name, result in results.tasks["ruler"].items()})
    return found


@pytest.mark.parametrize(
    ("suite", "arguments", "message"),
    [
        ("loss", ["--lengths", "64"], "--lengths has no effect without the suite needle or ruler; add --suite needle"),
        ("ruler", ["--haystack", "noise"], "--haystack has no effect without the suite needle; add --suite needle"),
        ("ruler", ["--depths", "4"], "--depths has no effect without the suite needle; add --suite needle"),
        ("needle", ["--depths", "1"], "num_depths = 1: a grid needs at least 2 depths"),
        ("needle", ["--lengths", "512", "256"], "give at least one context length, in rising order"),
        ("needle", ["--lengths", "0", "256"], "a context of 0 tokens is too short for a text and its question; use"),
        ("needle", ["--limit", "0"], "limit = 0 leaves no request"),
        ("needle", ["--tasks", "needle:esy"], "task 'esy': not in the suite needle; did you mean 'easy'?"),
        (
            "ruler",
            ["--tasks", "ruler:common_word"],
            "task 'common_word': not in the suite ruler; did you mean 'common",
        ),
        ("loss", ["--tasks", "mqar"], "--tasks has no effect without the suite choices; add --suite choices, or use"),
        ("loss", ["--tasks", "loss:train"], "task 'loss:train': 'loss' is no suite with tasks; known: choices, needle"),
        ("recal", [], "--suite recal: no such suite; did you mean 'recall'?"),
    ],
)
def test_bad_input_is_refused(config_file, tmp_path, capsys, suite, arguments, message):
    with process_group(CPU):
        train_here(config_file, tmp_path / "run", "train.stop_after_steps=1")
    assert main(["eval", str(tmp_path / "run"), "--suite", suite, *arguments]) != 0
    assert message in capsys.readouterr().err


def test_a_run_goes_through_the_suites(config_file, tmp_path, capsys):
    """On one process, then again from the stored results."""
    folder = tmp_path / "run"
    with process_group(CPU):
        train_here(config_file, folder, "train.stop_after_steps=1")
    capsys.readouterr()
    command = ["eval", str(folder), "data.sequence_length=130", "--suite", "recall,state-tracking,needle", "--json"]
    command += ["--limit", "2", "--lengths", "256", "--depths", "3"]
    assert main(command) == 0
    printed = json.loads(capsys.readouterr().out)["1"]
    assert set(printed) == {"recall", "state-tracking", "needle"}
    assert set(printed["needle"]) == {f"needle/{kind}[:2]" for kind in ("easy", "standard")}
    assert (folder / "evaluations/step-1-needle-standard-first-2.png").exists()
    assert main(command) == 0
    assert json.loads(capsys.readouterr().out)["1"] == printed  # seconds too: nothing ran again
    documents = ["eval", str(folder), "--suite", "needle", "--haystack", "documents", "--lengths", "256", "--json"]
    assert main([*documents, "--depths", "2"]) == 0
    found = json.loads(capsys.readouterr().out)["1"]["needle"]
    assert {each["details"]["haystack"] for each in found.values()} == {"documents of the validation split"}
    assert (folder / "evaluations/step-1-needle-standard-documents.png").exists()


def test_answers_do_not_depend_on_the_mesh(config_file, tmp_path):
    folder = tmp_path / "run"
    with process_group(CPU):
        train_here(config_file, folder, "train.stop_after_steps=1", "model.init_std=0.3")  # answers that differ
    (expected,) = run_ranks(1, _on_ranks, folder, [{}])[0]
    assert len(set(expected.values())) == len(expected) >= 3
    for found in run_ranks(2, _on_ranks, folder, [{}, {"tp": 2}]):
        assert found == [pytest.approx(expected)] * 2
    with pytest.raises(RankFailedError, match=r"ruler generates, which context parallelism cannot do; leave out"):
        run_ranks(2, _on_ranks, folder, [{"cp": 2}])


def test_byte_tokens_have_a_tokenizer(config):
    suite = NeedleSuite(config, lengths=[256], depths=2)
    assert isinstance(suite._tokenizer, ByteTokenizer)
    assert suite.result_names() == ["needle/easy", "needle/standard"]  # three needles take 289 bytes
    with pytest.raises(ConfigError, match="no task of the suite needle fits:\n  needle/easy: context_length = 64"):
        NeedleSuite(config, lengths=[64], depths=2)
    untokenized = config.model_copy(update={"data": config.data.model_copy(update={"tokenizer": None})})
    with pytest.raises(ConfigError, match=r"the suite needle needs data.tokenizer, which is not set"):
        NeedleSuite(untokenized)
