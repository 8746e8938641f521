"""LRPE of silu(q) and silu(k) with one set of sines, a = p theta: x -> [x cos a | x sin a], or the rotation of pairs.

q, k and the other parts of a projection are adjacent. Bytes: forward reads q and k and writes their codes; backward
reads q, k and the gradients of the codes and of the other parts, and writes the projection's gradient and one partial
sum of theta's gradient per block of rows.
"""

from __future__ import annotations

from torch import Tensor

import triton
import triton.language as tl

FORWARD = {False: {"ROWS": 4, "COLUMNS": 256, "num_warps": 4}, True: {"ROWS": 1, "COLUMNS": 512, "num_warps": 2}}
BACKWARD = {False: {"ROWS": 1, "COLUMNS": 256, "num_warps": 2}, True: {"ROWS": 8, "COLUMNS": 128, "num_warps": 4}}
"""Constants by form: True for the rotation."""
ROW_BLOCK = 32
"""Rows per partial sum of theta's gradient."""
JOIN = {"ROWS": 1, "COLUMNS": 2048, "num_warps": 4}


@triton.jit
def _sine_and_cosine(position, theta):
    """Sine and cosine of position * theta: the product in two fp32 parts, minus a multiple of pi / 2 in three parts;
    then polynomials."""
    angle = position * theta
    rest = tl.fma(position, theta, -angle)
    turns = tl.floor(angle * 0.6366197723675814 + 0.5)
    r = tl.fma(turns, -1.5703125, angle)
    r = tl.fma(turns, -4.837512969970703125e-4, r)
    r = tl.fma(turns, -7.54978995489188216e-8, r) + rest
    square = r * r
    sine = r + r * square * ((-1.9515295891e-4 * square + 8.3321608736e-3) * square - 1.6666654611e-1)
    cosine = (2.443315711809948e-5 * square - 1.388731625493765e-3) * square + 4.166664568298827e-2
    cosine = cosine * square * square - 0.5 * square + 1.0
    quarter = turns.to(tl.int32) & 3
    odd = (quarter == 1) | (quarter == 3)
    first = tl.where(odd, cosine, sine)
    second = tl.where(odd, sine, cosine)
    return tl.where(quarter >= 2, -first, first), tl.where((quarter == 1) | (quarter == 2), -second, second)


