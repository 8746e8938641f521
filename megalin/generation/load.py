"""A run's model and tokenizer for generation: weights in the dtype of the run's training."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, NamedTuple

import torch
from torch import nn

from megalin.checkpoint.load import load
from megalin.checkpoint.manifest import Checkpoint
from megalin.checkpoint.tensors import OPTIMIZER_PREFIX, weights
from megalin.data.tokenizers.tokenizer import Tokenizer, load_tokenizer
from megalin.errors import ConfigError
from megalin.generation.decoder import grows
from megalin.layers.mixers.base import FullPrecision
from megalin.model.config import EncoderConfig, ModelConfig
from megalin.model.language_model import LanguageModel
from megalin.parallel.initialisation import init_weights
from megalin.parallel.tensor_parallel import TensorParallel
from megalin.train.compute_dtypes import COMPUTE_DTYPES
from megalin.train.config import RunConfig, TrainConfig
from megalin.train.open_run import open_run

DtypeName = Literal["float32", "bfloat16", "float16"]


class GenerationRun(NamedTuple):
    """A run whose checkpoint can generate text."""

    config: RunConfig
    model: ModelConfig
    checkpoint: Checkpoint
    tokenizer: Tokenizer

    @property
    def positions(self) -> int | None:
        """Tokens that a sequence may have (`max_positions`)."""
        return max_positions(self.config, self.model)

    def load_model(
        self, device: torch.device, *, dtype: DtypeName | None = None, tp: TensorParallel | None = None
    ) -> LanguageModel:
        """Loads the weights (`load_whole_model`)."""
        return load_whole_model(self.model, self.config.train, self.checkpoint, device, dtype=dtype, tp=tp)


def max_positions(config: RunConfig, model: ModelConfig) -> int | None:
    """Tokens that a sequence of a run's decoder may have: those that softmax attention was trained on, else the rows of
    learned absolute positions; None where neither limits them."""
    return config.data.sequence_length if grows(LanguageModel(model)) else model.max_positions


def open_for_generation(folder: str | Path, *, step: int | None = None) -> GenerationRun:
    """Opens a checkpoint of a run, and the run's tokenizer.

    Args:
        step: finished steps of the checkpoint; None: the newest one.

    Raises:
        MegalinError: the run has no checkpoint (of this step) or no tokenizer, or its model is an encoder.
    """
    config, checkpoint = open_run(folder, step=step)
    if isinstance(config.model, EncoderConfig):
        raise ConfigError(
            f'{folder}: model.kind = "encoder" attends to full sequences and cannot continue one; give a decoder run'
        )
    if config.data.tokenizer is None:
        raise ConfigError(f"{folder}: data.tokenizer is not set, so text cannot be encoded; set it")
    return GenerationRun(config, config.model, checkpoint, load_tokenizer(config.data.tokenizer, config.data.eod_token))


def load_for_generation(
    folder: str | Path, device: torch.device, *, dtype: DtypeName | None = None
) -> tuple[LanguageModel, Tokenizer]:
    """The model (`GenerationRun.load_model`) and the tokenizer of a run. Raises as `open_for_generation`."""
    run = open_for_generation(folder)
    return run.load_model(device, dtype=dtype), run.tokenizer


def load_whole_model(
    config: ModelConfig,
    train: TrainConfig,
    checkpoint: Checkpoint,
    device: torch.device,
    *,
    dtype: DtypeName | None = None,
    tp: TensorParallel | None = None,
) -> LanguageModel:
    """Loads a checkpoint's weights as a model on `device` in eval mode, sharded over no axis but tensor parallelism.

    Args:
        dtype: of the weights (`cast_weights`); None: train.dtype, in which the training computed.
        tp: the tensor-parallel axis; None: this process has all weights.

    Raises:
        CheckpointError: the checkpoint cannot be read.
        ConfigError: the axis does not divide the model.
    """
    model = LanguageModel(config, tp)
    model.to_empty(device=device)
    init_weights(model, train.seed)
    load(checkpoint, weights(model), ignore=(OPTIMIZER_PREFIX,))
    model.after_optimizer_step()
    cast_weights(model, COMPUTE_DTYPES[dtype or train.dtype])
    return model.eval()


def cast_weights(model: LanguageModel, dtype: torch.dtype) -> None:
    """Casts the weights at rest, as training casts them in every step: all but those that compute in fp32, which feed
    exponentials and positions (`BaseModel.full_precision_modules`). Buffers keep their dtype."""
    for module in model.modules():
        if not isinstance(module, FullPrecision):
            for name, parameter in list(module.named_parameters(recurse=False)):
                # A new parameter: assigning to the data of a DTensor leaves its dtype as it is.
                cast = nn.Parameter(parameter.detach().to(dtype), requires_grad=parameter.requires_grad)
                module.register_parameter(name, cast)
