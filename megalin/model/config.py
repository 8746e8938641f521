"""The config of a model: its widths, and its blocks as a pattern of sub-layers."""

from __future__ import annotations

import math
from typing import Literal

import pydantic

from megalin.config import Config
from megalin.layers.mixers.base import SublayerConfig
from megalin.layers.norms import NormKind


class BlockConfig(Config):
    """One kind of block, and how many of them follow each other."""

    sublayers: list[SublayerConfig] = pydantic.Field(min_length=1)
    """The mixers of the block in order: token mixers and channel mixers, each with its norm and residual rule."""
    repeat: int = pydantic.Field(default=1, ge=1)
    """Number of such blocks in a row."""

    @pydantic.model_validator(mode="after")
    def _last_sublayer_joins_the_stream(self) -> BlockConfig:
        if self.sublayers[-1].residual != "add":
            raise ValueError(
                f'the last sub-layer has residual = "{self.sublayers[-1].residual}", so its result would be lost; '
                'use residual = "add" there'
            )
        return self


class ModelConfig(Config):
    """A decoder language model."""

    vocab_size: int = pydantic.Field(gt=0)
    """Number of token ids. The table is padded to a multiple of 128 rows; the padding is masked and not counted."""
    hidden_size: int = pydantic.Field(gt=0)
    """Width D of the residual stream."""
    layers: list[BlockConfig] = pydantic.Field(min_length=1)
    """The blocks, first to last."""
    embedding_scale: float = pydantic.Field(default=1.0, gt=0)
    """Factor on the embedded tokens (TransNormerLLM: the square root of the hidden size)."""
    tie_embeddings: bool = True
    """Whether the head shares the embedding's table."""
    norm: NormKind = "srmsnorm"
    """Norm before the head."""
    norm_eps: float = pydantic.Field(default=1e-6, gt=0)
    """Added to the mean square or the variance inside the root of that norm."""
    init_std: float = pydantic.Field(default=0.02, gt=0)
    """Standard deviation of the initial weights."""
    output_init: Literal["plain", "depth"] = "plain"
    """Standard deviation of the matrices that write to the residual stream. plain: init_std. depth: init_std divided
    by the square root of the number of sub-layers in the model (Rodimus)."""

    residual_dtype: Literal["compute", "float32"] = "compute"
    """Dtype of the residual stream. compute: that of the weights' computation. float32: at least fp32 (Rodimus)."""

    @property
    def num_layers(self) -> int:
        """Number of blocks."""
        return sum(block.repeat for block in self.layers)

    @property
    def output_std(self) -> float:
        """Standard deviation of the initial matrices that write to the residual stream."""
        if self.output_init == "plain":
            return self.init_std
        return self.init_std / math.sqrt(sum(block.repeat * len(block.sublayers) for block in self.layers))

    def blocks(self) -> list[tuple[str, BlockConfig]]:
        """Every block with the place of its config, repeats written out."""
        return [
            (f"model.layers.{index}", block) for index, block in enumerate(self.layers) for _ in range(block.repeat)
        ]
