"""Suites of tasks: their common interface, and the results of a task."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from megalin.evaluation.choices.metrics import Metric
from megalin.model.language_model import LanguageModel
from megalin.parallel.mesh import Mesh
from megalin.train.pipeline_model import Pipeline

Decoder = LanguageModel | Pipeline
"""A decoder on its mesh."""

ReportProgress = Callable[[int, int], None]
"""Receives the number of scored and of all batches or requests of this rank."""


def no_report(_done: int, _total: int) -> None:
    """Reports nothing."""


class TaskResult(NamedTuple):
    """Result of a task, equal on every rank."""

    metrics: Mapping[str, Metric]
    num_questions: int
    """Evaluated questions or examples, the first ones of their file or generator."""
    num_questions_in_file: int
    num_requests: int
    """Evaluated texts: answers, and those after a neutral prompt."""
    num_truncated: int
    """Requests that lost tokens on the left, because they have more than a sample."""
    method: str
    """carried_state, packed or generated."""
    seconds: float
    num_merged: int = 0
    """Requests whose answer merges with its prompt in the tokenizer."""
    details: Mapping[str, Any] = {}
    """Further values as JSON: of needle tasks, the outcome at each depth and length."""

    def values(self) -> dict[str, Any]:
        """The result as JSON."""
        return self._asdict() | {"metrics": {name: metric._asdict() for name, metric in self.metrics.items()}}

    @classmethod
    def from_values(cls, values: Mapping[str, Any]) -> TaskResult:
        """The inverse of `values`; other keys have no effect. Raises KeyError, TypeError or AttributeError."""
        metrics = {name: Metric(**metric) for name, metric in values["metrics"].items()}
        values = {"num_merged": 0, **values}  # results of earlier versions
        return cls(metrics, **{name: values[name] for name in cls._fields[1:]})


class Suite(Protocol):
    """Tasks of one kind on a run; every rank of a mesh has the same.

    Attributes:
        name: of the suite, and of its results in the run folder.
        generates: True where a model writes the answers. The ranks then divide the requests, but for those of a
            tensor-parallel axis, and the model is sharded over that axis alone.
    """

    name: str
    generates: bool

    def result_names(self) -> Sequence[str]:
        """Names of the results."""

    def settings(self, key: str) -> dict[str, Any]:
        """Everything besides the weights that a result depends on, as JSON."""

    def run(
        self, key: str, model: Decoder, mesh: Mesh, *, carry: bool = False, on_progress: ReportProgress = no_report
    ) -> TaskResult:
        """Evaluates a task; a collective.

        Args:
            carry: run each prompt once and carry its state into its answers, where that applies; else requests are
                packed into samples of the run's shape.
        """
