"""Training samples in Megatron-LM's order: its document, sample and shuffle index of a shard, and its blends."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from megalin.data.batch import Batch, pack
from megalin.data.config import DataConfig
from megalin.data.datasets.index_cache import cached, digest_of
from megalin.data.datasets.token import open_parts, refuse_label_masks, too_short
from megalin.data.order import MegatronOrder, Positions, megatron_blend, megatron_order
from megalin.data.shards.indexed_dataset import Shard
from megalin.errors import ConfigError, DataError

_VERSION = 1  # of the cached arrays
_SURPLUS = 0.005
"""Surplus of samples that Megatron-LM builds for each dataset of a blend."""
_SEEDS = 2**32


class MegatronDataset:
    """Samples of one shard as in Megatron-LM's GPTDataset: sample k is its k-th, over all epochs of the run.

    Memory: the mapped index. Thread-safe once open.

    Attributes:
        sequence_length: T.
        num_tokens: of one epoch.
        num_samples: of all epochs.
    """

    def __init__(
        self,
        part: tuple[Shard, int, int],
        order: MegatronOrder,
        *,
        sequence_length: int,
        vocab_size: int,
        isolate_documents: bool,
    ) -> None:
        """Takes the sequences [first, end) of a (shard, first, end), and their order."""
        self.sequence_length = sequence_length
        self._vocab_size, self._isolate_documents = vocab_size, isolate_documents
        self._shard, first, end = part
        self._order = order
        self.num_tokens = self._shard.first_token(end) - self._shard.first_token(first)
        self.num_samples = len(order.shuffle_index)

    @property
    def epoch_samples(self) -> int:
        """Whole samples in one epoch."""
        return (self.num_tokens - 1) // self.sequence_length

    def window(self, sample: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int32]]:
        """Ids [T + 1] int64 of `sample`, and the document of each, [T + 1] int32 from 0.

        Raises:
            DataError: an id of `vocab_size` or more (file, sequence, offset), a file that fails or shrank, or a damaged
                index.
        """
        assert 0 <= sample < self.num_samples, (sample, self.num_samples)
        order, row = self._order, int(self._order.shuffle_index[sample])
        if not 0 <= row < len(order.sample_index) - 1:
            raise self._damaged(f"row {row} of its samples")
        ids = np.empty(self.sequence_length + 1, np.int64)
        pieces = np.empty(self.sequence_length + 1, np.int32)
        place, offset = order.sample_index[row].tolist()
        filled = piece = 0
        while filled < len(ids):
            if not 0 <= place < len(order.document_index):
                raise self._damaged(f"place {place} of its documents")
            sequence = int(order.document_index[place])
            if not (0 <= sequence < self._shard.num_sequences and 0 <= offset <= self._shard.lengths[sequence]):
                raise self._damaged(f"token {offset} of sequence {sequence}")
            count = min(int(self._shard.lengths[sequence]) - offset, len(ids) - filled)
            if count:
                position = self._shard.first_token(sequence) + offset
                ids[filled : filled + count] = self._shard.read_checked(position, count, vocab_size=self._vocab_size)
                pieces[filled : filled + count] = piece
                filled += count
                piece += 1
            place, offset = place + 1, 0
        return ids, pieces

    def _damaged(self, named: str) -> DataError:
        return DataError(
            f"{self._shard.prefix}: its cached index refers to {named}, which does not exist; remove the folder "
            "data.cache, and it is built again"
        )

    def batch(self, samples: Positions) -> Batch:
        """Batch of the samples [B]. Raises DataError as `window` does."""
        windows, pieces = zip(*(self.window(int(sample)) for sample in samples), strict=True)
        return pack(np.stack(windows), np.stack(pieces), samples.copy(), isolate_documents=self._isolate_documents)

    @property
    def shards(self) -> list[Shard]:
        """The open shard."""
        return [self._shard]

    def close(self) -> None:
        """Closes the shard."""
        self._shard.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class MegatronBlend(NamedTuple):
    """Order of a run over its datasets, whose samples are numbered one dataset after the other."""

    dataset_index: npt.NDArray[np.int16]
    dataset_sample_index: npt.NDArray[np.int64]
    first_samples: Positions
    """[datasets] int64."""

    def samples(self, positions: Positions) -> Positions:
        """Samples at `positions`. Raises DataError past the end."""
        if positions.size and positions.max() >= len(self.dataset_index):
            raise DataError(
                f"position {positions.max()} is past the end of an order of {len(self.dataset_index)} samples"
            )
        return self.first_samples[self.dataset_index[positions]] + self.dataset_sample_index[positions]


class MegatronTraining(NamedTuple):
    """Training split of a run in Megatron-LM's order."""

    names: list[str]
    datasets: list[MegatronDataset]
    order: MegatronBlend
    counts: list[int]
    """Samples that the run reads of each dataset."""


def check_megatron_seed(seed: int) -> None:
    """Raises ConfigError for a seed beyond the range of Megatron-LM's generator."""
    if seed >= _SEEDS:
        raise ConfigError(f'train.seed = {seed}: data.order = "megatron" needs a seed below {_SEEDS}')


