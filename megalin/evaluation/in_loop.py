"""Tasks during training: choice tasks, and the suites of generated tasks that score given answers."""

from __future__ import annotations

from megalin.errors import MegalinError
from megalin.evaluation.choices.suite import ChoiceOptions, ChoiceSuite
from megalin.evaluation.generated.sequences import SEQUENCE_SUITES, sequence_suite
from megalin.evaluation.suite import Suite
from megalin.evaluation.suites import OTHER_SUITES
from megalin.model.encoder import Encoder
from megalin.parallel.mesh import Mesh
from megalin.train.build import TrainedModel
from megalin.train.config import RunConfig


class LoopTaskRunner:
    """The `TaskRunner` of `evaluation.tasks`: names of SEQUENCE_SUITES, and choice tasks. Requests are packed into
    samples of the run's own shape."""

    def __init__(self) -> None:
        self._suites: list[Suite] = []

    def describe_problems(self, config: RunConfig) -> list[str]:
        """Reads and encodes `evaluation.tasks`; the reasons why that fails, or nothing."""
        evaluation, problems = config.evaluation, []
        self._suites = []
        choices = [name for name in evaluation.tasks if name not in OTHER_SUITES]
        for name in evaluation.tasks:
            if name in OTHER_SUITES and name not in SEQUENCE_SUITES:
                problems.append(
                    f"the suite {name} does not run during training; evaluate the run's checkpoints with: megalin eval "
                    f"RUN --suite {name} --all-steps"
                )
                continue
            try:
                if name in SEQUENCE_SUITES:
                    self._suites.append(sequence_suite(name, config, limit=evaluation.limit))
                elif name == choices[0]:  # all choice tasks are one suite
                    self._suites.append(ChoiceSuite(config, ChoiceOptions(tasks=choices, limit=evaluation.limit)))
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
