"""Config of the FFN."""

from __future__ import annotations

from typing import ClassVar, Literal, Self

import pydantic

from megalin.layers.config import MixerConfig

ActivationName = Literal["gelu", "gelu_tanh", "relu", "silu", "squared_relu"]


class FFNConfig(MixerConfig):
    """The channel mixer of the Transformer and of BERT, two matrices and an activation."""

    attends_to: ClassVar[Literal["earlier", "all", "itself"]] = "itself"
    supports_context_parallel: ClassVar[bool] = True
    type: Literal["ffn"] = "ffn"
    """This mixer."""
    intermediate_size: int = pydantic.Field(gt=0)
    """Width between the two projections."""
    activation: ActivationName = "gelu"
    """Applied between them. gelu: with the error function; gelu_tanh: its approximation. squared_relu: relu(x)^2."""
    bias: bool = True
    """True: both projections have biases."""

    def shrink_for_verify(self, *, hidden_size: int, num_heads: int) -> Self:
        return self.model_copy(update={"intermediate_size": hidden_size + num_heads})


CONFIG = FFNConfig
