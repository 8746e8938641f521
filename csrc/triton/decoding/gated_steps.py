"""Decoding steps from a projection to the gated output: norm scale, activations, positions, recurrence, gate, squares.

A program owns a tile of a head's state [K, V], which it reads and writes once. The rest of its operands are a
few rows in the L2 cache: every program of a row repeats the row's scale, and every tile of a head q and k.
"""

from __future__ import annotations

from torch import Tensor

import triton
import triton.language as tl
from megalin._triton.decoding.row_scale import row_scale
from megalin._triton.dispatch.dependent_launch import dependent_launch, wait_for_inputs
from megalin._triton.positions.silu_lrpe import _sine_and_cosine

TILE = 4096
"""Elements of the state per program."""
FORMS = {None: 0, "cosine": 1, "rotation": 2}


@triton.jit
def _encoded(x_ptr, key, inside, scale, sine, cosine, HEAD: tl.constexpr, FORM: tl.constexpr):
    """LRPE(silu(scale x)) of the channels `key`."""
    channel = key % HEAD if FORM == 1 else key
    x = tl.load(x_ptr + channel, mask=inside, other=0.0).to(tl.float32) * scale
    x *= tl.sigmoid(x)
    if FORM == 1:
        x *= tl.where(key < HEAD, cosine, sine)
    if FORM == 2:
        other = tl.load(x_ptr + (key ^ 1), mask=inside, other=0.0).to(tl.float32) * scale
        other *= tl.sigmoid(other)
        x = x * cosine + tl.where(key % 2 == 0, -other, other) * sine
    return x


