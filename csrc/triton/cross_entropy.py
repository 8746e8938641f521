"""Cross entropy of rows of logits, overwritten by its gradient: loss = w (log sum_v exp(z_v) - z_label).

Bytes: the statistics read the logits once, the gradient reads them again and overwrites them. Arithmetic is fp32 with
one rounding at the end; both kernels subtract the same maximum before exponentials.
"""

from __future__ import annotations

import torch
from torch import Tensor

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)

STATISTICS = {"BLOCK": 2048, "num_warps": 4}
GRADIENT = {"BLOCK": 4096, "num_warps": 16}
SCALE = {"BLOCK": 4096, "num_warps": 8}


@triton.jit
def _online_logsumexp(peak, total, logit):
    """Online softmax step: updates peak and total = sum exp(z - peak) by a block."""
    higher = tl.maximum(peak, tl.max(logit))
    terms = tl.exp2(logit * LOG2_E - higher * LOG2_E)
    return higher, total * tl.exp2((peak - higher) * LOG2_E) + tl.sum(terms)


@triton.jit(do_not_specialize=["first", "columns"])
def statistics_kernel(logits_ptr, labels_ptr, statistics_ptr, first, columns, stride, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * stride
    peak = float("-inf")
    total = 0.0
    whole = columns // BLOCK * BLOCK
    # No masks in the loop, for loads of 16 bytes.
    for start in range(0, whole, BLOCK):
        peak, total = _online_logsumexp(peak, total, tl.load(row_ptr + start + tl.arange(0, BLOCK)).to(tl.float32))
    if whole < columns:
        column = whole + tl.arange(0, BLOCK)
        logit = tl.load(row_ptr + column, mask=column < columns, other=float("-inf")).to(tl.float32)
        peak, total = _online_logsumexp(peak, total, logit)
    index = tl.load(labels_ptr + row) - first
    here = (index >= 0) & (index < columns)
    target = tl.load(row_ptr + index, mask=here, other=float("-inf")).to(tl.float32)
    tl.store(statistics_ptr + row * 3, peak)
    tl.store(statistics_ptr + row * 3 + 1, total)
    tl.store(statistics_ptr + row * 3 + 2, target)


@triton.jit
def _gradient(logit, column, index, base, scale, weight, start, BLOCK: tl.constexpr):
    """Gradient w (exp(z) / sum exp(z) - [label]) of a block."""
    gradient = tl.exp2(logit * LOG2_E - base) * scale
    if (index >= start) & (index < start + BLOCK):
        gradient = tl.where(column == index, gradient - weight, gradient)
    return gradient


@triton.jit
def _write_gradient(row_ptr, index, columns, width, peak, total, weight, BLOCK: tl.constexpr):
    """Overwrites a row's logits by its gradient; zero in the padding after `columns`."""
    base, scale = peak * LOG2_E, weight / total
    whole = columns // BLOCK * BLOCK
    for start in range(0, whole, BLOCK):
        column = start + tl.arange(0, BLOCK)
        logit = tl.load(row_ptr + column).to(tl.float32)
        tl.store(row_ptr + column, _gradient(logit, column, index, base, scale, weight, start, BLOCK))
    for start in range(whole, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        logit = tl.load(row_ptr + column, mask=column < columns, other=float("-inf")).to(tl.float32)
        gradient = _gradient(logit, column, index, base, scale, weight, start, BLOCK)
        tl.store(row_ptr + column, gradient, mask=column < width)


@triton.jit(do_not_specialize=["rows", "first", "columns", "shards"])
def gradient_kernel(
    logits_ptr,
    labels_ptr,
    weights_ptr,
    statistics_ptr,
    losses_ptr,
    rows,
    first,
    columns,
    width,
    stride,
    shards,
    ignored_label,
    DIFFERENTIATE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * stride
    peak = float("-inf")
    target = float("-inf")
    for shard in range(shards):
        offset = (shard * rows + row) * 3
        peak = tl.maximum(peak, tl.load(statistics_ptr + offset))
        target = tl.maximum(target, tl.load(statistics_ptr + offset + 2))
    total = 0.0
    for shard in range(shards):
        offset = (shard * rows + row) * 3
        total += tl.load(statistics_ptr + offset + 1) * tl.exp2((tl.load(statistics_ptr + offset) - peak) * LOG2_E)
    label = tl.load(labels_ptr + row)
    weight = tl.where(label == ignored_label, 0.0, tl.load(weights_ptr + row))
    if weight == 0.0:
        # A row without a loss has zero loss and gradient, even with non-finite logits.
        tl.store(losses_ptr + row, 0.0)
        if DIFFERENTIATE:
            for start in range(0, width, BLOCK):
                column = start + tl.arange(0, BLOCK)
                tl.store(row_ptr + column, tl.zeros([BLOCK], logits_ptr.dtype.element_ty), mask=column < width)
    else:
        tl.store(losses_ptr + row, weight * ((peak * LOG2_E + tl.log2(total)) * LN_2 - target))
        if DIFFERENTIATE:
            _write_gradient(row_ptr, label - first, columns, width, peak, total, weight, BLOCK)


@triton.jit
def scale_kernel(source_ptr, factor_ptr, target_ptr, elements, BLOCK: tl.constexpr):
    offset = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offset < elements
    source = tl.load(source_ptr + offset, mask=mask).to(tl.float32)
    tl.store(target_ptr + offset, source * tl.load(factor_ptr).to(tl.float32), mask=mask)


def statistics(logits: Tensor, labels: Tensor, *, first: int, columns: int) -> Tensor:
    """logits [rows, width] with contiguous rows, labels [rows] int64 -> [rows, 3] fp32: the maximum of the first
    `columns` logits, the sum of exp(logit - maximum), and the label's logit, -inf where it is in another shard."""
    result = logits.new_empty(len(labels), 3, dtype=torch.float32)
    statistics_kernel[(len(labels),)](logits, labels, result, first, columns, logits.stride(0), **STATISTICS)
    return result


def losses_and_gradient(
    logits: Tensor,
    labels: Tensor,
    weights: Tensor,
    statistics: Tensor,
    losses: Tensor,
    *,
    first: int,
    columns: int,
    ignored_label: int,
    differentiate: bool,
) -> None:
    """Writes `losses` [rows] and, with `differentiate`, overwrites `logits` by the gradient of their sum, from the
    statistics of all vocabulary shards [shards, rows, 3]. weights [rows] fp32."""
    rows, width = logits.shape
    gradient_kernel[(rows,)](
        logits,
        labels,
        weights,
        statistics,
        losses,
        rows,
        first,
        columns,
        width,
        logits.stride(0),
        len(statistics),
        ignored_label,
        differentiate,
        **GRADIENT,
    )


def scaled(source: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """Computes factor * source in fp32, rounded once; source contiguous, factor with one element."""
    target = torch.empty_like(source, dtype=dtype)
    scale_kernel[(triton.cdiv(source.numel(), SCALE["BLOCK"]),)](source, factor, target, source.numel(), **SCALE)
    return target
