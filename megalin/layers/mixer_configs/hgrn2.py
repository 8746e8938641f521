"""Config of HGRN2's token mixer."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, Self

import pydantic

from megalin.config import REPORTED
from megalin.layers.choices import HeadNormKind
from megalin.layers.config import MixerConfig


class HGRN2Config(MixerConfig):
    """HGRN2's token mixer."""

    supports_context_parallel: ClassVar[bool] = True
    type: Literal["hgrn2"] = "hgrn2"
    """This mixer."""
    num_heads: int = pydantic.Field(gt=0)
    """Heads; must divide the hidden size, and be divided by parallel.tp."""
    query_activation: Literal["silu", "sigmoid"] = "silu"
    """Applied to the query, the paper's output gate. sigmoid: the WikiText-103 model."""
    value_activation: Literal["none", "silu"] = "none"
    """Applied to the value, the paper's input. silu: the WikiText-103 model."""
    lower_bounds: Literal["learned", "none"] = "learned"
    """Lower bounds beta of the forget gate. learned: eq. 2, increasing from layer to layer. none: beta = 0, f =
    sigmoid(x W_f) in every layer, the ablation of HGRN to which section 4.3 refers; no Gamma then."""
    bias: bool = False
    """True: the four projections have biases."""
    output_norm: HeadNormKind = "srmsnorm"
    """Norm of all heads' outputs together."""
    output_norm_eps: float | None = pydantic.Field(default=None, gt=0)
    """Added to the mean square or the variance inside the root of that norm; left out: norm_eps."""
    scan_scale: Literal["one", "inverse_sqrt"] = "one"
    """Factor on the scan's output. one: 1. inverse_sqrt: head width^(-1/2), as in flash-linear-attention's
    checkpoints. The norm after it cancels the factor but for eps."""
    chunk_size: Annotated[int, REPORTED] = pydantic.Field(default=64, gt=0)
    """Tokens a chunk of the scan; the result does not depend on it."""

    def shrink_for_verify(self, *, hidden_size: int, num_heads: int) -> Self:
        return self.model_copy(update={"num_heads": num_heads, "chunk_size": 16})


CONFIG = HGRN2Config
