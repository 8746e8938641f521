"""Keyed dropout: hashes against plain integers, values and gradient, shards, fractions and independence of masks."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor

from megalin.ops.dropout import DropoutKeys, dropout, dropout_mask, element_hashes, sample_keys

RATE = 0.1
DRAWS = 2**33 - 2 + torch.arange(4)
"""Numbers of samples whose low 32 bits overflow after the second."""

HASHES = [
    ((0, 0, 0, 0, 0), 0x00000000),
    ((0, 0, 0, 0, 1), 0x688990C0),
    ((0, 0, 0, 1, 0), 0x58F54975),
    ((0, 0, 1, 0, 0), 0x24009C6D),
    ((0, 1, 0, 0, 0), 0x4DA918EF),
    ((1, 0, 0, 0, 0), 0x663092EC),
    ((1234, 2**32 - 1, 3, 511, 767), 0x236C4951),
    ((1234, 2**32, 3, 511, 767), 0xC53E1DEA),
    ((2**32 + 1234, 2**40 + 17, 129, 8191, 4095), 0x48A919B8),
    ((2**32 - 1, 2**62 + 5, 257, 131071, 65535), 0xB6008400),
]
"""(seed, draw, site, token, channel) and the hash, which no version may change: runs resume with the same masks."""


def lowbias32(x: int) -> int:
    """The published hash on Python's integers."""
    x ^= x >> 16
    x = x * 0x7FEB352D % 2**32
    x ^= x >> 15
    x = x * 0x846CA68B % 2**32
    return x ^ x >> 16


def plain_hash(seed: int, draw: int, site: int, token: int, channel: int) -> int:
    """The hash of an element on Python's integers."""
    sample = lowbias32(lowbias32(seed % 2**32) ^ draw % 2**32)
    return lowbias32(lowbias32(lowbias32(sample ^ draw // 2**32 ^ site) ^ token) ^ channel)


def scalar(value: int) -> Tensor:
    return torch.tensor(value, dtype=torch.int64)


def keys(tokens: Tensor, draw: Tensor = DRAWS, seed: int = 7) -> DropoutKeys:
    return DropoutKeys(sample_keys(scalar(seed), draw), tokens)


@pytest.mark.parametrize(("place", "expected"), HASHES)
def test_hashes_are_those_of_plain_integers(place: tuple[int, ...], expected: int):
    seed, draw, site, token, channel = place
    found = element_hashes(keys(scalar(token)[None], scalar(draw)[None], seed), scalar(site), channel + 1)
    assert plain_hash(*place) == found[0, 0, channel].item() == expected


def test_shards_of_samples_tokens_and_both_are_those_of_the_whole():
    tokens, x = torch.arange(12), torch.randn(4, 12, 24, dtype=torch.float64)
    whole = dropout(x, keys(tokens), scalar(5), rate=RATE)
    for samples, part in product((slice(0, 2), slice(3, 4)), (slice(0, 4), slice(8, 12), slice(1, 2))):
        shard = dropout(x[samples, part], keys(tokens[part], DRAWS[samples]), scalar(5), rate=RATE)
        assert torch.equal(shard, whole[samples, part])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_values_and_gradient_are_zero_or_scaled_by_the_same_mask(dtype: torch.dtype):
    x = torch.randn(4, 6, 16, dtype=dtype, requires_grad=True)
    keep = torch.tensor(
        [
            [[plain_hash(7, draw, 9, token, channel) >= 0.25 * 2**32 for channel in range(16)] for token in range(6)]
            for draw in DRAWS.tolist()
        ]
    )
    y = dropout(x, keys(torch.arange(6)), scalar(9), rate=0.25)
    (gradient,) = torch.autograd.grad(y, x, torch.full_like(y, 3.0))
    assert y.dtype == dtype
    torch.testing.assert_close(y, torch.where(keep, x / 0.75, 0.0))
    torch.testing.assert_close(gradient, torch.where(keep, torch.full_like(x, 4.0), 0.0))


@pytest.mark.parametrize("rate", [0.0, 2**-32, 0.05, 0.1, 0.5, 0.9])
def test_fraction_of_kept_elements_is_within_four_standard_deviations(rate: float):
    kept = dropout_mask(keys(torch.arange(250)), scalar(3), 1000, rate=rate)  # 10^6 elements
    deviation = (kept.numel() * rate * (1 - rate)) ** 0.5
    assert abs(kept.sum().item() - kept.numel() * (1 - rate)) <= 4 * deviation


def _hashes(site: int = 4, first_draw: int = 2**33 - 250, seed: int = 7, num_tokens: int = 8) -> Tensor:
    draws = first_draw + torch.arange(500)
    return element_hashes(keys(torch.arange(num_tokens), draws, seed), scalar(site), 250)


NEIGHBOURS = {
    "channels": (lambda h: h[..., :-1], lambda h: h[..., 1:]),
    "tokens": (lambda h: h[:, :-1], lambda h: h[:, 1:]),
    "draws": (lambda h: h[:-1], lambda h: h[1:]),
    "sites": (lambda h: h, lambda _: _hashes(site=5)),
    "sites of neighbouring sub-layers": (lambda h: h, lambda _: _hashes(site=6)),
    "seeds": (lambda h: h, lambda _: _hashes(seed=8)),
    "epochs": (lambda h: h, lambda _: _hashes(first_draw=2**33 + 250)),
}


@pytest.mark.parametrize("name", NEIGHBOURS)
def test_masks_of_neighbours_are_independent(name: str):
    """A chi-square test of the 16 x 16 table of leading bits of neighbouring hashes: 225 degrees of freedom, of which
    the statistic has a deviation of sqrt(450). It sees any dependence of two masks, at any rate of some sixteenths."""
    first, second = NEIGHBOURS[name]
    a, b = (part(_hashes()) >> 28 for part in (first, second))
    table = torch.bincount((16 * a + b).flatten(), minlength=256).view(16, 16).double()
    expected = table.sum(1, keepdim=True) * table.sum(0, keepdim=True) / table.sum()
    statistic = ((table - expected).square() / expected).sum().item()
    assert abs(statistic - 225) < 4 * 450**0.5
