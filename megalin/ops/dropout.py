"""Dropout whose masks are functions of keys: no generator, so every mesh and every recomputation has the same mask.

    keep(b, t, c) = mix(mix(mix(sample(b) ^ site) ^ t) ^ c) >= p 2^32
    sample(b) = mix(mix(seed) ^ low(draw(b))) ^ high(draw(b))
    y(b, t, c) = keep(b, t, c) x(b, t, c) / (1 - p)

with draw(b) the number of the sample in the run, its low and high 32 bits, t the token's index in the full sequence, c
the channel in the full width, and `site` the place in the model. All are integers of 32 bits in int64 tensors.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

_BITS = 0xFFFFFFFF
_FIRST_FACTOR = 0x7FEB352D
_SECOND_FACTOR = 0x846CA68B - 2**32
"""Equal to 0x846CA68B modulo 2^32; its products with 32 bits fit into int64."""


class DropoutKeys(NamedTuple):
    """The keys of a forward's masks, the same for all sites."""

    samples: Tensor
    """[B] int64, `sample_keys` of the samples."""
    tokens: Tensor
    """[T] int64, each token's index in the full sequence."""


def mix(x: Tensor) -> Tensor:
    """Bijective hash of 32 bits in int64: x of any shape in [0, 2^32) -> the same shape and range.

    x ^= x >> 16; x *= 0x7feb352d; x ^= x >> 15; x *= 0x846ca68b; x ^= x >> 16, modulo 2^32. Source: lowbias32 (Chris
    Wellons, hash-prospector).
    """
    x = x ^ (x >> 16)
    x = (x * _FIRST_FACTOR) & _BITS
    x = x ^ (x >> 15)
    x = (x * _SECOND_FACTOR) & _BITS
    return x ^ (x >> 16)


def sample_keys(seed: Tensor, draw: Tensor) -> Tensor:
    """[B] int64 keys of samples: seed [] int64, of which the low 32 bits count, draw [B] int64, >= 0."""
    return mix(mix(seed & _BITS) ^ (draw & _BITS)) ^ ((draw >> 32) & _BITS)


def element_hashes(keys: DropoutKeys, site: Tensor, width: int) -> Tensor:
    """[B, T, width] int64, uniform in [0, 2^32): site [] int64."""
    tokens = mix(mix(keys.samples ^ site)[:, None] ^ keys.tokens)  # [B, T]
    return mix(tokens[..., None] ^ torch.arange(width, device=tokens.device))


def dropout_mask(keys: DropoutKeys, site: Tensor, width: int, *, rate: float) -> Tensor:
    """[B, T, width] bool, True where an element is kept, with probability 1 - rate: site [] int64."""
    return element_hashes(keys, site, width) >= math.ceil(rate * 2**32)


def dropout(x: Tensor, keys: DropoutKeys, site: Tensor, *, rate: float) -> Tensor:
    """x keep / (1 - rate) in the dtype of x: x [B, T, D], D the full width; site [] int64.

    The gradient passes where x is kept, with the same factor. Eager execution saves the mask, a byte an element; a
    compiled function fuses it with its neighbours.

    Args:
        keys: of B samples and T tokens.
        rate: probability in [0, 1) of a zero.
    """
    assert 0.0 <= rate < 1.0, rate
    assert x.shape[:2] == (len(keys.samples), len(keys.tokens)), (x.shape, keys.samples.shape, keys.tokens.shape)
    keep = dropout_mask(keys, site, x.shape[-1], rate=rate)
    return torch.where(keep, x, 0.0) * (1.0 / (1.0 - rate))
