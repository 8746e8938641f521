"""Interface of the tasks that a run evaluates during training; packages above `train` implement it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from megalin.errors import ConfigError
from megalin.parallel.agreement import on_every_rank
from megalin.parallel.mesh import Mesh
from megalin.train.build import TrainedModel
from megalin.train.config import RunConfig

PREFIX = "tasks/"
"""Start of the names of task results among the metrics."""


class TaskRunner(Protocol):
    """Evaluates the tasks of `evaluation.tasks` on a model in training."""

    def describe_problems(self, config: RunConfig) -> list[str]:
        """Reads the tasks of the run on this rank; the reasons why they cannot be evaluated. Not a collective."""

    def run(self, model: TrainedModel, mesh: Mesh, *, step: int) -> dict[str, float]:
        """Results after `step` finished steps by TASK/METRIC, equal on every rank; a collective. The model and its
        weights are afterwards as before."""


def check_tasks(config: RunConfig, tasks: TaskRunner | None) -> None:
    """Checks the run's tasks on every rank; a collective.

    Raises:
        ConfigError: on every rank, for tasks without a runner, and with all problems of a runner on any rank.
    """

    def check() -> None:
        problems = []
        if tasks is not None:
            problems = tasks.describe_problems(config)
        elif config.evaluation.tasks:
            problems = ["no runner evaluates them here; train with `megalin train`, or pass one to `train`"]
        raise_task_problems(config, problems)

    on_every_rank(check)


def raise_task_problems(config: RunConfig, problems: Sequence[str]) -> None:
    """Raises ConfigError with the problems of the run's tasks, if there are any."""
    if problems:
        raise ConfigError("\n  ".join([f"evaluation.tasks = {config.evaluation.tasks}:", *problems]))


def task_metrics(results: dict[str, float]) -> dict[str, float]:
    """The results of tasks under their names among the metrics."""
    return {f"{PREFIX}{name}": value for name, value in results.items()}


def task_lines(results: dict[str, float]) -> list[str]:
    """A line for people of each task's results, by TASK/METRIC."""
    lines = []
    for task, values in split_task_metrics(task_metrics(results)).items():
        shown = ", ".join(f"{metric.replace('_', ' ')} {value:.4f}" for metric, value in values.items())
        lines.append(f"{task}: {shown}")
    return lines


def split_task_metrics(metrics: Mapping[str, float]) -> dict[str, dict[str, float]]:
    """The results of tasks among the metrics of a step, by task and metric."""
    by_task: dict[str, dict[str, float]] = {}
    for name, value in metrics.items():
        if name.startswith(PREFIX):
            task, _, metric = name.removeprefix(PREFIX).rpartition("/")
            by_task.setdefault(task, {})[metric] = value
    return by_task
