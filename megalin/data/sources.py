"""Training data of a run: the datasets of its sources as one, and the order of its samples."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Generic, NamedTuple, Protocol, Self, TypeVar

import numpy as np
import torch

from megalin.data.batch import AnyBatch, Batch, BatchT, map_fields
from megalin.data.blend import BlendedOrder, BlendSource, Phase
from megalin.data.config import DataConfig, SplitName
from megalin.data.datasets.classified import ClassifiedDataset
from megalin.data.datasets.masked import MaskedDataset
from megalin.data.datasets.megatron import open_megatron
from megalin.data.datasets.packed import PackedDataset
from megalin.data.datasets.token import TokenDataset
from megalin.data.order import Order, Positions
from megalin.data.shards.indexed_dataset import Shard
from megalin.data.skipped_batches import SkippedBatches
from megalin.errors import DataError

LABEL_MASKS = "label masks of the sources, by sha256"
"""Key of the identity, where a source has a label mask: for each of its shards the mask's sha256, or null."""

SAMPLES = "some samples of the sources, by sha256"
"""Key of the identity: digests of samples as they are read, which follow from the shards, masks, tokenizer and packing
of each source, and of their order."""

SHARD_DIGESTS = "shards of the sources, by sha256"
"""Key of the identity, where the shards were verified: for each shard of a source the sha256 of its .idx, blocks of its
.bin, and a root over these."""

SKIPPED_BATCHES = "skipped batches"
"""Key of the identity, where a run has left out batches: the windows."""

_PROBED_POSITIONS, _PROBED_SAMPLES = 64, 4

BatchT_co = TypeVar("BatchT_co", bound=AnyBatch, covariant=True)


class Samples(Protocol[BatchT_co]):
    """Interface of a dataset to loaders."""

    num_samples: int

    def batch(self, samples: Positions) -> BatchT_co:
        """Samples [B] of these numbers as a batch."""


class Dataset(Samples[BatchT_co], Protocol[BatchT_co]):
    """An open dataset."""

    num_tokens: int

    @property
    def shards(self) -> Sequence[Shard]:
        """Its open shards, without those that have no tokens."""

    def close(self) -> None:
        """Closes its shards."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...


class ConcatDataset(Generic[BatchT]):
    """Concatenation of datasets of one kind: their samples are numbered one dataset after the other.

    Attributes:
        num_tokens: of all of them.
        num_samples: of all of them.
    """

    def __init__(self, datasets: Sequence[Dataset[BatchT]]) -> None:
        self._datasets = list(datasets)
        self._first_samples = np.cumsum([0, *(dataset.num_samples for dataset in datasets)], dtype=np.int64)
        self.num_samples = int(self._first_samples[-1])
        self.num_tokens = sum(dataset.num_tokens for dataset in datasets)

    def batch(self, samples: Positions) -> BatchT:
        """Samples [B] in this order, under the numbers of this dataset. Raises as the datasets do."""
        owners = np.searchsorted(self._first_samples, samples, side="right") - 1
        parts, places = [], []
        for owner in np.unique(owners):
            owned = np.flatnonzero(owners == owner)
            parts.append(self._datasets[owner].batch(samples[owned] - self._first_samples[owner]))
            places.append(owned)
        if len(parts) == 1:
            batch = parts[0]
        else:
            back = torch.from_numpy(np.argsort(np.concatenate(places)))
            batch = map_fields(lambda *fields: torch.cat(fields)[back], *parts)
        return batch._replace(sample_ids=torch.from_numpy(samples.copy()))

    @property
    def shards(self) -> list[Shard]:
        """The open shards of all datasets."""
        return [shard for dataset in self._datasets for shard in dataset.shards]

    def close(self) -> None:
        """Closes all datasets."""
        for dataset in self._datasets:
            dataset.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class SourceUse(NamedTuple):
    """A source and the number of its samples that a run reads."""

    name: str
    tokens: int
    """Tokens of the source's training split."""
    samples: int
    """Samples of an epoch."""
    read: int
    """Samples that the run reads of it."""
    fraction: float
    """Fraction of the run's samples."""
    empty_fraction: float | None = None
    """Fraction of padding in its packed samples; None where samples are not packed."""
    shards: Sequence[Shard] = ()
    """Its open shards."""
    label_masks: Sequence[str | None] = ()
    """sha256 of the label mask of each of its shards; None: a shard without one."""
    some_samples: str = ""
    """sha256 of some of its samples."""

    @property
    def epochs(self) -> float:
        """Number of times that each of its samples is read."""
        return self.read / self.samples


