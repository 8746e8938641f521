"""Choice tasks during training, as `train` asks for them."""

from __future__ import annotations

from megalin.errors import MegalinError
from megalin.evaluation.choices.suite import ChoiceOptions, ChoiceSuite
from megalin.model.encoder import Encoder
from megalin.parallel.mesh import Mesh
from megalin.train.build import TrainedModel
from megalin.train.config import RunConfig


class ChoiceTaskRunner:
    """The `TaskRunner` of choice tasks: requests are packed into samples of the run's own shape."""

    def __init__(self) -> None:
        self._suite: ChoiceSuite | None = None

    def describe_problems(self, config: RunConfig) -> list[str]:
        """Reads and encodes `evaluation.tasks`; the reason why that fails, or nothing."""
        options = ChoiceOptions(tasks=config.evaluation.tasks, limit=config.evaluation.limit)
        try:
            self._suite = ChoiceSuite(config, options)
        except MegalinError as error:
            return [str(error)]
        return []

    def run(self, model: TrainedModel, mesh: Mesh, *, step: int) -> dict[str, float]:
        """Results of all tasks by TASK/METRIC; a collective."""
        assert self._suite is not None, step
        assert not isinstance(model, Encoder), type(model)
        results: dict[str, float] = {}
        for key, encoded in self._suite.tasks.items():
            metrics = self._suite.run(key, model, mesh).metrics
            results |= {f"{encoded.task.name}/{name}": metric.value for name, metric in metrics.items()}
        return results
