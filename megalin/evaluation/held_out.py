"""Evaluation of a saved run on a data split, under data, tensor and context parallelism."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from megalin.checkpoint.load import load
from megalin.checkpoint.tensors import OPTIMIZER_PREFIX, weights
from megalin.config import apply_overrides, parse
from megalin.data.config import SplitName
from megalin.data.loader import ValidationLoader
from megalin.data.sources import open_dataset
from megalin.data.tokenizers.tokenizer import load_tokenizer
from megalin.errors import ConfigError
from megalin.launch import launched
from megalin.model.build import check_divisions
from megalin.parallel.mesh import Mesh, ParallelConfig, check_world_size
from megalin.parallel.process_group import compute_device, process_group
from megalin.train.build import COMPUTE_DTYPES, build_model
from megalin.train.open_run import open_run
from megalin.train.validation import AnyEvaluation, evaluate

_AXES = ("parallel.tp", "parallel.cp")
"""The keys of [parallel] that an evaluation reads."""


def evaluate_on_launched_ranks(
    folder: str | Path, overrides: Sequence[str] = (), *, split: SplitName = "validation"
) -> AnyEvaluation | None:
    """Evaluates a run on the ranks that a launcher started, or in this process alone; see `evaluate_run`.

    Args:
        overrides: `parallel.tp` and `parallel.cp` set the mesh, by default 1 each; the remaining ranks divide the
            samples. All others apply to the run's config.

    Returns:
        The evaluation on rank 0, None on the other ranks.

    Raises:
        MegalinError: as `evaluate_run`; an override of another key of [parallel]; a mesh that does not fit the ranks.
    """
    parallel, overrides = _mesh_overrides(overrides)
    device = compute_device()
    check_world_size(parallel, launched().world_size)
    with process_group(device):
        mesh = Mesh(parallel, device)
        evaluation = evaluate_run(folder, mesh, overrides, split=split)
        return evaluation if mesh.is_first_rank else None


def _mesh_overrides(overrides: Sequence[str]) -> tuple[ParallelConfig, list[str]]:
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


def evaluate_run(
    folder: str | Path, mesh: Mesh, overrides: Sequence[str] = (), *, split: SplitName = "validation"
) -> AnyEvaluation:
    """Evaluates the newest checkpoint of a run on a split; all ranks of the mesh call it.

    Args:
        mesh: any that the model and the sequence length fit; it need not be the training's.
        overrides: changes to the run's config; `data.validation=[...]` names other shards.

    Raises:
        MegalinError: the run has no checkpoint or no such split, data is invalid or missing, or the mesh does not fit.
    """
    # The training's mesh is dropped: it does not apply to the ranks of the evaluation.
    config, checkpoint = open_run(folder, [*overrides, "parallel={}"])
    if problem := mesh.config.length_problem(config.data.sequence_length):
        raise ConfigError(f"data.sequence_length = {config.data.sequence_length} {problem}")
    check_divisions(config.model, mesh.tp.size)
    if not config.data.has(split):
        raise ConfigError(
            f"{folder}: the run has no {split} split (data.{split} is empty, and no part of the training shards is "
            f"held out for it); name shards to evaluate on: data.{split}=['prefix']"
        )
    model = build_model(
        config.model,
        mesh,
        compute_dtype=COMPUTE_DTYPES[config.train.dtype],
        recompute=False,
        compile_blocks=config.train.compile,
        seed=config.train.seed,
    )
    load(checkpoint, weights(model), ignore=(OPTIMIZER_PREFIX,))
    model.after_optimizer_step()
    tokenizer = None if config.data.tokenizer is None else load_tokenizer(config.data.tokenizer)
    token_bytes = None if tokenizer is None else torch.from_numpy(tokenizer.token_bytes())
    with open_dataset(config.data, split, config.model.vocab_size, config.train.seed) as dataset:
        loader = ValidationLoader(
            dataset,
            micro_batch_size=config.train.micro_batch_size,
            dp_rank=mesh.samples.rank,
            dp_size=mesh.samples.size,
        )
        return evaluate(model, loader, mesh, token_bytes=token_bytes)
