"""Powers of TPE's decays as matmul operands, and blocks of tokens.

A matmul has bf16 operands: an fp32 number is a sum of two or three bf16 terms. Tensor cores truncate their sums, so no
state is accumulated there. lambda^L has two fp32 terms, since its rounding error is the same in every block.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

import triton
import triton.language as tl
from megalin._triton.dispatch.chips import MEASURED_ON, capability

BLOCK = 16
"""L of scans and gradients."""
STATES_BLOCK = 64
"""L of the pass between segments."""


class Tiles(NamedTuple):
    """Tiles of the kernels."""

    group: int
    """Decays a warp of the scan."""
    states: tuple[int, int, int]
    """Channels, decays and warps of the pass between segments."""
    gradient: tuple[int, int, int]
    """Channels, decays and warps of the gradients."""


LARGE_TILES = Tiles(64, (64, 64, 4), (64, 64, 4))
SMALL_TILES = Tiles(32, (32, 64, 4), (16, 32, 1))


class DecayPowers(NamedTuple):
    """Powers of lambda."""

    terms: Tensor
    """[2, 3, STATES_BLOCK + 1, E] bf16 terms of lambda^n and of n lambda^n."""
    rounded: Tensor
    """[2, STATES_BLOCK + 2, E] fp32: lambda^n and its rounding error; in the last row n is a segment's length."""


class DocumentAges(NamedTuple):
    """Distances of tokens from their document's first token, in the order of the scan."""

    age: Tensor
    """[B, T] uint8, at most STATES_BLOCK: tokens of the document before this one."""
    broken: Tensor
    """[B, segments] uint8: whether a document starts in a segment."""


@triton.jit(do_not_specialize=["segment"])
def powers_kernel(
    log_decay_ptr, terms_ptr, rounded_ptr, segment, decays, LONGEST: tl.constexpr, DECAYS: tl.constexpr
):  # fmt: skip
    """One power of all decays."""
    row = tl.program_id(0)
    index = tl.arange(0, DECAYS)
    mask = index < decays
    exponent = tl.where(row > LONGEST, segment, row).to(tl.float64)
    exact = tl.exp(exponent * tl.load(log_decay_ptr + index, mask=mask, other=0.0).to(tl.float64))
    rounded = exact.to(tl.float32)
    tl.store(rounded_ptr + row * decays + index, rounded, mask=mask)
    tl.store(
        rounded_ptr + (LONGEST + 2 + row) * decays + index, (exact - rounded.to(tl.float64)).to(tl.float32), mask=mask
    )
    if row <= LONGEST:
        for table in tl.static_range(2):
            rest = exact
            if table == 1:
                rest = exponent * exact
            for term in tl.static_range(3):
                value = rest.to(tl.float32).to(tl.bfloat16)
                rest -= value.to(tl.float32).to(tl.float64)
                place = terms_ptr + ((table * 3 + term) * (LONGEST + 1) + row) * decays + index
                tl.store(place, value, mask=mask)


@triton.jit(do_not_specialize=["length", "segment", "segments"])
def ages_kernel(
    starts_ptr, age_ptr, broken_ptr, length, segment, segments,
    REVERSE: tl.constexpr, REACH: tl.constexpr, TOKENS: tl.constexpr
):  # fmt: skip
    """Ages of a segment's tokens."""
    part, batch = tl.program_id(0), tl.program_id(1).to(tl.int64)
    distance = tl.arange(0, REACH)[:, None]
    begin = part * segment + length - segments * segment
    end = begin + segment
    broken = tl.zeros([TOKENS], tl.int32)
    for start in range(tl.maximum(begin, 0), end, TOKENS):
        token = start + tl.arange(0, TOKENS)
        source = token[None, :] - distance
        place = source
        if REVERSE:
            place = length - source
        mask = (source >= 0) & (token < end)[None, :]
        flag = tl.load(starts_ptr + batch * (length + 1) + place, mask=mask, other=0)
        age = tl.minimum(tl.min(tl.where(flag != 0, distance, REACH), axis=0), token)
        tl.store(age_ptr + batch * length + token, age, mask=token < end)
        broken = tl.maximum(broken, tl.where((age == 0) & (token > 0) & (token < end), 1, 0))
    tl.store(broken_ptr + batch * segments + part, tl.max(broken, axis=0))


