"""Suites of tasks on token ids, recall and state tracking: accuracy of the answers' tokens, on any mesh."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from megalin.errors import ConfigError
from megalin.evaluation.choices.metrics import Metric, RequestScores, mean
from megalin.evaluation.choices.scoring import score_packed
from megalin.evaluation.suite import Decoder, ReportProgress, TaskResult, no_report
from megalin.evaluation.task_names import match_tasks
from megalin.evaluation.tasks.mqar import MQAR, MQAR_SETTINGS
from megalin.evaluation.tasks.registry import build_task
from megalin.evaluation.tasks.sequence_task import LabelledSequence, SequenceTask, split_seed
from megalin.model.config import EncoderConfig
from megalin.parallel.cross_entropy import IGNORED_LABEL
from megalin.parallel.mesh import Mesh
from megalin.train.config import RunConfig

STATE_TRACKING = ("parity", "modular_addition", "s5", "palindrome", "stack")
NUM_EXAMPLES = 1000
"""Examples of each task, if no limit is given."""
_log = logging.getLogger(__name__)


class LabelledRequest(NamedTuple):
    """An example as a request: its label mask chooses the answers' tokens."""

    ids: npt.NDArray[np.int32]
    label_mask: npt.NDArray[np.bool_]

    @property
    def num_answer_tokens(self) -> int:
        """Number of labels; the first id has no text before it and is none."""
        return int(self.label_mask[1:].sum())

    def labels(self) -> npt.NDArray[np.int64]:
        """[n - 1] label of each id but the last."""
        return np.where(self.label_mask[1:], self.ids[1:], IGNORED_LABEL).astype(np.int64)


class SequenceSuite:
    """Generated tasks on token ids; the examples are those of the split `test` of `megalin data generate-task`.

    Every example is a document of a sample of the run's own shape, as in training on packed documents.
    """

    generates = False

    def __init__(
        self, name: str, config: RunConfig, tasks: Mapping[str, SequenceTask], *, limit: int | None = None
    ) -> None:
        """Makes the examples. Tasks with more ids than the model, or with an example longer than a sample, are left out
        with a warning.

        Args:
            limit: examples of each task; None: NUM_EXAMPLES.

        Raises:
            ConfigError: an encoder, a limit below 1, or no task that fits.
        """
        problems = check_sequences(name, config, tasks, limit=limit)
        self.name, self._config, self._tasks = name, config, dict[str, SequenceTask]()
        self._requests: dict[str, list[LabelledRequest]] = {}
        for key, task in tasks.items():
            if key not in problems:
                full_key = key if limit is None else f"{key}[:{limit}]"
                self._tasks[full_key] = task
                self._requests[full_key] = [LabelledRequest(*example) for example in _examples(task, limit)]
        for key, problem in problems.items():
            _log.warning("left out of the suite %s: %s: %s", name, key, problem)

    def result_names(self) -> Sequence[str]:
        """Names of the results."""
        return list(self._tasks)

    def settings(self, key: str) -> dict[str, Any]:
        """Everything besides the weights that a result depends on, as JSON."""
        return {
            "fields": self._tasks[key].model_dump(mode="json"),
            "examples": len(self._requests[key]),
            "sequence_length": self._config.data.sequence_length,
            "dtype": self._config.train.dtype,
        }

    def run(
        self, key: str, model: Decoder, mesh: Mesh, *, carry: bool = False, on_progress: ReportProgress = no_report
    ) -> TaskResult:
        """Evaluates a task; a collective. `carry` has no effect: an example's answers lie between its other ids."""
        started, requests = time.perf_counter(), self._requests[key]
        scores = score_packed(
            model,
            requests,
            mesh,
            micro_batch_size=self._config.train.micro_batch_size,
            sequence_length=self._config.data.sequence_length,
            on_progress=on_progress,
        )
        return TaskResult(
            metrics=answer_metrics(scores),
            num_questions=len(requests),
            num_questions_in_file=len(requests),
            num_requests=len(requests),
            num_truncated=0,
            method="packed",
            seconds=time.perf_counter() - started,
        )


