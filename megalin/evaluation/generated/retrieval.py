"""Suites of tasks on text whose answers a model writes: needles in a haystack, and a RULER-like set."""

from __future__ import annotations

import abc
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from megalin.data.config import SplitName
from megalin.data.tokenizers.tokenizer import load_tokenizer
from megalin.errors import ConfigError, DataError
from megalin.evaluation.choices.encoding import check_vocabulary
from megalin.evaluation.choices.metrics import Metric, mean
from megalin.evaluation.generated.haystack import Haystack, read_documents
from megalin.evaluation.held_out import split_settings
from megalin.evaluation.needle import accuracy_at_length, accuracy_up_to_length, niah_score, weighted_average
from megalin.evaluation.suite import Decoder, ReportProgress, TaskResult, no_report
from megalin.evaluation.task_names import match_tasks
from megalin.evaluation.tasks.needle import Needle, needle_grid
from megalin.evaluation.tasks.registry import TASKS, build_task, text_tasks
from megalin.evaluation.tasks.sequence_task import split_seed
from megalin.evaluation.tasks.text_task import GenerationRequest, TextTask, fraction_found
from megalin.generation import Sampling, generate_batches
from megalin.generation.decoder import grows
from megalin.generation.prompts import completion_text
from megalin.model.config import EncoderConfig
from megalin.model.language_model import LanguageModel
from megalin.parallel.agreement import on_every_rank
from megalin.parallel.mesh import Mesh
from megalin.train.config import RunConfig

NUM_DEPTHS = 11
NUM_RULER_REQUESTS = 100
BATCH_TOKENS = 32768
"""Tokens of the prompts that are generated together, about."""
_log = logging.getLogger(__name__)
LEAST_LENGTH = 256
"""Shortest context length of the default ones."""


