"""The endless order of training samples: a keyed permutation per epoch, computed where it is needed, never stored."""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt

Positions = npt.NDArray[np.int64]

_ROUNDS = 8


def permute(positions: Positions, *, num_samples: int, seed: int, epoch: int) -> Positions:
    """The samples at `positions` of an epoch: a bijection of 0 .. num_samples - 1 keyed by (seed, epoch).

    A balanced Feistel network over the least even number of bits that holds `num_samples`, walked until the value
    falls inside (at most four passes on average). Memory and time depend on the number of positions alone.

    Args:
        positions: any shape, int64, each in [0, num_samples).

    Returns:
        Sample numbers of the same shape, int64.
    """
    assert num_samples >= 1, num_samples
    assert positions.dtype == np.int64, positions.dtype
    assert positions.size == 0 or (positions.min() >= 0 and positions.max() < num_samples), num_samples
    half_bits = np.uint64(max(1, ((num_samples - 1).bit_length() + 1) // 2))
    keys = _round_keys(seed, epoch)
    values = positions.astype(np.uint64).reshape(-1)
    outside = np.arange(values.size)
    while outside.size:
        values[outside] = _feistel(values[outside], half_bits, keys)
        outside = outside[values[outside] >= np.uint64(num_samples)]
    return values.astype(np.int64).reshape(positions.shape)


def endless(positions: Positions, *, num_samples: int, seed: int) -> Positions:
    """The samples at `positions` (>= 0, any shape, int64) of the endless run: epoch e is [e n, (e + 1) n)."""
    assert num_samples >= 1, num_samples
    result = np.empty_like(positions)
    epochs = positions // num_samples
    for epoch in np.unique(epochs):
        chosen = epochs == epoch
        inside = positions[chosen] - epoch * num_samples
        result[chosen] = permute(inside, num_samples=num_samples, seed=seed, epoch=int(epoch))
    return result


def _round_keys(seed: int, epoch: int) -> npt.NDArray[np.uint64]:
    """One 64-bit key per round; a cryptographic hash, so that neighbouring seeds and epochs have unrelated keys."""
    material = hashlib.shake_256(f"megalin sample order {seed} {epoch}".encode()).digest(8 * _ROUNDS)
    return np.frombuffer(material, "<u8").astype(np.uint64)


def _feistel(
    values: npt.NDArray[np.uint64], half_bits: np.uint64, keys: npt.NDArray[np.uint64]
) -> npt.NDArray[np.uint64]:
    mask = (np.uint64(1) << half_bits) - np.uint64(1)
    left, right = values >> half_bits, values & mask
    for key in keys:
        left, right = right, left ^ (_mix(right ^ key) & mask)
    return (left << half_bits) | right


def _mix(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The finaliser of splitmix64 (Steele, Lea, Flood 2014): every input bit reaches every output bit."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
