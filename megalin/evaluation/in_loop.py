"""Tasks during training: choice tasks, and the suites of generated tasks that score given answers."""

from __future__ import annotations

from collections.abc import Sequence

from megalin.errors import ConfigError, MegalinError
from megalin.evaluation.choices.suite import ChoiceOptions, ChoiceSuite
from megalin.evaluation.generated.sequences import SEQUENCE_SUITES, sequence_suite
from megalin.evaluation.suite import Suite
from megalin.evaluation.suites import OTHER_SUITES, TASK_SUITES
from megalin.evaluation.task_names import split_name
from megalin.model.encoder import Encoder
from megalin.parallel.mesh import Mesh
from megalin.train.build import TrainedModel
from megalin.train.config import RunConfig


class LoopTaskRunner:
    """The `TaskRunner` of `evaluation.tasks`: suites of SEQUENCE_SUITES, choice tasks, and SUITE:TASK. Requests are
    packed into samples of the run's own shape."""

    def __init__(self) -> None:
        self._suites: list[Suite] = []

    def describe_problems(self, config: RunConfig) -> list[str]:
        """Reads and encodes `evaluation.tasks`; the reasons why that fails, or nothing."""
        evaluation, problems = config.evaluation, []
        self._suites = []
        by_suite: dict[str, list[str]] = {}
        for name in evaluation.tasks:
            try:
                suite, pattern = (name, "*") if name in OTHER_SUITES else split_name(name, TASK_SUITES)
                by_suite.setdefault(suite or "choices", []).append(pattern)
            except MegalinError as error:
                problems.append(str(error))
        for suite, patterns in by_suite.items():
            try:
                self._suites.append(_suite(suite, config, patterns))
            except MegalinError as error:
                problems.append(str(error))
        return problems

    def run(self, model: TrainedModel, mesh: Mesh, *, step: int) -> dict[str, float]:
        """Results of all tasks by TASK/METRIC, the task without its limit; a collective."""
        assert self._suites, step
        assert not isinstance(model, Encoder), type(model)
        results: dict[str, float] = {}
        for suite in self._suites:
            for name in suite.result_names():
                metrics = suite.run(name, model, mesh).metrics
                task = name.partition("[:")[0]
                results |= {f"{task}/{metric}": found.value for metric, found in metrics.items()}
        return results


def _suite(name: str, config: RunConfig, patterns: Sequence[str]) -> Suite:
    """A suite with the tasks of these patterns. Raises MegalinError for one that is not of training, or cannot run."""
    limit = config.evaluation.limit
    if name == "choices":
        return ChoiceSuite(config, ChoiceOptions(tasks=patterns, limit=limit))
    if name in SEQUENCE_SUITES:
        return sequence_suite(name, config, limit=limit, tasks=patterns)
    raise ConfigError(
        f"the suite {name} does not run during training; evaluate the run's checkpoints with: megalin eval RUN --suite "
        f"{name} --all-steps"
    )
