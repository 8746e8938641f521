"""Requests of choice tasks: the questions of a task, each with its answers, read from verified files."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from megalin.data.corpus.decompression import DAMAGE, decompress
from megalin.errors import DataError
from megalin.evaluation.choices.manifest import TaskFile, read_manifest, read_verified, remedy, requests_path
from megalin.evaluation.task_names import match_tasks

_UNCONDITIONAL_OFFSET = 1_000_000
"""Added to the number of a question for the requests that repeat its answers after a neutral prompt."""
_TYPES = ("loglikelihood", "generate_until_and_loglikelihood")
_LINE_LIMIT_BYTES = 1 << 24

COMMON_SENSE = ("boolq", "piqa", "hellaswag", "winogrande", "arc_easy", "arc_challenge", "openbookqa")
"""The seven common-sense tasks of the scaling-laws paper."""
GROUPS = {
    "common_sense": tuple(f"{task}/rc_0shot" for task in COMMON_SENSE),
    "common_sense_5shot": tuple(f"{task}/val_rc_5shot" for task in COMMON_SENSE),
}
"""Names of several tasks at once."""


class Request(NamedTuple):
    """A text whose log-probability after another one is asked for."""

    context: str
    """The prompt; may be empty."""
    continuation: str
    """The answer, with the space that separates it from the prompt."""


class Question(NamedTuple):
    """A question with its possible answers."""

    number: int
    """Number in the file."""
    choices: tuple[Request, ...]
    """The answers, at least one."""
    gold: int
    """Index of the right answer; 0 where there is only one."""
    unconditional: tuple[Request, ...]
    """The same answers after a neutral prompt, for normalisation; empty where the file has none."""

    def requests(self) -> tuple[Request, ...]:
        """Every request of the question: the choices, then the unconditional ones."""
        return self.choices + self.unconditional


class Task(NamedTuple):
    """The questions of a task that are evaluated, in the order of the file."""

    name: str
    """TASK/VARIANT."""
    sha256: str
    """Digest of the file."""
    questions: list[Question]
    """The first ones of the file."""
    num_questions: int
    """Questions of the whole file."""

    @property
    def has_choices(self) -> bool:
        """True where questions have several answers; False where only the probability of the right one is asked."""
        return any(len(question.choices) > 1 for question in self.questions)

    def requests(self) -> list[Request]:
        """Every request, question after question."""
        return [request for question in self.questions for request in question.requests()]


class EvaluationData:
    """A folder of evaluation data, made by `megalin data get-evaluation-data`.

    Attributes:
        tasks: its files by the name of the task.
    """

    def __init__(self, folder: Path) -> None:
        """Reads the manifest. Raises DataError as `read_manifest`."""
        self.folder = folder
        self.tasks: dict[str, TaskFile] = dict(read_manifest(folder).tasks)

    def select(self, patterns: Sequence[str]) -> list[str]:
        """The tasks that the patterns name: a group of GROUPS, TASK/VARIANT, or TASK for all its variants, with the
        wildcards * and ?. Raises ConfigError for one that matches none."""
        expanded = [name for pattern in patterns for name in GROUPS.get(pattern, (pattern,))]
        return match_tasks(expanded, list(self.tasks))

    def read(self, name: str, *, limit: int | None = None) -> Task:
        """Reads and verifies a task of the folder.

        Args:
            limit: keeps the first questions of the file; None: all.

        Raises:
            DataError: the file is missing, damaged, or has other content than requests.
        """
        record = self.tasks[name]
        path = requests_path(self.folder, name)
        data = read_verified(self.folder, name, record)
        try:
            questions = _questions(_lines(data, str(path)))
        except (*DAMAGE, ValueError, KeyError, TypeError, RecursionError) as error:
            raise DataError(f"{path}: not a file of requests: {error}; {remedy(self.folder)}") from None
        return Task(name, record.sha256, questions[:limit], len(questions))


def _lines(data: bytes, path: str) -> Iterator[dict[str, Any]]:
    """Yields the requests of a compressed file as they are; memory holds one line at a time."""
    with decompress(io.BytesIO(data), "gz", path) as file:
        while line := file.readline(_LINE_LIMIT_BYTES):
            yield json.loads(line)


class _Answers:
    """The requests of one question as they are read, by their index."""

    def __init__(self) -> None:
        self.requests: dict[int, Request] = {}
        self.label: Any = None

    def add(self, index: int, request: Request, label: Any) -> None:
        if index in self.requests:
            raise ValueError(f"two requests of index {index}")
        self.requests[index], self.label = request, label

    def in_order(self) -> tuple[Request, ...]:
        """The requests by index. Raises ValueError for a gap."""
        if sorted(self.requests) != list(range(len(self.requests))):
            raise ValueError(f"indices {sorted(self.requests)} have a gap")
        return tuple(self.requests[index] for index in range(len(self.requests)))

    def gold(self) -> int:
        """Index of the right answer. Raises ValueError for an invalid label."""
        if len(self.requests) == 1:  # the label is a text, or several
            return 0
        if not isinstance(self.label, int) or not 0 <= self.label < len(self.requests):
            raise ValueError(f"label {self.label!r} is not an index into {len(self.requests)} answers")
        return self.label


def _questions(lines: Iterator[dict[str, Any]]) -> list[Question]:
    """The questions of a file in order. Raises ValueError, KeyError or TypeError for another content."""
    answers: dict[int, _Answers] = {}
    contexts: dict[str, str] = {}  # equal prompts share their memory
    for line in lines:
        if line["request_type"] not in _TYPES:
            raise ValueError(f"request_type {line['request_type']!r} is not one of {', '.join(_TYPES)}")
        context, continuation = line["request"]["context"], line["request"]["continuation"]
        if not isinstance(context, str) or not isinstance(continuation, str):
            raise TypeError("context and continuation must be texts")
        if not continuation:
            raise ValueError("an empty continuation has no probability")
        number, index = int(line["doc_id"]), int(line["idx"])
        request = Request(contexts.setdefault(context, context), continuation)
        answers.setdefault(number, _Answers()).add(index, request, line["label"])
    questions = []
    for number, own in answers.items():
        if number >= _UNCONDITIONAL_OFFSET:
            continue
        other = answers.get(number + _UNCONDITIONAL_OFFSET)
        choices, unconditional = own.in_order(), () if other is None else other.in_order()
        if unconditional and [each.continuation for each in choices] != [each.continuation for each in unconditional]:
            raise ValueError(f"question {number}: its unconditional requests have other answers")
        questions.append(Question(number, choices, own.gold(), unconditional))
    if not questions:
        raise ValueError("no questions")
    return questions
