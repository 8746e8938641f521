"""Suites of evaluations on the checkpoints of a run, on the ranks that a launcher started."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from megalin.checkpoint.load import load
from megalin.checkpoint.manifest import Checkpoint
from megalin.checkpoint.tensors import OPTIMIZER_PREFIX, weights
from megalin.data.config import SplitName
from megalin.errors import ConfigError, MegalinError
from megalin.evaluation.choices.partial import PartialScores
from megalin.evaluation.choices.suite import ChoiceOptions, ChoiceSuite, can_carry
from megalin.evaluation.generated.haystack import Haystack
from megalin.evaluation.generated.heat_map import write_heat_map
from megalin.evaluation.generated.retrieval import NUM_DEPTHS, NeedleSuite, RulerSuite
from megalin.evaluation.generated.sequences import SEQUENCE_SUITES, sequence_suite
from megalin.evaluation.held_out import check_mesh, check_split, evaluate_split, held_out_name, mesh_overrides
from megalin.evaluation.positions import PositionSuite
from megalin.evaluation.results import add_results, parse_result, read_results, results_path
from megalin.evaluation.sources import SourceSuite, split_sources
from megalin.evaluation.suite import Suite, TaskResult
from megalin.generation.load import load_whole_model
from megalin.launch import launched
from megalin.model.config import ModelConfig
from megalin.model.language_model import LanguageModel
from megalin.parallel.agreement import on_every_rank, on_rank_zero
from megalin.parallel.mesh import Mesh, check_world_size
from megalin.parallel.process_group import compute_device, process_group
from megalin.train.build import TrainedModel, build_model
from megalin.train.compute_dtypes import COMPUTE_DTYPES
from megalin.train.config import RunConfig
from megalin.train.open_run import Steps, open_run, selected_steps
from megalin.train.pipeline_model import Pipeline
from megalin.train.validation import AnyEvaluation

_log = logging.getLogger(__name__)

Report = Callable[[str, int, int], None]
"""Receives the name of a part of the evaluation and its finished and total number of batches or requests."""


OTHER_SUITES = ("positions", *SEQUENCE_SUITES, "needle", "ruler")
"""Suites next to loss and choices: the loss by position, and generated tasks."""
TASK_SUITES = ("choices", *SEQUENCE_SUITES, "needle", "ruler")
"""Suites whose tasks have names, for SUITE:TASK."""


class SuiteOptions(NamedTuple):
    """Suites next to loss and choices, and their sizes."""

    suites: Sequence[str]
    """Some of OTHER_SUITES."""
    limit: int | None = None
    """Examples of each task, or samples; None: as many as the suite has by default."""
    lengths: Sequence[int] | None = None
    """Context lengths of needle and ruler, rising; None: the run's sequence length, its half and its quarter."""
    depths: int = NUM_DEPTHS
    """Depths of the needles, evenly from the start to the end."""
    split: SplitName = "validation"
    """Split of the suite positions, and of the haystack of documents."""
    haystack: Haystack = "noise"
    """Text around the needles of the suite needle."""
    tasks: Mapping[str, Sequence[str]] = MappingProxyType({})
    """Patterns of the tasks of a suite, as `match_tasks` takes them; a suite without an entry has all its tasks."""


class EvalOptions(NamedTuple):
    """A selection of suites and checkpoints."""

    split: SplitName | None = "validation"
    """Split for the suite loss, as a whole and, of a decoder, by source; None leaves the suite out."""
    choices: ChoiceOptions | None = None
    """Tasks of the suite choices; None leaves the suite out."""
    steps: Steps = "newest"
    """The checkpoints."""
    others: SuiteOptions | None = None
    """Further suites; None leaves them out."""