@triton.jit
def fixed_kernel(
    parts_ptr, gate_ptr, x_ptr, theta_ptr, positions_ptr, slopes_ptr, state_ptr, next_ptr, product_ptr, squares_ptr,
    parts_row, gate_row, heads, width, eps,
    HEAD: tl.constexpr, KEY: tl.constexpr, FORM: tl.constexpr, NORM: tl.constexpr, GATE: tl.constexpr,
    GATE_SCALED: tl.constexpr, DECAY: tl.constexpr, PDL: tl.constexpr,
    BLOCK_X: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(HEAD, BLOCK_V)
    row = (tl.program_id(0) // tiles).to(tl.int64)
    batch, head = row // heads, row % heads
    key = tl.arange(0, BLOCK_K)
    value = tl.program_id(0) % tiles * BLOCK_V + tl.arange(0, BLOCK_V)
    inside = (key < KEY)[:, None] & (value < HEAD)[None, :]
    at = row * KEY * HEAD + key[:, None] * HEAD + value[None, :]
    state = tl.load(state_ptr + at, mask=inside, other=0.0)  # written one token ago
    wait_for_inputs(PDL)
    scale = 1.0
    if NORM:
        scale = row_scale(x_ptr + batch * width, width, eps, BLOCK_X)
    sine, cosine = 0.0, 1.0
    if FORM:
        angles = KEY // 2
        angle = key // 2 if FORM == 2 else key % HEAD
        theta = tl.load(theta_ptr + head * angles + angle, mask=key < KEY, other=0.0)
        sine, cosine = _sine_and_cosine(tl.load(positions_ptr + batch).to(tl.float32), theta)
    source = parts_ptr + batch * parts_row + head * HEAD
    q = _encoded(source, key, key < KEY, scale, sine, cosine, HEAD, FORM)
    k = _encoded(source + heads * HEAD, key, key < KEY, scale, sine, cosine, HEAD, FORM)
    v = tl.load(source + 2 * heads * HEAD + value, mask=value < HEAD, other=0.0).to(tl.float32) * scale
    if DECAY:
        state *= tl.exp(-tl.load(slopes_ptr + head))
    state += k[:, None] * v[None, :]
    tl.store(next_ptr + at, state, mask=inside)
    output = tl.sum(q[:, None] * state, axis=0)
    tl.store(squares_ptr + tl.program_id(0), tl.sum(output * output, axis=0))
    if GATE:
        gate = tl.load(gate_ptr + batch * gate_row + head * HEAD + value, mask=value < HEAD, other=0.0).to(tl.float32)
        output *= gate * scale if GATE_SCALED else gate
    tl.store(product_ptr + row * HEAD + value, output, mask=value < HEAD)


@triton.jit
def vector_kernel(
    parts_ptr, bound_ptr, x_ptr, state_ptr, next_ptr, output_ptr, squares_ptr,
    parts_row, heads, width, eps, factor,
    HEAD: tl.constexpr, NORM: tl.constexpr, SILU_QUERY: tl.constexpr, SILU_VALUE: tl.constexpr,
    PDL: tl.constexpr,
    BLOCK_X: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """S' = diag(f) S + (1 - f) v^T with f = b + (1 - b) sigmoid(l), o = factor S'^T q."""
    tiles = tl.cdiv(HEAD, BLOCK_V)
    row = (tl.program_id(0) // tiles).to(tl.int64)
    batch, head = row // heads, row % heads
    key = tl.arange(0, BLOCK_K)
    value = tl.program_id(0) % tiles * BLOCK_V + tl.arange(0, BLOCK_V)
    inside = (key < HEAD)[:, None] & (value < HEAD)[None, :]
    at = row * HEAD * HEAD + key[:, None] * HEAD + value[None, :]
    state = tl.load(state_ptr + at, mask=inside, other=0.0)  # written one token ago
    wait_for_inputs(PDL)
    scale = 1.0
    if NORM:
        scale = row_scale(x_ptr + batch * width, width, eps, BLOCK_X)
    source = parts_ptr + batch * parts_row + head * HEAD
    q = tl.load(source + key, mask=key < HEAD, other=0.0).to(tl.float32) * scale
    logit = tl.load(source + heads * HEAD + key, mask=key < HEAD, other=0.0).to(tl.float32) * scale
    bound = tl.load(bound_ptr + head * HEAD + key, mask=key < HEAD, other=0.0)
    v = tl.load(source + 2 * heads * HEAD + value, mask=value < HEAD, other=0.0).to(tl.float32) * scale
    positive = tl.sigmoid(q)
    q = q * positive if SILU_QUERY else tl.where(key < HEAD, positive, 0.0)
    if SILU_VALUE:
        v *= tl.sigmoid(v)
    forget = bound + (1.0 - bound) * tl.sigmoid(logit)
    k = (1.0 - bound) * tl.sigmoid(-logit)
    state = state * forget[:, None] + k[:, None] * v[None, :]
    tl.store(next_ptr + at, state, mask=inside)
    output = tl.sum(q[:, None] * state, axis=0) * factor
    tl.store(squares_ptr + tl.program_id(0), tl.sum(output * output, axis=0))
    tl.store(output_ptr + row * HEAD + value, output, mask=value < HEAD)


def _blocks(width: int, key: int, value: int) -> dict[str, int]:
    block = triton.next_power_of_2(key)
    tile = max(1, min(triton.next_power_of_2(value), TILE // block))
    return {"BLOCK_X": triton.next_power_of_2(width), "BLOCK_K": block, "BLOCK_V": tile}


def fixed_step(
    parts: Tensor, gate: Tensor | None, x: Tensor | None, theta: Tensor | None, positions: Tensor,
    slopes: Tensor | None, state: Tensor, following: Tensor, *, form: str | None, gate_scaled: bool, eps: float
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """parts [B, 3 or 4, H, V] and gate [B, H V] with contiguous rows, x [B, D], state [B, H, K, V], contiguous,
    -> the product [B, H V] in the dtype of parts, and partial sums of squares [B, N]. Writes the next
    state to `following`, which may be `state`: a program reads its tile before it writes it."""
    (batch, heads, key), head = state.shape[:3], state.shape[3]
    width = 1 if x is None else x.shape[1]
    blocks = _blocks(width, key, head)
    tiles = triton.cdiv(head, blocks["BLOCK_V"])
    product = parts.new_empty(batch, heads * head)
    squares = state.new_empty(batch, heads * tiles)
    fixed_kernel[(batch * heads * tiles,)](
        parts, gate, x, theta, positions, slopes, state, following, product, squares,
        parts.stride(0), 0 if gate is None else gate.stride(0), heads, width, eps,
        HEAD=head, KEY=key, FORM=FORMS[form], NORM=x is not None, GATE=gate is not None, GATE_SCALED=gate_scaled,
        DECAY=slopes is not None, **blocks, **dependent_launch(), num_warps=4,
    )  # fmt: skip
    return product, squares


def vector_step(
    parts: Tensor, bound: Tensor, x: Tensor | None, state: Tensor, following: Tensor,
    *, silu_query: bool, silu_value: bool, factor: float, eps: float
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """parts [B, 3, H, V] (q, l, v) with contiguous rows, bound [H V] fp32, x [B, D], state [B, H, V, V], contiguous,
    -> the output [B, H V] in the dtype of parts, and partial sums of squares [B, N]. Writes the next
    state to `following`, which may be `state`: a program reads its tile before it writes it."""
    batch, heads, head = state.shape[:3]
    width = 1 if x is None else x.shape[1]
    blocks = _blocks(width, head, head)
    tiles = triton.cdiv(head, blocks["BLOCK_V"])
    output = parts.new_empty(batch, heads * head)
    squares = state.new_empty(batch, heads * tiles)
    vector_kernel[(batch * heads * tiles,)](
        parts, bound, x, state, following, output, squares, parts.stride(0), heads, width, eps, factor,
        HEAD=head, NORM=x is not None, SILU_QUERY=silu_query, SILU_VALUE=silu_value, **blocks,
        **dependent_launch(), num_warps=4,
    )  # fmt: skip
    return output, squares
