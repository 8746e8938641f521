"""Gradient of the short convolution.

    dp_t = dy_t or dy_t silu'(p_t),    dx_s = sum over k = 0 .. W-1 of w_{W-1-k} dp_{s+k},
    dw_{W-1-k} = sum over t of dp_t x_{t-k},    db = sum over t of dp_t

Each thread loops over the tokens of its channels with the last W - 1 inputs in registers, and the partial gradients of
as many tokens; both are cleared at a document's start.

Bytes: x, dy and the addends are read and dx written, and per tile one partial sum of W + 1 numbers per channel. Each
tile reads 2 W - 2 tokens of x twice and W - 1 of dy.
"""

# ruff: noqa: RUF005 (Triton has no starred expressions)

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

import triton
import triton.language as tl
from megalin._triton.scans.short_conv import (
    counted_from,
    entering,
    load_documents,
    load_rows,
    place,
    pre_activation,
    weights,
)

BACKWARD = {"BLOCK_T": 64, "BLOCK_D": 128, "ROWS": 4, "num_warps": 1}
FEW_TAPS = 4
"""Above this, the backward processes two tokens at a time: four take a minute to compile."""
SUM_COLUMNS = 32
SUM_TILES = 64


@triton.jit
def _store_gradient(
    dx_ptr, dstate_ptr, dx, s, begin, end, dx_t, width, column, inside, TAPS: tl.constexpr, STATE: tl.constexpr
):  # fmt: skip
    """Stores dx_s if begin <= s < end; before the first token, to the gradient of the state."""
    inside = inside & (s >= begin)
    at = dx_ptr + s * dx_t + column
    tl.store(at, dx.to(dx_ptr.dtype.element_ty), mask=inside & (s >= 0) & (s < end))
    if STATE:
        tl.store(dstate_ptr + (s + TAPS - 1) * width + column, dx, mask=inside & (s < 0))


@triton.jit
def _load_addends(addend_ptr, second_ptr, first, end, addend_t, column, inside, ROWS: tl.constexpr):
    """Loads ROWS tokens from `first`, maybe negative, of the other gradients of x; zeros where there are none."""
    rows = ()
    for r in tl.static_range(ROWS):
        s = first + r
        at, within = s * addend_t + column, inside & (s >= 0) & (s < end)
        row = tl.zeros_like(column).to(tl.float32)
        if addend_ptr is not None:
            row = tl.load(addend_ptr + at, mask=within, other=0.0)
        second = tl.zeros_like(row)
        if second_ptr is not None:
            second = tl.load(second_ptr + at, mask=within, other=0.0)
        rows = rows + ((row, second),)
    return rows


@triton.jit
def _sum(dx, addends, addend_ptr, second_ptr):
    """dx and the other gradients, in fp32."""
    if addend_ptr is not None:
        dx += addends[0].to(tl.float32)
    if second_ptr is not None:
        dx += addends[1].to(tl.float32)
    return dx


@triton.jit
def _state_gradient(
    dnext_ptr, documents_ptr, s, lowest, length, width, column, inside,
    TAPS: tl.constexpr, FINAL: tl.constexpr, DOCUMENTS: tl.constexpr,
):  # fmt: skip
    """Contribution to dx_s of the gradient of the final state."""
    i = s - (length - (TAPS - 1))
    inside = inside & (i >= 0) & (s < length)
    if DOCUMENTS and FINAL:
        at = tl.minimum(tl.maximum(s, lowest), length - 1)
        inside = inside & (tl.load(documents_ptr + at) == tl.load(documents_ptr + length - 1))
    dx = tl.zeros_like(column).to(tl.float32)
    if FINAL:
        dx = tl.load(dnext_ptr + i * width + column, mask=inside, other=0.0)
    return dx


@triton.jit
def _gradient(x, dy, window, taps, bias, TAPS: tl.constexpr, SILU: tl.constexpr):
    """Computes dp_t."""
    dp = dy.to(tl.float32)
    if SILU:
        p = pre_activation(x, window, taps, bias, TAPS)
        gate = tl.sigmoid(p)
        dp *= gate * (1.0 + p * (1.0 - gate))
    return dp


@triton.jit
def _pass_on(dp, own, waiting, taps, TAPS: tl.constexpr):
    """Partial sums of dx_t, dx_{t-1}, .. after token t; the last one is complete."""
    moved = (own + dp * taps[0],)
    for k in tl.static_range(1, TAPS):
        moved = moved + (waiting[k - 1] + dp * taps[k],)
    return moved


@triton.jit
def _add(sums, factor, terms, TERMS: tl.constexpr):
    """Elementwise sums + factor * terms."""
    more = ()
    for k in tl.static_range(TERMS):
        more = more + (sums[k] + factor * terms[k],)
    return more


