"""The configs of models: their widths, and their blocks as a pattern of sub-layers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import pydantic

from megalin.config import Config, NestedConfigError, parse, problems
from megalin.layers.mixers.base import SublayerConfig
from megalin.layers.norms import NormKind


class BlockConfig(Config):
    """One kind of block, and how many of them follow each other."""

    sublayers: list[SublayerConfig] = pydantic.Field(min_length=1)
    """The mixers of the block in order: token mixers and channel mixers, each with its norm and residual rule."""
    repeat: int = pydantic.Field(default=1, ge=1)
    """Number of such blocks in a row."""

    @pydantic.model_validator(mode="after")
    def _last_sublayer_writes_to_the_residual_stream(self) -> BlockConfig:
        if self.sublayers[-1].residual != "add":
            raise ValueError(
                f'the last sub-layer has residual = "{self.sublayers[-1].residual}", so its result would be lost; '
                'use residual = "add" there'
            )
        return self


class StackConfig(Config):
    """What every model has: a vocabulary, a width and blocks."""

    vocab_size: int = pydantic.Field(gt=0)
    """Number of token ids. The table is padded to a multiple of 128 rows; the padding is masked and not counted."""
    hidden_size: int = pydantic.Field(gt=0)
    """Width D of the residual stream."""
    layers: list[BlockConfig] = pydantic.Field(min_length=1)
    """The blocks, first to last."""
    norm: NormKind
    """Norm before the heads."""
    norm_eps: float = pydantic.Field(gt=0)
    """What that norm adds."""
    init_std: float = pydantic.Field(default=0.02, gt=0)
    """Standard deviation of the initial weights."""

    @property
    def num_layers(self) -> int:
        """Number of blocks."""
        return sum(block.repeat for block in self.layers)

    @property
    def num_sublayers(self) -> int:
        """Number of sub-layers of all blocks."""
        return sum(block.repeat * len(block.sublayers) for block in self.layers)

    @property
    def output_std(self) -> float:
        """Standard deviation of the initial matrices that write to the residual stream."""
        return self.init_std

    def blocks(self) -> list[tuple[str, BlockConfig]]:
        """Every block with the place of its config, repeats written out."""
        return [
            (f"model.layers.{index}", block) for index, block in enumerate(self.layers) for _ in range(block.repeat)
        ]

    def check_causality(self, *, causal: bool, rule: str) -> None:
        """Raises ValueError with a line for each sub-layer that is causal where it must not be, or the reverse."""
        lines = [
            f'layers.{block}.sublayers.{index}.type = "{sublayer.type}": {rule}'
            for block, config in enumerate(self.layers)
            for index, sublayer in enumerate(config.sublayers)
            if sublayer.causal != causal
        ]
        if lines:
            raise ValueError("\n".join(lines))


class ModelConfig(StackConfig):
    """A decoder language model."""

    kind: Literal["decoder"] = "decoder"
    """What the model is. decoder: it predicts each next token."""
    embedding_scale: float = pydantic.Field(default=1.0, gt=0)
    """Factor on the embedded tokens (TransNormerLLM: the square root of the hidden size)."""
    tie_embeddings: bool = True
    """Whether the head shares the embedding's table."""
    norm: NormKind = "srmsnorm"
    """Norm before the head."""
    norm_eps: float = pydantic.Field(default=1e-6, gt=0)
    """Added to the mean square or the variance inside the root of that norm."""
    output_init: Literal["plain", "scaled_by_depth"] = "plain"
    """Standard deviation of the matrices that write to the residual stream. plain: init_std. scaled_by_depth: init_std
    divided by the square root of the number of sub-layers in the model (Rodimus)."""
    residual_dtype: Literal["compute", "float32"] = "compute"
    """Dtype of the residual stream. compute: that of the weights' computation. float32: at least fp32 (Rodimus)."""

    @pydantic.model_validator(mode="after")
    def _is_causal(self) -> ModelConfig:
        self.check_causality(
            causal=True, rule='it reads tokens to come, which a decoder must predict; use kind = "encoder" for it'
        )
        return self

    @property
    def output_std(self) -> float:
        """Standard deviation of the initial matrices that write to the residual stream."""
        if self.output_init == "plain":
            return self.init_std
        return self.init_std / math.sqrt(self.num_sublayers)


class EncoderConfig(StackConfig):
    """A bidirectional encoder: heads for masked tokens and the next sentence, or one that classifies sequences."""

    kind: Literal["encoder"]
    """What the model is. encoder: it reads the whole sequence at once."""
    max_positions: int = pydantic.Field(default=512, gt=0)
    """Rows of the position table: tokens that a sequence has at most."""
    num_token_types: int = pydantic.Field(default=2, ge=2)
    """Rows of the table of token types: 0 for segment A, 1 for segment B."""
    norm: NormKind = "uncentered_layernorm"
    """Norm after the blocks, and inside the head of masked tokens."""
    norm_eps: float = pydantic.Field(default=1e-12, gt=0)
    """Added to the magnitude that it divides by."""
    num_classes: int | None = pydantic.Field(default=None, ge=2)
    """Classes of a sequence-classification head in place of the pretraining heads; left out: pretraining."""
    pooling: Literal["first", "mean"] = "first"
    """What the head of a sequence reads. first: its first token. mean: the mean over its tokens, without padding."""

    @pydantic.model_validator(mode="after")
    def _is_bidirectional(self) -> EncoderConfig:
        self.check_causality(
            causal=False, rule="it sees no token to come, so an encoder cannot use it; a decoder (the default kind) can"
        )
        return self


AnyModelConfig = ModelConfig | EncoderConfig
"""The config of any model."""


def parse_model(values: Mapping[str, Any], source: str) -> AnyModelConfig:
    """The model that a table tells, by its `kind`. Raises ConfigError as `parse` does."""
    if values.get("kind") == "encoder":
        return parse(EncoderConfig, values, source)
    return parse(ModelConfig, values, source)


def _resolve(values: Any) -> Any:
    """A table -> an instance of the class of its `kind`; an instance is passed on."""
    if isinstance(values, StackConfig):
        return values
    if not isinstance(values, Mapping):
        raise ValueError(f"{values!r} is not a table; write it as [model] with its keys below")
    cls = EncoderConfig if values.get("kind") == "encoder" else ModelConfig
    try:
        return cls.model_validate(dict(values))
    except pydantic.ValidationError as error:
        raise NestedConfigError(problems(cls, error)) from None


ModelField = Annotated[AnyModelConfig, pydantic.BeforeValidator(_resolve)]
"""A field that holds the config of any model, chosen by its `kind`."""
