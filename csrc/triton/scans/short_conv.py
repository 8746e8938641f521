"""Depthwise causal convolution of a few taps, with documents and states; gradient: short_conv_gradient.py.

    p_t = b + sum over k = 0 .. W-1 of w_{W-1-k} x_{t-k},    y_t = p_t or silu(p_t)

Each thread loops over the tokens of its channels with the last W - 1 inputs in registers, cleared at a document's
start. Offsets inside a tile are 32 bits, counted from its first token; only that token's own offset takes more.

Bytes: x is read and y written; each tile reads W - 1 tokens twice.
"""

# ruff: noqa: RUF005 (Triton has no starred expressions)

from __future__ import annotations

import torch
from torch import Tensor

import triton
import triton.language as tl

FORWARD = {"BLOCK_T": 64, "BLOCK_D": 256, "ROWS": 4, "num_warps": 2}


@triton.jit
def place(length, width, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr):
    """Batch, first token, tile and channels of this program; consecutive programs share a tile of tokens."""
    blocks, tiles = tl.cdiv(width, BLOCK_D), tl.cdiv(length, BLOCK_T)
    program = tl.program_id(0)
    batch_tile = program // blocks
    column = (program % blocks) * BLOCK_D + tl.arange(0, BLOCK_D)
    return (batch_tile // tiles).to(tl.int64), (batch_tile % tiles).to(tl.int64) * BLOCK_T, batch_tile, column


@triton.jit
def counted_from(first, length, BLOCK_T: tl.constexpr):
    """Offsets from token `first` of the sequence's end and of its start, the latter at least -BLOCK_T."""
    return (length - first).to(tl.int32), tl.maximum(-first, -BLOCK_T).to(tl.int32)


@triton.jit
def weights(weight_ptr, bias_ptr, column, inside, TAPS: tl.constexpr, BIAS: tl.constexpr):
    """Loads the taps, that of the newest input first, and the bias."""
    taps = ()
    for k in tl.static_range(TAPS):
        taps = taps + (tl.load(weight_ptr + column * TAPS + TAPS - 1 - k, mask=inside, other=0.0).to(tl.float32),)
    bias = tl.zeros_like(taps[0])
    if BIAS:
        bias = tl.load(bias_ptr + column, mask=inside, other=0.0).to(tl.float32)
    return taps, bias


@triton.jit
def _input(
    x_ptr, state_ptr, documents_ptr, s, lowest, document, x_t, width, column, inside,
    TAPS: tl.constexpr, STATE: tl.constexpr, DOCUMENTS: tl.constexpr,
):  # fmt: skip
    """Loads x_s, from the state if s is before the first token `lowest`; zero if it is of another document."""
    if DOCUMENTS:
        inside = inside & (tl.load(documents_ptr + tl.maximum(s, lowest)) == document)
    x = tl.load(x_ptr + s * x_t + column, mask=inside & (s >= lowest), other=0.0).to(tl.float32)
    if STATE:
        x += tl.load(state_ptr + (s + TAPS - 1) * width + column, mask=inside & (s < lowest), other=0.0)
    return x


@triton.jit
def entering(
    x_ptr, state_ptr, documents_ptr, lowest, x_t, width, column, inside,
    TAPS: tl.constexpr, STATE: tl.constexpr, DOCUMENTS: tl.constexpr,
):  # fmt: skip
    """Loads the inputs before the tile, newest first, of the document of the token before it; and that document."""
    document = _document(documents_ptr, tl.maximum(lowest, -1), DOCUMENTS)
    window = ()
    for k in tl.static_range(1, TAPS):
        window = window + (
            _input(
                x_ptr, state_ptr, documents_ptr, -k, lowest, document, x_t, width, column, inside,
                TAPS, STATE, DOCUMENTS,
            ),
        )  # fmt: skip
    return window, document


@triton.jit
def load_rows(x_ptr, first, end, x_t, column, inside, ROWS: tl.constexpr):
    rows = ()
    for r in tl.static_range(ROWS):
        t = first + r
        rows = rows + (tl.load(x_ptr + t * x_t + column, mask=inside & (t < end), other=0.0),)
    return rows


@triton.jit
def _document(documents_ptr, t, DOCUMENTS: tl.constexpr):
    """Document of token t; 0 without DOCUMENTS."""
    document = 0
    if DOCUMENTS:
        document = tl.load(documents_ptr + t)
    return document


@triton.jit
def load_documents(documents_ptr, first, length, ROWS: tl.constexpr, DOCUMENTS: tl.constexpr):
    """Documents of ROWS tokens from `first`; past the last token, that of the last."""
    documents = ()
    for r in tl.static_range(ROWS):
        documents = documents + (_document(documents_ptr, tl.minimum(first + r, length - 1), DOCUMENTS),)
    return documents


@triton.jit
def pre_activation(x, window, taps, bias, TAPS: tl.constexpr):
    p = bias
    for k in tl.static_range(1, TAPS):
        p += window[TAPS - 1 - k] * taps[TAPS - k]
    return p + x * taps[0]


@triton.jit(do_not_specialize=["length"])
def forward_kernel(
    x_ptr, weight_ptr, bias_ptr, state_ptr, documents_ptr,  # [B, T, D] strided, [D, W], [D], [B, W - 1, D], [B, T]
    y_ptr, next_ptr,  # [B, T, D], [B, W - 1, D]
    x_b, x_t, length, width,
    TAPS: tl.constexpr, SILU: tl.constexpr, BIAS: tl.constexpr, STATE: tl.constexpr, DOCUMENTS: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    batch, first, _, column = place(length, width, BLOCK_T, BLOCK_D)
    inside = column < width
    x_ptr += batch * x_b + first * x_t
    y_ptr += (batch * length + first) * width
    if STATE:
        state_ptr += batch * (TAPS - 1) * width
    if DOCUMENTS:
        documents_ptr += batch * length + first
    length, lowest = counted_from(first, length, BLOCK_T)
    taps, bias = weights(weight_ptr, bias_ptr, column, inside, TAPS, BIAS)
    window, document = entering(
        x_ptr, state_ptr, documents_ptr, lowest, x_t, width, column, inside, TAPS, STATE, DOCUMENTS
    )
    nothing = tl.zeros([BLOCK_D], tl.float32)
    end = tl.minimum(BLOCK_T, length)
    for start in range(0, end, ROWS):
        rows = load_rows(x_ptr, start, end, x_t, column, inside, ROWS)
        documents = load_documents(documents_ptr, start, length, ROWS, DOCUMENTS)
        for r in tl.static_range(ROWS):
            t = start + r
            if DOCUMENTS and documents[r] != document:
                window = (nothing,) * (TAPS - 1)
                document = documents[r]
            x = rows[r].to(tl.float32)
            y = pre_activation(x, window, taps, bias, TAPS)
            if SILU:
                y = y * tl.sigmoid(y)
            y_at = y_ptr + t * width + column
            tl.store(y_at, y.to(y_ptr.dtype.element_ty), mask=inside & (t < end))
            window = (x,) + window[: TAPS - 2]
    if end == length:
        next_ptr += batch * (TAPS - 1) * width
        for i in tl.static_range(TAPS - 1):
            last = _input(
                x_ptr, state_ptr, documents_ptr, length - (TAPS - 1) + i, lowest, document, x_t, width, column, inside,
                TAPS, STATE, DOCUMENTS,
            )  # fmt: skip
            tl.store(next_ptr + i * width + column, last, mask=inside)


def forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor | None, documents: Tensor | None, *, silu: bool
) -> tuple[Tensor, Tensor]:
    """Returns y [B, T, D] and the state after the last token [B, W - 1, D] fp32.

    x [B, T, D] with its last dimension contiguous; weight [D, W], bias [D], state [B, W - 1, D] fp32 and documents
    [B, T] int32 contiguous.
    """
    batch, length, width = x.shape
    taps = weight.shape[1]
    y = x.new_empty(batch, length, width)
    behind = x.new_empty(batch, taps - 1, width, dtype=torch.float32)
    programs = batch * triton.cdiv(length, FORWARD["BLOCK_T"]) * triton.cdiv(width, FORWARD["BLOCK_D"])
    forward_kernel[(programs,)](
        x, weight, bias, state, documents, y, behind, *x.stride()[:2], length, width,
        TAPS=taps, SILU=silu, BIAS=bias is not None, STATE=state is not None, DOCUMENTS=documents is not None,
        **FORWARD,
    )  # fmt: skip
    return y, behind