@triton.jit
def power(terms_ptr, exponent, decay, decays, LONGEST: tl.constexpr, TERMS: tl.constexpr):
    """bf16 terms of lambda^exponent, or n lambda^n with the second table; 0 outside."""
    place = terms_ptr + exponent * decays + decay
    inside = (decay < decays) & (exponent >= 0)
    high = tl.load(place, mask=inside, other=0.0)
    middle = tl.load(place + (LONGEST + 1) * decays, mask=inside, other=0.0)
    low = middle
    if TERMS == 3:
        low = tl.load(place + 2 * (LONGEST + 1) * decays, mask=inside, other=0.0)
    return high, middle, low


@triton.jit
def _truncate(a):
    """The upper half of an fp32 number as bf16, and the rest. Rounding would take an instruction at a quarter rate."""
    upper = (a.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)
    return upper.to(tl.bfloat16), a - upper


@triton.jit
def matmul(a, high, middle, low, TERMS: tl.constexpr):
    """a @ b for b in bf16 terms, the smallest products first; `a` is split into as many terms unless it is bf16."""
    if a.dtype == tl.bfloat16:
        product = tl.dot(a, middle)
        if TERMS == 3:
            product = tl.dot(a, middle, tl.dot(a, low))
        product = tl.dot(a, high, product)
    else:
        first, rest = _truncate(a.to(tl.float32))
        second = rest.to(tl.bfloat16)
        if TERMS == 3:
            second, rest = _truncate(rest)
            third = rest.to(tl.bfloat16)
            product = tl.dot(first, low)
            product = tl.dot(second, middle, product)
            product = tl.dot(third, high, product)
            product = tl.dot(first, middle, product)
        else:
            product = tl.dot(first, middle)
        product = tl.dot(second, high, product)
        product = tl.dot(first, high, product)
    return product


@triton.jit
def advance(state, through, rest, added):
    """lambda^L state + added. Without fused operations `rest`, half a unit in the last place, would be rounded off."""
    return tl.fma(state, through, tl.fma(state, rest, added))


@triton.jit
def tokens(ptr, token, batch, channel, length, width, REVERSE: tl.constexpr):
    """Pointers [channels, tokens] of a [B, T, D] tensor."""
    row = batch * length + token
    if REVERSE:
        row = batch * length + (length - 1 - token)
    return ptr + row[None, :] * width + channel[:, None]


def tile_of(decays: int, largest: int) -> int:
    """Decays of a matmul, which has at least 16."""
    return min(largest, max(16, triton.next_power_of_2(decays)))


def terms_of(x: Tensor) -> int:
    """bf16 terms of an operand: errors of 2^-17 vanish in outputs of 16 bits."""
    return 3 if x.dtype == torch.float32 else 2


def tiles_of(x: Tensor) -> Tiles:
    """Large tiles for bf16 on 9.0. Others spill there, and on other chips."""
    return LARGE_TILES if x.dtype == torch.bfloat16 and capability() == MEASURED_ON else SMALL_TILES


def ages_of(starts: Tensor, segment: int, segments: int, *, reverse: bool) -> DocumentAges:
    """Ages of tokens from `starts` [B, T + 1], the first token of each document; `reverse`: in a scan from the end."""
    batch, length = starts.shape[0], starts.shape[1] - 1
    age = starts.new_empty(batch, length)
    broken = starts.new_empty(batch, segments)
    ages_kernel[(segments, batch)](
        starts, age, broken, length, segment, segments, REVERSE=reverse, REACH=STATES_BLOCK, TOKENS=64, num_warps=4
    )
    return DocumentAges(age, broken)


def powers_of(log_decay: Tensor, segment: int) -> DecayPowers:
    """Powers for segments of so many tokens."""
    (decays,) = log_decay.shape
    terms = log_decay.new_empty(2, 3, STATES_BLOCK + 1, decays, dtype=torch.bfloat16)
    rounded = log_decay.new_empty(2, STATES_BLOCK + 2, decays)
    powers_kernel[(STATES_BLOCK + 2,)](
        log_decay, terms, rounded, segment, decays, LONGEST=STATES_BLOCK, DECAYS=triton.next_power_of_2(decays),
        num_warps=4
    )  # fmt: skip
    return DecayPowers(terms, rounded)