@triton.jit
def _pairs(x, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    return tl.split(tl.reshape(x, (ROWS, COLUMNS // 2, 2)))


@triton.jit
def _encode(
    x_ptr, code_ptr, row, column, mask, stride, width, sine, cosine,
    KEY: tl.constexpr, ROTATION: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    x = tl.load(x_ptr + row[:, None] * stride + column[None, :], mask=mask, other=0.0).to(tl.float32)
    active = x * tl.sigmoid(x)
    if ROTATION:
        even, odd = _pairs(active, ROWS, COLUMNS)
        code = tl.join(even * cosine - odd * sine, even * sine + odd * cosine)
        tl.store(code_ptr + row[:, None] * width + column[None, :], tl.reshape(code, (ROWS, COLUMNS)), mask=mask)
    else:
        target = code_ptr + row[:, None] * (2 * width) + (column + column // KEY * KEY)[None, :]
        tl.store(target, active * cosine, mask=mask)
        tl.store(target + KEY, active * sine, mask=mask)


@triton.jit
def _decode(
    x_ptr, dcode_ptr, dx_ptr, row, column, mask, stride, width, sine, cosine,
    KEY: tl.constexpr, ROTATION: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """Writes dx; returns the gradient of the angles."""
    x = tl.load(x_ptr + row[:, None] * stride + column[None, :], mask=mask, other=0.0).to(tl.float32)
    gate = tl.sigmoid(x)
    active = x * gate
    if ROTATION:
        source = dcode_ptr + row[:, None] * width + column[None, :]
        first, second = _pairs(tl.load(source, mask=mask, other=0.0).to(tl.float32), ROWS, COLUMNS)
        even, odd = _pairs(active, ROWS, COLUMNS)
        dactive = tl.reshape(tl.join(first * cosine + second * sine, second * cosine - first * sine), (ROWS, COLUMNS))
        dangle = second * (even * cosine - odd * sine) - first * (even * sine + odd * cosine)
    else:
        source = dcode_ptr + row[:, None] * (2 * width) + (column + column // KEY * KEY)[None, :]
        first = tl.load(source, mask=mask, other=0.0).to(tl.float32)
        second = tl.load(source + KEY, mask=mask, other=0.0).to(tl.float32)
        dactive = first * cosine + second * sine
        dangle = active * (second * cosine - first * sine)
    dx = dactive * gate * (1.0 + x * (1.0 - gate))
    tl.store(dx_ptr + row[:, None] * stride + column[None, :], dx, mask=mask)
    return dangle


@triton.jit
def _place(theta_ptr, width, ROTATION: tl.constexpr, COLUMNS: tl.constexpr):
    """Columns of q and k of this program, and the corresponding columns and values of theta."""
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    if ROTATION:
        angle = tl.program_id(1) * (COLUMNS // 2) + tl.arange(0, COLUMNS // 2)
        angles = width // 2
    else:
        angle = column
        angles = width
    return column, angle, angles, tl.load(theta_ptr + angle, mask=angle < angles, other=0.0)


@triton.jit(do_not_specialize=["rows", "period"])
def forward_kernel(
    q_ptr, k_ptr, theta_ptr, positions_ptr, q_code_ptr, k_code_ptr, rows, period, stride, width,
    KEY: tl.constexpr, ROTATION: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    column, _, _, theta = _place(theta_ptr, width, ROTATION, COLUMNS)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    mask = (row < rows)[:, None] & (column < width)[None, :]
    position = tl.load(positions_ptr + row % period, mask=row < rows, other=0).to(tl.float32)
    sine, cosine = _sine_and_cosine(position[:, None], theta[None, :])
    _encode(q_ptr, q_code_ptr, row, column, mask, stride, width, sine, cosine, KEY, ROTATION, ROWS, COLUMNS)
    _encode(k_ptr, k_code_ptr, row, column, mask, stride, width, sine, cosine, KEY, ROTATION, ROWS, COLUMNS)


@triton.jit(do_not_specialize=["rows", "period"])
def backward_kernel(
    q_ptr, k_ptr, theta_ptr, positions_ptr, dq_code_ptr, dk_code_ptr, dq_ptr, dk_ptr, dtheta_ptr,
    rows, period, stride, width,
    KEY: tl.constexpr, ROTATION: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, ROW_BLOCK: tl.constexpr
):  # fmt: skip
    column, angle, angles, theta = _place(theta_ptr, width, ROTATION, COLUMNS)
    total = tl.zeros([ROWS, COLUMNS // 2 if ROTATION else COLUMNS], tl.float32)
    first = tl.program_id(0).to(tl.int64) * ROW_BLOCK
    for start in range(0, ROW_BLOCK, ROWS):
        row = first + start + tl.arange(0, ROWS)
        mask = (row < rows)[:, None] & (column < width)[None, :]
        position = tl.load(positions_ptr + row % period, mask=row < rows, other=0).to(tl.float32)[:, None]
        sine, cosine = _sine_and_cosine(position, theta[None, :])
        dangle = _decode(
            q_ptr, dq_code_ptr, dq_ptr, row, column, mask, stride, width, sine, cosine, KEY, ROTATION, ROWS, COLUMNS
        )
        dangle += _decode(
            k_ptr, dk_code_ptr, dk_ptr, row, column, mask, stride, width, sine, cosine, KEY, ROTATION, ROWS, COLUMNS
        )
        total += position * dangle
    tl.store(dtheta_ptr + tl.program_id(0).to(tl.int64) * angles + angle, tl.sum(total, axis=0), mask=angle < angles)


@triton.jit
def _join(
    x_ptr, dx_ptr, dy_ptr, row, column, mask, stride, width, SILU: tl.constexpr
):  # fmt: skip
    """Writes one part of the projection's gradient: dy itself, or with `SILU` the gradient of the silu's input x."""
    gradient = tl.load(dy_ptr + row[:, None] * width + column[None, :], mask=mask, other=0.0)
    place = row[:, None] * stride + column[None, :]
    if SILU:
        x = tl.load(x_ptr + place, mask=mask, other=0.0).to(tl.float32)
        gate = tl.sigmoid(x)
        gradient = gradient.to(tl.float32) * gate * (1.0 + x * (1.0 - gate))
    tl.store(dx_ptr + place, gradient, mask=mask)


@triton.jit(do_not_specialize=["rows"])
def join_kernel(
    projection_ptr, dq_ptr, dk_ptr, third_ptr, fourth_ptr, dprojection_ptr, rows, stride, width,
    PARTS: tl.constexpr, SILU: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    mask = (row < rows)[:, None] & (column < width)[None, :]
    if SILU:
        _join(projection_ptr, dprojection_ptr, dq_ptr, row, column, mask, stride, width, True)
        _join(projection_ptr + width, dprojection_ptr + width, dk_ptr, row, column, mask, stride, width, True)
    if PARTS > 2:
        _join(projection_ptr, dprojection_ptr + 2 * width, third_ptr, row, column, mask, stride, width, False)
    if PARTS > 3:
        _join(projection_ptr, dprojection_ptr + 3 * width, fourth_ptr, row, column, mask, stride, width, False)


def forward(projection: Tensor, theta: Tensor, positions: Tensor, *, rotation: bool) -> tuple[Tensor, Tensor]:
    """projection [rows, parts, H, K] contiguous, q and k first, theta [H, K or K/2] fp32, positions [period], repeated
    over the rows -> the codes [rows, H, 2 K or K] of q and k."""
    rows, parts, heads, key = projection.shape
    width = heads * key
    codes = [projection.new_empty(rows, heads, key if rotation else 2 * key) for _ in range(2)]
    table = FORWARD[rotation]
    grid = (triton.cdiv(rows, table["ROWS"]), triton.cdiv(width, table["COLUMNS"]))
    forward_kernel[grid](
        projection,
        projection[:, 1],
        theta,
        positions,
        *codes,
        rows,
        len(positions),
        parts * width,
        width,
        key,
        rotation,
        **table,
    )
    return codes[0], codes[1]


def backward(
    gradients: list[Tensor], projection: Tensor, theta: Tensor, positions: Tensor, *, rotation: bool
) -> tuple[Tensor, Tensor]:
    """Gradients of the projection and of theta from those of the codes and of the parts after them, all contiguous;
    the rest as in `forward`."""
    rows, parts, heads, key = projection.shape
    width = heads * key
    target = projection.new_empty(projection.shape)
    grid = (triton.cdiv(rows, ROW_BLOCK), triton.cdiv(width, BACKWARD[rotation]["COLUMNS"]))
    partial = theta.new_empty(grid[0], *theta.shape)
    backward_kernel[grid](
        projection,
        projection[:, 1],
        theta,
        positions,
        *gradients[:2],
        target,
        target[:, 1],
        partial,
        rows,
        len(positions),
        parts * width,
        width,
        key,
        rotation,
        ROW_BLOCK=ROW_BLOCK,
        **BACKWARD[rotation],
    )
    if parts > 2:
        _launch_join(gradients, projection, target, silu=False)
    return target, partial.sum(0)


def silu_backward(gradients: list[Tensor], projection: Tensor) -> Tensor:
    """Gradient of the projection where q and k went through silu only; arguments as in `backward`."""
    target = projection.new_empty(projection.shape)
    _launch_join(gradients, projection, target, silu=True)
    return target


def _launch_join(gradients: list[Tensor], projection: Tensor, target: Tensor, *, silu: bool) -> None:
    rows, parts, heads, key = projection.shape
    assert 2 <= parts <= 4, parts
    width = heads * key
    grid = (triton.cdiv(rows, JOIN["ROWS"]), triton.cdiv(width, JOIN["COLUMNS"]))
    sources = [*gradients, *gradients[:1] * (4 - parts)]
    join_kernel[grid](projection, *sources, target, rows, parts * width, width, parts, silu, **JOIN)