class Training(NamedTuple):
    """Training split of a run."""

    dataset: Dataset[Any]
    order: Order
    uses: list[SourceUse]
    """Samples that the whole run reads of each source."""
    phases: list[tuple[int, dict[str, float]]]
    """(first step, fraction of each source in the samples from it on), without zeros."""
    total_steps: int | None
    """Steps that the order was made for; None: any number."""
    digests: Mapping[Path, Mapping[str, Any]] = {}
    """Records of the shards that were verified, by prefix (`verification.record`); empty with `data.verify` = "off"."""
    skipped: SkippedBatches = SkippedBatches()
    """Batches of the order that the run leaves out. The phases begin at batches of the order, not at steps."""

    def identity(self, step: int) -> dict[str, Any]:
        """Inputs that determine the samples of the first `step` steps, besides the config's seed and sizes (JSON).

        Later sources and phases are not part of it, so they can be added when a run is resumed.
        """
        batches, skipped = self.skipped.batch(step), self.skipped.before(step)
        phases = [phase for phase in self.phases if phase[0] == 0 or phase[0] < batches]
        names = {name for _, fractions in phases for name in fractions}
        masks = {use.name: list(use.label_masks) for use in self.uses if use.name in names and any(use.label_masks)}
        records = {
            use.name: [dict(self.digests.get(shard.prefix, {})) for shard in use.shards]
            for use in self.uses
            if use.name in names
        }
        some = {use.name: use.some_samples for use in self.uses if use.name in names}
        if self.total_steps is not None:  # an order that is stored, in files of the host
            places = np.linspace(0, sum(use.read for use in self.uses) - 1, _PROBED_POSITIONS).astype(np.int64)
            some["order"] = hashlib.sha256(self.order.samples(places).tobytes()).hexdigest()
        return {
            SAMPLES: some,
            "shares of the sources": [[first, fractions] for first, fractions in phases],
            "tokens of the sources": {use.name: use.tokens for use in self.uses if use.name in names},
            "samples of the sources": {use.name: use.samples for use in self.uses if use.name in names},
            "train.steps, for this order": self.total_steps,
            # Without masks and rollbacks as in runs from before there were any.
            **({LABEL_MASKS: masks} if masks else {}),
            **({SHARD_DIGESTS: records} if self.digests else {}),
            **({SKIPPED_BATCHES: skipped.to_json()} if skipped.windows else {}),
        }

    def report_lines(self) -> list[str]:
        """Table of the sources, a line each: tokens, samples, fraction of the run, epochs, padding when packed."""
        width = max(len("source"), *(len(use.name) for use in self.uses))
        head = (
            f"{'source':{width}} {'tokens':>18} {'samples':>14} {'read':>14} {'fraction':>8} {'epochs':>8} {'empty':>8}"
        )
        rows = [
            f"{use.name:{width}} {use.tokens:>18,} {use.samples:>14,} {use.read:>14,} {use.fraction:>8.3%} "
            f"{use.epochs:>8.3f} {'-' if use.empty_fraction is None else format(use.empty_fraction, '.3%'):>8}"
            for use in self.uses
        ]
        return [head, *rows]


