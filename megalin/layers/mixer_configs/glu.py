"""Config of the GLU."""

from __future__ import annotations

from typing import ClassVar, Literal, Self

import pydantic

from megalin.layers.config import MixerConfig
from megalin.ops.choices import Activation


class GLUConfig(MixerConfig):
    """The gated channel mixer."""

    attends_to: ClassVar[Literal["earlier", "all", "itself"]] = "itself"
    supports_context_parallel: ClassVar[bool] = True
    type: Literal["glu"] = "glu"
    """This mixer."""
    intermediate_size: int = pydantic.Field(gt=0)
    """Width between the up and down projections."""
    activation: Activation = "none"
    """Applied to the gate. none: SGLU (TransNormerLLM, TNL, HGRN2); silu: SwiGLU."""
    bias: bool = False
    """True: the three projections have biases."""

    def shrink_for_verify(self, *, hidden_size: int, num_heads: int) -> Self:
        return self.model_copy(update={"intermediate_size": hidden_size + num_heads})


CONFIG = GLUConfig
