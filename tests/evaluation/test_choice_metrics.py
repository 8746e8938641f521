"""Metrics of choice tasks against values computed by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from megalin.evaluation.choices.metrics import RequestScores, choice_metrics
from megalin.evaluation.choices.requests import Question, Request, Task


def _task(*questions: Question) -> Task:
    return Task("a/b", "0" * 64, list(questions), len(questions))


def _scores(values: list[float], greedy: list[bool] | None = None) -> RequestScores:
    found = np.array([False] * len(values) if greedy is None else greedy)
    return RequestScores(np.array(values), found.astype(np.int64), np.ones(len(values), np.int64))


def _answers(*texts: str) -> tuple[Request, ...]:
    return tuple(Request("?", f" {text}") for text in texts)


def test_each_accuracy_has_its_own_normalisation():
    # "日日" has 2 characters and 6 bytes: per character it is the worst, per byte the best.
    question = Question(0, _answers("ab", "日日", "abcdefgh"), 1, _answers("ab", "日日", "abcdefgh"))
    metrics = choice_metrics(_task(question), _scores([-4.0, -6.0, -9.0, -1.0, -4.5, -8.9]))
    # acc: -4 is the largest (answer 0). Per character: -2, -3, -1.125 (answer 2). Per byte: -2, -1, -1.125 (answer 1).
    # Minus the unconditional: -3, -1.5, -0.1 (answer 2).
    assert {name: metric.value for name, metric in metrics.items()} == {
        "acc": 0.0,
        "acc_norm": 0.0,
        "acc_bytes": 1.0,
        "acc_unconditional": 0.0,
        "bits_per_byte": pytest.approx(6.0 / math.log(2) / 7),
    }


@pytest.mark.parametrize(("gold", "right"), [(0, {"acc"}), (2, {"acc_norm", "acc_unconditional"})])
def test_the_right_answer_counts(gold, right):
    question = Question(0, _answers("ab", "日日", "abcdefgh"), gold, _answers("ab", "日日", "abcdefgh"))
    metrics = choice_metrics(_task(question), _scores([-4.0, -6.0, -9.0, -1.0, -4.5, -8.9]))
    assert {name for name, metric in metrics.items() if metric.value == 1.0 and name.startswith("acc")} == right


def test_space_before_an_answer_does_not_count_to_its_length():
    # Per character -1 and -0.8; with the space it would be -0.5 and -0.6.
    question = Question(0, _answers("a", "abc"), 1, ())
    metrics = choice_metrics(_task(question), _scores([-1.0, -2.4]))
    assert (metrics["acc"].value, metrics["acc_norm"].value, metrics["acc_bytes"].value) == (0.0, 1.0, 1.0)


def test_means_and_standard_errors_are_those_over_questions():
    questions = [Question(number, _answers("a", "b"), 0, ()) for number in range(4)]
    metrics = choice_metrics(_task(*questions), _scores([-1.0, -2.0, -2.0, -1.0, -1.0, -2.0, -1.0, -1.0]))
    # Right, wrong, right, and a tie, which the first answer wins.
    assert metrics["acc"] == (0.75, pytest.approx(0.25))
    assert metrics["bits_per_byte"].value == pytest.approx((1 + 2 + 1 + 1) / 4 / math.log(2) / 2)
    assert "acc_unconditional" not in metrics


def test_unconditional_accuracy_needs_every_question():
    questions = [Question(0, _answers("a", "b"), 0, _answers("a", "b")), Question(1, _answers("a", "b"), 0, ())]
    assert "acc_unconditional" not in choice_metrics(_task(*questions), _scores([-1.0] * 6))


def test_task_of_single_answers_reports_greedy_matches_and_bits():
    questions = [Question(number, _answers("abc"), 0, ()) for number in range(3)]
    metrics = choice_metrics(_task(*questions), _scores([-1.0, -2.0, -3.0], [True, False, True]))
    assert list(metrics) == ["bits_per_byte", "greedy_match"]
    assert metrics["greedy_match"].value == pytest.approx(2 / 3)
    assert metrics["bits_per_byte"].value == pytest.approx(2.0 / math.log(2) / 4)
