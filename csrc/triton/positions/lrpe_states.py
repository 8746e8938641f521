"""States of a fixed-decay scan with LRPE from segment to segment, each rotated into the next segment's positions.

    E_0 = initial,    E_{c+1} = R(angle) (decay_c E_c + continues_c U_c)

R(a): (x, y) -> (x cos a + y sin a, y cos a - x sin a), the rows x and y of a state that belong to one frequency.
"""

from __future__ import annotations

import torch
from torch import Tensor

import triton
import triton.language as tl

TILE = {"BLOCK_ANGLE": 8, "BLOCK_VALUE": 128, "num_warps": 4}


@triton.jit
def _place(angles, VALUE: tl.constexpr, ROTATION: tl.constexpr, BLOCK_ANGLE: tl.constexpr, BLOCK_VALUE: tl.constexpr):
    """Frequencies of this program, and the offsets of their two rows in a state [KEY, VALUE]: adjacent with `ROTATION`,
    else KEY / 2 apart."""
    angle = tl.program_id(1) * BLOCK_ANGLE + tl.arange(0, BLOCK_ANGLE)
    value = tl.program_id(2) * BLOCK_VALUE + tl.arange(0, BLOCK_VALUE)
    inside = (angle < angles)[:, None] & (value < VALUE)[None, :]
    first = (angle * 2 if ROTATION else angle)[:, None] * VALUE + value[None, :]
    return angle, inside, first, first + (VALUE if ROTATION else angles * VALUE)


@triton.jit(do_not_specialize=["segments"])
def forward_kernel(
    added_ptr, initial_ptr, cosines_ptr, sines_ptr, decay_ptr, continues_ptr, entering_ptr, leaving_ptr,
    heads, segments, angles,
    INITIAL: tl.constexpr, VALUE: tl.constexpr, ROTATION: tl.constexpr,
    BLOCK_ANGLE: tl.constexpr, BLOCK_VALUE: tl.constexpr,
):  # fmt: skip
    """Forward recurrence over segments. Grid (batch * heads, tiles of frequencies, tiles of values)."""
    angle, inside, first, second = _place(angles, VALUE, ROTATION, BLOCK_ANGLE, BLOCK_VALUE)
    row = tl.program_id(0).to(tl.int64)
    batch, head = row // heads, row % heads
    size = 2 * angles * VALUE
    cosine = tl.load(cosines_ptr + head * angles + angle, mask=angle < angles, other=0.0)[:, None]
    sine = tl.load(sines_ptr + head * angles + angle, mask=angle < angles, other=0.0)[:, None]
    x = tl.zeros([BLOCK_ANGLE, BLOCK_VALUE], tl.float32)
    y = tl.zeros([BLOCK_ANGLE, BLOCK_VALUE], tl.float32)
    if INITIAL:
        x = tl.load(initial_ptr + row * size + first, mask=inside, other=0.0)
        y = tl.load(initial_ptr + row * size + second, mask=inside, other=0.0)
    for c in range(0, segments):
        place = ((batch * segments + c) * heads + head) * size
        tl.store(entering_ptr + place + first, x, mask=inside)
        tl.store(entering_ptr + place + second, y, mask=inside)
        decay = tl.load(decay_ptr + (batch * segments + c) * heads + head)
        continues = tl.load(continues_ptr + batch * segments + c)
        x = decay * x + continues * tl.load(added_ptr + place + first, mask=inside, other=0.0)
        y = decay * y + continues * tl.load(added_ptr + place + second, mask=inside, other=0.0)
        x, y = x * cosine + y * sine, y * cosine - x * sine
    tl.store(leaving_ptr + row * size + first, x, mask=inside)
    tl.store(leaving_ptr + row * size + second, y, mask=inside)


