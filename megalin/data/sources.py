"""What a run reads: the dataset of each of its sources, seen as one, and the order of its samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Generic, NamedTuple, Protocol, Self, TypeVar

import numpy as np
import torch

from megalin.data.batch import AnyBatch, Batch, BatchT
from megalin.data.blend import BlendedOrder, BlendSource, Phase
from megalin.data.config import DataConfig, SplitName
from megalin.data.datasets.masked import MaskedDataset
from megalin.data.datasets.megatron import open_megatron
from megalin.data.datasets.packed import PackedDataset
from megalin.data.datasets.token import TokenDataset
from megalin.data.order import Order, Positions

BatchT_co = TypeVar("BatchT_co", bound=AnyBatch, covariant=True)


class Samples(Protocol[BatchT_co]):
    """A dataset as loaders see it."""

    num_samples: int

    def batch(self, samples: Positions) -> BatchT_co:
        """The samples [B] of these numbers."""


class Dataset(Samples[BatchT_co], Protocol[BatchT_co]):
    """A dataset that was opened."""

    num_tokens: int

    def close(self) -> None:
        """Closes its shards."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...


class JoinedDataset(Generic[BatchT]):
    """Datasets of one kind as one: their samples are numbered one dataset after the other.

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
        """The samples [B], in this order, each under its number here. Raises as the datasets do."""
        owners = np.searchsorted(self._first_samples, samples, side="right") - 1
        parts, places = [], []
        for owner in np.unique(owners):
            rows = np.flatnonzero(owners == owner)
            parts.append(self._datasets[owner].batch(samples[rows] - self._first_samples[owner]))
            places.append(rows)
        if len(parts) == 1:
            joined = parts[0]
        else:
            back = torch.from_numpy(np.argsort(np.concatenate(places)))
            joined = type(parts[0])(*(torch.cat(field)[back] for field in zip(*parts, strict=True)))
        return joined._replace(sample_ids=torch.from_numpy(samples.copy()))

    def close(self) -> None:
        """Closes all of them."""
        for dataset in self._datasets:
            dataset.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class SourceUse(NamedTuple):
    """What a run reads of a source."""

    name: str
    tokens: int
    """Tokens of the source's training split."""
    samples: int
    """Its samples."""
    read: int
    """Samples of it that the run reads."""
    share: float
    """Of the samples of the run."""
    empty_share: float | None = None
    """Share of the places in its packed rows that hold no token; None where samples are not packed."""

    @property
    def epochs(self) -> float:
        """How often each of its samples is read."""
        return self.read / self.samples


class Training(NamedTuple):
    """What a run trains on."""

    dataset: Dataset[Any]
    order: Order
    uses: list[SourceUse]
    """What the whole run reads of each source."""
    phases: list[tuple[int, dict[str, float]]]
    """From which step on which source has which share; no zeros."""
    total_steps: int | None
    """Steps that the order was made for; None: for any number."""

    def identity(self, step: int) -> dict[str, Any]:
        """What the samples of the first `step` steps are a function of, beside the config's seed and sizes (JSON).

        Sources and phases that come later are not part of it, so a run may be given some while it goes on.
        """
        phases = [phase for phase in self.phases if phase[0] == 0 or phase[0] < step]
        names = {name for _, shares in phases for name in shares}
        return {
            "shares of the sources": [[first, shares] for first, shares in phases],
            "tokens of the sources": {use.name: use.tokens for use in self.uses if use.name in names},
            "samples of the sources": {use.name: use.samples for use in self.uses if use.name in names},
            "train.steps, for this order": self.total_steps,
        }

    def report_lines(self) -> list[str]:
        """The report of the sources, a line each: tokens, samples, share and epochs of the run, places left empty."""
        width = max(len("source"), *(len(use.name) for use in self.uses))
        head = f"{'source':{width}} {'tokens':>18} {'samples':>14} {'read':>14} {'share':>8} {'epochs':>8} {'empty':>8}"
        rows = [
            f"{use.name:{width}} {use.tokens:>18,} {use.samples:>14,} {use.read:>14,} {use.share:>8.3%} "
            f"{use.epochs:>8.3f} {'-' if use.empty_share is None else format(use.empty_share, '.3%'):>8}"
            for use in self.uses
        ]
        return [head, *rows]


def open_training(
    config: DataConfig, vocab_size: int, *, seed: int, steps: int, global_batch_size: int, folder: Path
) -> Training:
    """Opens the training split of a run of `steps` steps in `folder`, and makes its order.

    Raises:
        ConfigError, DataError, StorageError: as the datasets and the order do.
    """
    if config.order == "megatron":
        num_samples = steps * global_batch_size
        found = open_megatron(config, vocab_size, seed=seed, num_samples=num_samples, cache=folder / config.cache)
        uses = [
            SourceUse(name, dataset.num_tokens, dataset.epoch_samples, count, count / num_samples)
            for name, dataset, count in zip(found.names, found.datasets, found.counts, strict=True)
        ]
        shares = {use.name: use.share for use in uses}
        joined = JoinedDataset[Batch](found.datasets)
        return Training(joined, found.order, uses, [(0, shares)], total_steps=steps)
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
    phases = [(0, _shares(dict(zip(names, weights, strict=True))))]
    phases += [(phase.from_step, _shares(phase.weights)) for phase in config.phases]
    order = BlendedOrder(
        [BlendSource(name, dataset.num_samples) for name, dataset in zip(names, datasets, strict=True)],
        [Phase(first * global_batch_size, [shares.get(name, 0.0) for name in names]) for first, shares in phases],
        seed=seed,
    )
    uses = _uses(names, datasets, order.counts(steps * global_batch_size).tolist())
    return Training(JoinedDataset(datasets), order, uses, phases, total_steps=None)


def _shares(weights: Mapping[str, float | None]) -> dict[str, float]:
    """Weights in any unit as shares of 1, without the zeros."""
    numbers = {name: weight for name, weight in weights.items() if weight}
    whole = sum(numbers.values())
    return {name: weight / whole for name, weight in numbers.items()}


def _uses(names: Sequence[str], datasets: Sequence[Dataset[Any]], counts: Sequence[int]) -> list[SourceUse]:
    return [
        SourceUse(
            name,
            dataset.num_tokens,
            dataset.num_samples,
            count,
            count / sum(counts),
            dataset.empty_share if isinstance(dataset, PackedDataset) else None,
        )
        for name, dataset, count in zip(names, datasets, counts, strict=True)
    ]


def open_dataset(
    config: DataConfig, split: SplitName, vocab_size: int, seed: int, paths: Sequence[str] | None = None
) -> Dataset[Any]:
    """The samples of a split, or of `paths` of its shards: of masked tokens where `config.masking` is set, else of next
    tokens, cut or packed as `config.packing` says. Raises as the datasets do."""
    if config.masking is not None:
        return MaskedDataset.open(config, split, vocab_size, seed, paths)
    if config.packing != "concatenate":
        return PackedDataset.open(config, split, vocab_size, paths)
    return TokenDataset.open(config, split, vocab_size, paths)
