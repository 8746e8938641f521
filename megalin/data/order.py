"""Orders of training samples: a keyed permutation per epoch that is never stored, and Megatron-LM's order."""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from megalin._index import build_blend, build_sample_index
from megalin.errors import DataError

Positions = npt.NDArray[np.int64]

_ROUNDS = 8
_INT32, _UINT32 = 2**31 - 1, 2**32 - 1
_MOST_DATASETS = 2**15 - 1
_OWN_EPOCH = 0.80
"""Megatron-LM shuffles the last epoch separately where the run needs less than this fraction of it."""


def permute(positions: Positions, *, num_samples: int, seed: int, epoch: int, source: str = "") -> Positions:
    """Samples at `positions` of an epoch: a bijection of 0 .. num_samples - 1 keyed by (seed, epoch, source).

    A balanced Feistel network over the least even number of bits that holds `num_samples`, applied until the value is
    in range (at most four passes on average). Memory and time depend on the number of positions alone.

    Args:
        positions: any shape, int64, each in [0, num_samples).
        source: name of a source of a blend; each has its own order.

    Returns:
        Sample numbers of the same shape, int64.
    """
    assert num_samples >= 1, num_samples
    assert positions.dtype == np.int64, positions.dtype
    assert positions.size == 0 or (positions.min() >= 0 and positions.max() < num_samples), num_samples
    half_bits = np.uint64(max(1, ((num_samples - 1).bit_length() + 1) // 2))
    keys = _round_keys(seed, epoch, source)
    values = positions.astype(np.uint64).reshape(-1)
    outside = np.arange(values.size)
    while outside.size:
        values[outside] = _feistel(values[outside], half_bits, keys)
        outside = outside[values[outside] >= np.uint64(num_samples)]
    return values.astype(np.int64).reshape(positions.shape)


def endless(positions: Positions, *, num_samples: int, seed: int, source: str = "") -> Positions:
    """Samples at `positions` (>= 0, any shape, int64) of the endless run: epoch e is [e n, (e + 1) n)."""
    assert num_samples >= 1, num_samples
    result = np.empty_like(positions)
    epochs = positions // num_samples
    for epoch in np.unique(epochs):
        chosen = epochs == epoch
        inside = positions[chosen] - epoch * num_samples
        result[chosen] = permute(inside, num_samples=num_samples, seed=seed, epoch=int(epoch), source=source)
    return result


class Order(Protocol):
    """Order in which a run reads samples."""

    def samples(self, positions: Positions) -> Positions:
        """Samples at `positions` of the run, both any shape, int64. Raises DataError past the end of an order."""


class MegatronOrder(NamedTuple):
    """Megatron-LM's index arrays: sample k reads `seq_length + extra_token` tokens, from row `shuffle_index[k]` of
    `sample_index` to the next."""

    document_index: npt.NDArray[np.int32]
    """[E x ids], the documents of all epochs in the order in which their tokens are concatenated."""
    sample_index: npt.NDArray[np.int32]
    """[n + 1, 2], start of each sample: place in `document_index` and token of that document."""
    shuffle_index: npt.NDArray[np.uint32] | npt.NDArray[np.int64]
    """[n], row of `sample_index` of each sample of the run; n may be more than requested."""


def megatron_order(
    lengths: npt.NDArray[np.int32],
    ids: npt.NDArray[np.int32],
    seq_length: int,
    num_samples: int | None,
    seed: int,
    extra_token: int = 1,
) -> MegatronOrder:
    """Megatron-LM's order of one dataset, bitwise equal to its index files.

    E epochs are the fewest with E x tokens >= num_samples x seq_length + extra_token. One pseudo-random generator
    shuffles the documents of all epochs as one array, then the samples; the last epoch is shuffled separately where
    less than 80 % of it is needed. So a longer run may have another order from its first sample; `endless` has not.

    Args:
        lengths: [N] tokens of each document of the shard.
        ids: the documents of the split, as numbers of `lengths`.
        seq_length: tokens a sample.
        num_samples: samples that the run reads; None for one epoch.
        seed: in [0, 2^32).
        extra_token: 1 where a sample includes the label of its last token, else 0.

    Raises:
        DataError: no sample in an epoch, an unknown document, or 2^31 documents and more over the epochs.

    Source: Megatron-LM, GPTDataset.
    """
    assert extra_token in (0, 1), extra_token
    assert seq_length >= 1, seq_length
    assert num_samples is None or num_samples >= 1, num_samples
    lengths, ids = np.asarray(lengths, np.int32), np.asarray(ids, np.int32)
    if ids.size and not 0 <= ids.min() <= ids.max() < len(lengths):
        raise DataError(f"documents {ids.min()} to {ids.max()} of a shard with {len(lengths)}; ids must be lower")
    tokens = int(lengths[ids].sum(dtype=np.int64))
    per_epoch = (tokens - extra_token) // seq_length
    if tokens == 0 or (num_samples is None and per_epoch < 1):
        raise DataError(
            f"{ids.size} documents of {tokens} tokens are too few for a sample of {seq_length + extra_token}; "
            "lower seq_length or add data"
        )
    epochs = 1 if num_samples is None else max(1, -(-(num_samples * seq_length + extra_token) // tokens))
    if epochs * ids.size > _INT32:
        raise DataError(
            f"{epochs} epochs of {ids.size} documents are more than Megatron-LM's order can number ({_INT32}); "
            'lower train.steps, or use data.order = "megalin"'
        )
    before_last = ((epochs - 1) * tokens - extra_token) // seq_length
    needed = 0 if num_samples is None else num_samples - before_last
    separate = epochs > 1 and needed < int(_OWN_EPOCH * per_epoch)
    generator = np.random.RandomState(seed)
    groups = [epochs - 1, 1] if separate else [epochs]
    documents = np.concatenate([_shuffled(np.tile(ids, count), generator) for count in groups])
    samples = _megatron_samples(
        lengths[documents], (epochs * tokens - extra_token) // seq_length, seq_length, extra_token
    )
    bounds = [0, before_last, len(samples) - 1] if separate else [0, len(samples) - 1]
    dtype = np.uint32 if bounds[-1] < _UINT32 - 1 else np.int64
    pieces = [_shuffled(np.arange(*pair, dtype=dtype), generator) for pair in itertools.pairwise(bounds)]
    return MegatronOrder(documents, samples, np.concatenate(pieces))


def megatron_blend(weights: Sequence[float], size: int | None) -> tuple[npt.NDArray[np.int16], npt.NDArray[np.int64]]:
    """Megatron-LM's blend: the dataset of each sample and the sample's number in it.

    Sample i comes from the dataset d of largest w_d max(i, 1) - (samples taken of d), the first on ties.

    Args:
        weights: one positive number a dataset, in any unit. With `size` None they are the datasets' lengths.
        size: samples of the blend; None for every sample of every dataset once, by the same rule among the datasets
            that have samples left.

    Returns:
        dataset_index [size] int16 and dataset_sample_index [size] int64.

    Raises:
        DataError: weights that are not positive numbers, or lengths that are not whole; more than 32767 datasets.

    Source: Megatron-LM, BlendedDataset.
    """
    values = np.asarray(weights, np.float64)
    if not 1 <= values.size <= _MOST_DATASETS:
        raise DataError(f"a blend of {values.size} datasets; use 1 to {_MOST_DATASETS}")
    for number, weight in enumerate(weights):
        if not (math.isfinite(weight) and weight > 0):
            raise DataError(f"weight {number} of the blend is {weight}; weights must be positive")
        if size is None and weight != int(weight):
            raise DataError(f"weight {number} of the blend is {weight}; without a size, weights must be whole lengths")
    limits = np.full(values.size, size) if size is not None else values.astype(np.int64)
    return build_blend(values / values.sum(), limits.astype(np.int64), int(limits.sum()) if size is None else size)


def _shuffled(values: Any, generator: np.random.RandomState) -> Any:
    generator.shuffle(values)
    return values


def _megatron_samples(
    lengths: npt.NDArray[np.int32], count: int, seq_length: int, extra_token: int
) -> npt.NDArray[np.int32]:
    """Starts of the samples: row j is at the last token of sample j - 1 with an extra token, after it without."""
    rows = np.zeros((count + 1, 2), np.int32)
    if count > 0:
        last = seq_length - 1 + extra_token
        places, offsets = build_sample_index(lengths, first_token=last, stride=seq_length, count=count)
        rows[1:, 0], rows[1:, 1] = places, offsets + 1 - extra_token
    return rows


def _round_keys(seed: int, epoch: int, source: str) -> npt.NDArray[np.uint64]:
    """One 64-bit key per round; a cryptographic hash, so that neighbouring seeds and epochs have unrelated keys."""
    words = ["megalin sample order", str(seed), str(epoch), *([source] if source else [])]
    material = hashlib.shake_256(" ".join(words).encode()).digest(8 * _ROUNDS)
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
