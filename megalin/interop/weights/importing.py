"""Import of another system's folder as a run folder with one checkpoint: the weights at step 0."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import megalin
from megalin.checkpoint.save import save
from megalin.checkpoint.tensors import weights
from megalin.config import dumps, parse
from megalin.data.tokenizers.formats import END_OF_DOCUMENT, TOKENIZER_FILE, TOKENIZER_SETTINGS
from megalin.data.tokenizers.tokenizer import EndOfDocumentError, HuggingFaceTokenizer, token_of_id
from megalin.errors import CheckpointError, DataError, MegalinError, StorageError
from megalin.generation.decoder import grows
from megalin.interop.weights.exporting import check_empty
from megalin.interop.weights.folder import CONFIG_FILE, Folder, equal, read_json
from megalin.interop.weights.layout import CheckpointLayout, Placed, place
from megalin.interop.weights.layouts import layouts_of_folder
from megalin.interop.weights.settings import Settings
from megalin.model.config import ModelConfig
from megalin.model.language_model import LanguageModel
from megalin.train.config import RunConfig
from megalin.train.run_folder import RunFolder

UNNAMED_SHARDS = "name-your-training-shards"
"""Placeholder for the training data in an imported run's config."""
_SEQUENCE_LENGTH = 2048
"""data.sequence_length of models whose state has a constant size, which no length is too long for."""
_HEAD, _EMBEDDING = "head.weight", "embedding.weight"


class ImportedWeights(NamedTuple):
    """Result of an import."""

    layout: CheckpointLayout
    num_parameters: int
    without_tokenizer: str | None
    """Reason why the run has no tokenizer; None if it has one."""


class _Plan(NamedTuple):
    """Layout of a folder, its model on the meta device, and the place of every tensor."""

    layout: CheckpointLayout
    model: LanguageModel
    placed: list[Placed]


def import_hf(source: Path, run: Path) -> ImportedWeights:
    """Creates the run folder `run` from the folder `source`; train, eval and generate read it like any other.

    Its config.toml has the model, and placeholders for data, batch size and learning rate, to set before training.
    Memory: one tensor. Disk: twice the fp32 weights during the import, then once.

    Raises:
        CheckpointError: a folder that is unsupported, incomplete or inconsistent; names every tensor that does not fit.
        ConfigError: a `run` that is not empty, or sizes that no model can have.
        StorageError: `run` cannot be written.
    """
    check_empty(run)
    with Folder(source) as folder:
        settings = Settings(read_json(source / CONFIG_FILE), str(source / CONFIG_FILE))
        plan = _plan(folder, settings)
        with RunFolder(run) as claimed:
            try:
                reason = _write_run(claimed, folder, plan, settings)
            except MegalinError:
                shutil.rmtree(run, ignore_errors=True)  # the folder was empty before this import
                raise
    return ImportedWeights(plan.layout, plan.model.num_parameters(), reason)


def _write_run(run: RunFolder, folder: Folder, plan: _Plan, settings: Settings) -> str | None:
    """Writes tokenizer, checkpoint and config; returns why the run has no tokenizer, or None."""
    model, title = plan.model.config, plan.layout.title
    tokenizer = _copy_tokenizer(folder.path, run.path, model, settings)
    reason = tokenizer if isinstance(tokenizer, str) else None
    length = _sequence_length(plan.model, plan.layout.complete(settings))
    config = _run_config(model, length, run.path, None if isinstance(tokenizer, str) else tokenizer)
    state = {
        "step": 0,
        "order": None,
        "config": config.model_dump(mode="json"),
        "versions": {"megalin": megalin.__version__, "torch": torch.__version__},
        "source": {"folder": str(folder.path), "class": title},
    }
    save(run.checkpoints, step=0, tensors=_convert(plan, folder, run.path), state=state)
    # A name may contain a line break, and a comment must not.
    header = f"# {title} from {str(folder.path)!r}. To train it, set data.train, train.* and optimizer.lr.\n"
    run.write_text(run.config, header + dumps(config))
    return reason


def _plan(folder: Folder, settings: Settings) -> _Plan:
    """Reads config.json, builds the model and compares every tensor. Raises CheckpointError and ConfigError."""
    candidates = layouts_of_folder(settings)
    settings.check_fixed(candidates[0].fixed, candidates[0].title)
    table = candidates[0].to_model(candidates[0].complete(settings))
    num_layers = sum(block["repeat"] for block in table["layers"])
    if num_layers > len(folder.tensors):
        raise CheckpointError(
            f"{settings.source}: {num_layers} layers, but the folder has only {len(folder.tensors)} tensors"
        )
    config = parse(ModelConfig, table, settings.source)
    kinds = tuple(sublayer.type for sublayer in config.layers[0].sublayers)
    layout = next(candidate for candidate in candidates if candidate.sublayers == kinds)
    model = LanguageModel(config)
    plans = []
    for older in (False, True) if layout.older_block else (False,):
        held = [item for item in place(layout, model, older=older) if item.held]
        plans.append(_Plan(layout, model, held))
    found = [_problems(folder, plan) for plan in plans]
    if all(found):
        raise CheckpointError(f"{folder.path}: tensors do not match {layout.title}:\n  " + "\n  ".join(found[0]))
    return plans[found.index([])]


