"""Config of sliding-window attention with one shared key."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, Self

import pydantic

from megalin.config import REPORTED
from megalin.layers.choices import NormKind
from megalin.layers.config import MixerConfig


class SharedKeyAttentionConfig(MixerConfig):
    """Sliding-window attention with one shared key."""

    supports_context_parallel: ClassVar[bool] = True
    type: Literal["shared_key_attention"] = "shared_key_attention"
    """This mixer."""
    norm: NormKind = "rmsnorm"
    """Norm of the sub-layer's input."""
    norm_eps: float = pydantic.Field(default=1e-5, gt=0)
    """Added to the mean square inside the root."""
    num_heads: int = pydantic.Field(gt=0)
    """Query and value heads; must divide the hidden size into even widths, and be divided by parallel.tp."""
    window: int = pydantic.Field(ge=1)
    """Visible tokens, the token itself included (Rodimus+: half the training length)."""
    rope_base: float = pydantic.Field(default=10000.0, gt=1)
    """Base of the rotary frequencies base^(-2 j / head width), radians a token."""
    backend: Annotated[Literal["auto", "mask"], REPORTED] = "auto"
    """Implementation of attention without a state. auto: as of `softmax`. mask: PyTorch's own with a T x T mask of
    packed documents, slow for long sequences; the host reads no documents, as train.cuda_graphs needs on several
    ranks."""

    @property
    def host_reads_documents(self) -> bool:
        return self.backend != "mask"

    @property
    def widest_window(self) -> int:
        return self.window

    def shrink_for_verify(self, *, hidden_size: int, num_heads: int) -> Self:
        return self.model_copy(update={"num_heads": num_heads, "window": 11})


CONFIG = SharedKeyAttentionConfig
