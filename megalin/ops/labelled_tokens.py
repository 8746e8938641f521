"""Selection of the tokens with a label, in a fixed number of rows, so that the head need not compute the others."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megalin.ops.dispatch.operands import check_operands


class LabelledTokens(NamedTuple):
    """Labelled tokens in their order, then padding."""

    x: Tensor
    """[C, D], zero at padding."""
    labels: Tensor
    """[C], `ignored_label` at padding."""
    overflow: Tensor
    """[] bool, True if more than C tokens have a label, the last of which are then missing."""


def label_capacity(tokens: int, max_fraction: float) -> int:
    """C rows for `tokens` tokens of which at most `max_fraction` have a label."""
    return math.ceil(round(tokens * max_fraction, 6))  # 0.07 x 100 is 7.000000000000001


def labelled_tokens(x: Tensor, labels: Tensor, *, capacity: int, ignored_label: int) -> LabelledTokens:
    """The rows of x [N, D] and of labels [N] whose label is not `ignored_label`, in `capacity` rows.

    No shape depends on the labels, so the host does not wait for them and a CUDA graph can contain this op. The
    gradient of x is exact and does not depend on the order of additions: each row is read at most once.

    Raises:
        OperandError: tensors with incompatible shapes or devices.
    """
    check_operands("labelled_tokens", {"x": (x, "ND"), "labels": (labels, "N int")})
    tokens, labelled = len(labels), labels != ignored_label
    ranks = labelled.cumsum(0)  # counts from 1
    slots = torch.where(labelled & (ranks <= capacity), ranks - 1, capacity)
    sources = torch.full((capacity + 1,), tokens, device=labels.device)  # `tokens` stands for padding
    sources.scatter_(0, slots, torch.arange(tokens, device=labels.device))
    sources = sources[:capacity]  # the last slot held all others
    padded_labels = torch.nn.functional.pad(labels, (0, 1), value=ignored_label)
    return LabelledTokens(_SelectRows.apply(x, sources), padded_labels[sources], ranks[-1] > capacity)


class _SelectRows(torch.autograd.Function):
    """y_c = x_s(c), 0 where s(c) = N; no source below N occurs twice, so dx is a copy."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sources: Tensor) -> Tensor:
        ctx.save_for_backward(sources)
        ctx.rows = len(x)
        padding = sources == len(x)
        return x.index_select(0, sources.masked_fill(padding, 0)).masked_fill_(padding[:, None], 0.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (sources,) = ctx.saved_tensors
        dx = grads[0].new_zeros(ctx.rows + 1, grads[0].shape[1])
        return dx.index_copy_(0, sources, grads[0])[: ctx.rows], None
