"""Token datasets for training loops of one's own: shards (.bin/.idx), their samples, and the batches of a run.

    data = {"train": ["shards/train"], "sequence_length": 2048, "tokenizer": "shards/tokenizer.json"}
    with open_split(data, "train", vocab_size=50304) as dataset:
        for batch in batches(dataset, batch_size=8, steps=1000):
            loss = model(batch.tokens, targets=batch.labels, document_ids=batch.document_ids).loss

A sample is a window of T + 1 ids; in a batch `labels` are the ids after `tokens`, so they are `targets` of a model.
`ShardWriter` writes shards, `megalin data preprocess` makes them of text (docs/data.md).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from megalin.config import parse
from megalin.data.batch import Batch, EncoderBatch, batch_to
from megalin.data.blend import BlendedOrder, BlendSource, Phase
from megalin.data.config import ONLY_SOURCE, SPLITS, DataConfig, SplitName
from megalin.data.datasets.classified import ClassifiedDataset
from megalin.data.datasets.masked import MaskedDataset
from megalin.data.datasets.packed import PackedDataset
from megalin.data.datasets.token import TokenDataset
from megalin.data.loader import Loader, ValidationLoader
from megalin.data.shards.indexed_dataset import Shard, ShardWriter
from megalin.data.sources import Dataset, open_dataset
from megalin.data.tokenizers.tokenizer import Tokenizer, load_tokenizer
from megalin.errors import ConfigError

__all__ = [
    "Batch",
    "ClassifiedDataset",
    "DataConfig",
    "Dataset",
    "EncoderBatch",
    "Loader",
    "MaskedDataset",
    "PackedDataset",
    "Shard",
    "ShardWriter",
    "TokenDataset",
    "Tokenizer",
    "ValidationLoader",
    "batches",
    "load_tokenizer",
    "open_split",
]


def open_split(
    data: DataConfig | Mapping[str, Any], split: SplitName = "train", *, vocab_size: int, seed: int = 0
) -> Dataset[Any]:
    """Opens the shards of a split as a dataset: `num_samples`, `num_tokens` and `batch(samples)`; a context manager.

    It is a `TokenDataset` of windows, or by the config a `PackedDataset`, or for encoders a `MaskedDataset` or a
    `ClassifiedDataset`.

    Args:
        data: the table [data] of a run's config (docs/configuration.md).
        vocab_size: of the model; larger ids are an error.
        seed: of the masks of a `MaskedDataset`.

    Raises:
        ConfigError: an invalid config, a split that it does not have, or training data in Megatron-LM's order.
        DataError: bad shards, too few tokens, or another tokenizer than the one that made a shard.
    """
    config = data if isinstance(data, DataConfig) else parse(DataConfig, data, "the data's config")
    if split not in SPLITS or not config.has(split):
        raise ConfigError(f"split = {split!r}: the config has none; it may name shards as {', '.join(SPLITS)}")
    if split == "train" and config.order == "megatron":
        raise ConfigError(
            'data.order = "megatron": only runs have this order, `batches` would have another; set order = "megalin"'
        )
    return open_dataset(config, split, vocab_size, seed)


def batches(
    dataset: Dataset[Any],
    batch_size: int,
    *,
    steps: int,
    first_step: int = 0,
    seed: int = 0,
    device: str | torch.device = "cpu",
) -> Iterator[Any]:
    """Yields the batches of steps [first_step, first_step + steps), shuffled, read ahead by a thread.

    They are those of `megalin train` with this `train.seed` and `train.global_batch_size`, for data of one source.
    Step s is the same whatever came before, so the number of finished steps is all that a loop resumes from. Samples
    repeat in another order in the next epoch.

    Args:
        device: copies each batch there.

    Raises:
        ConfigError: a batch size below 1.
        DataError: an unreadable shard, or an id beyond the vocabulary.
    """
    order = BlendedOrder([BlendSource(ONLY_SOURCE, dataset.num_samples)], [Phase(0, [1.0])], seed=seed)
    place = torch.device(device)
    with Loader(dataset, order, global_batch_size=batch_size, micro_batch_size=batch_size) as loader:
        for step in range(first_step, first_step + steps):
            (batch,) = loader.step(step).batches
            yield batch_to(batch, place)
