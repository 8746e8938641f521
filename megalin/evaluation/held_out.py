"""Held-out loss of a model on a split of its run's data, under data, tensor and context parallelism."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from megalin.config import apply_overrides, parse
from megalin.data.batch import AnyBatch
from megalin.data.config import SplitName
from megalin.data.loader import ValidationLoader
from megalin.data.shards.indexed_dataset import bin_path
from megalin.data.sources import open_dataset
from megalin.data.tokenizers.tokenizer import tokenizer_of
from megalin.errors import ConfigError
from megalin.model.build import check_divisions
from megalin.parallel.config import ParallelConfig
from megalin.parallel.mesh import Mesh
from megalin.train.build import TrainedModel
from megalin.train.config import RunConfig, load_saved_config
from megalin.train.identity import config_entries
from megalin.train.validation import AnyEvaluation, bytes_per_token, evaluate

_AXES = ("parallel.tp", "parallel.cp")
"""The keys of [parallel] that an evaluation reads."""


def mesh_overrides(overrides: Sequence[str]) -> tuple[ParallelConfig, list[str]]:
    """The mesh of the evaluation, independent of the training's, and the overrides of other keys."""
    keys = [override.partition("=")[0].strip() for override in overrides]
    axes = [override for override, key in zip(overrides, keys, strict=True) if key in _AXES]
    others = [override for override, key in zip(overrides, keys, strict=True) if key not in _AXES]
    for override in others:
        if override.strip().startswith(("parallel.", "parallel=")):
            raise ConfigError(
                f"override {override!r}: an evaluation reads only {' and '.join(_AXES)} of [parallel] and divides the "
                "samples among the remaining ranks; remove it"
            )
    return parse(ParallelConfig, apply_overrides({"parallel": {}}, axes)["parallel"], "command line"), others


def check_mesh(config: RunConfig, mesh: Mesh) -> None:
    """Raises ConfigError for a mesh that the model or the sequence length does not fit."""
    if problem := mesh.config.length_problem(config.data.sequence_length):
        raise ConfigError(f"data.sequence_length = {config.data.sequence_length} {problem}")
    check_divisions(config.model, mesh.tp.size)


def check_split(folder: str | Path, config: RunConfig, split: SplitName) -> None:
    """Raises ConfigError for a split that the run does not have."""
    if not config.data.has(split):
        raise ConfigError(
            f"{folder}: the run has no {split} split (data.{split} is empty, and no part of the training shards is "
            f"held out for it); name shards to evaluate on: data.{split}=['prefix']"
        )


def held_out_name(folder: Path, config: RunConfig, split: SplitName) -> str:
    """The name under which a split's result is kept in the run folder. That of other data than the run's own has their
    values, so that no report takes it for the run's.

    Raises:
        ConfigError: the config of the run does not parse.
    """
    own, found = (_data_values(each, split) for each in (load_saved_config(folder, []), config))
    changed = [f"{name}={json.dumps(found[name])}" for name in found if own.get(name) != found[name]]
    return f"{split} with {', '.join(changed)}" if changed else split


def _data_values(config: RunConfig, split: SplitName) -> dict[str, Any]:
    """The keys of [data] that decide a split's samples and their bytes."""
    paths = {f"data.{split}": config.data.paths(split), "data.tokenizer": config.data.tokenizer}
    others = ("sources", "phases", "validation", "test")
    return paths | {
        name: entry.value
        for name, entry in config_entries(config).items()
        if name.startswith("data.") and entry.change != "silent" and name.split(".")[1] not in others
    }


def evaluate_split(
    model: TrainedModel,
    config: RunConfig,
    mesh: Mesh,
    split: SplitName,
    on_progress: Callable[[int, int], None] = lambda _done, _total: None,
    *,
    paths: Sequence[str] | None = None,
) -> AnyEvaluation:
    """Evaluates a model on all samples of a split of a run's data; all ranks of the mesh call it.

    Args:
        on_progress: receives the finished and the total number of this rank's batches.
        paths: prefixes of some of the split's shards, the only ones that are read; None: all.

    Raises:
        DataError: data or tokenizer is invalid or missing.
    """
    token_bytes = bytes_per_token(tokenizer_of(config.data))
    with open_dataset(config.data, split, config.model.vocab_size, config.train.seed, paths) as dataset:
        loader: ValidationLoader[Any] = ValidationLoader(
            dataset,
            micro_batch_size=config.train.micro_batch_size,
            dp_rank=mesh.samples.rank,
            dp_size=mesh.samples.size,
        )
        return evaluate(model, _reported(loader, on_progress), mesh, token_bytes=token_bytes)


def split_settings(config: RunConfig, split: SplitName, paths: Sequence[str]) -> dict[str, Any]:
    """Everything besides the weights that a result on the shards `paths` of a split depends on, as JSON."""
    files = [bin_path(prefix).stat() for prefix in paths]
    return {
        "split": split,
        "data": config.data.model_dump(mode="json", exclude={"special_tokens"}),  # of texts, not of shards
        "bytes and times of the shards": [[file.st_size, file.st_mtime_ns] for file in files],
        "seed": config.train.seed,
        "dtype": config.train.dtype,
    }


def _reported(loader: ValidationLoader[Any], on_progress: Callable[[int, int], None]) -> Iterator[AnyBatch]:
    """Yields the loader's batches, and reports each when the next one is asked for."""
    for done, batch in enumerate(loader, 1):
        yield batch
        on_progress(done, len(loader))
