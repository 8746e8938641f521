"""Models of the API: built from a config with fresh weights, or loaded from a run's checkpoint."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path

import torch

from megalin.api.arguments import ModelSource, read_device, read_dtype, read_model
from megalin.api.causal_lm import CausalLM
from megalin.config import suggest
from megalin.data.tokenizers.tokenizer import tokenizer_of
from megalin.errors import ConfigError
from megalin.generation import DtypeName, cast_weights
from megalin.generation.load import load_whole_model, max_positions
from megalin.model.config import AnyModelConfig, ModelConfig
from megalin.model.language_model import LanguageModel
from megalin.model.presets import preset_families, preset_names
from megalin.parallel.initialisation import init_weights
from megalin.train.compute_dtypes import COMPUTE_DTYPES
from megalin.train.config_file import CONFIG_NAME
from megalin.train.open_run import open_run


def presets(family: str | None = None) -> list[str]:
    """The names of the presets that `build_model` takes, those of one family ("hgrn2") or all.

    Raises:
        ConfigError: no such family.
    """
    if family is None:
        return preset_names()
    families = preset_families()
    if family not in families:
        raise ConfigError(f"family {family!r}: no presets of this family; {suggest(family, list(families))}")
    return families[family]


def build_model(
    config: ModelSource,
    *,
    device: str | torch.device | None = None,
    dtype: DtypeName | torch.dtype = "float32",
    seed: int = 0,
) -> CausalLM:
    """Builds a decoder with fresh weights, those with which `megalin train` starts from this seed on such a device.

    Needs no process group and no GPU. The model is in training mode, as a new `nn.Module` is.

    Args:
        config: a preset's name ("hgrn2-150m"; `presets()` lists them), a model's config, a run's, a dict with the keys
            of either ({"preset": "hgrn2-150m", "vocab_size": 50304}), or the path of a config file (.toml).
        device: "cpu", "cuda" or "cuda:N"; None: this process's GPU where torch sees one, else the CPU.
        dtype: of the weights: "float32", or "bfloat16" or "float16", as training in these casts them for each step;
            weights that feed exponentials or positions stay in fp32.
        seed: of the weights.

    Raises:
        ConfigError: an unknown preset, an invalid config, an encoder, or a device or dtype that there is not.
    """
    model_config = _decoder(read_model(config), "this model")
    place, name = read_device(device), read_dtype(dtype)
    if seed < 0:
        raise ConfigError(f"seed = {seed} is negative; use 0 or more")
    model = LanguageModel(model_config)
    model.to_empty(device=place)
    init_weights(model, seed)
    if name != "float32":
        cast_weights(model, COMPUTE_DTYPES[name])
    return CausalLM(model)


def load(
    folder: str | os.PathLike[str],
    step: int | None = None,
    *,
    device: str | torch.device | None = None,
    dtype: DtypeName | torch.dtype | None = None,
    mixers: Collection[str] = (),
) -> CausalLM:
    """Loads the model of a run, in eval mode, with the run's tokenizer; a run of any mesh, in one process.

    Args:
        folder: a run folder, made by `megalin train` or `megalin import`.
        step: finished steps of the checkpoint; None: the newest one.
        device: as for `build_model`.
        dtype: of the weights; None: train.dtype, in which the run computes. Use "float32" to train on.
        mixers: packages whose mixers the run's config may name as their `type`; they are imported and run code. Those
            that this process has imported need not be named, and neither do megalin's own.

    Raises:
        ConfigError: not a run folder, a run of an encoder, a mixer of another package that `mixers` does not name, or a
            device or dtype that there is not.
        CheckpointError: no checkpoint (of this step), or one that does not verify.
        DataError: a missing or invalid tokenizer.
    """
    folder = Path(folder)
    if not (folder / CONFIG_NAME).is_file():
        raise ConfigError(f"{folder}: not a run folder, it has no {CONFIG_NAME}; give one that `megalin train` made")
    run, checkpoint = open_run(folder, step=step, mixers=mixers)
    config, place = _decoder(run.model, f"{folder}: its model"), read_device(device)
    tokenizer = tokenizer_of(run.data)
    model = load_whole_model(config, run.train, checkpoint, place, dtype=None if dtype is None else read_dtype(dtype))
    return CausalLM(
        model,
        tokenizer=tokenizer,
        max_positions=max_positions(run, config),
        special_tokens=bool(run.data.special_tokens),
    ).eval()


def _decoder(config: AnyModelConfig, name: str) -> ModelConfig:
    """The config of a decoder. Raises ConfigError for an encoder."""
    if isinstance(config, ModelConfig):
        return config
    raise ConfigError(
        f'{name} has kind = "encoder", which has no next-token logits; give a decoder, or train it with megalin.Trainer'
    )