@triton.jit(do_not_specialize=["segments"])
def backward_kernel(
    dentering_ptr, dleaving_ptr, entering_ptr, leaving_ptr, cosines_ptr, sines_ptr, decay_ptr, continues_ptr,
    dadded_ptr, dinitial_ptr, dangle_ptr, heads, segments, angles,
    VALUE: tl.constexpr, ROTATION: tl.constexpr, BLOCK_ANGLE: tl.constexpr, BLOCK_VALUE: tl.constexpr,
):  # fmt: skip
    """Reverse recurrence; dangle is the sum over c of dx y - dy x of the state (x, y) that enters segment c + 1."""
    angle, inside, first, second = _place(angles, VALUE, ROTATION, BLOCK_ANGLE, BLOCK_VALUE)
    row = tl.program_id(0).to(tl.int64)
    batch, head = row // heads, row % heads
    size = 2 * angles * VALUE
    cosine = tl.load(cosines_ptr + head * angles + angle, mask=angle < angles, other=0.0)[:, None]
    sine = tl.load(sines_ptr + head * angles + angle, mask=angle < angles, other=0.0)[:, None]
    dx = tl.load(dleaving_ptr + row * size + first, mask=inside, other=0.0)
    dy = tl.load(dleaving_ptr + row * size + second, mask=inside, other=0.0)
    x = tl.load(leaving_ptr + row * size + first, mask=inside, other=0.0)
    y = tl.load(leaving_ptr + row * size + second, mask=inside, other=0.0)
    total = tl.zeros([BLOCK_ANGLE, BLOCK_VALUE], tl.float32)
    for back in range(0, segments):
        c = segments - 1 - back
        total += dx * y - dy * x
        place = ((batch * segments + c) * heads + head) * size
        decay = tl.load(decay_ptr + (batch * segments + c) * heads + head)
        continues = tl.load(continues_ptr + batch * segments + c)
        dx, dy = dx * cosine - dy * sine, dy * cosine + dx * sine
        tl.store(dadded_ptr + place + first, continues * dx, mask=inside)
        tl.store(dadded_ptr + place + second, continues * dy, mask=inside)
        dx = decay * dx + tl.load(dentering_ptr + place + first, mask=inside, other=0.0)
        dy = decay * dy + tl.load(dentering_ptr + place + second, mask=inside, other=0.0)
        x = tl.load(entering_ptr + place + first, mask=inside, other=0.0)
        y = tl.load(entering_ptr + place + second, mask=inside, other=0.0)
    tl.store(dinitial_ptr + row * size + first, dx, mask=inside)
    tl.store(dinitial_ptr + row * size + second, dy, mask=inside)
    part = (row * tl.num_programs(2) + tl.program_id(2)) * angles
    tl.store(dangle_ptr + part + angle, tl.sum(total, axis=1), mask=angle < angles)


def forward(
    added: Tensor, initial: Tensor | None, angle: Tensor, decay: Tensor, continues: Tensor, *, rotation: bool
) -> tuple[Tensor, Tensor]:
    """added [B, N, H, K, V], initial [B, H, K, V], angle [H, K/2], decay [B, N, H], continues [B, N], all contiguous
    fp32 -> the states entering the segments, as `added`, and the last one [B, H, K, V]."""
    batch, segments, heads, key, value = added.shape
    entering = torch.empty_like(added)
    leaving = added.new_empty(batch, heads, key, value)
    forward_kernel[_grid(added)](
        added, initial, angle.cos(), angle.sin(), decay, continues, entering, leaving, heads, segments, key // 2,
        INITIAL=initial is not None, VALUE=value, ROTATION=rotation, **TILE,
    )  # fmt: skip
    return entering, leaving


def backward(
    d_entering: Tensor,
    d_leaving: Tensor,
    entering: Tensor,
    leaving: Tensor,
    angle: Tensor,
    decay: Tensor,
    continues: Tensor,
    *,
    rotation: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `added`, `initial` and `angle` from those of the results; the rest as in `forward`."""
    batch, segments, heads, key, value = entering.shape
    grid = _grid(entering)
    d_added, d_initial = torch.empty_like(entering), torch.empty_like(leaving)
    d_angle = angle.new_empty(batch, heads, grid[2], key // 2)
    backward_kernel[grid](
        d_entering, d_leaving, entering, leaving, angle.cos(), angle.sin(), decay, continues,
        d_added, d_initial, d_angle, heads, segments, key // 2, VALUE=value, ROTATION=rotation, **TILE,
    )  # fmt: skip
    return d_added, d_initial, d_angle.sum((0, 2))


def _grid(states: Tensor) -> tuple[int, int, int]:
    batch, _, heads, key, value = states.shape
    return batch * heads, triton.cdiv(key // 2, TILE["BLOCK_ANGLE"]), triton.cdiv(value, TILE["BLOCK_VALUE"])
