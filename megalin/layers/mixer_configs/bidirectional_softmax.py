"""Config of BERT's attention."""

from __future__ import annotations

from typing import ClassVar, Literal, Self

import pydantic

from megalin.layers.config import MixerConfig


class BidirectionalSoftmaxConfig(MixerConfig):
    """BERT's attention."""

    attends_to: ClassVar[Literal["earlier", "all", "itself"]] = "all"
    supports_context_parallel: ClassVar[bool] = True
    type: Literal["bidirectional_softmax"] = "bidirectional_softmax"
    """This mixer."""
    num_heads: int = pydantic.Field(gt=0)
    """Heads; must divide the hidden size, and be divided by parallel.tp."""
    bias: bool = True
    """True: the four projections have biases."""
    rope_base: float | None = pydantic.Field(default=None, gt=1)
    """Base of the rotary frequencies base^(-2 j / head width), radians a token, of queries and keys. Left out: the
    encoder's learned positions alone."""

    def shrink_for_verify(self, *, hidden_size: int, num_heads: int) -> Self:
        return self.model_copy(update={"num_heads": num_heads})


CONFIG = BidirectionalSoftmaxConfig