def _problems(folder: Folder, plan: _Plan) -> list[str]:
    expected = {name: shape for item in plan.placed for name, shape in item.shapes().items()}
    links = {link.ours: link.theirs[0] for link in plan.layout.model}
    head, embedding = links[_HEAD], links[_EMBEDDING]
    tied_copy = plan.model.config.tie_embeddings and head in folder.tensors
    problems = folder.problems(expected, ignored=(*plan.layout.ignored, *([head] if tied_copy else [])))
    if tied_copy and not problems and not equal(folder.read(head), folder.read(embedding)):
        problems.append(
            f"{head}: differs from {embedding}, but the model ties them; set tie_word_embeddings to false in "
            f"{CONFIG_FILE} to keep both"
        )
    return problems


def _convert(plan: _Plan, folder: Folder, path: Path) -> Mapping[str, Tensor]:
    """Our parameters in fp32, memory-mapped from unlinked files: they use disk, and memory that can be reclaimed."""
    shapes = {name: tensor.shape for name, tensor in weights(plan.model).items()}
    converted: dict[str, Tensor] = {}
    try:
        for item in plan.placed:
            tensors = {name: _mapped(path / ".import", shapes[name]) for name in item.link.names}
            item.to_ours(folder.read, list(tensors.values()))
            converted |= tensors
    except (OSError, RuntimeError) as error:
        raise _unwritable(path, error) from None
    return converted


def _mapped(file: Path, shape: torch.Size) -> Tensor:
    try:
        with file.open("xb") as reserved:  # a page without a block ends the process by SIGBUS where the disk is full
            os.posix_fallocate(reserved.fileno(), 0, max(1, 4 * shape.numel()))
        return torch.from_file(str(file), shared=True, size=shape.numel(), dtype=torch.float32).view(shape)
    finally:
        file.unlink(missing_ok=True)


def _sequence_length(model: LanguageModel, settings: Settings) -> int:
    """data.sequence_length of an imported run. Of softmax attention all positions of the model, because it also limits
    generation, evaluation and export."""
    positions = settings.integer("max_position_embeddings", _SEQUENCE_LENGTH)
    return positions if grows(model) else min(_SEQUENCE_LENGTH, positions)


def _run_config(model: ModelConfig, length: int, run: Path, tokenizer: HuggingFaceTokenizer | None) -> RunConfig:
    """The config of a run with this model, the tokenizer copied to `run`, and placeholders for the rest."""
    data: dict[str, Any] = {"train": [UNNAMED_SHARDS], "sequence_length": length}
    if tokenizer is not None:
        data["tokenizer"] = str((run / TOKENIZER_FILE).resolve())
        if tokenizer.eod_token != END_OF_DOCUMENT:
            data["eod_token"] = tokenizer.eod_token
        if tokenizer.special.before:
            data["special_tokens"] = True
    values = {
        "model": model.model_dump(),
        "data": data,
        "train": {"steps": 1, "global_batch_size": 1, "micro_batch_size": 1},
        "optimizer": {"lr": 1e-5},
    }
    return parse(RunConfig, values, "imported run")


def _copy_tokenizer(source: Path, run: Path, model: ModelConfig, settings: Settings) -> HuggingFaceTokenizer | str:
    """Copies tokenizer.json if runs can use it; else returns the reason."""
    file = source / TOKENIZER_FILE
    if not file.exists():
        return f"{source} has no {TOKENIZER_FILE}"
    try:
        tokenizer = _load_tokenizer(file, settings)
    except DataError as error:
        return str(error)
    if tokenizer.vocab_size > model.vocab_size:
        return f"{file} has {tokenizer.vocab_size} ids, more than the model's {model.vocab_size}"
    try:
        shutil.copyfile(tokenizer.path, run / TOKENIZER_FILE)
        if (begin := tokenizer.special.begin) is not None:
            names = {"bos_token": tokenizer.decode([begin])}
            (run / TOKENIZER_SETTINGS).write_text(json.dumps(names) + "\n", encoding="utf-8")
    except OSError as error:
        raise _unwritable(run, error) from None
    return tokenizer


def _load_tokenizer(file: Path, settings: Settings) -> HuggingFaceTokenizer:
    """Loads a tokenizer.json whose document ends as its folder says, or else with eos_token_id of config.json."""
    try:
        return HuggingFaceTokenizer(file)
    except EndOfDocumentError:
        ids = settings.values.get("eos_token_id")
        first = ids[0] if isinstance(ids, list) and ids else ids
        token = token_of_id(file, first) if type(first) is int else None
        if token is None:
            raise
        return HuggingFaceTokenizer(file, eod_token=token)


def _unwritable(path: Path, error: Exception) -> StorageError:
    return StorageError(f"cannot write {path}: {error}; free space or fix the permissions")