def open_training(
    config: DataConfig, vocab_size: int, *, seed: int, steps: int, global_batch_size: int, folder: Path
) -> Training:
    """Opens the training split of a run of `steps` steps in `folder` and builds its order.

    Raises:
        ConfigError, DataError, StorageError: as the datasets and the order do.
    """
    if config.order == "megatron":
        num_samples = steps * global_batch_size
        found = open_megatron(config, vocab_size, seed=seed, num_samples=num_samples, cache=folder / config.cache)
        uses = [
            SourceUse(
                name,
                dataset.num_tokens,
                dataset.epoch_samples,
                count,
                count / num_samples,
                shards=dataset.shards,
                some_samples=sample_digest(dataset),
            )
            for name, dataset, count in zip(found.names, found.datasets, found.counts, strict=True)
        ]
        fractions = {use.name: use.fraction for use in uses}
        dataset = ConcatDataset[Batch](found.datasets)
        return Training(dataset, found.order, uses, [(0, fractions)], total_steps=steps)
    sources = config.training_sources()
    with ExitStack() as stack:
        datasets = [
            stack.enter_context(open_dataset(config, "train", vocab_size, seed, source.paths)) for source in sources
        ]
        stack.pop_all()
    weights = [source.weight for source in sources]
    if None in weights:
        weights = [
            dataset.num_samples if weight is None else 0.0 for dataset, weight in zip(datasets, weights, strict=True)
        ]
    names = [source.name for source in sources]
    phases = [(0, _fractions(dict(zip(names, weights, strict=True))))]
    phases += [(phase.from_step, _fractions(phase.weights)) for phase in config.phases]
    order = BlendedOrder(
        [BlendSource(name, dataset.num_samples) for name, dataset in zip(names, datasets, strict=True)],
        [Phase(first * global_batch_size, [fractions.get(name, 0.0) for name in names]) for first, fractions in phases],
        seed=seed,
    )
    uses = _uses(names, datasets, order.counts(steps * global_batch_size).tolist())
    return Training(ConcatDataset(datasets), order, uses, phases, total_steps=None)


def _fractions(weights: Mapping[str, float | None]) -> dict[str, float]:
    """Weights normalised to a sum of 1, without the zeros."""
    numbers = {name: weight for name, weight in weights.items() if weight}
    total = sum(numbers.values())
    return {name: weight / total for name, weight in numbers.items()}


def _uses(names: Sequence[str], datasets: Sequence[Dataset[Any]], counts: Sequence[int]) -> list[SourceUse]:
    return [
        SourceUse(
            name,
            dataset.num_tokens,
            dataset.num_samples,
            count,
            count / sum(counts),
            dataset.empty_fraction if isinstance(dataset, PackedDataset) else None,
            dataset.shards,
            [None if shard.label_mask is None else shard.label_mask.digest() for shard in dataset.shards],
            sample_digest(dataset),
        )
        for name, dataset, count in zip(names, datasets, counts, strict=True)
    ]


def sample_digest(dataset: Samples[Any]) -> str:
    """sha256, in hex, of some samples of a dataset, from its first to its last one; empty if one of them is bad, which
    ends the run at the step that reads it."""
    numbers = np.unique(np.linspace(0, dataset.num_samples - 1, _PROBED_SAMPLES).astype(np.int64))
    state = hashlib.sha256()
    try:
        batch = dataset.batch(numbers)
    except DataError:
        return ""
    for field in batch:
        if field is not None:
            state.update(field.numpy().tobytes())
    return state.hexdigest()


def open_dataset(
    config: DataConfig, split: SplitName, vocab_size: int, seed: int, paths: Sequence[str] | None = None
) -> Dataset[Any]:
    """Opens a split, or `paths` of its shards: masked tokens with `config.masking`, documents and their classes with
    `config.classification`, else next tokens, cut or packed by `config.packing`. Raises as the datasets do."""
    if config.masking is not None:
        return MaskedDataset.open(config, split, vocab_size, seed, paths)
    if config.classification is not None:
        return ClassifiedDataset.open(config, split, vocab_size, paths)
    if config.packing != "concatenate":
        return PackedDataset.open(config, split, vocab_size, paths)
    return TokenDataset.open(config, split, vocab_size, paths)