@triton.jit(do_not_specialize=["length"])
def backward_kernel(
    dy_ptr, dnext_ptr, addend_ptr, second_ptr, x_ptr, weight_ptr, bias_ptr, state_ptr, documents_ptr,
    dx_ptr, dstate_ptr, partial_ptr,  # [B, T, D] strided, [B, W - 1, D], [B tiles, W + 1, D] fp32
    dy_b, dy_t, x_b, x_t, dx_b, dx_t, length, width,
    TAPS: tl.constexpr, SILU: tl.constexpr, BIAS: tl.constexpr, STATE: tl.constexpr, DOCUMENTS: tl.constexpr,
    FINAL: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Gradients of this tile's inputs, and its partial sums of those of the taps (the newest input's first) and bias.

    waiting[k - 1] is the partial sum of dx_{t-k}; it is complete where a document starts. The addends [B, T, D]
    contiguous, other gradients of x, are added where dx is stored.
    """
    batch, first, batch_tile, column = place(length, width, BLOCK_T, BLOCK_D)
    inside = column < width
    x_ptr += batch * x_b + first * x_t
    dy_ptr += batch * dy_b + first * dy_t
    dx_ptr += batch * dx_b + first * dx_t
    if addend_ptr is not None:
        addend_ptr += (batch * length + first) * width
    if second_ptr is not None:
        second_ptr += (batch * length + first) * width
    before = batch * (TAPS - 1) * width
    if STATE:
        state_ptr += before
        dstate_ptr += before
    if FINAL:
        dnext_ptr += before
    if DOCUMENTS:
        documents_ptr += batch * length + first
    length, lowest = counted_from(first, length, BLOCK_T)
    taps, bias = weights(weight_ptr, bias_ptr, column, inside, TAPS, BIAS)
    window, document = entering(
        x_ptr, state_ptr, documents_ptr, lowest, x_t, width, column, inside, TAPS, STATE, DOCUMENTS
    )
    waiting = ()
    for k in tl.static_range(1, TAPS):
        waiting = waiting + (
            _state_gradient(
                dnext_ptr, documents_ptr, -k, lowest, length, width, column, inside, TAPS, FINAL, DOCUMENTS
            ),
        )
    begin = 0
    if STATE:
        begin = tl.where(first == 0, 1 - TAPS, 0)
    end = tl.minimum(BLOCK_T, length)
    nothing = tl.zeros([BLOCK_D], tl.float32)
    sums = (nothing,) * (TAPS + 1)
    # Loads of the next tokens are in flight while these are computed.
    next_xs = load_rows(x_ptr, 0, end, x_t, column, inside, ROWS)
    next_dys = load_rows(dy_ptr, 0, end, dy_t, column, inside, ROWS)
    next_addends = _load_addends(addend_ptr, second_ptr, 1 - TAPS, end, width, column, inside, ROWS)
    next_documents = load_documents(documents_ptr, 0, length, ROWS, DOCUMENTS)
    for start in range(0, end, ROWS):
        xs, dys, addends, documents = next_xs, next_dys, next_addends, next_documents
        next_xs = load_rows(x_ptr, start + ROWS, end, x_t, column, inside, ROWS)
        next_dys = load_rows(dy_ptr, start + ROWS, end, dy_t, column, inside, ROWS)
        next_addends = _load_addends(
            addend_ptr, second_ptr, start + ROWS - (TAPS - 1), end, width, column, inside, ROWS
        )
        next_documents = load_documents(documents_ptr, start + ROWS, length, ROWS, DOCUMENTS)
        # Summed over ROWS tokens first: one long sum would have a larger rounding error than the reference.
        some = (nothing,) * (TAPS + 1)
        for r in tl.static_range(ROWS):
            t = start + r
            # Past the last token the partial sums are complete, too.
            if (t == length) | (documents[r] != document):
                last = _load_addends(addend_ptr, second_ptr, t - (TAPS - 1), end, width, column, inside, TAPS - 1)
                for k in tl.static_range(1, TAPS):
                    dx = _sum(waiting[k - 1], last[TAPS - 1 - k], addend_ptr, second_ptr)
                    _store_gradient(dx_ptr, dstate_ptr, dx, t - k, begin, end, dx_t, width, column, inside, TAPS, STATE)
                begin, document = t, documents[r]
                window, waiting = (nothing,) * (TAPS - 1), (nothing,) * (TAPS - 1)
            x = xs[r].to(tl.float32)
            dp = _gradient(x, dys[r], window, taps, bias, TAPS, SILU)
            own = _state_gradient(
                dnext_ptr, documents_ptr, t, lowest, length, width, column, inside, TAPS, FINAL, DOCUMENTS
            )
            moved = _pass_on(dp, own, waiting, taps, TAPS)
            dx = _sum(moved[TAPS - 1], addends[r], addend_ptr, second_ptr)
            _store_gradient(
                dx_ptr, dstate_ptr, dx, t - (TAPS - 1), begin, end, dx_t, width, column, inside, TAPS, STATE
            )
            inputs = (x,) + window
            window, waiting = inputs[: TAPS - 1], moved[: TAPS - 1]
            some = _add(some, dp, inputs, TAPS) + (some[TAPS] + dp,)
        sums = _add(sums, 1.0, some, TAPS + 1)
    for k in tl.static_range(TAPS + 1):
        tl.store(partial_ptr + (batch_tile.to(tl.int64) * (TAPS + 1) + k) * width + column, sums[k], mask=inside)
    # The tokens after the tile that are of its last token's document.
    behind = tl.cdiv(end, ROWS) * ROWS
    xs = load_rows(x_ptr, behind, length, x_t, column, inside, TAPS - 1)
    dys = load_rows(dy_ptr, behind, length, dy_t, column, inside, TAPS - 1)
    addends = _load_addends(addend_ptr, second_ptr, behind - (TAPS - 1), end, width, column, inside, TAPS - 1)
    documents = load_documents(documents_ptr, behind, length, TAPS - 1, DOCUMENTS)
    goes_on = behind < length
    for r in tl.static_range(TAPS - 1):
        t = behind + r
        goes_on = goes_on & (t < length) & (documents[r] == document)
        x = xs[r].to(tl.float32)
        dp = tl.where(goes_on, _gradient(x, dys[r], window, taps, bias, TAPS, SILU), 0.0)
        moved = _pass_on(dp, nothing, waiting, taps, TAPS)
        dx = _sum(moved[TAPS - 1], addends[r], addend_ptr, second_ptr)
        _store_gradient(dx_ptr, dstate_ptr, dx, t - (TAPS - 1), begin, end, dx_t, width, column, inside, TAPS, STATE)
        window, waiting = (x,) + window[: TAPS - 2], moved[: TAPS - 1]


@triton.jit(do_not_specialize=["tiles"])
def sum_kernel(
    partial_ptr, dweight_ptr, dbias_ptr, tiles, width, TAPS: tl.constexpr, TILES: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """Sums dw [D, W] and db [D] over the tiles' partial sums, always in the same order."""
    column, k = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS), tl.program_id(1)
    inside = column < width
    sums = tl.zeros([TILES, COLUMNS], tl.float32)
    for start in range(0, tiles, TILES):
        tile = (start + tl.arange(0, TILES)).to(tl.int64)
        at = partial_ptr + (tile * (TAPS + 1) + k)[:, None] * width + column[None, :]
        sums += tl.load(at, mask=(tile < tiles)[:, None] & inside[None, :], other=0.0)
    total = tl.sum(sums, axis=0)
    if k == TAPS:
        tl.store(dbias_ptr + column, total.to(dbias_ptr.dtype.element_ty), mask=inside)
    else:
        at = dweight_ptr + column * TAPS + TAPS - 1 - k
        tl.store(at, total.to(dweight_ptr.dtype.element_ty), mask=inside)


