"""Powers of TPE's decays as matmul operands, and blocks of tokens.

A matmul has bf16 operands: an fp32 number is a sum of two or three bf16 terms. Tensor cores truncate their sums, so no
state is accumulated there. lambda^L has two fp32 terms, since its rounding error is the same in every block.

`age` [B, T] int32 counts tokens since the first one of a document, in the order of the scan: a token of age n has the n
tokens before it in its document.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

import triton
import triton.language as tl

BLOCK = 16
"""L of scans and gradients."""
STATES_BLOCK = 64
"""L of the pass between segments."""


class DecayPowers(NamedTuple):
    """Powers n = 0 .. STATES_BLOCK of lambda."""

    terms: Tensor
    """[2, 3, n, E] bf16 terms of lambda^n and of n lambda^n."""
    rounded: Tensor
    """[2, n, E] fp32: lambda^n and its rounding error."""


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


def age_of(starts: Tensor) -> Tensor:
    """[B, T] int32: tokens since the last start, or since the first token."""
    index = torch.arange(starts.shape[1], device=starts.device)
    return (index - torch.where(starts != 0, index, 0).cummax(1).values).int()


def exact_powers(log_decay: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """n = 0 .. count - 1 [n, 1], and lambda^n [n, E], fp64."""
    index = torch.arange(count, device=log_decay.device, dtype=torch.float64)[:, None]
    return index, torch.exp(index * log_decay.double())


def powers_of(log_decay: Tensor) -> DecayPowers:
    index, exact = exact_powers(log_decay, STATES_BLOCK + 1)
    rounded = exact.float()
    rest = torch.stack([exact, index * exact])
    terms = []
    for _ in range(3):
        terms.append(rest.bfloat16())
        rest = rest - terms[-1].double()
    return DecayPowers(torch.stack(terms, dim=1), torch.stack([rounded, (exact - rounded).float()]))
