"""Loaders of a rank: training batches as a function of the step number, read ahead in threads; validation."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from typing import Generic, NamedTuple, Self

import numpy as np
import numpy.typing as npt
import torch

from megalin.data.batch import BatchT, pad_samples, take_samples, with_draw
from megalin.data.order import Order, Positions
from megalin.data.shards.indexed_dataset import Shard
from megalin.data.shards.watch import ShardWatch
from megalin.data.sources import Samples
from megalin.errors import ConfigError, RankStalledError

_DIGEST_BYTES = 16
_NAMED_SAMPLES = 8


class StepBatches(NamedTuple, Generic[BatchT]):
    """Micro-batches of a rank in a step, and their digest."""

    batches: list[BatchT]
    """Micro-batches, in order."""
    digest: torch.Tensor
    """[2] int64, its term of the digest of the step's token ids: the step's is the sum over ranks, wrapping."""


class _Read(NamedTuple):
    """A micro-batch that a thread reads."""

    worker: int
    samples: Positions


class Loader(Generic[BatchT]):
    """Training batches of one data-parallel rank; its only state to resume from is the step number.

    Step s is positions [s G, (s + 1) G) of the order, G = global_batch_size. Micro-batch m of rank r is the
    `micro_batch_size` positions from (m * dp_size + r) * micro_batch_size of these. The samples of a step, and with
    micro_batch_size * dp_size fixed those of a micro-batch, do not depend on the number of ranks or threads. A sample's
    position is its `draw`: unlike its id it does not recur in the next epoch.
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
        timeout_seconds: float | None = None,
        shards: Sequence[Shard] = (),
        watch: ShardWatch | None = None,
    ) -> None:
        """Creates the loader; the first `step` starts reading.

        Args:
            workers: threads that read, each an equal number of a step's micro-batches.
            read_ahead_steps: steps after the requested one that are read in the background.
            prepare: called on each micro-batch by the thread that read it, after its digest: takes the rank's tokens of
                each sample, pins memory.
            timeout_seconds: longest wait for the samples of a step; None: no limit.
            shards: of the dataset, for the message about a thread that does not end its read.
            watch: of the shards, entered with the loader; its error is raised by `step`.

        Raises:
            ConfigError: the global batch is not a whole number of micro-batches on each rank.
        """
        assert 0 <= dp_rank < dp_size, (dp_rank, dp_size)
        multiple = micro_batch_size * dp_size
        if min(global_batch_size, micro_batch_size) < 1 or global_batch_size % multiple:
            nearest = max(multiple, global_batch_size // multiple * multiple) if multiple > 0 else 1
            raise ConfigError(
                f"global_batch_size = {global_batch_size} is not a positive multiple of micro_batch_size = "
                f"{micro_batch_size} times dp = {dp_size}; use {nearest} or {nearest + multiple}"
            )
        self._dataset: Samples[BatchT] = dataset
        self._order = order
        self._global_batch_size = global_batch_size
        first = np.arange(global_batch_size // multiple, dtype=np.int64) * dp_size + dp_rank
        self._offsets: Positions = first[:, None] * micro_batch_size + np.arange(micro_batch_size)  # [micro, B]
        self._prepare = prepare
        self._read_ahead_steps = read_ahead_steps
        self._workers = min(workers, len(self._offsets))
        self._readers = ThreadPoolExecutor(max_workers=self._workers, thread_name_prefix="megalin-data")
        self._ahead: dict[int, list[Future[StepBatches[BatchT]]]] = {}
        self._timeout_seconds, self._shards, self._watch = timeout_seconds, shards, watch
        self._reads: dict[int, _Read] = {}  # by thread
        self._stuck = False

    def step(self, step: int) -> StepBatches[BatchT]:
        """Micro-batches of `step` (>= 0); the next steps are read in the background.

        Any step may be requested; only those after the last are ready. The time in this call is the wait for data.

        Raises:
            DataError: as dataset and order do, for a step that was read ahead when it is requested; or as the watch.
            RankStalledError: the samples do not come in time; names the thread, the file and the samples.
        """
        assert step >= 0, step
        if self._watch is not None:
            self._watch.raise_problem()
        window = range(step, step + 1 + self._read_ahead_steps)
        for number in self._ahead.keys() - window:
            for future in self._ahead.pop(number):
                future.cancel()
        for number in window:
            if number not in self._ahead:
                # One task per thread, not per micro-batch: each submission costs time of the training thread.
                self._ahead[number] = [
                    self._readers.submit(self._read, number, worker) for worker in range(self._workers)
                ]
        parts = self._wait(step, self._ahead.pop(step))
        order = range(len(self._offsets))
        batches = [parts[place % self._workers].batches[place // self._workers] for place in order]
        return StepBatches(batches, torch.stack([part.digest for part in parts]).sum(0))

    def _wait(self, step: int, futures: list[Future[StepBatches[BatchT]]]) -> list[StepBatches[BatchT]]:
        done = wait(futures, self._timeout_seconds, FIRST_EXCEPTION)
        for future in futures:  # in their order, so that of several errors the same one is raised
            if future in done.done:
                future.result()
        if not done.not_done:
            return [future.result() for future in futures]
        self._stuck = True
        reads = sorted(self._reads.items(), key=lambda item: item[1].worker)
        stuck = [self._describe_read(thread, read) for thread, read in reads]
        raise RankStalledError(
            f"batch {step + 1} was not read within {self._timeout_seconds:g} s (train.hang_timeout_seconds): "
            f"{'; '.join(stuck) or 'no data worker reads'}. Check the file system, and run the same command to "
            "continue from the newest checkpoint"
        )

    def _describe_read(self, thread: int, read: _Read) -> str:
        files = [f"{shard.prefix}.bin" for shard in self._shards if thread in shard.reading]
        samples = ", ".join(map(str, read.samples[:_NAMED_SAMPLES].tolist()))
        more = ", ..." if len(read.samples) > _NAMED_SAMPLES else ""
        return f"data worker {read.worker} reads {files[0] if files else 'no file'} for samples {samples}{more}"

    def _read(self, step: int, worker: int) -> StepBatches[BatchT]:
        """Micro-batches `worker`, `worker` + workers and so on of a step, and their term of its digest."""
        batches, digest = [], np.zeros(_DIGEST_BYTES // 8, np.int64)
        for offsets in self._offsets[worker :: self._workers]:
            draw = offsets + step * self._global_batch_size
            samples = self._order.samples(draw)
            self._reads[threading.get_ident()] = _Read(worker, samples)
            batch = with_draw(self._dataset.batch(samples), torch.from_numpy(draw))
            digest += _digest(offsets, batch.tokens)
            batches.append(batch if self._prepare is None else self._prepare(batch))
        self._reads.pop(threading.get_ident(), None)
        return StepBatches(batches, torch.from_numpy(digest))

    def close(self) -> None:
        """Stops the threads and drops their batches. The dataset stays open."""
        self._ahead = {}
        self._readers.shutdown(wait=not self._stuck, cancel_futures=True)
        if self._watch is not None:
            self._watch.__exit__()

    def __enter__(self) -> Self:
        if self._watch is not None:
            self._watch.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _digest(offsets: Positions, tokens: torch.Tensor) -> npt.NDArray[np.int64]:
    """Sum, wrapping, of a hash of each sample's position in the step and its token ids: [2] int64."""
    hashes = [
        hashlib.blake2b(offset.tobytes() + ids.tobytes(), digest_size=_DIGEST_BYTES).digest()
        for offset, ids in zip(offsets.astype("<i8"), tokens.numpy().astype("<i8", copy=False), strict=True)
    ]
    words = np.frombuffer(b"".join(hashes), "<i8").reshape(-1, _DIGEST_BYTES // 8)
    return words.sum(axis=0, dtype=np.int64)


class ValidationLoader(Generic[BatchT]):
    """Batches of a rank over a split in file order, each sample once; every rank has the same number of batches.

    Batch k of rank r is the samples from (k * dp_size + r) * micro_batch_size. The end is filled with padding samples:
    no valid label, sample id -1.
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
        """Reads at most the first `max_samples` of the split, over all ranks."""
        assert 0 <= dp_rank < dp_size, (dp_rank, dp_size)
        assert micro_batch_size >= 1, micro_batch_size
        self._dataset: Samples[BatchT] = dataset
        self._micro_batch_size = micro_batch_size
        self._dp_rank = dp_rank
        self._dp_size = dp_size
        self.num_samples = dataset.num_samples if max_samples is None else min(max_samples, dataset.num_samples)

    def __len__(self) -> int:
        """Batches per rank."""
        return -(-self.num_samples // (self._micro_batch_size * self._dp_size))

    def __iter__(self) -> Iterator[BatchT]:
        """Iterates from the first batch. Raises DataError as the dataset does."""
        for index in range(len(self)):
            first = (index * self._dp_size + self._dp_rank) * self._micro_batch_size
            samples = np.arange(first, min(first + self._micro_batch_size, self.num_samples), dtype=np.int64)
            if samples.size:
                yield pad_samples(self._dataset.batch(samples), self._micro_batch_size)
            else:
                yield self._padding()

    def _padding(self) -> BatchT:
        # Any sample gives the shapes; it is not kept.
        first = self._dataset.batch(np.zeros(1, np.int64))
        return pad_samples(take_samples(first, slice(0)), self._micro_batch_size)
