"""Config of Mamba-1's token mixer."""

from __future__ import annotations

from typing import ClassVar, Literal, Self

import pydantic

from megalin.layers.choices import NormKind
from megalin.layers.config import MixerConfig


class Mamba1Config(MixerConfig):
    """Mamba-1's token mixer, of width twice the hidden size; a block needs no other."""

    supports_context_parallel: ClassVar[bool] = True
    type: Literal["mamba1"] = "mamba1"
    """This mixer."""
    norm: NormKind = "rmsnorm"
    """Norm of the sub-layer's input."""
    norm_eps: float = pydantic.Field(default=1e-5, gt=0)
    """Added to the mean square inside the root."""
    state_size: int = pydantic.Field(default=16, gt=0)
    """N, states a channel: the width of B and of C."""
    step_rank: int | None = pydantic.Field(default=None, gt=0)
    """R, rank of the projection to the time steps; left out: the hidden size / 16, rounded up."""
    conv_width: int = pydantic.Field(default=4, ge=2)
    """Taps of the short convolution, the current token included."""

    def shrink_for_verify(self, *, hidden_size: int, num_heads: int) -> Self:
        return self.model_copy(update={"state_size": 6, "step_rank": 5})


CONFIG = Mamba1Config
