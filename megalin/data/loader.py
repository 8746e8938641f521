"""Batches of a rank: step s of training as a pure function of (seed, s), read ahead by one step; and validation."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, Protocol, Self, TypeVar

import numpy as np

from megalin.data.dataset import DataConfig, TokenDataset
from megalin.data.order import Positions, endless
from megalin.data.packing import AnyBatch, BatchT, pad_rows, take_rows
from megalin.errors import ConfigError

__all__ = ["DataConfig", "Loader", "TokenDataset", "ValidationLoader"]


BatchT_co = TypeVar("BatchT_co", bound=AnyBatch, covariant=True)


class Samples(Protocol[BatchT_co]):
    """A dataset as loaders see it: TokenDataset or MaskedDataset."""

    num_samples: int

    def batch(self, samples: Positions) -> BatchT_co:
        """The samples [B] of these numbers."""


class Loader(Generic[BatchT]):
    """The training batches of one data-parallel rank; the step number is the whole resume state.

    Step s is positions [s G, (s + 1) G) of the endless order (order.py), G = global_batch_size. Micro-batch m of rank r
    is the `micro_batch_size` positions from (m * dp_size + r) * micro_batch_size of these: so the samples of a step,
    and with micro_batch_size * dp_size fixed those of a micro-batch, do not depend on the number of ranks.
    """

    def __init__(
        self,
        dataset: Samples[BatchT],
        *,
        seed: int,
        global_batch_size: int,
        micro_batch_size: int,
        dp_rank: int = 0,
        dp_size: int = 1,
    ) -> None:
        """Starts no reading yet; the first `step` does.

        Raises:
            ConfigError: the global batch is not a whole number of micro-batches on each rank.
        """
        assert 0 <= dp_rank < dp_size, (dp_rank, dp_size)
        together = micro_batch_size * dp_size
        if min(global_batch_size, micro_batch_size) < 1 or global_batch_size % together:
            nearest = max(together, global_batch_size // together * together) if together > 0 else 1
            raise ConfigError(
                f"global_batch_size = {global_batch_size} is not a positive multiple of micro_batch_size = "
                f"{micro_batch_size} times dp = {dp_size}; use {nearest} or {nearest + together}"
            )
        self._dataset: Samples[BatchT] = dataset
        self._seed = seed
        self._global_batch_size = global_batch_size
        self._num_micro_batches = global_batch_size // together
        first = np.arange(self._num_micro_batches, dtype=np.int64) * dp_size + dp_rank
        self._offsets: Positions = first[:, None] * micro_batch_size + np.arange(micro_batch_size)  # [micro, B]
        self._reader = ThreadPoolExecutor(max_workers=1, thread_name_prefix="megalin-data")
        self._ahead: tuple[int, Future[list[BatchT]]] | None = None

    def step(self, step: int) -> list[BatchT]:
        """The micro-batches of `step` (>= 0), in order; step + 1 is read meanwhile in a thread.

        Any step may be asked for; only the one after the last is ready. The time in this call is the wait for data.

        Raises:
            DataError: as the dataset does, also for a step that was read ahead, when it is asked for.
        """
        assert step >= 0, step
        if self._ahead is not None and self._ahead[0] == step:
            current = self._ahead[1]
        else:
            current = self._reader.submit(self._read, step)
        self._ahead = (step + 1, self._reader.submit(self._read, step + 1))
        return current.result()

    def _read(self, step: int) -> list[BatchT]:
        positions = self._offsets + step * self._global_batch_size
        samples = endless(positions, num_samples=self._dataset.num_samples, seed=self._seed)
        return [self._dataset.batch(row) for row in samples]

    def close(self) -> None:
        """Ends the thread; what it was reading is dropped. The dataset stays open."""
        self._ahead = None
        self._reader.shutdown(wait=True, cancel_futures=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class ValidationLoader(Generic[BatchT]):
    """A rank's batches of a split in its own order, each sample once; every rank has the same number of batches.

    Batch k of rank r is the samples from (k * dp_size + r) * micro_batch_size. What is missing at the end are padding
    rows: no valid label, sample id -1.
    """

    def __init__(
        self,
        dataset: Samples[BatchT],
        *,
        micro_batch_size: int,
        dp_rank: int = 0,
        dp_size: int = 1,
        max_samples: int | None = None,
    ) -> None:
        """`max_samples` bounds how much of the split is read: its first samples, over all ranks."""
        assert 0 <= dp_rank < dp_size, (dp_rank, dp_size)
        assert micro_batch_size >= 1, micro_batch_size
        self._dataset: Samples[BatchT] = dataset
        self._micro_batch_size = micro_batch_size
        self._dp_rank = dp_rank
        self._dp_size = dp_size
        self.num_samples = dataset.num_samples if max_samples is None else min(max_samples, dataset.num_samples)

    def __len__(self) -> int:
        """Batches a rank."""
        return -(-self.num_samples // (self._micro_batch_size * self._dp_size))

    def __iter__(self) -> Iterator[BatchT]:
        """Reads from the first batch on. Raises DataError as the dataset does."""
        for index in range(len(self)):
            first = (index * self._dp_size + self._dp_rank) * self._micro_batch_size
            samples = np.arange(first, min(first + self._micro_batch_size, self.num_samples), dtype=np.int64)
            if samples.size:
                yield pad_rows(self._dataset.batch(samples), self._micro_batch_size)
            else:
                yield self._padding()

    def _padding(self) -> BatchT:
        # Any sample gives the shapes; none of its rows is kept.
        first = self._dataset.batch(np.zeros(1, np.int64))
        return pad_rows(take_rows(first, slice(0)), self._micro_batch_size)
