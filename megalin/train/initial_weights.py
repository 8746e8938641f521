"""Initial weights of a run from another run's checkpoint, and the report of the tensors taken, new and left out."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from megalin.checkpoint.index import Index
from megalin.checkpoint.load import load, newest, of_step, saved_steps, shape_problem
from megalin.checkpoint.manifest import Checkpoint
from megalin.checkpoint.tensors import OPTIMIZER_PREFIX
from megalin.errors import CheckpointError
from megalin.model.config import AnyModelConfig, EncoderConfig, parse_model
from megalin.model.encoder import POSITION_TABLE
from megalin.parallel.agreement import on_every_rank, on_rank_zero
from megalin.parallel.tensor_parallel import assign
from megalin.train.config import RunConfig
from megalin.train.config_file import CHECKPOINTS_NAME
from megalin.train.engine import Engine
from megalin.train.open_run import model_differences, saved_model

_MOST_LINES = 8
_ALL = ("",)
"""Prefixes of the names that `load` may leave in the checkpoint: those of all names."""


class InitialWeights(NamedTuple):
    """Report on the start from a checkpoint; every list is sorted by name."""

    checkpoint: str
    """Path of the checkpoint."""
    step: int
    """Its number of finished steps."""
    taken: list[str]
    """Tensors whose values are the checkpoint's."""
    tiled: list[str]
    """Tables of positions that repeat the checkpoint's shorter one."""
    new: list[str]
    """Tensors that the checkpoint lacks, with initial values of this run's seed."""
    left: list[str]
    """Weights of the checkpoint that the model lacks."""
    model_differences: list[str]
    """Fields of the model with another value than in the checkpoint's config, with both."""

    def report_lines(self) -> list[str]:
        """The report as text, long lists cut."""
        counts = f"{len(self.taken)} tensors taken, {len(self.tiled)} tiled, {len(self.new)} new, {len(self.left)} left"
        lines = [
            f"{self.checkpoint}: {counts}; the optimizer state is new",
            *(f"{name} is tiled: more positions" for name in self.tiled),
            *_cut([f"{name} is new: not in the checkpoint" for name in self.new]),
            *_cut([f"{name} is left in the checkpoint: not in the model" for name in self.left]),
            *_cut(self.model_differences),
        ]
        return [f"initial weights: {line}" for line in lines]


def find_initial_weights(config: RunConfig, checkpoints: Path) -> Checkpoint | None:
    """The checkpoint of `train.initial_weights`, verified; None without that key, or if the run's own folder
    `checkpoints` has one to resume from. All ranks call it.

    Raises:
        CheckpointError: on every rank, for a folder without checkpoints, a step without one (names the nearest), or a
            checkpoint that is invalid or has another vocabulary.
    """
    source = config.train.initial_weights
    if source is None or saved_steps(checkpoints):
        return None
    checkpoint = named_checkpoint("train.initial_weights", source)
    values = on_rank_zero(lambda: saved_model(checkpoint).model_dump(mode="json"))
    saved = parse_model(values, str(checkpoint.path))
    if saved.kind != config.model.kind:
        raise CheckpointError(
            f'{_key(source)}: model.kind = "{saved.kind}" in {checkpoint.path}, "{config.model.kind}" in the config; '
            "give a run of the same kind"
        )
    if saved.vocab_size != config.model.vocab_size:
        raise CheckpointError(
            f"{_key(source)}: model.vocab_size = {saved.vocab_size} in {checkpoint.path}, {config.model.vocab_size} in "
            "the config: the same id is another token; use the tokenizer and vocabulary size of that run"
        )
    return checkpoint


def named_checkpoint(key: str, source: str) -> Checkpoint:
    """The verified checkpoint that the value of a key names: RUN, its newest one, or RUN@STEP. All ranks call it.

    Raises:
        CheckpointError: on every rank, for a folder without checkpoints, a step without one (names the nearest), or an
            invalid one.
    """
    match = re.fullmatch(r"(.+)@(\d{1,18})", source)
    folder, step = (Path(source), None) if match is None else (Path(match[1]), int(match[2]))
    named = f"{key} = {source!r}"
    on_rank_zero(lambda: _check_run_folder(named, folder))
    checkpoint = newest(folder / CHECKPOINTS_NAME) if step is None else of_step(folder / CHECKPOINTS_NAME, step)
    if checkpoint is None:
        raise CheckpointError(f"{named}: the run has no checkpoint yet; train it first (megalin train)")
    return checkpoint


