"""Export of a run's checkpoint as a folder of another system; memory holds the tensors of one file at a time."""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from megalin.checkpoint.load import load
from megalin.checkpoint.manifest import Checkpoint
from megalin.checkpoint.tensors import OPTIMIZER_PREFIX, weights
from megalin.data.tokenizers.formats import TOKENIZER_FILE, TOKENIZER_SETTINGS
from megalin.data.tokenizers.special_tokens import special_tokens_of
from megalin.data.tokenizers.tokenizer import HuggingFaceTokenizer, Tokenizer, tokenizer_of
from megalin.errors import CheckpointError, ConfigError, StorageError
from megalin.generation.decoder import grows
from megalin.interop.weights import model_card as cards
from megalin.interop.weights.folder import CONFIG_FILE, INDEX_FILE, WEIGHTS_FILE
from megalin.interop.weights.layout import CheckpointLayout, Placed, place
from megalin.interop.weights.layouts import layout_of_model
from megalin.model.config import ModelConfig
from megalin.model.language_model import LanguageModel
from megalin.train.open_run import open_run

FILE_BYTES = 2 << 30
"""Maximum size of a file, unless it has a single tensor; an export needs about three times as much memory."""
NO_LIMIT = 1 << 20
"""max_position_embeddings of models whose state has a constant size: no length is too long for them."""
_ELEMENT_BYTES = 4


def export_hf(
    run: Path, out: Path, *, form: str | None = None, step: int | None = None, file_bytes: int = FILE_BYTES
) -> CheckpointLayout:
    """Writes a checkpoint of `run` as fp32 safetensors with a config.json; `out` appears only when complete.

    Args:
        step: finished steps of the checkpoint; None: the newest one.
        form: the system, for models that fit several; None takes the first.
        file_bytes: maximum size of a file, unless it has a single tensor.

    Returns:
        The layout written.

    Raises:
        ConfigError: no run, a model that the class cannot express, or an `out` that is not empty.
        CheckpointError: no checkpoint (of this step) that verifies, or one with other tensors than its model.
        StorageError: `out` cannot be written.
    """
    check_empty(out)
    out = out.resolve()  # "." has no name, and a folder does not take the place of a link
    config, checkpoint = open_run(run, step=step)
    if not isinstance(config.model, ModelConfig):
        raise ConfigError(
            f'{run}: no external class exists for model.kind = "{config.model.kind}"; give the run of a decoder'
        )
    layout = layout_of_model(config.model, form)
    model = LanguageModel(config.model)
    _check_tensors(checkpoint, model)
    tokenizer = tokenizer_of(config.data)
    temporary = out.with_name(f".{out.name}.{secrets.token_hex(4)}.tmp")
    try:
        temporary.mkdir(parents=True)
        _write_tensors(temporary, checkpoint, model, layout, file_bytes)
        length = config.data.sequence_length if grows(model) else NO_LIMIT
        asked = config.data.special_tokens
        write_settings(temporary, config.model, layout, tokenizer, length=length, special_tokens=asked)
        card = cards.model_card(run, config, layout, step=checkpoint.step, num_parameters=model.num_parameters())
        (temporary / cards.FILE).write_text(card, encoding="utf-8")
        _set_modes(temporary)
        os.rename(temporary, out)
    except OSError as error:
        raise StorageError(f"cannot write {out}: {error}; free space or fix the permissions") from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return layout


def _set_modes(folder: Path) -> None:
    """Gives all files the mode of the umask; safetensors writes files that only their owner can read."""
    mode = (folder / CONFIG_FILE).stat().st_mode & 0o777
    for file in folder.iterdir():
        file.chmod(mode)


def check_empty(path: Path) -> None:
    """Raises ConfigError unless `path` is absent or an empty folder."""
    if os.path.lexists(path) and not (path.is_dir() and not any(path.iterdir())):
        raise ConfigError(f"{path}: exists and is not an empty folder; name one that does not exist yet")


