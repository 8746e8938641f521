"""Evaluation of a saved run on one of its splits, on ranks that share out samples, tokens and layers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from megalin.checkpoint.load import load
from megalin.checkpoint.tensors import OPTIMIZER_PREFIX, weights
from megalin.data.config import SplitName
from megalin.data.loader import ValidationLoader
from megalin.data.sources import open_dataset
from megalin.data.tokenizers.tokenizer import load_tokenizer
from megalin.errors import ConfigError
from megalin.model.build import check_divisions
from megalin.parallel.mesh import Mesh
from megalin.train.build import COMPUTE_DTYPES, build_model
from megalin.train.open_run import open_run
from megalin.train.validation import AnyEvaluation, evaluate


def evaluate_run(
    folder: str | Path, mesh: Mesh, overrides: Sequence[str] = (), *, split: SplitName = "validation"
) -> AnyEvaluation:
    """The newest checkpoint of a run on a split (`data.validation=[...]` names other shards); a collective.

    Args:
        mesh: not the one of the training: any that the model and the length of its rows fit.

    Raises:
        MegalinError: a run without a checkpoint or without this split, data that is bad or missing, or a mesh that does
            not fit.
    """
    # What the run was trained on says nothing of the rows and the ranks here.
    config, checkpoint = open_run(folder, [*overrides, "parallel={}"])
    if problem := mesh.config.length_problem(config.data.sequence_length):
        raise ConfigError(f"data.sequence_length = {config.data.sequence_length} {problem}")
    check_divisions(config.model, mesh.tp.size)
    if not config.data.has(split):
        raise ConfigError(
            f"{folder}: the run has no {split} split (data.{split} is empty, and nothing of the training shards is "
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