class _TextSuite(abc.ABC):
    """Base of the suites on text: their options, and the answers of a model."""

    name: str
    generates = True
    _haystack = "generated noise"

    def __init__(self, config: RunConfig, *, lengths: Sequence[int] | None, limit: int | None) -> None:
        if isinstance(config.model, EncoderConfig):
            raise ConfigError(f'the suite {self.name} needs a decoder, but model.kind = "encoder"')
        if config.data.tokenizer is None:
            raise ConfigError(
                f"the suite {self.name} needs data.tokenizer, which is not set: the run has token ids without their "
                "text; set it, or evaluate the loss alone (--suite loss)"
            )
        if limit is not None and limit < 1:
            raise ConfigError(f"limit = {limit} leaves no request; use at least 1, or leave it out")
        self.lengths = list(lengths) if lengths is not None else default_lengths(config.data.sequence_length)
        if grows(LanguageModel(config.model)) and max(self.lengths) > config.data.sequence_length:
            raise ConfigError(
                f"a context of {max(self.lengths)} tokens is longer than the {config.data.sequence_length} positions "
                "that this softmax model was trained on (data.sequence_length); use shorter ones"
            )
        self._config = config
        self._tokenizer = load_tokenizer(config.data.tokenizer, config.data.eod_token)
        check_vocabulary(self._tokenizer, config.model.vocab_size)
        self._requests: dict[str, list[GenerationRequest]] = {}

    def _make_requests(self, makers: Mapping[str, Callable[[], list[GenerationRequest]]]) -> None:
        """Makes the requests of each result, by its name; leaves those out, with a warning, whose shortest prompt is
        longer than its context. Raises ConfigError where none is left."""
        problems = []
        for name, make in makers.items():
            try:
                self._requests[name] = make()
            except ConfigError as error:
                problems.append(f"{name}: {error}")
        if not self._requests:
            raise ConfigError(f"no task of the suite {self.name} fits:\n  " + "\n  ".join(problems))
        for problem in problems:
            _log.warning("left out of the suite %s: %s", self.name, problem)

    def result_names(self) -> Sequence[str]:
        """Names of the results."""
        return list(self._requests)

    def settings(self, key: str) -> dict[str, Any]:
        """Everything besides the weights that a result depends on, as JSON."""
        return {
            "lengths": self.lengths,
            "requests": len(self._requests[key]),
            "tokenizer": self._tokenizer.digest,
            "dtype": self._config.train.dtype,
        }

    def run(
        self, key: str, model: Decoder, mesh: Mesh, *, carry: bool = False, on_progress: ReportProgress = no_report
    ) -> TaskResult:
        """Evaluates a task with greedy answers; a collective, in which the ranks of the data axis answer some requests
        each."""
        assert isinstance(model, LanguageModel), type(model)
        started, requests = time.perf_counter(), self._requests[key]
        ranks = mesh.samples
        assert mesh.cp.size == mesh.pp.size == 1, (mesh.cp.size, mesh.pp.size)
        found = np.empty(len(requests))
        own = requests[ranks.rank :: ranks.size]
        # Ranks of a tensor-parallel axis have equal answers.
        for rank, fractions in on_every_rank(lambda: (ranks.rank, self._answers(model, own, on_progress))):
            found[rank :: ranks.size] = fractions
        metrics, details = self._measure(key, found)
        return TaskResult(
            metrics=metrics,
            num_questions=len(requests),
            num_questions_in_file=len(requests),
            num_requests=len(requests),
            num_truncated=0,
            method="generated",
            seconds=time.perf_counter() - started,
            details=details | {"haystack": self._haystack},
        )

    def _answers(
        self, model: LanguageModel, requests: Sequence[GenerationRequest], on_progress: ReportProgress
    ) -> list[float]:
        """Fraction of the references that each request's answer holds."""
        fractions = [0.0] * len(requests)
        order = sorted(range(len(requests)), key=lambda number: len(requests[number].prompt))
        done = 0
        while done < len(order):
            size = max(BATCH_TOKENS // len(requests[order[done]].prompt), 1)
            batch = [requests[number] for number in order[done : done + size]]
            completions = generate_batches(
                model,
                [request.prompt for request in batch],
                max_tokens=max(request.new_tokens for request in batch),
                sampling=Sampling(),
                batch_size=len(batch),
                num_ids=self._tokenizer.vocab_size,
                stop_ids=(self._tokenizer.eod_id,),
            )
            for completion in completions:
                request = batch[completion.number]
                text = completion_text(self._tokenizer, request.prompt, completion.tokens[: request.new_tokens])
                fractions[order[done + completion.number]] = fraction_found(text, request.references)
            done += len(batch)
            on_progress(done, len(order))
        return fractions

    def _state_bytes(self) -> int:
        """Bytes of one sequence's decoding state, of all ranks together."""
        assert not isinstance(self._config.model, EncoderConfig)
        return LanguageModel(self._config.model).state_bytes()

    @abc.abstractmethod
    def _measure(self, key: str, found: npt.NDArray[np.float64]) -> tuple[dict[str, Metric], dict[str, Any]]:
        """Metrics and details of a task from the fraction of each request."""


class NeedleSuite(_TextSuite):
    """Needles at every depth and length: `easy`, where the question stands in the haystack too, `standard`, where only
    the fact does, and `multi`, with three facts in one question. A cell succeeds if all of its numbers are found."""

    name = "needle"

    def __init__(
        self,
        config: RunConfig,
        *,
        lengths: Sequence[int] | None = None,
        depths: int = NUM_DEPTHS,
        limit: int | None = None,
        haystack: Haystack = "noise",
        split: SplitName = "validation",
        tasks: Sequence[str] = ("*",),
    ) -> None:
        """Makes the requests, `limit` (1) for each cell, whose majority decides.

        Args:
            haystack: noise, the same sentences for every run, or documents of the run's `split`.
            tasks: patterns of easy, standard and multi.

        Raises:
            ConfigError: an encoder, a run without tokenizer, lengths that do not rise or that fit no prompt, fewer than
                two depths, a run without the split of the documents, a pattern without a task.
            DataError: the split cannot be read, or has fewer tokens than the longest haystack.
        """
        super().__init__(config, lengths=lengths, limit=limit)
        self._depths, self._per_cell = depths, limit or 1
        self._split: SplitName = split
        self._documents: list[list[int]] | None = None
        suffix = "" if limit is None else f"[:{limit}]"
        if haystack == "documents":
            self._documents = read_documents(config, split, self._tokenizer, longest=max(self.lengths))
            self._haystack, suffix = f"documents of the {split} split", f"-documents{suffix}"
        kinds: Mapping[str, Needle] = {
            "easy": Needle(mode="easy"),
            "standard": Needle(),
            "multi": Needle(num_needles=3),
        }
        chosen = match_tasks(tasks, list(kinds), place="the suite needle")
        grids = {kind: needle_grid(kinds[kind], self.lengths, depths) for kind in chosen}
        self._fitting: dict[str, list[int]] = {}
        names = {f"needle/{kind}{suffix}": grid for kind, grid in grids.items()}
        self._make_requests({name: partial(self._of_grid, name, grid) for name, grid in names.items()})

    def _of_grid(self, name: str, grid: Sequence[Sequence[Needle]]) -> list[GenerationRequest]:
        """The requests of all cells, of all lengths for each depth; leaves lengths out, with a warning, that the
        shortest prompt does not fit. Raises ConfigError where it fits none."""
        columns: dict[int, list[list[GenerationRequest]]] = {}  # of each length, the requests by depth
        problems = []
        for length, *cells in zip(self.lengths, *grid, strict=True):
            try:
                columns[length] = [self._of_cell(cell) for cell in cells]
            except ConfigError as error:
                problems.append(f"{name}: {error}")
        if not columns:
            raise ConfigError(problems[-1].removeprefix(f"{name}: "))
        for problem in problems:
            _log.warning("left out of the suite %s: %s", self.name, problem)
        self._fitting[name] = list(columns)
        return [request for row in zip(*columns.values(), strict=True) for cell in row for request in cell]

    def _of_cell(self, cell: Needle) -> list[GenerationRequest]:
        seed = split_seed(0, "test")
        try:
            return [cell.request(self._tokenizer, seed, number, self._documents) for number in range(self._per_cell)]
        except DataError as error:
            raise DataError(f"data.{self._split}: {error}; or use --haystack noise") from None

    def settings(self, key: str) -> dict[str, Any]:
        """Everything besides the weights that a result depends on, as JSON."""
        settings = super().settings(key) | {"lengths": self._fitting[key], "depths": self._depths}
        if self._documents is not None:
            settings["haystack"] = split_settings(self._config, self._split, self._config.data.paths(self._split))
        return settings

    def _measure(self, key: str, found: npt.NDArray[np.float64]) -> tuple[dict[str, Metric], dict[str, Any]]:
        lengths = self._fitting[key]
        whole = (found == 1.0).reshape(self._depths, len(lengths), self._per_cell)
        success = whole.mean(axis=2) > 0.5
        metrics = {
            "accuracy": mean(success.astype(np.float64).flatten().tolist()),
            "weighted_average": Metric(weighted_average(success), 0.0),
            "niah_score": Metric(niah_score(success), 0.0),
        }
        details = {
            "success": success.tolist(),
            "lengths": lengths,
            "accuracy_at_length": accuracy_at_length(success).tolist(),
            "accuracy_up_to_length": accuracy_up_to_length(success).tolist(),
            "state_bytes": self._state_bytes(),
        }
        return metrics, details


class RulerSuite(_TextSuite):
    """The RULER-like tasks at every length, by TASK/LENGTH: the mean fraction of the references in an answer."""

    name = "ruler"

    def __init__(
        self,
        config: RunConfig,
        *,
        lengths: Sequence[int] | None = None,
        limit: int | None = None,
        tasks: Sequence[str] = ("*",),
    ) -> None:
        """Makes the requests, `limit` of each task and length (NUM_RULER_REQUESTS). Lengths that the shortest prompt of
        a task does not fit are left out with a warning.

        Args:
            tasks: patterns of TASK/LENGTH.

        Raises:
            ConfigError: as `NeedleSuite`; no task that fits a length.
        """
        super().__init__(config, lengths=lengths, limit=limit)
        suffix, count = "" if limit is None else f"[:{limit}]", limit or NUM_RULER_REQUESTS
        names = [name for name in text_tasks() if TASKS[name].task is not Needle]
        makers = {
            f"{name}/{length}": partial(self._of_task, name, length, count) for name in names for length in self.lengths
        }
        chosen = match_tasks(tasks, list(makers), place="the suite ruler")
        self._make_requests({f"{name}{suffix}": makers[name] for name in chosen})

    def _of_task(self, name: str, length: int, count: int) -> list[GenerationRequest]:
        task = build_task(name, {"context_length": length})
        assert isinstance(task, TextTask), name
        return [task.request(self._tokenizer, split_seed(0, "test"), number) for number in range(count)]

    def _measure(self, key: str, found: npt.NDArray[np.float64]) -> tuple[dict[str, Metric], dict[str, Any]]:
        exact = (found == 1.0).astype(np.float64)
        metrics = {"score": mean(found.tolist()), "exact_match": mean(exact.tolist())}
        return metrics, {"state_bytes": self._state_bytes()}


def default_lengths(sequence_length: int) -> list[int]:
    """The run's sequence length, its half and its quarter, those of at least LEAST_LENGTH."""
    lengths = [sequence_length // 4, sequence_length // 2, sequence_length]
    return [length for length in lengths if length >= LEAST_LENGTH] or [sequence_length]
