"""Bases of the configs of gated linear attention with a fixed decay or none (TransNormerLLM, TNL, cosFormer2)."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, Self

import pydantic

from megalin.config import REPORTED
from megalin.layers.choices import AbsolutePositionsKind, HeadNormKind
from megalin.layers.config import MixerConfig
from megalin.ops.choices import LRPEForm, QueryKeyActivation


class LinearAttentionConfig(MixerConfig):
    """Base of these mixers' configs."""

    supports_context_parallel: ClassVar[bool] = True
    num_heads: int = pydantic.Field(gt=0)
    """Heads; must divide the hidden size, and be divided by parallel.tp."""
    lrpe: LRPEForm | None = None
    """Learnable relative positions on queries and keys; left out: none."""
    activation: QueryKeyActivation = "silu"
    """Applied to queries and keys. none: the identity. 1+elu: 1 + elu(x), positive (TransNormerLLM Table 6). Only silu
    is fused with the positions and in decoding."""
    output_norm: HeadNormKind = "srmsnorm"
    """Norm of all heads' outputs together, before the gate."""
    chunk_size: Annotated[int, REPORTED] = pydantic.Field(default=64, gt=0)
    """Tokens a chunk of the scan; a segment of LRPE has twice as many. Changes the result by rounding alone."""

    @pydantic.model_validator(mode="after")
    def _keys_agree(self) -> Self:
        if problems := self.contradictions():
            raise ValueError("\n".join(problems))
        return self

    def contradictions(self) -> list[str]:
        """A line for each key that has no meaning with another; subclasses append theirs."""
        return []

    def shrink_for_verify(self, *, hidden_size: int, num_heads: int) -> Self:
        return self.model_copy(update={"num_heads": num_heads, "chunk_size": 16})


class PositionedAttentionConfig(LinearAttentionConfig):
    """Base of the configs of mixers that can add absolute positions to the model's input."""

    absolute_positions: AbsolutePositionsKind = "none"
    """Positions added to the embedded tokens, once a model, by the first sub-layer of this type that has them (APE,
    TransNormerLLM Table 3). sinusoidal: sines and cosines. learned: a table of max_positions rows. Positions run on
    over packed documents."""
    max_positions: int | None = pydantic.Field(default=None, gt=0)
    """Longest sequence with learned positions, in tokens: rows of their table. Required with them."""

    def contradictions(self) -> list[str]:
        problems = super().contradictions()
        if self.absolute_positions == "learned" and self.max_positions is None:
            problems.append(
                'absolute_positions = "learned" needs max_positions, the longest sequence in tokens; give it'
            )
        if self.absolute_positions != "learned" and self.max_positions is not None:
            problems.append(
                f'max_positions = {self.max_positions} has no meaning without absolute_positions = "learned"; leave '
                "it out"
            )
        return problems


class LowRankGatedConfig(LinearAttentionConfig):
    """Base of the configs of mixers with a low-rank output gate."""

    gate: Literal["low_rank", "none"] = "low_rank"
    """Output gate. low_rank: sigmoid(x W_down W_up) of rank D / H. none: the normed output alone (TransNormerLLM
    Table 5, there with a linear gate)."""
    gate_input: Literal["normed", "residual"] = "normed"
    """Input of the gate. normed: the sub-layer's normed input, as in the public TNL module. residual: its input before
    that norm, as the scaling-laws paper prints it (eq. 9 and 17)."""

    def contradictions(self) -> list[str]:
        problems = super().contradictions()
        if self.gate == "none" and self.gate_input == "residual":
            problems.append(
                'gate_input = "residual" has no meaning with gate = "none"; leave it out, or use gate = "low_rank"'
            )
        return problems

    @property
    def norms_input(self) -> bool:
        return self.gate_input == "residual"
