"""The short convolution of Rodimus and Mamba: depthwise, causal, a few tokens wide, blind across documents."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from megalin.ops.srmsnorm import compute_dtype


class ShortConvOutput(NamedTuple):
    """Result of a short convolution."""

    output: Tensor
    """[B, T, D] in the dtype of the input."""
    state: Tensor
    """[B, W - 1, D], the last inputs of the last token's document, oldest first, zero before its start; at least
    fp32."""


def short_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    state: Tensor | None = None,
    document_ids: Tensor | None = None,
    activation: Literal["none", "silu"] = "silu",
) -> ShortConvOutput:
    """y_t = act(bias + sum over j = 0 .. W-1 of weight_j * x_{t-W+1+j}), each channel by itself.

    Args:
        x: [B, T, D].
        weight: [D, W], the newest input last.
        bias: [D], or None for zero.
        state: [B, W - 1, D], the inputs before the first, of its document; None for zeros.
        document_ids: [B, T] integers; None when each row is one document. An input of another document counts as
            zero.

    Returns:
        ShortConvOutput. Products and the sum are computed in at least fp32.

    Source: Mamba; Rodimus section 3.
    """
    wide, length, past = compute_dtype(x), x.shape[1], weight.shape[1] - 1
    before = x.new_zeros(x.shape[0], past, x.shape[2], dtype=wide) if state is None else state.to(wide)
    inputs = torch.cat([before, x.to(wide)], dim=1)  # [B, W - 1 + T, D]
    taps = [inputs[:, j : j + length] for j in range(past + 1)]
    next_state = inputs[:, length:]
    if document_ids is not None:
        known = torch.cat([document_ids[:, :1].expand(-1, past), document_ids], dim=1)  # [B, W - 1 + T]
        taps = [_hide(tap, known[:, j : j + length] != document_ids) for j, tap in enumerate(taps[:-1])] + taps[-1:]
        next_state = _hide(next_state, known[:, length:] != document_ids[:, -1:])
    wide_weight = weight.to(wide)
    y = taps[0] * wide_weight[:, 0]
    for j in range(1, past + 1):
        y = y + taps[j] * wide_weight[:, j]
    if bias is not None:
        y = y + bias.to(wide)
    if activation == "silu":
        y = functional.silu(y)
    return ShortConvOutput(y.to(x.dtype), next_state.clone())


def short_conv_recurrent(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    state: Tensor | None = None,
    document_ids: Tensor | None = None,
    activation: Literal["none", "silu"] = "silu",
) -> ShortConvOutput:
    """The same token by token, over a window of W inputs that a new document empties."""
    wide, past = compute_dtype(x), weight.shape[1] - 1
    window = x.new_zeros(x.shape[0], past, x.shape[2], dtype=wide) if state is None else state.to(wide)
    outputs = []
    for t in range(x.shape[1]):
        if document_ids is not None and t > 0:
            window = _hide(window, (document_ids[:, t] != document_ids[:, t - 1])[:, None])
        window = torch.cat([window, x[:, t : t + 1].to(wide)], dim=1)  # [B, W, D]
        y = (window * weight.to(wide).T).sum(1)
        y = y if bias is None else y + bias.to(wide)
        outputs.append(functional.silu(y) if activation == "silu" else y)
        window = window[:, 1:]
    return ShortConvOutput(torch.stack(outputs, dim=1).to(x.dtype), window)


def _hide(x: Tensor, hidden: Tensor) -> Tensor:
    """x [B, W, D] with zeros where hidden [B, W or 1] is true."""
    return x.masked_fill(hidden[..., None], 0.0)
