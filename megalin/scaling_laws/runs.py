"""Measured losses of run folders, and the check that the runs belong together."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from megalin.config import read_toml
from megalin.errors import ConfigError, DataError
from megalin.files import read_input
from megalin.generation.decoder import grows
from megalin.ladder.state import finished_runs
from megalin.model.build import make_model
from megalin.model.config import ModelConfig
from megalin.model.language_model import LanguageModel
from megalin.scaling_laws.paper_counts import paper_counts
from megalin.scaling_laws.points import Point
from megalin.train.config import RunConfig, load_saved_config
from megalin.train.curves import finite
from megalin.train.jsonl import read_records

Counts = Literal["model", "paper"]
"""Counts of parameters and FLOPs: the model's own, or the paper's formulas."""
_MOST_LEVELS = 3
"""Levels of folders below a given one in which runs are searched."""
_SAMPLES = (
    *("train", "sources", "phases", "validation", "validation_fraction", "split", "sequence_length", "packing"),
    "isolate_documents",
)
"""Keys of [data] that determine the samples."""
_LIMIT_BYTES = 1 << 24
_STEADY = ("constant", "inverse_sqrt")
"""Schedules whose runs are measured at every evaluation; the loss of others counts at the end of their decay only."""


class MeasuredRun(NamedTuple):
    """A run with its measured losses."""

    path: Path
    config: RunConfig
    mixer: str
    points: list[Point]
    steps_before: int
    """Steps of the trunk that the run branched from."""


class _Line(NamedTuple):
    step: int
    tokens: float
    flops: float
    loss: float | None
    """Held-out loss, if the step was evaluated."""


_START = _Line(0, 0.0, 0.0, None)


def read_runs(folders: Sequence[str | Path], *, counts: Counts = "model", force: bool = False) -> list[MeasuredRun]:
    """Reads run folders, all runs in folders that contain some, and the finished ones of ladders.

    Runs of a ladder have its names of the mixers.

    Args:
        counts: "paper" counts parameters and FLOPs by the paper's Table 1.
        force: accepts runs that differ in tokenizer, data or schedule.

    Raises:
        ConfigError: no run in a folder, an encoder, or runs that do not belong together.
        DataError: a run without a held-out loss (after its last step, where its schedule decays), or metrics that are
            not finite or whose steps or tokens do not rise.
    """
    found = {path.resolve(): name for folder in folders for path, name in _run_folders(Path(folder))}
    runs = [_read(path, counts, name) for path, name in found.items()]
    if not force and (problems := list(differences(runs))):
        raise ConfigError(
            "these runs do not belong together:\n" + "\n".join(problems) + "\nfit those of one kind, or add --force"
        )
    return runs


def mixer_name(model: ModelConfig) -> str:
    """The types of a model's token mixers, joined by +."""
    sublayers = [sublayer for _, block in model.blocks() for sublayer in block.sublayers]
    return "+".join(dict.fromkeys(sublayer.type for sublayer in sublayers if sublayer.attends_to != "itself"))


def differences(runs: Sequence[MeasuredRun]) -> Iterator[str]:
    """A line for each key of tokenizer, data and schedule in which runs differ, with the runs of each value."""
    tables = [dict(_identity(run)) for run in runs]
    for key in dict.fromkeys(key for table in tables for key in table):
        values: dict[str, list[str]] = {}
        for run, table in zip(runs, tables, strict=True):
            values.setdefault(table.get(key, "none"), []).append(run.path.name)
        if len(values) > 1:
            yield f"  {key}: " + "; ".join(f"{value} in {', '.join(names)}" for value, names in values.items())


def _identity(run: MeasuredRun) -> Iterator[tuple[str, str]]:
    """Keys and values that runs of one scaling law share."""
    config, schedule = run.config, run.config.schedule
    yield "data.tokenizer", str(config.data.tokenizer)
    yield "model.vocab_size", str(config.model.vocab_size)
    samples = config.data.model_dump(mode="json", include=set(_SAMPLES))
    yield from ((f"data.{key}", json.dumps(samples[key])) for key in _SAMPLES)
    yield "schedule.type", schedule.type
    yield "schedule.min_lr_ratio", str(schedule.min_lr_ratio)
    if schedule.decay_steps is not None:
        fraction = schedule.decay_steps / (run.steps_before + config.train.steps)
        yield "schedule.decay_steps", f"{round(20 * fraction) * 5} % of the steps"


def _run_folders(folder: Path, levels: int = _MOST_LEVELS) -> list[tuple[Path, str | None]]:
    """The runs in a folder, with the names that a ladder gives their mixers."""
    if (of_ladder := finished_runs(folder)) is not None:
        if not of_ladder:
            raise ConfigError(f"{folder}: no run of this ladder has ended yet; run megalin ladder first")
        return [*of_ladder]
    if _is_run(folder):
        return [(folder, None)]
    inner = sorted(entry for entry in folder.iterdir() if entry.is_dir()) if folder.is_dir() and levels else []
    found = [run for entry in inner for run in _run_folders(entry, levels - 1)]
    if not found and levels == _MOST_LEVELS:
        raise ConfigError(f"{folder}: no run in this folder (config.toml and metrics.jsonl); give folders of runs")
    return found


