"""Config of LLaMA's attention."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, Self

import pydantic

from megalin.config import REPORTED, Change, Config
from megalin.layers.config import MixerConfig
from megalin.ops.choices import AttentionBackend


class RopeScalingConfig(Config):
    """Division of the frequencies of rotary positions, as in models trained on longer texts after their pretraining."""

    on_change: ClassVar[Change | None] = "refused"
    type: Literal["linear", "llama3"]
    """linear: all frequencies. llama3: the low ones, with a transition between two wavelengths (LLaMA 3.1)."""
    factor: float = pydantic.Field(gt=0)
    """Number that frequencies are divided by."""
    low_frequency_factor: float = pydantic.Field(default=1.0, gt=0)
    """llama3: frequencies with fewer turns in original_length tokens are divided by factor."""
    high_frequency_factor: float = pydantic.Field(default=4.0, gt=0)
    """llama3: frequencies with more turns in original_length tokens are kept; above low_frequency_factor."""
    original_length: int = pydantic.Field(default=8192, gt=0)
    """llama3: tokens of a sequence in the pretraining."""

    @pydantic.model_validator(mode="after")
    def _is_a_transition(self) -> Self:
        low, high = self.low_frequency_factor, self.high_frequency_factor
        if high <= low:
            raise ValueError(f"high_frequency_factor = {high} must be above low_frequency_factor = {low}; raise it")
        return self


class SoftmaxConfig(MixerConfig):
    """LLaMA's attention."""

    supports_context_parallel: ClassVar[bool] = True
    type: Literal["softmax"] = "softmax"
    """This mixer."""
    num_heads: int = pydantic.Field(gt=0)
    """Query heads; must divide the hidden size into even widths, and be divided by parallel.tp."""
    num_key_value_heads: int | None = pydantic.Field(default=None, gt=0)
    """Heads of keys and values, each read by num_heads / num_key_value_heads query heads; must divide num_heads and be
    divided by parallel.tp. Left out: num_heads."""
    head_dim: int | None = pydantic.Field(default=None, gt=0)
    """K, channels of a head, even; left out: hidden_size / num_heads."""
    qkv_bias: bool = False
    """True: the projections to queries, keys and values have biases (Qwen2)."""
    output_bias: bool = False
    """True: the last projection has a bias (LLaMA with attention_bias, together with qkv_bias)."""
    qk_norm: bool = False
    """True: an RMSNorm of each head's queries and keys before their positions, with norm_eps (Qwen3)."""
    window: int | None = pydantic.Field(default=None, ge=1)
    """Visible tokens, the token itself included (Rodimus+ Tables 6 and 14); left out: all earlier ones. Decoding then
    keeps a state of fixed size."""
    num_sinks: int | None = pydantic.Field(default=None, ge=1)
    """First tokens of each document that stay visible outside of the window (StreamingLLM, Rodimus+ Table 7), at their
    true distance; left out: none. They need a T x T mask in training, which no flash kernel takes."""
    block_size: int | None = pydantic.Field(default=None, ge=1)
    """Tokens of a block; a token attends to earlier ones of its own block alone, and each document starts a block
    (DiagAttention of TransNormer, TransNormerLLM Table 2). Left out: no blocks."""
    rope_base: float = pydantic.Field(default=10000.0, gt=1)
    """Base of the rotary frequencies base^(-2 j / head width), radians a token."""
    rope_scaling: RopeScalingConfig | None = None
    """Change of the rotary frequencies for longer texts; left out: none."""
    backend: Annotated[AttentionBackend, REPORTED] = "auto"
    """Implementation of attention without a state. sdpa: PyTorch's own, cuDNN or FlashAttention-2 where they run.
    flash_attn, flash_attn_4: the packages flash-attn and flash-attn-4, on CUDA in bf16 or fp16; training refuses to go
    on without the one that is asked for. auto: flash_attn_4 where it is installed on Hopper GPUs, but for sequences of
    one document only from 8,192 tokens on; else sdpa, and flash_attn for packed documents of head widths that PyTorch
    has no kernel for. mask: PyTorch's own with a T x T mask of packed documents, slow for long sequences; the host
    reads no documents, as train.cuda_graphs needs on several ranks."""

    @property
    def host_reads_documents(self) -> bool:
        return self.backend != "mask"

    @pydantic.model_validator(mode="after")
    def _keys_agree(self) -> Self:
        problems = []
        if self.head_dim is not None and self.head_dim % 2:
            problems.append(
                f"head_dim = {self.head_dim} is odd, but rotary positions need an even width; use "
                f"{self.head_dim + 1}, or leave it out"
            )
        if self.window is not None and self.block_size is not None:
            problems.append(
                f"window = {self.window} and block_size = {self.block_size} are two choices of visible tokens; give one"
            )
        if self.num_sinks is not None and self.window is None:
            problems.append(f"num_sinks = {self.num_sinks} needs a window, outside of which they are; give one")
        if self.num_sinks is not None and self.backend in ("flash_attn", "flash_attn_4"):
            problems.append(f'backend = "{self.backend}" takes no num_sinks, which need a mask; use "auto" or "sdpa"')
        if problems:
            raise ValueError("\n".join(problems))
        return self

    @property
    def span(self) -> int:
        """Tokens of the window or block."""
        span = self.window or self.block_size
        assert span is not None, "all earlier tokens are visible"
        return span

    @property
    def widest_window(self) -> int | None:
        return self.window

    @property
    def key_value_heads(self) -> int:
        """Heads of keys and values."""
        return self.num_heads if self.num_key_value_heads is None else self.num_key_value_heads

    def shrink_for_verify(self, *, hidden_size: int, num_heads: int) -> Self:
        grouped = self.key_value_heads < self.num_heads
        update = {"num_heads": num_heads, "num_key_value_heads": num_heads // 2 if grouped else None}
        if self.head_dim is not None:
            update["head_dim"] = 6
        small = {"window": 11, "num_sinks": 3, "block_size": 7}
        update |= {name: size for name, size in small.items() if getattr(self, name) is not None}
        return self.model_copy(update=update)


CONFIG = SoftmaxConfig