def load_initial_weights(checkpoint: Checkpoint, config: RunConfig, engine: Engine) -> InitialWeights:
    """Sets the engine's weights from those of `checkpoint`, from any mesh to any; the optimizer state stays new.

    Tensors are matched by global name. An encoder's table of positions with more rows than the checkpoint's repeats
    it: row p is row p mod M of its M rows (DenseAttention's released code; the paper's stages of growing length).

    Raises:
        CheckpointError: on every rank, before any weight is changed: lists every tensor of another shape, and the
            fields of the model that differ; or no tensor has a name of the model.
    """
    tables = (POSITION_TABLE,) if isinstance(config.model, EncoderConfig) else ()
    reports: list[InitialWeights] = []

    def fill(tensors: Mapping[str, Tensor]) -> Collection[str]:
        index = on_rank_zero(checkpoint.index, Index)
        report = _compare(checkpoint, index, tensors, config.model, tables)
        reports.append(report)
        taken = {name: tensors[name] for name in report.taken if name in tensors}
        grown = {name: tensors[name] for name in report.tiled if name in tensors}
        short = {
            name: torch.empty(index.tensors[name].shape, dtype=tensor.dtype, device=tensor.device)
            for name, tensor in grown.items()
        }
        load(checkpoint, taken | short, ignore=_ALL)
        for name, table in short.items():
            rows = torch.arange(len(grown[name]), device=table.device) % len(table)
            assign(grown[name], table[rows])
        return [*taken, *grown]

    engine.set_weights(fill)
    (report,) = reports
    return report


def _compare(
    checkpoint: Checkpoint, index: Index, tensors: Mapping[str, Tensor], model: AnyModelConfig, tables: Collection[str]
) -> InitialWeights:
    """Compares the names and shapes of all ranks' tensors with the checkpoint's. One all-gather."""
    shapes = dict[str, list[int]]()
    for of_rank in on_every_rank(lambda: {name: list(tensor.shape) for name, tensor in tensors.items()}):
        shapes |= of_rank
    saved = {name: record.shape for name, record in index.tensors.items() if not name.startswith(OPTIMIZER_PREFIX)}
    common = sorted(saved.keys() & shapes)
    differing = [name for name in common if saved[name] != shapes[name]]
    tiled = [name for name in differing if name in tables and _grows(saved[name], shapes[name])]
    report = InitialWeights(
        str(checkpoint.path),
        checkpoint.step,
        taken=[name for name in common if name not in differing],
        tiled=tiled,
        new=sorted(shapes.keys() - saved),
        left=sorted(saved.keys() - shapes),
        model_differences=on_rank_zero(lambda: model_differences(model, saved_model(checkpoint))),
    )
    problems = [
        shape_problem(name, saved[name], shapes[name])
        + ("; a table of positions grows, but is never cut: raise model.max_positions" if name in tables else "")
        for name in differing
        if name not in tiled
    ]
    if problems:
        raise CheckpointError(
            f"train.initial_weights: {len(problems)} tensors of {checkpoint.path} have another shape in this model, "
            "and weights are taken as they are:\n"
            + "\n".join(f"  {line}" for line in _cut(problems))
            + "\nuse the checkpoint's values of these fields, or start without initial_weights:\n"
            + "\n".join(f"  {line}" for line in _cut(report.model_differences))
        )
    if not report.taken:
        raise CheckpointError(
            f"train.initial_weights: {checkpoint.path} has no tensor of this model; give a run of a similar model"
        )
    return report


def _grows(saved: list[int], shape: list[int]) -> bool:
    return saved[1:] == shape[1:] and saved[0] < shape[0]


def _check_run_folder(named: str, folder: Path) -> None:
    """Raises CheckpointError, with the remedy, for a path that is no run folder."""
    if (folder / CHECKPOINTS_NAME).is_dir():
        return
    if not folder.is_dir():
        raise CheckpointError(f"{named}: no such folder; give a run folder, or RUN@STEP")
    if (folder / "config.json").is_file():
        raise CheckpointError(
            f"{named}: a Hugging Face folder; make a run folder of it with `megalin import hf {folder} RUN`, "
            "and give RUN"
        )
    raise CheckpointError(f"{named}: not a run folder: it has no {CHECKPOINTS_NAME}/")


def _key(source: str) -> str:
    return f"train.initial_weights = {source!r}"


def _cut(lines: list[str]) -> list[str]:
    more = len(lines) - _MOST_LINES
    return lines if more <= 0 else [*lines[:_MOST_LINES], f"... and {more} more"]
