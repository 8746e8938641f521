"""Config of Mamba-2's token mixer."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, Self

import pydantic

from megalin.config import REPORTED
from megalin.layers.choices import NormKind
from megalin.layers.config import MixerConfig


class Mamba2Config(MixerConfig):
    """Mamba-2's token mixer, of width twice the hidden size; a block needs no other."""

    supports_context_parallel: ClassVar[bool] = True
    type: Literal["mamba2"] = "mamba2"
    """This mixer."""
    norm: NormKind = "rmsnorm"
    """Norm of the sub-layer's input."""
    norm_eps: float = pydantic.Field(default=1e-5, gt=0)
    """Added to the mean square inside the root, here and in the gated norm before the output projection."""
    head_dim: int = pydantic.Field(default=64, gt=0)
    """P, values a head; divides twice the hidden size into heads that parallel.tp divides."""
    state_size: int = pydantic.Field(default=128, gt=0)
    """N, keys a head: the width of B and of C."""
    num_groups: int = pydantic.Field(default=1, gt=0)
    """G, groups of heads, each with a B and C and a norm of its own; divides the heads. parallel.tp divides several."""
    conv_width: int = pydantic.Field(default=4, ge=2)
    """Taps of the short convolution, the current token included."""
    chunk_size: Annotated[int, REPORTED] = pydantic.Field(default=64, gt=0)
    """Tokens a chunk of the scan; the result does not depend on it."""

    def shrink_for_verify(self, *, hidden_size: int, num_heads: int) -> Self:
        head_dim = 2 * hidden_size // num_heads
        groups = 1 if self.num_groups == 1 else num_heads // 2
        update = {"head_dim": head_dim, "state_size": 12, "num_groups": groups, "chunk_size": 16}
        return self.model_copy(update=update)


CONFIG = Mamba2Config