def answer_metrics(scores: RequestScores) -> dict[str, Metric]:
    """accuracy: fraction of the answers' tokens that are the likeliest, its standard error over examples; exact_match:
    fraction of the examples in which all are; loss: nats a token of an answer, as a mean over examples."""
    fractions = scores.num_greedy / scores.num_tokens
    accuracy = float(scores.num_greedy.sum() / scores.num_tokens.sum())
    return {
        "accuracy": Metric(accuracy, mean(fractions.tolist()).standard_error),
        "exact_match": mean(scores.greedy.astype(np.float64).tolist()),
        "loss": mean((-scores.log_probabilities / scores.num_tokens).tolist()),
    }


SEQUENCE_SUITES = ("recall", "state-tracking")
"""Suites of tasks on token ids."""


def sequence_suite(
    name: str, config: RunConfig, *, limit: int | None = None, tasks: Sequence[str] = ("*",)
) -> SequenceSuite:
    """The suite `name` of SEQUENCE_SUITES, with the `tasks` of these patterns alone.

    Raises:
        ConfigError: as `SequenceSuite`; a pattern without a task.
    """
    return SequenceSuite(name, config, select_sequences(name, config, tasks), limit=limit)


def select_sequences(name: str, config: RunConfig, patterns: Sequence[str]) -> dict[str, SequenceTask]:
    """The tasks of the suite `name` that the patterns name. Raises ConfigError for a pattern without a task."""
    assert name in SEQUENCE_SUITES, name
    known = recall_tasks(config) if name == "recall" else state_tracking_tasks()
    return {task: known[task] for task in match_tasks(patterns, list(known), place=f"the suite {name}")}


def check_sequences(
    name: str, config: RunConfig, tasks: Mapping[str, SequenceTask], *, limit: int | None
) -> dict[str, str]:
    """The tasks that do not fit the run, with the reasons. Raises ConfigError as `SequenceSuite`."""
    if isinstance(config.model, EncoderConfig):
        raise ConfigError(f'the suite {name} needs a decoder, but model.kind = "encoder"; evaluate its loss alone')
    if limit is not None and limit < 1:
        raise ConfigError(f"limit = {limit} leaves no example; use at least 1, or leave it out for {NUM_EXAMPLES}")
    found = {key: _problem(config, task, limit) for key, task in tasks.items()}
    problems = {key: problem for key, problem in found.items() if problem}
    if len(problems) == len(tasks):
        lines = [f"{key}: {problem}" for key, problem in problems.items()]
        raise ConfigError("\n  ".join([f"no task of the suite {name} fits the run:", *lines]))
    return problems


def recall_tasks(config: RunConfig) -> dict[str, SequenceTask]:
    """The test sets of MQAR's setting of 2026 by mqar/TOKENSxPAIRS, with the model's number of ids, at most 8,192."""
    tasks: dict[str, SequenceTask] = {}
    for task, _ in MQAR_SETTINGS["2026"].test:
        vocab_size = min(task.vocab_size, config.model.vocab_size // 2 * 2)
        fields = task.model_dump() | {"vocab_size": max(vocab_size, 2 * (task.num_pairs + 1))}
        tasks[f"mqar/{task.sequence_length}x{task.num_pairs}"] = MQAR(**fields)
    return tasks


def state_tracking_tasks() -> dict[str, SequenceTask]:
    """The five tasks of state tracking with their default fields."""
    tasks = {name: build_task(name) for name in STATE_TRACKING}
    return {name: task for name, task in tasks.items() if isinstance(task, SequenceTask)}


def _problem(config: RunConfig, task: SequenceTask, limit: int | None) -> str:
    """The reason why a run cannot be evaluated by a task; empty if it can."""
    longest = _longest(task, limit)
    if longest > config.data.sequence_length + 1:
        return f"its examples have up to {longest} ids, more than data.sequence_length + 1"
    if task.num_ids > config.model.vocab_size:
        return f"it has {task.num_ids} ids, more than model.vocab_size = {config.model.vocab_size}"
    return ""


def _examples(task: SequenceTask, limit: int | None) -> list[LabelledSequence]:
    return [task.example(split_seed(0, "test"), number) for number in range(limit or NUM_EXAMPLES)]


@functools.cache
def _longest(task: SequenceTask, limit: int | None) -> int:
    """Ids of the longest example; the runs of a sweep share them."""
    return max(len(example.tokens) for example in _examples(task, limit))
