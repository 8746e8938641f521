"""The depthwise causal convolution of a few taps, forward and backward, with documents and states.

    p_t = b + sum over k = 0 .. W-1 of w_{W-1-k} x_{t-k},    y_t = p_t or silu(p_t)
    dp_t = dy_t or dy_t silu'(p_t),    dx_s = sum over k of w_{W-1-k} dp_{s+k},    dw_{W-1-k} = sum of dp_t x_{t-k}

Each thread walks down the tokens of its channels with the last W - 1 inputs in registers, backward also with the
gradients of as many tokens, which are still being added up. Where a document starts both begin empty.

Bytes: the forward reads x and writes y; the backward reads x and dy and writes dx, and of every tile one partial sum of
W + 1 numbers a channel. Each tile reads W - 1 tokens twice (backward 2 W - 2 of x).
"""

# ruff: noqa: RUF005 (Triton has no starred expressions)

from __future__ import annotations

import torch
from torch import Tensor

import triton
import triton.language as tl

FORWARD = {"BLOCK_T": 64, "BLOCK_D": 256, "ROWS": 4, "num_warps": 2}
BACKWARD = {"BLOCK_T": 64, "BLOCK_D": 128, "ROWS": 4, "num_warps": 1}
FEW_TAPS = 4
"""Above, the backward takes two rows at a time: four take the compiler a minute."""
SUM_COLUMNS = 32
SUM_TILES = 64