def _table(taps: int) -> dict[str, int]:
    return BACKWARD if taps <= FEW_TAPS else BACKWARD | {"ROWS": 2}


def backward(
    dy: Tensor, dnext: Tensor | None, x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor | None,
    documents: Tensor | None, *, silu: bool, into: Tensor | None = None, addends: Sequence[Tensor] = (),
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Returns the gradients of x, the weight, a bias, and the state (empty if there is none).

    dy as x, dnext as state, the rest as in `forward`. The gradient of x is `into` [B, T, D], with its last dimension
    contiguous, or a new contiguous tensor; it includes `addends`, at most two [B, T, D] contiguous.
    """
    batch, length, width = x.shape
    taps = weight.shape[1]
    tiles = batch * triton.cdiv(length, BACKWARD["BLOCK_T"])
    dx = x.new_empty(batch, length, width) if into is None else into
    dstate = x.new_empty(0, dtype=torch.float32)
    if state is not None:
        dstate = torch.empty_like(state)
    partial = x.new_empty(tiles, taps + 1, width, dtype=torch.float32)
    addend, second = (*addends, None, None)[:2]
    backward_kernel[(tiles * triton.cdiv(width, BACKWARD["BLOCK_D"]),)](
        dy, dnext, addend, second, x, weight, bias, state, documents, dx, dstate, partial,
        *dy.stride()[:2], *x.stride()[:2], *dx.stride()[:2], length, width,
        TAPS=taps, SILU=silu, BIAS=bias is not None, STATE=state is not None, DOCUMENTS=documents is not None,
        FINAL=dnext is not None, **_table(taps),
    )  # fmt: skip
    dweight, dbias = torch.empty_like(weight), weight.new_empty(width)
    sum_kernel[(triton.cdiv(width, SUM_COLUMNS), taps + 1)](
        partial, dweight, dbias, tiles, width, TAPS=taps, TILES=SUM_TILES, COLUMNS=SUM_COLUMNS
    )
    return dx, dweight, dbias, dstate
