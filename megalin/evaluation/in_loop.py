"""Tasks during training: choice tasks, generated tasks that score given answers, and the loss by position."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from megalin.errors import ConfigError, MegalinError
from megalin.evaluation.choices.suite import ChoiceOptions, ChoiceSuite, check_choices
from megalin.evaluation.generated.sequences import SEQUENCE_SUITES, check_sequences, select_sequences, sequence_suite
from megalin.evaluation.positions import PositionSuite
from megalin.evaluation.suite import Suite
from megalin.evaluation.suites import OTHER_SUITES, TASK_SUITES
from megalin.evaluation.task_names import split_name
from megalin.model.encoder import Encoder
from megalin.parallel.mesh import Mesh
from megalin.train.build import TrainedModel
from megalin.train.config import RunConfig
from megalin.train.launch_checks import launch_checks, raise_together
from megalin.train.tasks import raise_task_problems


def check_run(config: RunConfig, world_size: int | None = None) -> None:
    """Checks all that `megalin train` refuses before its first step without a look at data: the run's config, its tasks
    and, if their number is given, its ranks.

    Raises:
        ConfigError: with all problems, as `check_launch`, and for tasks that cannot run whatever their data are.
    """
    tasks = partial(_for_each_suite, config, _check_suite)
    raise_together([*launch_checks(config, world_size), lambda: raise_task_problems(config, tasks())])


class LoopTaskRunner:
    """The `TaskRunner` of `evaluation.tasks`: suites of SEQUENCE_SUITES, choice tasks, SUITE:TASK, and the loss by
    position of the validation split. Requests are packed into samples of the run's own shape."""

    def __init__(self) -> None:
        self._suites: list[Suite] = []

    def describe_problems(self, config: RunConfig) -> list[str]:
        """Reads and encodes `evaluation.tasks`; the reasons why that fails, or nothing."""
        self._suites = []
        return _for_each_suite(config, lambda *suite: self._suites.append(_suite(*suite)))

    def run(self, model: TrainedModel, mesh: Mesh, *, step: int) -> dict[str, float]:
        """Results by TASK/METRIC, the task without its limit, and positions/SPLIT/METRIC; a collective."""
        assert self._suites, step
        assert not isinstance(model, Encoder), type(model)
        results: dict[str, float] = {}
        for suite in self._suites:
            for name in suite.result_names():
                metrics = suite.run(name, model, mesh).metrics
                task = name.partition("[:")[0]
                if isinstance(suite, PositionSuite):  # named after its split
                    task = f"{suite.name}/{task}"
                results |= {f"{task}/{metric}": found.value for metric, found in metrics.items()}
        return results


def _for_each_suite(config: RunConfig, use: Callable[[str, RunConfig, Sequence[str]], None]) -> list[str]:
    """Calls `use` with each suite of `evaluation.tasks`, the config and the suite's patterns of tasks; its errors, and
    those of names of no suite."""
    problems = []
    by_suite: dict[str, list[str]] = {}
    for name in config.evaluation.tasks:
        try:
            suite, pattern = (name, "*") if name in OTHER_SUITES else split_name(name, TASK_SUITES)
            by_suite.setdefault(suite or "choices", []).append(pattern)
        except MegalinError as error:
            problems.append(str(error))
    for suite, patterns in by_suite.items():
        try:
            use(suite, config, patterns)
        except MegalinError as error:
            problems.append(str(error))
    return problems


def _check_suite(name: str, config: RunConfig, patterns: Sequence[str]) -> None:
    """Raises MegalinError for a suite that cannot run, whatever its data are."""
    if name == "choices":
        check_choices(config)
    elif name in SEQUENCE_SUITES:
        check_sequences(name, config, select_sequences(name, config, patterns), limit=config.evaluation.limit)
    else:
        _suite(name, config, patterns)


def _suite(name: str, config: RunConfig, patterns: Sequence[str]) -> Suite:
    """A suite with the tasks of these patterns. Raises MegalinError for one that is not of training, or cannot run."""
    limit = config.evaluation.limit
    if name == "choices":
        return ChoiceSuite(config, ChoiceOptions(tasks=patterns, limit=limit))
    if name in SEQUENCE_SUITES:
        return sequence_suite(name, config, limit=limit, tasks=patterns)
    if name == "positions":
        return PositionSuite(config, limit=limit)
    raise ConfigError(
        f"the suite {name} does not run during training; evaluate the run's checkpoints with: megalin eval RUN --suite "
        f"{name} --all-steps"
    )
