"""Our numbers of quality, from run folders whose model is that of a row."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple

from megalin.config import suggest, translate_renamed
from megalin.errors import ConfigError
from megalin.model.config import AnyModelConfig, parse_model
from megalin.report.reading import RunRecord, read_run
from megalin.reproduce.computed import row_model
from megalin.reproduce.papers import Row, Table

MEAN_STEPS = 1000
"""Steps at the end of a run whose mean loss is its training loss, as in the TransNormerLLM paper (section 4)."""
SPLITS = ("test", "validation", "train")
"""Splits whose stored loss is read, the first one that there is."""


class MatchedRun(NamedTuple):
    """A run folder, and the row that the command line names for it."""

    record: RunRecord
    model: AnyModelConfig
    row: str | None


def read_runs(arguments: Sequence[str], table: Table) -> list[MatchedRun]:
    """Reads the runs of the command line: RUN, or ROW=RUN with the name of a row or of its preset.

    Raises:
        ConfigError: a folder without a run or with an unreadable model, a row that the table does not have, or a run
            without a row: no row has its model (but for the vocabulary) and length.
    """
    names = [name for row in table.rows for name in (row.name, row.preset) if name]
    runs = []
    for argument in arguments:
        row, equals, folder = argument.partition("=")
        if not equals or Path(argument).is_dir():
            row, folder = "", argument
        elif row not in names:
            raise ConfigError(f"--runs {argument}: the table has no row {row!r}; {suggest(row, names)}")
        record = read_run(folder)
        values = record.config.get("model")
        if not isinstance(values, dict):
            raise ConfigError(f"{folder}: no [model] in its config.toml; give the folder of a run")
        model = parse_model(translate_renamed({"model": values})["model"], f"{folder}/config.toml")
        runs.append(MatchedRun(record, model, row or None))
        if not any(matches(runs[-1], each) for each in table.rows):
            raise ConfigError(
                f"--runs {argument}: no row of this table has its model and length (the vocabulary may differ); name "
                f"the row it belongs to, as in '{names[0] if names else 'ROW'}={folder}'"
            )
    return runs


def matches(run: MatchedRun, row: Row) -> bool:
    """True where the run belongs to the row: as named, or by equal models but for the vocabulary, and equal lengths."""
    if run.row is not None:
        return run.row in (row.name, row.preset)
    model = row_model(row)
    if model is None or row.length not in (None, run.record.number("data", "sequence_length")):
        return False
    return run.model == model.model_copy(update={"vocab_size": run.model.vocab_size})


def measured(measure: str, run: MatchedRun) -> float | None:
    """Our number for a cell of quality, or None where the run has none yet."""
    if measure in MEASURES:
        return MEASURES[measure](run.record)
    suite, task, metric = measure.split(" ")
    found = [
        result.metrics[metric]
        for result in run.record.results
        if result.suite == suite and fnmatchcase(result.task, task) and metric in result.metrics
    ]
    return found[-1] if found else None


def command(measure: str) -> str:
    """The command that fills a cell of quality."""
    if measure in ("train_loss", "train_bits", "train_perplexity"):
        return "megalin train"
    if measure in MEASURES:
        return "megalin eval RUN"
    suite, task, _ = measure.split(" ")
    if suite == "loss":
        return f"megalin eval RUN --suite loss --split {task}"
    if suite == "lm-eval":
        return f"megalin lm-eval RUN --tasks {task}"
    return f"megalin eval RUN --suite {suite}" + (f" --tasks {task}" if suite == "choices" else "")


def _train_loss(record: RunRecord) -> float | None:
    """Mean loss of the last MEAN_STEPS steps, nats a token."""
    losses = [loss for _, loss in record.progress.curves["loss"][-MEAN_STEPS:]]
    return statistics.fmean(losses) if losses else None


def _held_out(name: str) -> Callable[[RunRecord], float | None]:
    """The newest stored result of `megalin eval`, else the newest evaluation during training."""

    def read(record: RunRecord) -> float | None:
        for split in SPLITS:
            found = [
                result.metrics[name]
                for result in record.results
                if (result.suite, result.task) == ("loss", split) and name in result.metrics
            ]
            if found:
                return found[-1]
        inside = [evaluation[name] for evaluation in record.progress.evaluations if name in evaluation]
        return inside[-1] if inside else None

    return read


def _of_loss(
    read: Callable[[RunRecord], float | None], change: Callable[[float], float]
) -> Callable[[RunRecord], float | None]:
    def changed(record: RunRecord) -> float | None:
        loss = read(record)
        return None if loss is None else change(loss)

    return changed


def _bits(nats: float) -> float:
    return nats / math.log(2)


def _perplexity(nats: float) -> float:
    return math.exp(min(nats, 700.0))


MEASURES: Mapping[str, Callable[[RunRecord], float | None]] = {
    "train_loss": _train_loss,
    "train_bits": _of_loss(_train_loss, _bits),
    "train_perplexity": _of_loss(_train_loss, _perplexity),
    "loss": _held_out("loss"),
    "perplexity": _of_loss(_held_out("loss"), _perplexity),
    "mlm_loss": _held_out("mlm_loss"),
    "mlm_accuracy": _held_out("mlm_accuracy"),
    "accuracy": _held_out("accuracy"),
}
"""Measures of a run by name: losses in nats a token, `bits` in bits a token, accuracies as fractions."""