@triton.jit
def _place(length, width, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr):
    """Batch, first token and channels of this program; programs of one tile of tokens run side by side."""
    blocks, tiles = tl.cdiv(width, BLOCK_D), tl.cdiv(length, BLOCK_T)
    program = tl.program_id(0)
    batch_tile = program // blocks
    column = (program % blocks) * BLOCK_D + tl.arange(0, BLOCK_D)
    return (batch_tile // tiles).to(tl.int64), (batch_tile % tiles).to(tl.int64) * BLOCK_T, batch_tile, column


@triton.jit
def _weights(weight_ptr, bias_ptr, column, inside, TAPS: tl.constexpr, BIAS: tl.constexpr):
    """The taps, that of the newest input first, and the bias."""
    taps = ()
    for k in tl.static_range(TAPS):
        taps = taps + (tl.load(weight_ptr + column * TAPS + TAPS - 1 - k, mask=inside, other=0.0).to(tl.float32),)
    bias = tl.zeros_like(taps[0])
    if BIAS:
        bias = tl.load(bias_ptr + column, mask=inside, other=0.0).to(tl.float32)
    return taps, bias


@triton.jit
def _input(
    x_ptr, state_ptr, documents_ptr, s, document, x_t, width, column, inside,
    TAPS: tl.constexpr, STATE: tl.constexpr, DOCUMENTS: tl.constexpr,
):  # fmt: skip
    """x_s, before the first token of the state; zero where it belongs to another document."""
    if DOCUMENTS:
        inside = inside & (tl.load(documents_ptr + tl.maximum(s, 0)) == document)
    x = tl.load(x_ptr + s * x_t + column, mask=inside & (s >= 0), other=0.0).to(tl.float32)
    if STATE:
        x += tl.load(state_ptr + (s + TAPS - 1) * width + column, mask=inside & (s < 0), other=0.0)
    return x


@triton.jit
def _entering(
    x_ptr, state_ptr, documents_ptr, first, x_t, width, column, inside,
    TAPS: tl.constexpr, STATE: tl.constexpr, DOCUMENTS: tl.constexpr,
):  # fmt: skip
    """The inputs before token `first`, newest first, of the document of the token before it."""
    document = 0
    if DOCUMENTS:
        document = tl.load(documents_ptr + tl.maximum(first - 1, 0))
    window = ()
    for k in tl.static_range(1, TAPS):
        window = window + (
            _input(
                x_ptr, state_ptr, documents_ptr, first - k, document, x_t, width, column, inside,
                TAPS, STATE, DOCUMENTS,
            ),
        )  # fmt: skip
    return window


@triton.jit
def _load_rows(x_ptr, first, end, x_t, column, inside, ROWS: tl.constexpr):
    rows = ()
    for r in tl.static_range(ROWS):
        t = first + r
        rows = rows + (tl.load(x_ptr + t * x_t + column, mask=inside & (t < end), other=0.0),)
    return rows


@triton.jit
def _starts(documents_ptr, t, length, DOCUMENTS: tl.constexpr):
    """Whether token t begins another document; past the last one, whether it is the first that is not there."""
    starts = t == length
    if DOCUMENTS:
        at = tl.minimum(t, length - 1)
        starts = starts | (tl.load(documents_ptr + at) != tl.load(documents_ptr + tl.maximum(at - 1, 0)))
    return starts


@triton.jit
def _pre_activation(x, window, taps, bias, TAPS: tl.constexpr):
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
    batch, first, _, column = _place(length, width, BLOCK_T, BLOCK_D)
    inside = column < width
    x_ptr += batch * x_b
    y_ptr += batch * length * width
    if STATE:
        state_ptr += batch * (TAPS - 1) * width
    if DOCUMENTS:
        documents_ptr += batch * length
    taps, bias = _weights(weight_ptr, bias_ptr, column, inside, TAPS, BIAS)
    window = _entering(x_ptr, state_ptr, documents_ptr, first, x_t, width, column, inside, TAPS, STATE, DOCUMENTS)
    nothing = tl.zeros([BLOCK_D], tl.float32)
    end = tl.minimum(first + BLOCK_T, length)
    for start in range(first, end, ROWS):
        rows = _load_rows(x_ptr, start, end, x_t, column, inside, ROWS)
        for r in tl.static_range(ROWS):
            t = start + r
            if DOCUMENTS and _starts(documents_ptr, t, length, DOCUMENTS):
                window = (nothing,) * (TAPS - 1)
            x = rows[r].to(tl.float32)
            y = _pre_activation(x, window, taps, bias, TAPS)
            if SILU:
                y = y * tl.sigmoid(y)
            y_at = y_ptr + t * width + column
            tl.store(y_at, y.to(y_ptr.dtype.element_ty), mask=inside & (t < end))
            window = (x,) + window[: TAPS - 2]
    if end == length:
        document = 0
        if DOCUMENTS:
            document = tl.load(documents_ptr + length - 1)
        next_ptr += batch * (TAPS - 1) * width
        for i in tl.static_range(TAPS - 1):
            last = _input(
                x_ptr, state_ptr, documents_ptr, length - (TAPS - 1) + i, document, x_t, width, column, inside,
                TAPS, STATE, DOCUMENTS,
            )  # fmt: skip
            tl.store(next_ptr + i * width + column, last, mask=inside)


@triton.jit
def _store_gradient(
    dx_ptr, dstate_ptr, dx, s, begin, end, width, column, inside, TAPS: tl.constexpr, STATE: tl.constexpr
):  # fmt: skip
    """dx_s, where begin <= s < end; before the first token it is the state's."""
    inside = inside & (s >= begin)
    at = dx_ptr + s * width + column
    tl.store(at, dx.to(dx_ptr.dtype.element_ty), mask=inside & (s >= 0) & (s < end))
    if STATE:
        tl.store(dstate_ptr + (s + TAPS - 1) * width + column, dx, mask=inside & (s < 0))


@triton.jit
def _left_behind(
    dnext_ptr, documents_ptr, s, length, width, column, inside,
    TAPS: tl.constexpr, FINAL: tl.constexpr, DOCUMENTS: tl.constexpr,
):  # fmt: skip
    """What x_s gets from the gradient of the state behind the last token."""
    i = s - (length - (TAPS - 1))
    inside = inside & (i >= 0) & (s < length)
    if DOCUMENTS and FINAL:
        at = tl.minimum(tl.maximum(s, 0), length - 1)
        inside = inside & (tl.load(documents_ptr + at) == tl.load(documents_ptr + length - 1))
    dx = tl.zeros_like(column).to(tl.float32)
    if FINAL:
        dx = tl.load(dnext_ptr + i * width + column, mask=inside, other=0.0)
    return dx


@triton.jit
def _gradient(x, dy, window, taps, bias, TAPS: tl.constexpr, SILU: tl.constexpr):
    """dp_t."""
    dp = dy.to(tl.float32)
    if SILU:
        p = _pre_activation(x, window, taps, bias, TAPS)
        gate = tl.sigmoid(p)
        dp *= gate * (1.0 + p * (1.0 - gate))
    return dp


@triton.jit
def _pass_on(dp, own, waiting, taps, TAPS: tl.constexpr):
    """What dx_t, dx_{t-1}, .. have after token t; the last is complete."""
    moved = (own + dp * taps[0],)
    for k in tl.static_range(1, TAPS):
        moved = moved + (waiting[k - 1] + dp * taps[k],)
    return moved


@triton.jit
def _add(sums, factor, terms, TERMS: tl.constexpr):
    """sums + factor * terms, one by one."""
    more = ()
    for k in tl.static_range(TERMS):
        more = more + (sums[k] + factor * terms[k],)
    return more


@triton.jit(do_not_specialize=["length"])
def backward_kernel(
    dy_ptr, dnext_ptr, x_ptr, weight_ptr, bias_ptr, state_ptr, documents_ptr,
    dx_ptr, dstate_ptr, partial_ptr,  # [B, T, D], [B, W - 1, D], [B tiles, W + 1, D] fp32
    dy_b, dy_t, x_b, x_t, length, width,
    TAPS: tl.constexpr, SILU: tl.constexpr, BIAS: tl.constexpr, STATE: tl.constexpr, DOCUMENTS: tl.constexpr,
    FINAL: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Gradients of this tile's inputs, and its share of those of the taps (the newest input's first) and the bias.

    waiting[k - 1] is what dx_{t-k} got so far; where a document starts, nothing more is to come.
    """
    batch, first, batch_tile, column = _place(length, width, BLOCK_T, BLOCK_D)
    inside = column < width
    x_ptr += batch * x_b
    dy_ptr += batch * dy_b
    dx_ptr += batch * length * width
    before = batch * (TAPS - 1) * width
    if STATE:
        state_ptr += before
        dstate_ptr += before
    if FINAL:
        dnext_ptr += before
    if DOCUMENTS:
        documents_ptr += batch * length
    taps, bias = _weights(weight_ptr, bias_ptr, column, inside, TAPS, BIAS)
    window = _entering(x_ptr, state_ptr, documents_ptr, first, x_t, width, column, inside, TAPS, STATE, DOCUMENTS)
    waiting = ()
    for k in tl.static_range(1, TAPS):
        waiting = waiting + (
            _left_behind(dnext_ptr, documents_ptr, -k, length, width, column, inside, TAPS, FINAL, DOCUMENTS),
        )
    begin = first
    if STATE:
        begin = tl.where(first == 0, 1 - TAPS, first)
    end = tl.minimum(first + BLOCK_T, length)
    nothing = tl.zeros([BLOCK_D], tl.float32)
    sums = (nothing,) * (TAPS + 1)
    # The next rows are under way while these are computed.
    next_xs = _load_rows(x_ptr, first, end, x_t, column, inside, ROWS)
    next_dys = _load_rows(dy_ptr, first, end, dy_t, column, inside, ROWS)
    for start in range(first, end, ROWS):
        xs, dys = next_xs, next_dys
        next_xs = _load_rows(x_ptr, start + ROWS, end, x_t, column, inside, ROWS)
        next_dys = _load_rows(dy_ptr, start + ROWS, end, dy_t, column, inside, ROWS)
        # Rows are added up among themselves first: one long sum would lose more than the reference does.
        some = (nothing,) * (TAPS + 1)
        for r in tl.static_range(ROWS):
            t = start + r
            if _starts(documents_ptr, t, length, DOCUMENTS):
                for k in tl.static_range(1, TAPS):
                    _store_gradient(
                        dx_ptr, dstate_ptr, waiting[k - 1], t - k, begin, end, width, column, inside, TAPS, STATE
                    )
                begin = t
                window, waiting = (nothing,) * (TAPS - 1), (nothing,) * (TAPS - 1)
            x = xs[r].to(tl.float32)
            dp = _gradient(x, dys[r], window, taps, bias, TAPS, SILU)
            own = _left_behind(dnext_ptr, documents_ptr, t, length, width, column, inside, TAPS, FINAL, DOCUMENTS)
            moved = _pass_on(dp, own, waiting, taps, TAPS)
            _store_gradient(
                dx_ptr, dstate_ptr, moved[TAPS - 1], t - (TAPS - 1), begin, end, width, column, inside, TAPS, STATE
            )
            inputs = (x,) + window
            window, waiting = inputs[: TAPS - 1], moved[: TAPS - 1]
            some = _add(some, dp, inputs, TAPS) + (some[TAPS] + dp,)
        sums = _add(sums, 1.0, some, TAPS + 1)
    for k in tl.static_range(TAPS + 1):
        tl.store(partial_ptr + (batch_tile.to(tl.int64) * (TAPS + 1) + k) * width + column, sums[k], mask=inside)
    # The tokens behind the tile, of the document of its last one.
    behind = first + tl.cdiv(end - first, ROWS) * ROWS
    xs = _load_rows(x_ptr, behind, length, x_t, column, inside, TAPS - 1)
    dys = _load_rows(dy_ptr, behind, length, dy_t, column, inside, TAPS - 1)
    goes_on = behind >= 0
    for r in tl.static_range(TAPS - 1):
        t = behind + r
        goes_on = goes_on & (_starts(documents_ptr, t, length, DOCUMENTS) == 0)
        x = xs[r].to(tl.float32)
        dp = tl.where(goes_on, _gradient(x, dys[r], window, taps, bias, TAPS, SILU), 0.0)
        moved = _pass_on(dp, nothing, waiting, taps, TAPS)
        _store_gradient(
            dx_ptr, dstate_ptr, moved[TAPS - 1], t - (TAPS - 1), begin, end, width, column, inside, TAPS, STATE
        )
        window, waiting = (x,) + window[: TAPS - 2], moved[: TAPS - 1]


@triton.jit(do_not_specialize=["tiles"])
def sum_kernel(
    partial_ptr, dweight_ptr, dbias_ptr, tiles, width, TAPS: tl.constexpr, TILES: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """dw [D, W] and db [D] from the tiles' shares, always in the same order."""
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


def _backward_table(taps: int) -> dict[str, int]:
    return BACKWARD if taps <= FEW_TAPS else BACKWARD | {"ROWS": 2}


def forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor | None, documents: Tensor | None, *, silu: bool
) -> tuple[Tensor, Tensor]:
    """y [B, T, D] and the state behind the last token [B, W - 1, D] fp32.

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


def backward(
    dy: Tensor, dnext: Tensor | None, x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor | None,
    documents: Tensor | None, *, silu: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of x (contiguous), the weight, a bias, and the state (empty where there is none).

    dy as x, dnext as state, the rest as in `forward`.
    """
    batch, length, width = x.shape
    taps = weight.shape[1]
    tiles = batch * triton.cdiv(length, BACKWARD["BLOCK_T"])
    dx, dstate = x.new_empty(batch, length, width), x.new_empty(0, dtype=torch.float32)
    if state is not None:
        dstate = torch.empty_like(state)
    partial = x.new_empty(tiles, taps + 1, width, dtype=torch.float32)
    backward_kernel[(tiles * triton.cdiv(width, BACKWARD["BLOCK_D"]),)](
        dy, dnext, x, weight, bias, state, documents, dx, dstate, partial,
        *dy.stride()[:2], *x.stride()[:2], length, width,
        TAPS=taps, SILU=silu, BIAS=bias is not None, STATE=state is not None, DOCUMENTS=documents is not None,
        FINAL=dnext is not None, **_backward_table(taps),
    )  # fmt: skip
    dweight, dbias = torch.empty_like(weight), weight.new_empty(width)
    sum_kernel[(triton.cdiv(width, SUM_COLUMNS), taps + 1)](
        partial, dweight, dbias, tiles, width, TAPS=taps, TILES=SUM_TILES, COLUMNS=SUM_COLUMNS
    )
    return dx, dweight, dbias, dstate


def compile_cases() -> list[tuple[object, dict[str, str], dict[str, object], dict[str, int]]]:
    """(kernel, signature, constants, options) of representative launches, compiled ahead of time in CI."""
    cases = []
    wide = {"state_ptr", "next_ptr", "dnext_ptr", "dstate_ptr", "partial_ptr"}
    for taps in (4, 8):
        for kernel, table, more in (
            (forward_kernel, FORWARD, {}),
            (backward_kernel, _backward_table(taps), {"FINAL": False, "dnext_ptr": None, "dstate_ptr": None}),
        ):
            blocks = {name: value for name, value in table.items() if name != "num_warps"}
            flags = {"SILU": True, "BIAS": True, "STATE": False, "DOCUMENTS": True, "state_ptr": None}
            types = {}
            for name in kernel.arg_names:
                if name.endswith("_ptr"):
                    types[name] = "*i32" if name == "documents_ptr" else "*fp32" if name in wide else "*bf16"
                elif name.islower():
                    types[name] = "i32"
            constants = {"TAPS": taps, **flags, **more, **blocks}
            cases.append((kernel, types, constants, {"num_warps": table["num_warps"]}))
    return cases