def _is_run(folder: Path) -> bool:
    return (folder / "config.toml").is_file() and (folder / "metrics.jsonl").is_file()


def _read(path: Path, counts: Counts, name: str | None) -> MeasuredRun:
    """`name`: of its mixer, if a ladder gives one."""
    config = load_saved_config(path, [])
    if not isinstance(config.model, ModelConfig):
        raise ConfigError(f"{path}: an encoder, whose loss is of masked tokens; give runs of decoders")
    model = make_model(config.model)
    assert isinstance(model, LanguageModel), type(model)
    length = config.data.sequence_length
    parameters: float = model.num_parameters() - model.num_embedding_parameters()
    flops_per_token: float = model.training_flops(length)
    if counts == "paper":
        parameters, flops_per_token = paper_counts(config.model, length)
    lines = list(_lines(path, flops_per_token, own=counts == "model"))
    root, before = _origin(path, flops_per_token, own=counts == "model")
    mixer = name or mixer_name(config.model)
    state = None if grows(model) else model.state_bytes()
    points = [
        Point(parameters, before.tokens + line.tokens, line.loss, before.flops + line.flops, mixer, state, str(root))
        for line in _measured(path, config, lines)
        if line.loss is not None
    ]
    return MeasuredRun(path, config, mixer, points, before.step)


def _measured(path: Path, config: RunConfig, lines: Sequence[_Line]) -> list[_Line]:
    """The lines whose held-out loss counts."""
    evaluated = [line for line in lines if line.loss is not None]
    if not evaluated:
        raise DataError(
            f"{path}: no held-out loss in metrics.jsonl; give its config data.validation or data.validation_fraction, "
            "and train again"
        )
    if config.schedule.type in _STEADY:
        warm = [line for line in evaluated if line.step >= config.schedule.warmup_steps]
        if warm:
            return warm
    elif evaluated[-1].step == config.train.steps:
        return evaluated[-1:]
    raise DataError(
        f"{path}: no held-out loss after its last step ({config.train.steps:,}), where the rate of its schedule "
        f'"{config.schedule.type}" is as its runs end; resume it, or leave it out'
    )


def _lines(path: Path, flops_per_token: float, *, own: bool) -> Iterator[_Line]:
    """The lines of metrics.jsonl; `own`: with their FLOPs, where they have them."""
    metrics, last = path / "metrics.jsonl", _START
    try:
        for record in read_records(metrics):
            last = _line(f"{metrics}, step {record['step']}", record, last, flops_per_token, own=own)
            yield last
    except OSError as error:
        raise DataError(f"{metrics}: cannot be read ({error.strerror}); fix the permissions") from None


def _line(place: str, record: dict[str, Any], last: _Line, flops_per_token: float, *, own: bool) -> _Line:
    remedy = "remove this line, or leave the run out"
    if record["step"] <= last.step:
        raise DataError(f"{place}: follows step {last.step}, but steps must rise; {remedy}")
    tokens = finite(record.get("tokens"))
    if tokens is None or tokens <= last.tokens:
        raise DataError(f"{place}: tokens = {record.get('tokens')} must be above {last.tokens:,.0f}; {remedy}")
    loss = finite(record.get("evaluation_loss"))
    if "evaluation_loss" in record and (loss is None or loss <= 0):
        value = record.get("evaluation_loss_nonfinite", record["evaluation_loss"])
        raise DataError(f"{place}: evaluation_loss = {value} is not a finite positive number; {remedy}")
    flops = finite(record.get("flops")) if own else None
    return _Line(record["step"], tokens, flops or tokens * flops_per_token, loss)


def _origin(path: Path, flops_per_token: float, *, own: bool) -> tuple[Path, _Line]:
    """The first trunk of a run, itself if it is no branch, and the steps, tokens and FLOPs that its metrics lack."""
    source = read_toml(path / "config.toml").get("train", {}).get("branch_from")
    if source is not None:  # a branch that goes on counting its trunk's steps, and does not read that run again
        trunk = Path(re.sub(r"@\d+$", "", source))
        trunk = trunk if _is_run(trunk) else path.parent / trunk.name  # both may have been copied
        return _origin(trunk.resolve(), flops_per_token, own=own) if _is_run(trunk) else (trunk.resolve(), _START)
    report = path / "initial_weights.json"
    if not report.is_file():
        return path, _START
    remedy = "keep the run that it branched from, or leave this one out"
    try:
        values = json.loads(read_input(report, limit_bytes=_LIMIT_BYTES, remedy=remedy))
        trunk, step = Path(values["checkpoint"]).resolve().parent.parent, int(values["step"])
    except (ValueError, KeyError, TypeError):
        raise DataError(f"{report}: names no checkpoint and step; {remedy}") from None
    if not _is_run(trunk):
        raise DataError(f"{report}: {trunk} holds no run, so that its tokens are unknown; {remedy}")
    found = [line for line in _lines(trunk, flops_per_token, own=own) if line.step == step]
    if not found:
        raise DataError(f"{report}: {trunk}/metrics.jsonl has no step {step}; {remedy}")
    root, before = _origin(trunk, flops_per_token, own=own)
    line = _Line(before.step + step, before.tokens + found[0].tokens, before.flops + found[0].flops, None)
    return root, line