def _check_tensors(checkpoint: Checkpoint, model: LanguageModel) -> None:
    """Raises CheckpointError for tensors that the model lacks: export looks tensors up by name and would skip them."""
    names = {name for name in checkpoint.index().tensors if not name.startswith(OPTIMIZER_PREFIX)}
    if extra := sorted(names - weights(model).keys()):
        raise CheckpointError(f"{checkpoint.path}: has tensors that its model does not have: {', '.join(extra[:8])}")


def _write_tensors(
    folder: Path, checkpoint: Checkpoint, model: LanguageModel, layout: CheckpointLayout, file_bytes: int
) -> None:
    shapes = weights(model)
    groups = list(_groups(place(layout, model), file_bytes))
    weight_map: dict[str, str] = {}
    for number, group in enumerate(groups, start=1):
        name = WEIGHTS_FILE if len(groups) == 1 else f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        held = [name for item in group if item.held for name in item.link.names]
        ours = {name: torch.empty(shapes[name].shape) for name in held}
        load(checkpoint, ours, ignore=("",))  # these tensors and no others
        tensors = {name: tensor for item in group for name, tensor in _convert(item, ours).items()}
        save_file(tensors, folder / name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, name)
    if len(groups) > 1:
        total = sum(_num_bytes(item) for group in groups for item in group)
        _write_json(folder / INDEX_FILE, {"metadata": {"total_size": total}, "weight_map": weight_map})


def _convert(item: Placed, ours: dict[str, Tensor]) -> dict[str, Tensor]:
    """Converts a placed link; removes our tensors from `ours`, so that their memory is freed."""
    tensors = [ours.pop(name) for name in item.link.names] if item.held else [torch.ones(item.rows)]
    return item.to_theirs(tensors)


def _groups(items: list[Placed], limit_bytes: int) -> Iterator[list[Placed]]:
    """Splits parameters into consecutive groups that fit into one file."""
    group: list[Placed] = []
    for item in items:
        if group and sum(map(_num_bytes, group)) + _num_bytes(item) > limit_bytes:
            yield group
            group = []
        group.append(item)
    yield group


def _num_bytes(item: Placed) -> int:
    return torch.Size(item.rows).numel() * _ELEMENT_BYTES


def write_settings(
    folder: Path,
    model: ModelConfig,
    layout: CheckpointLayout,
    tokenizer: Tokenizer | None,
    *,
    length: int,
    special_tokens: bool | None = None,
) -> None:
    """Writes config.json and the tokenizer's files, whose texts have special tokens as those of the run
    (data.special_tokens)."""
    eos = None if tokenizer is None else tokenizer.eod_id
    bos = None if tokenizer is None else special_tokens_of(tokenizer, special_tokens).prefix_id
    end = {"bos_token_id": None if bos == eos else bos, "eos_token_id": eos, "pad_token_id": None}
    values: dict[str, Any] = {
        "architectures": [layout.architecture],
        "model_type": layout.model_type,
        "torch_dtype": "float32",
        "max_position_embeddings": length,
        **{key: accepted[0] for key, accepted in layout.fixed.items()},
        **layout.to_settings(model),
        **end,
    }
    _write_json(folder / CONFIG_FILE, values)
    if tokenizer is None:
        return
    _write_json(folder / "generation_config.json", end)
    if isinstance(tokenizer, HuggingFaceTokenizer):
        if special_tokens is False:
            description = json.loads(tokenizer.path.read_bytes())
            _write_json(folder / TOKENIZER_FILE, description | {"post_processor": None})
        else:
            shutil.copyfile(tokenizer.path, folder / TOKENIZER_FILE)
        about = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": tokenizer.eod_token}
        if bos is not None and bos != eos:
            about["bos_token"] = tokenizer.decode([bos])
        _write_json(folder / TOKENIZER_SETTINGS, about)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=1, allow_nan=False) + "\n", encoding="utf-8")
