"""Batches of a rank: a step of training as a function of its number, read ahead in threads; and validation."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, NamedTuple, Self

import numpy as np
import numpy.typing as npt
import torch

from megalin.data.batch import BatchT, pad_rows, take_rows
from megalin.data.order import Order, Positions
from megalin.data.sources import Samples
from megalin.errors import ConfigError

_DIGEST_BYTES = 16


class StepBatches(NamedTuple, Generic[BatchT]):
    """What a rank trains on in a step."""

    batches: list[BatchT]
    """Its micro-batches, in order."""
    digest: torch.Tensor
    """[2] int64, its part of the digest of the step's token ids: the sum over ranks, wrapping, is that of the step."""


class Loader(Generic[BatchT]):
    """The training batches of one data-parallel rank; the step number is the whole resume state.

    Step s is positions [s G, (s + 1) G) of the order, G = global_batch_size. Micro-batch m of rank r is the
    `micro_batch_size` positions from (m * dp_size + r) * micro_batch_size of these: so the samples of a step, and with
    micro_batch_size * dp_size fixed those of a micro-batch, depend on the number neither of ranks nor of threads.
    """

    def __init__(
        self,
        dataset: Samples[BatchT],
        order: Order,
        *,
        global_batch_size: int,
        micro_batch_size: int,
        dp_rank: int = 0,
        dp_size: int = 1,
        workers: int = 1,
        read_ahead_steps: int = 1,
        prepare: Callable[[BatchT], BatchT] | None = None,
    ) -> None:
        """Starts no reading yet; the first `step` does.

        Args:
            workers: threads that read; each takes an equal part of a step's micro-batches.
            read_ahead_steps: steps after the asked one that are read meanwhile.
            prepare: done to each micro-batch by the thread that read it, after its digest: the rank's tokens of each
                row, pinned memory.

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
        self._order = order
        self._global_batch_size = global_batch_size
        first = np.arange(global_batch_size // together, dtype=np.int64) * dp_size + dp_rank
        self._offsets: Positions = first[:, None] * micro_batch_size + np.arange(micro_batch_size)  # [micro, B]
        self._prepare = prepare
        self._read_ahead_steps = read_ahead_steps
        self._workers = min(workers, len(self._offsets))
        self._readers = ThreadPoolExecutor(max_workers=self._workers, thread_name_prefix="megalin-data")
        self._ahead: dict[int, list[Future[StepBatches[BatchT]]]] = {}

    def step(self, step: int) -> StepBatches[BatchT]:
        """The micro-batches of `step` (>= 0); the steps after it are read meanwhile.

        Any step may be asked for; only those after the last are ready. The time in this call is the wait for data.

        Raises:
            DataError: as dataset and order do, also for a step that was read ahead, when it is asked for.
        """
        assert step >= 0, step
        wanted = range(step, step + 1 + self._read_ahead_steps)
        for number in self._ahead.keys() - wanted:
            for future in self._ahead.pop(number):
                future.cancel()
        for number in wanted:
            if number not in self._ahead:
                # A task a thread, not one a micro-batch: what is handed over costs the trainer's own thread time.
                self._ahead[number] = [
                    self._readers.submit(self._read, number, worker) for worker in range(self._workers)
                ]
        parts = [future.result() for future in self._ahead.pop(step)]
        order = range(len(self._offsets))
        batches = [parts[place % self._workers].batches[place // self._workers] for place in order]
        return StepBatches(batches, torch.stack([part.digest for part in parts]).sum(0))

    def _read(self, step: int, worker: int) -> StepBatches[BatchT]:
        """Micro-batches `worker`, `worker` + workers and so on of a step, and their part of its digest."""
        batches, digest = [], np.zeros(_DIGEST_BYTES // 8, np.int64)
        for offsets in self._offsets[worker :: self._workers]:
            batch = self._dataset.batch(self._order.samples(offsets + step * self._global_batch_size))
            digest += _digest(offsets, batch.tokens)
            batches.append(batch if self._prepare is None else self._prepare(batch))
        return StepBatches(batches, torch.from_numpy(digest))

    def close(self) -> None:
        """Ends the threads; what they were reading is dropped. The dataset stays open."""
        self._ahead = {}
        self._readers.shutdown(wait=True, cancel_futures=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _digest(offsets: Positions, tokens: torch.Tensor) -> npt.NDArray[np.int64]:
    """The sum, wrapping, of a hash of each row's place in the step and its token ids: [2] int64."""
    hashes = [
        hashlib.blake2b(offset.tobytes() + row.tobytes(), digest_size=_DIGEST_BYTES).digest()
        for offset, row in zip(offsets.astype("<i8"), tokens.numpy().astype("<i8", copy=False), strict=True)
    ]
    words = np.frombuffer(b"".join(hashes), "<i8").reshape(-1, _DIGEST_BYTES // 8)
    return words.sum(axis=0, dtype=np.int64)


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