class StepResults(NamedTuple):
    """Results of one checkpoint, equal on every rank."""

    loss: AnyEvaluation | None
    """Result of the suite loss on the whole split."""
    tasks: dict[str, dict[str, TaskResult]]
    """Results of the other suites by suite and `Suite.result_names`, with those that an earlier evaluation left; those
    of the suite loss by source under "sources"."""

    def values(self) -> dict[str, Any]:
        """The results as JSON, by suite."""
        loss = {} if self.loss is None else {"loss": self.loss.values()}
        tasks = {suite: {name: each.values() for name, each in own.items()} for suite, own in self.tasks.items()}
        return loss | tasks


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
    results, evaluator = {}, None
    for step in selected_steps(folder, options.steps):
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
            self._loss_name = held_out_name(folder, config, self._split)
        self._suites: list[Suite] = []
        on_every_rank(partial(self._open_suites, options))  # hosts may have different disks
        self._model: TrainedModel | None = None

    def _open_suites(self, options: EvalOptions) -> None:
        config, split = self._config, self._split
        if split is not None and isinstance(config.model, ModelConfig) and len(split_sources(config.data, split)) > 1:
            self._suites.append(SourceSuite(config, split))
        if options.choices is not None:
            self._suites.append(ChoiceSuite(self._config, options.choices))
        if options.others is not None:
            self._suites += [_suite(name, self._config, options.others) for name in options.others.suites]
        if self._mesh.cp.size > 1 and (writing := [suite.name for suite in self._suites if suite.generates]):
            raise ConfigError(
                f"the suite {writing[0]} generates, which context parallelism cannot do; leave out parallel.cp = "
                f"{self._mesh.cp.size}, or evaluate it by a command of its own: the ranks divide its requests"
            )

    @property
    def _carry(self) -> bool:
        """Whether prompts run once. Sequences then have many lengths, each of which would be compiled."""
        return any(isinstance(suite, ChoiceSuite) for suite in self._suites) and can_carry(self._mesh)

    def run(self, checkpoint: Checkpoint) -> StepResults:
        """Evaluates a checkpoint; a collective."""
        earlier = on_rank_zero(partial(self._finished, checkpoint), dict[str, dict[str, TaskResult]])
        loss, step = None, checkpoint.manifest.step
        scored = {
            suite.name
            for suite in self._suites
            if not suite.generates and len(earlier[suite.name]) < len(suite.result_names())
        }
        if self._split is not None or scored:
            model = self._load(checkpoint)
        if self._split is not None:
            loss = evaluate_split(model, self._config, self._mesh, self._split, partial(self._report, self._split))
            self._keep(step, "loss", self._loss_name, loss.values())
        found: dict[str, dict[str, TaskResult]] = {}
        whole: LanguageModel | None = None
        for suite in self._suites:
            found[suite.name] = {}
            for key in suite.result_names():
                result = earlier[suite.name].get(key)
                if result is None:
                    if suite.generates and whole is None:
                        whole = self._load_whole(checkpoint)
                    kept = self._partial(suite, key, checkpoint)
                    result = self._run_task(suite, key, whole if suite.generates else model, kept)
                    self._keep(step, suite.name, key, result.values() | self._identity(suite, key, checkpoint))
                    self._draw(step, key, result)
                    kept.remove()
                found[suite.name][key] = result
        return StepResults(loss, found)

    def _run_task(self, suite: Suite, key: str, model: TrainedModel | None, kept: PartialScores) -> TaskResult:
        assert isinstance(model, LanguageModel | Pipeline), type(model)  # others are refused by the suites
        report = partial(self._report, key)
        if isinstance(suite, ChoiceSuite):
            return suite.run(key, model, self._mesh, carry=self._carry, on_progress=report, partial=kept)
        return suite.run(key, model, self._mesh, carry=self._carry, on_progress=report)

    def _partial(self, suite: Suite, key: str, checkpoint: Checkpoint) -> PartialScores:
        """The file of a task's partial scores. Its batches depend on the mesh too."""
        mesh, train = self._mesh, self._config.train
        batches = {
            "mesh": mesh.config.model_dump(mode="json"),
            "samples": mesh.samples.size,
            "carry": self._carry,
            "micro_batch_size": train.micro_batch_size,
        }
        path = _file_of(self._folder, checkpoint.manifest.step, key, "partial.json")
        return PartialScores(path, self._identity(suite, key, checkpoint) | batches)

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

    def _load_whole(self, checkpoint: Checkpoint) -> LanguageModel:
        """The model for generation, sharded over tp alone, in the dtype in which the training computed."""
        assert isinstance(self._config.model, ModelConfig), type(self._config.model)  # refused by the suites
        return load_whole_model(self._config.model, self._config.train, checkpoint, self._mesh.device, tp=self._mesh.tp)

    def _identity(self, suite: Suite, key: str, checkpoint: Checkpoint) -> dict[str, Any]:
        """Everything that a task's result depends on."""
        digest = hashlib.sha256(checkpoint.manifest.model_dump_json().encode()).hexdigest()
        return {"settings": suite.settings(key) | {"checkpoint": digest}}

    def _finished(self, checkpoint: Checkpoint) -> dict[str, dict[str, TaskResult]]:
        """The results of an earlier evaluation that stand for this one, by suite."""
        path, found = results_path(self._folder, checkpoint.manifest.step), dict[str, dict[str, TaskResult]]()
        stored = read_results(self._folder, checkpoint.manifest.step) if self._suites else {}
        for suite in self._suites:
            found[suite.name] = {}
            for key in suite.result_names():
                entry = stored.get(suite.name, {}).get(key)
                if entry is not None and entry.get("settings") == self._identity(suite, key, checkpoint)["settings"]:
                    found[suite.name][key] = parse_result(path, entry)
        return found

    def _keep(self, step: int, suite: str, name: str, values: dict[str, Any]) -> None:
        """Adds a result to the run folder; a failure is a warning, because the result is printed in any case."""
        if self._mesh.is_first_rank:
            try:
                add_results(self._folder, step, suite, {name: values})
            except MegalinError as error:
                _log.warning("the result of %s is not kept: %s", name, error)

    def _draw(self, step: int, key: str, result: TaskResult) -> None:
        """Writes the heat map of a needle task into the run folder; a failure is a warning."""
        if self._mesh.is_first_rank and "success" in result.details:
            try:
                write_heat_map(result.details, f"{key}, step {step:,}", _file_of(self._folder, step, key, "png"))
            except MegalinError as error:
                _log.warning("the heat map of %s is not kept: %s", key, error)


def _file_of(folder: Path, step: int, key: str, suffix: str) -> Path:
    """A file of a task, such as step-5-needle-easy-first-3.png of needle/easy[:3]."""
    name = key.replace("/", "-").replace("[:", "-first-").rstrip("]")
    return results_path(folder, step).with_name(f"step-{step}-{name}.{suffix}")


def _suite(name: str, config: RunConfig, options: SuiteOptions) -> Suite:
    if name == "positions":
        return PositionSuite(config, split=options.split, limit=options.limit)
    tasks = options.tasks.get(name, ("*",))
    if name in SEQUENCE_SUITES:
        return sequence_suite(name, config, limit=options.limit, tasks=tasks)
    if name == "needle":
        return NeedleSuite(
            config,
            lengths=options.lengths,
            depths=options.depths,
            limit=options.limit,
            haystack=options.haystack,
            split=options.split,
            tasks=tasks,
        )
    assert name == "ruler", name
    return RulerSuite(config, lengths=options.lengths, limit=options.limit, tasks=tasks)


def _no_report(_name: str, _done: int, _total: int) -> None:
    """Reports nothing."""
