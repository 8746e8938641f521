"""Metrics of a choice task from the log-probabilities of its requests.

With l_i the log-probability of answer i in nats, u_i that after the neutral prompt, c_i and b_i the characters and
UTF-8 bytes of the answer without the space before it, the chosen answer is the first maximum of

    acc               l_i
    acc_norm          l_i / c_i
    acc_bytes         l_i / b_i
    acc_unconditional l_i - u_i

where acc, acc_norm and acc_unconditional are acc, acc_norm and acc_mutual_info of the harness lm-eval. For the right
answer g, with B_g its bytes including the space before it, bits_per_byte is the mean over questions of
-l_g / (B_g ln 2), the bpb_v2 of OLMo's evaluation (DataDecide: below 1B parameters it ranks models better than
accuracy). In a task of one answer a question, greedy_match is the fraction of answers of which every token is the
likeliest, lm-eval's accuracy of LAMBADA.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from megalin.evaluation.choices.requests import Question, Task

Floats = npt.NDArray[np.float64]


class RequestScores(NamedTuple):
    """Scores of the requests of a task, in the order of `Task.requests`; equal on every rank."""

    log_probabilities: Floats
    """[N] sum of the log-probabilities of the answer's tokens, nats."""
    num_greedy: npt.NDArray[np.int64]
    """[N] number of these tokens that are the likeliest, the smallest id of equals."""
    num_tokens: npt.NDArray[np.int64]
    """[N] number of these tokens."""

    @property
    def greedy(self) -> npt.NDArray[np.bool_]:
        """[N] True where each of the answer's tokens is the likeliest."""
        return self.num_greedy == self.num_tokens

    def part(self, first: int, end: int) -> RequestScores:
        """The scores of the requests [first, end)."""
        span = slice(first, end)
        return RequestScores(self.log_probabilities[span], self.num_greedy[span], self.num_tokens[span])


class Metric(NamedTuple):
    """A mean over questions."""

    value: float
    standard_error: float
    """Standard deviation of the sample over sqrt(questions); 0 for one question."""


def choice_metrics(task: Task, scores: RequestScores) -> dict[str, Metric]:
    """The metrics of a task, as above, in the order of the page; those that do not apply are left out."""
    assert len(scores.log_probabilities) == len(task.requests()), (task.name, len(scores.log_probabilities))
    values: dict[str, list[float]] = {}
    first = 0
    for question in task.questions:
        count = len(question.requests())
        of_question = scores.part(first, first + count)
        first += count
        for name, value in _of_question(question, of_question, has_choices=task.has_choices).items():
            values.setdefault(name, []).append(value)
    unequal = {name: len(each) for name, each in values.items() if len(each) != len(task.questions)}
    # A mean over some questions alone would not compare with other models' means.
    return {name: mean(each) for name, each in values.items() if name not in unequal}


def chosen_answers(question: Question, scores: RequestScores) -> dict[str, int]:
    """Index of the answer that each accuracy chooses, by its name; `scores` are the question's own."""
    count = len(question.choices)
    conditional = scores.log_probabilities[:count]
    texts = [choice.continuation.removeprefix(" ") for choice in question.choices]
    characters = np.array([max(len(text), 1) for text in texts], np.float64)
    num_bytes = np.array([max(len(text.encode()), 1) for text in texts], np.float64)
    rankings = {"acc": conditional, "acc_norm": conditional / characters, "acc_bytes": conditional / num_bytes}
    if question.unconditional:
        rankings["acc_unconditional"] = conditional - scores.log_probabilities[count:]
    return {name: int(np.argmax(ranking)) for name, ranking in rankings.items()}


def _of_question(question: Question, scores: RequestScores, *, has_choices: bool) -> dict[str, float]:
    answer = question.choices[question.gold].continuation
    nats = -float(scores.log_probabilities[question.gold])
    bits = {"bits_per_byte": nats / math.log(2) / len(answer.encode())}
    if not has_choices:
        return bits | {"greedy_match": float(scores.greedy[question.gold])}
    chosen = chosen_answers(question, scores)
    return {name: float(index == question.gold) for name, index in chosen.items()} | bits


def mean(values: Sequence[float]) -> Metric:
    array = np.array(values, np.float64)
    error = float(array.std(ddof=1) / math.sqrt(len(array))) if len(array) > 1 else 0.0
    return Metric(float(array.mean()), error)
