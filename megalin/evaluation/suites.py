"""Suites of evaluations on the checkpoints of a run, on the ranks that a launcher started."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

from megalin.checkpoint.load import load, saved_steps
from megalin.checkpoint.manifest import Checkpoint
from megalin.checkpoint.tensors import OPTIMIZER_PREFIX, weights
from megalin.data.config import SplitName
from megalin.errors import MegalinError
from megalin.evaluation.choices.encoding import EncodedTask
from megalin.evaluation.choices.suite import ChoiceOptions, ChoiceSuite, TaskResult, can_carry
from megalin.evaluation.held_out import check_mesh, check_split, evaluate_split, mesh_overrides
from megalin.evaluation.results import add_results, parse_result, read_results, results_path
from megalin.launch import launched
from megalin.model.encoder import Encoder
from megalin.parallel.agreement import on_every_rank, on_rank_zero
from megalin.parallel.mesh import Mesh, check_world_size
from megalin.parallel.process_group import compute_device, process_group
from megalin.train.build import COMPUTE_DTYPES, TrainedModel, build_model
from megalin.train.config import RunConfig
from megalin.train.open_run import open_run
from megalin.train.run_folder import CHECKPOINTS_NAME
from megalin.train.validation import AnyEvaluation

_log = logging.getLogger(__name__)

Report = Callable[[str, int, int], None]
"""Receives the name of a part of the evaluation and its finished and total number of batches or requests."""


class EvalOptions(NamedTuple):
    """A selection of suites and checkpoints."""

    split: SplitName | None = "validation"
    """Split for the suite loss; None leaves the suite out."""
    choices: ChoiceOptions | None = None
    """Tasks of the suite choices; None leaves the suite out."""
    steps: int | Literal["newest", "all"] = "newest"
    """Finished steps of the checkpoint, or several."""


class StepResults(NamedTuple):
    """Results of one checkpoint, equal on every rank."""

    loss: AnyEvaluation | None
    """Result of the suite loss."""
    choices: dict[str, TaskResult]
    """Results of the suite choices by `ChoiceSuite.key`, with those that an earlier evaluation left."""

    def values(self) -> dict[str, Any]:
        """The results as JSON, by suite."""
        loss = {} if self.loss is None else {"loss": self.loss._asdict()}
        return loss | (
            {"choices": {name: each.values() for name, each in self.choices.items()}} if self.choices else {}
        )


def evaluate_on_launched_ranks(
    folder: Path, overrides: Sequence[str], options: EvalOptions, report: Report
) -> dict[int, StepResults] | None:
    """Evaluates checkpoints of a run on the ranks that a launcher started, or in this process alone.

    Results are added to RUN/evaluations/step-N.json as they come; choice tasks that stand there with the same weights,
    data and settings do not run again.

    Args:
        overrides: `parallel.tp` and `parallel.cp` set the mesh, by default 1 each; the remaining ranks divide the
            samples. All others apply to the run's config.
        report: called on rank 0.

    Returns:
        The results by step on rank 0, None on the other ranks.

    Raises:
        MegalinError: no such checkpoint or split, data that is invalid or missing, a mesh that does not fit the ranks
            or the model, an override of another key of [parallel].
    """
    parallel, overrides = mesh_overrides(overrides)
    device = compute_device()
    check_world_size(parallel, launched().world_size)
    with process_group(device):
        mesh = Mesh(parallel, device)
        results = evaluate_checkpoints(folder, mesh, overrides, options, report if mesh.is_first_rank else _no_report)
        return results if mesh.is_first_rank else None


def evaluate_checkpoints(
    folder: Path, mesh: Mesh, overrides: Sequence[str], options: EvalOptions, report: Report
) -> dict[int, StepResults]:
    """`evaluate_on_launched_ranks` on a mesh, all ranks of which call it and get the results."""
    steps: list[int | None] = [options.steps] if isinstance(options.steps, int) else [None]
    if options.steps == "all":
        steps = [*saved_steps(folder / CHECKPOINTS_NAME)] or [None]  # no checkpoint is an error of `open_run`
    results, evaluator = {}, None
    for step in steps:
        # The training's mesh is dropped: it does not apply to the ranks of the evaluation.
        config, checkpoint = open_run(folder, [*overrides, "parallel={}"], step=step)
        if evaluator is None:
            evaluator = _Evaluator(folder, config, mesh, options, report)
        results[checkpoint.manifest.step] = evaluator.run(checkpoint)
    return results


class _Evaluator:
    """Evaluates a run's checkpoints on a mesh; tasks are read and the model is built once."""

    def __init__(self, folder: Path, config: RunConfig, mesh: Mesh, options: EvalOptions, report: Report) -> None:
        """Raises MegalinError for everything that can be seen before the model is built."""
        self._folder, self._config, self._mesh, self._report = folder, config, mesh, report
        self._split = options.split
        check_mesh(config, mesh)
        if self._split is not None:
            check_split(folder, config, self._split)
        self._suite: ChoiceSuite | None = None
        on_every_rank(partial(self._open_suite, options.choices))  # hosts may have different disks
        self._model: TrainedModel | None = None

    def _open_suite(self, options: ChoiceOptions | None) -> None:
        if options is not None:
            self._suite = ChoiceSuite(self._config, options)

    @property
    def _carry(self) -> bool:
        """Whether prompts run once. Sequences then have many lengths, each of which would be compiled."""
        return self._suite is not None and can_carry(self._mesh)

    def run(self, checkpoint: Checkpoint) -> StepResults:
        """Evaluates a checkpoint; a collective."""
        tasks = {} if self._suite is None else {self._suite.key(encoded): encoded for encoded in self._suite.tasks}
        found = on_rank_zero(partial(self._finished, checkpoint))
        loss, step = None, checkpoint.manifest.step
        if self._split is not None or len(found) < len(tasks):
            model = self._load(checkpoint)
        if self._split is not None:
            loss = evaluate_split(model, self._config, self._mesh, self._split, partial(self._report, self._split))
            self._keep(step, "loss", self._split, loss._asdict())
        for key, encoded in tasks.items():
            if key not in found:
                found[key] = self._run_task(key, encoded, model)
                self._keep(step, "choices", key, found[key].values() | self._identity(encoded, checkpoint))
        return StepResults(loss, {key: found[key] for key in tasks})

    def _run_task(self, key: str, encoded: EncodedTask, model: TrainedModel) -> TaskResult:
        assert self._suite is not None
        assert not isinstance(model, Encoder), type(model)  # refused by the suite
        return self._suite.run(encoded, model, self._mesh, carry=self._carry, on_progress=partial(self._report, key))

    def _load(self, checkpoint: Checkpoint) -> TrainedModel:
        train = self._config.train
        if self._model is None:
            self._model = build_model(
                self._config.model,
                self._mesh,
                compute_dtype=COMPUTE_DTYPES[train.dtype],
                recompute=False,
                compile_blocks=train.compile and not self._carry,
                seed=train.seed,
            )
        load(checkpoint, weights(self._model), ignore=(OPTIMIZER_PREFIX,))
        self._model.after_optimizer_step()
        return self._model

    def _identity(self, encoded: EncodedTask, checkpoint: Checkpoint) -> dict[str, Any]:
        """Everything that a task's result depends on."""
        assert self._suite is not None
        digest = hashlib.sha256(checkpoint.manifest.model_dump_json().encode()).hexdigest()
        return {"settings": self._suite.settings(encoded) | {"checkpoint": digest}}

    def _finished(self, checkpoint: Checkpoint) -> dict[str, TaskResult]:
        """The results of an earlier evaluation that stand for this one, in the order of the tasks."""
        if self._suite is None:
            return {}
        path, found = results_path(self._folder, checkpoint.manifest.step), {}
        earlier = read_results(self._folder, checkpoint.manifest.step).get("choices", {})
        for encoded in self._suite.tasks:
            entry = earlier.get(self._suite.key(encoded))
            if entry is not None and entry.get("settings") == self._identity(encoded, checkpoint)["settings"]:
                found[self._suite.key(encoded)] = parse_result(path, entry)
        return found

    def _keep(self, step: int, suite: str, name: str, values: dict[str, Any]) -> None:
        """Adds a result to the run folder; a failure is a warning, because the result is printed in any case."""
        if self._mesh.is_first_rank:
            try:
                add_results(self._folder, step, suite, {name: values})
            except MegalinError as error:
                _log.warning("the result of %s is not kept: %s", name, error)


def _no_report(_name: str, _done: int, _total: int) -> None:
    """Reports nothing."""