def open_megatron(config: DataConfig, vocab_size: int, *, seed: int, num_samples: int, cache: Path) -> MegatronTraining:
    """Opens the training split and builds the order of a run of `num_samples`, or maps it from the folder `cache`.

    Shards with weights are blended by them; several without in proportion to their size, each sample once at most.

    Raises:
        ConfigError: a seed beyond the range of Megatron-LM's generator.
        DataError: as `open_parts` and `megatron_order` do; a label mask; shards without weights have too few samples.
        StorageError: the cache cannot be written.
    """
    check_megatron_seed(seed)
    prefixes, weights = config.training_paths(), _weights(config)
    sizes: Sequence[int | None] = [None] * len(prefixes)
    if weights is not None:
        targets = [math.ceil(num_samples * weight) for weight in weights]
        sizes = [math.ceil(target * (1 + _SURPLUS)) for target in targets]
    elif len(prefixes) == 1:
        sizes = [num_samples]
    with ExitStack() as stack:
        datasets = [
            stack.enter_context(_open_shard(config, vocab_size, prefix, size, seed, cache))
            for prefix, size in zip(prefixes, sizes, strict=True)
        ]
        if weights is None and len(prefixes) == 1:
            blend = (np.zeros(num_samples, np.int16), np.arange(num_samples))
        elif weights is None:
            lengths = [dataset.num_samples for dataset in datasets]
            if sum(lengths) < num_samples:
                raise DataError(
                    f"{', '.join(prefixes)}: {sum(lengths)} samples, but the run reads {num_samples}; Megatron-LM "
                    "reads shards without weights once: give each a weight in data.sources, or lower train.steps"
                )
            blend = _blend(lengths, num_samples, cache)
        else:
            blend = _blend(weights, sum(targets), cache)
        for dataset, prefix, taken in zip(datasets, prefixes, _counts(blend[0], len(prefixes)), strict=True):
            if taken > dataset.num_samples:
                raise DataError(
                    f"{prefix}: the blend needs {taken} samples, but Megatron-LM builds only {dataset.num_samples} and "
                    "fails there; change train.steps or the weights a little"
                )
        stack.pop_all()
    first_samples = np.cumsum([0, *(dataset.num_samples for dataset in datasets[:-1])], dtype=np.int64)
    names = [source.name for source in config.sources] or prefixes
    return MegatronTraining(
        names, datasets, MegatronBlend(*blend, first_samples), _counts(blend[0][:num_samples], len(prefixes))
    )


def _weights(config: DataConfig) -> list[float] | None:
    """Weights of the sources as Megatron-LM normalises them, or None without weights."""
    weights = [source.weight for source in config.sources]
    if not weights or None in weights:
        return None
    values = np.array(weights, np.float64)
    normalised: list[float] = (values / values.sum()).tolist()
    return normalised


def _open_shard(
    config: DataConfig, vocab_size: int, prefix: str, num_samples: int | None, seed: int, cache: Path
) -> MegatronDataset:
    """Opens the training split of a shard with at least `num_samples`, or one epoch."""
    length = config.sequence_length
    with ExitStack() as stack:
        parts = open_parts(config, "train", vocab_size, [prefix], stack)
        refuse_label_masks(parts, 'data.order = "megatron"')
        tokens = sum(shard.first_token(end) - shard.first_token(first) for shard, first, end in parts)
        if tokens <= length:
            raise too_short(config, "train", [prefix], num_tokens=tokens)
        ((shard, first, end),) = parts
        key = {
            "what": f"order of Megatron-LM, version {_VERSION}",
            "lengths of the sequences": digest_of(shard.lengths),
            "sequences of the split": [first, end],
            "sequence_length": length,
            "num_samples": num_samples,
            "seed": seed,
        }
        arrays = cached(
            cache,
            key,
            lambda: megatron_order(
                shard.lengths, np.arange(first, end, dtype=np.int32), length, num_samples, seed
            )._asdict(),
        )
        stack.pop_all()
    return MegatronDataset(
        (shard, first, end),
        MegatronOrder(**arrays),
        sequence_length=length,
        vocab_size=vocab_size,
        isolate_documents=config.isolate_documents,
    )


def _blend(weights: Sequence[float], size: int, cache: Path) -> tuple[npt.NDArray[np.int16], npt.NDArray[np.int64]]:
    def build() -> dict[str, npt.NDArray[Any]]:
        sources, samples = megatron_blend(weights, size)
        return {"dataset_index": sources, "dataset_sample_index": samples}

    key = {"what": f"blend of Megatron-LM, version {_VERSION}", "weights": list(weights), "size": size}
    arrays = cached(cache, key, build)
    return arrays["dataset_index"], arrays["dataset_sample_index"]


def _counts(sources: npt.NDArray[np.int16], num_sources: int) -> list[int]:
    counts: list[int] = np.bincount(sources, minlength=num_sources).tolist()
    return counts
