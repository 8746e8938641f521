"""The suite of choice tasks of a run: its questions encoded once, and their results on a model."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from megalin.data.tokenizers.special_tokens import special_tokens_of
from megalin.data.tokenizers.tokenizer import load_tokenizer
from megalin.errors import ConfigError
from megalin.evaluation.choices.encoding import EncodedTask, check_vocabulary, encode_task
from megalin.evaluation.choices.metrics import choice_metrics
from megalin.evaluation.choices.partial import PartialScores
from megalin.evaluation.choices.requests import EvaluationData
from megalin.evaluation.choices.scoring import score_carried, score_packed
from megalin.evaluation.suite import Decoder, ReportProgress, TaskResult, no_report
from megalin.model.config import EncoderConfig
from megalin.model.language_model import LanguageModel
from megalin.parallel.mesh import Mesh
from megalin.train.config import RunConfig

DEFAULT_TASKS = ("common_sense",)


class ChoiceOptions(NamedTuple):
    """A selection of choice tasks."""

    data: Path | None = None
    """Folder of evaluation data; None: that of the run's config."""
    tasks: Sequence[str] = DEFAULT_TASKS
    """Names as `EvaluationData.select` takes them."""
    limit: int | None = None
    """Evaluates only the first questions of each file; None: all."""


def check_choices(config: RunConfig) -> None:
    """Raises ConfigError for a run without choice tasks: an encoder, or one without a tokenizer."""
    if isinstance(config.model, EncoderConfig):
        raise ConfigError('choice tasks need a decoder, but model.kind = "encoder"; evaluate its loss alone')
    if config.data.tokenizer is None:
        raise ConfigError(
            "choice tasks need data.tokenizer, which is not set: the run has token ids without their text; set it, "
            "or evaluate the loss alone (--suite loss)"
        )


class ChoiceSuite:
    """Choice tasks of a run, read and encoded on this rank; every rank of a mesh has the same.

    Attributes:
        tasks: by the name of their result: that of the task, with the limit if there is one, as in
            hellaswag/rc_0shot[:100].
    """

    name = "choices"
    generates = False

    def __init__(self, config: RunConfig, options: ChoiceOptions) -> None:
        """Reads, verifies and encodes the tasks. Not a collective: hosts may have different disks.

        Raises:
            ConfigError: an encoder, a run without tokenizer or with one of more ids than the model, an unknown task, or
                a limit below 1.
            DataError: the data is missing, damaged or of another version, or has an answer longer than a sample.
        """
        self.config, self.options = config, options
        self.tasks: dict[str, EncodedTask] = {}
        check_choices(config)
        assert config.data.tokenizer is not None
        if options.limit is not None and options.limit < 1:
            raise ConfigError(f"limit = {options.limit} leaves no question; use at least 1, or leave it out for all")
        tokenizer = load_tokenizer(config.data.tokenizer, config.data.eod_token)
        check_vocabulary(tokenizer, config.model.vocab_size)
        self._tokenizer_digest = tokenizer.digest
        self._special_tokens = special_tokens_of(tokenizer, config.data.special_tokens)
        self._has_begin = self._special_tokens != (False, tokenizer.eod_id)
        data = EvaluationData(options.data or Path(config.evaluation.data))
        for name in data.select(options.tasks):
            task = data.read(name, limit=options.limit)
            key = name if options.limit is None else f"{name}[:{options.limit}]"
            self.tasks[key] = encode_task(
                task, tokenizer, max_tokens=config.data.sequence_length, special_tokens=self._special_tokens
            )

    def result_names(self) -> list[str]:
        """Names of the results."""
        return list(self.tasks)

    def settings(self, key: str) -> dict[str, Any]:
        """Everything besides the weights that a task's result depends on, as JSON."""
        return {
            # Only where they are there: results of earlier versions remain valid.
            **({"special_tokens": list(self._special_tokens)} if self._has_begin else {}),
            "sha256": self.tasks[key].task.sha256,
            "limit": self.options.limit,
            "tokenizer": self._tokenizer_digest,
            "sequence_length": self.config.data.sequence_length,
            "dtype": self.config.train.dtype,
        }

    def run(
        self,
        key: str,
        model: Decoder,
        mesh: Mesh,
        *,
        carry: bool = False,
        on_progress: ReportProgress = no_report,
        partial: PartialScores | None = None,
    ) -> TaskResult:
        """Evaluates a task; a collective.

        Args:
            carry: runs each prompt once and carries its state into its answers, where `can_carry`; else requests are
                packed into samples of the run's shape.
            partial: file of partial scores, from which an earlier evaluation goes on.
        """
        started, encoded = time.perf_counter(), self.tasks[key]
        if carry:
            assert isinstance(model, LanguageModel), type(model)
            scores = score_carried(model, encoded.requests, mesh, on_progress=on_progress, partial=partial)
        else:
            scores = score_packed(
                model,
                encoded.requests,
                mesh,
                micro_batch_size=self.config.train.micro_batch_size,
                sequence_length=self.config.data.sequence_length,
                on_progress=on_progress,
                partial=partial,
            )
        task = encoded.task
        return TaskResult(
            metrics=choice_metrics(task, scores),
            num_questions=len(task.questions),
            num_questions_in_file=task.num_questions,
            num_requests=len(encoded.requests),
            num_truncated=encoded.num_truncated,
            num_merged=encoded.num_merged,
            method="carried_state" if carry else "packed",
            seconds=time.perf_counter() - started,
        )


def can_carry(mesh: Mesh) -> bool:
    """True on meshes where the state of a prompt can be carried into its answers: one process, or tp alone."""
    return mesh.data.size == mesh.cp.size == mesh.pp.size == 1
