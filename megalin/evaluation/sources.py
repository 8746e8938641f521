"""The held-out loss of each source of a split: every source as if it were the whole split."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any

from megalin.data.config import DataConfig, SplitName
from megalin.data.sources import open_dataset
from megalin.errors import DataError
from megalin.evaluation.choices.metrics import Metric
from megalin.evaluation.held_out import evaluate_split, split_settings
from megalin.evaluation.suite import Decoder, ReportProgress, TaskResult, no_report
from megalin.parallel.mesh import Mesh
from megalin.train.config import RunConfig
from megalin.train.validation import Evaluation

_log = logging.getLogger(__name__)


class SourceSuite:
    """Loss, perplexity, bits per byte and unigram entropy of each source of a split.

    A source is cut into samples on its own, so that its result is that of a split of this source alone. The samples of
    the whole split may cross from one source to the next.
    """

    name = "sources"
    generates = False

    def __init__(self, config: RunConfig, split: SplitName) -> None:
        """Opens every source once; those without a whole sample are left out with a warning."""
        self._config, self._split = config, split
        self._sources: dict[str, Sequence[str]] = {}
        for name, paths in split_sources(config.data, split).items():
            try:
                open_dataset(config.data, split, config.model.vocab_size, config.train.seed, paths).close()
            except DataError as error:
                _log.warning("left out of the losses by source: %s: %s", name, error)
            else:
                self._sources[name] = paths

    def result_names(self) -> Sequence[str]:
        """The sources."""
        return list(self._sources)

    def settings(self, key: str) -> dict[str, Any]:
        """Everything besides the weights that a result depends on, as JSON."""
        return split_settings(self._config, self._split, self._sources[key])

    def run(
        self, key: str, model: Decoder, mesh: Mesh, *, carry: bool = False, on_progress: ReportProgress = no_report
    ) -> TaskResult:
        """Evaluates a source; a collective. `carry` has no effect. Raises DataError as `evaluate_split`."""
        started = time.perf_counter()
        found = evaluate_split(model, self._config, mesh, self._split, on_progress, paths=self._sources[key])
        assert isinstance(found, Evaluation), type(found)
        values = {name: value for name, value in found._asdict().items() if isinstance(value, float)}
        return TaskResult(
            metrics={name: Metric(value, 0.0) for name, value in values.items()},
            num_questions=found.tokens,
            num_questions_in_file=found.tokens,
            num_requests=found.tokens,
            num_truncated=0,
            method="packed",
            seconds=time.perf_counter() - started,
        )


def split_sources(data: DataConfig, split: SplitName) -> Mapping[str, Sequence[str]]:
    """Prefixes of the shards of each source of a split: those of `data.sources` by their names, where the split lies in
    the training shards; else each shard is a source and named by its prefix."""
    paths = data.paths(split)
    if data.sources and paths == data.training_paths():
        return {source.name: source.paths for source in data.sources}
    return {path: [path] for path in paths}
