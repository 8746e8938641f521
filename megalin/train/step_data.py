"""Samples of each step on this rank, read in agreement with all other ranks."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch
from torch import Tensor

from megalin.data.batch import AnyBatch, batch_to, pinned, split_tokens
from megalin.data.loader import Loader, StepBatches
from megalin.data.shards.watch import ShardWatch
from megalin.data.sources import Training
from megalin.errors import DataError, MegalinError
from megalin.ops.labelled_tokens import label_capacity
from megalin.parallel.agreement import on_every_rank, rank, sum_over_ranks, world_size
from megalin.parallel.mesh import Mesh
from megalin.train.config import RunConfig
from megalin.train.preemption import STOP_SIGNALS, PreemptionHandler

_DESCRIBED_RANKS, _DESCRIBED_SAMPLES = 8, 16


class Preemption(NamedTuple):
    """A signal on at least one rank that ends the run."""

    signal: str


class DataFailure(NamedTuple):
    """Samples that at least one rank could not read."""

    error: MegalinError | None
    """This rank's error; None if it read its own samples."""

    def raise_error(self) -> NoReturn:
        """Raises the error of the ranks that have one, on every rank; a collective."""
        on_every_rank(self._raise_own)
        raise AssertionError("no rank has an error")

    def _raise_own(self) -> None:
        if self.error is not None:
            raise self.error


def _preemption(received: list[int]) -> Preemption | None:
    """The first of STOP_SIGNALS that a rank has received, from their counts over all ranks."""
    return next((Preemption(name) for name, count in zip(STOP_SIGNALS, received, strict=True) if count), None)


class StepData(NamedTuple):
    """Samples of a step, or the reason to end the run before it."""

    batches: list[AnyBatch]
    """This rank's micro-batches, on its device."""
    digest: Tensor
    """[2] int64, of the step's token ids over all ranks, for the ledger."""
    wait_seconds: float
    """Longest time that a rank waited for its samples, not for the device, which may still run the previous step."""
    wait_rank: int
    """The rank that waited longest."""
    own_seconds: list[float]
    """By rank: own time in an earlier step, without waits for other ranks; 0 where there is no new one."""
    stop: DataFailure | Preemption | None
    """Reason to end the run, of the same type on every rank; None: the step can be launched."""
    save_has_ended: bool
    """Whether the threads of all ranks have ended with the save in flight; the same on every rank."""


def describe_samples(config: RunConfig, data: Training, mesh: Mesh, batch: int) -> str:
    """Sample ids of a batch, counted from 1, by data-parallel rank: at most 16 of a rank and 8 ranks."""
    train, size = config.train, mesh.samples.size
    positions = np.arange((batch - 1) * train.global_batch_size, batch * train.global_batch_size)
    # [micro-batches, ranks, samples of a micro-batch], as `Loader` assigns them
    ids = data.order.samples(positions).reshape(-1, size, train.micro_batch_size)
    parts = []
    for number in range(min(size, _DESCRIBED_RANKS)):
        own = ids[:, number].flatten().tolist()
        more = f" and {len(own) - _DESCRIBED_SAMPLES} more" if len(own) > _DESCRIBED_SAMPLES else ""
        parts.append(f"{number}: {', '.join(map(str, own[:_DESCRIBED_SAMPLES]))}{more}")
    left = f"; and those of {size - _DESCRIBED_RANKS} more ranks" if size > _DESCRIBED_RANKS else ""
    return "; ".join(parts) + left


def training_loader(config: RunConfig, data: Training, mesh: Mesh, watch: ShardWatch | None = None) -> Loader[Any]:
    """Loader of this rank's micro-batches: its shard of each sequence, in pinned memory if they go to a GPU. A batch
    with more labels than `train.max_label_fraction` allows is a DataError, as is a change that the watch finds."""
    max_fraction = config.train.max_label_fraction

    def prepare(batch: AnyBatch) -> AnyBatch:
        batch = split_tokens(batch, mesh.cp)
        if max_fraction < 1.0:
            _check_label_fraction(batch, max_fraction)
        return pinned(batch) if mesh.device.type == "cuda" else batch

    return Loader(
        data.dataset,
        data.order,
        global_batch_size=config.train.global_batch_size,
        micro_batch_size=config.train.micro_batch_size,
        dp_rank=mesh.samples.rank,
        dp_size=mesh.samples.size,
        workers=config.data.workers,
        read_ahead_steps=config.data.read_ahead_steps,
        prepare=prepare,
        timeout_seconds=config.train.hang_timeout_seconds,
        shards=data.dataset.shards,
        watch=watch,
    )


def _check_label_fraction(batch: AnyBatch, max_fraction: float) -> None:
    tokens, labels = batch.tokens.numel(), int(batch.label_counts().sum())
    if labels > label_capacity(tokens, max_fraction):
        samples = ", ".join(str(number) for number in batch.sample_ids[:4].tolist())
        raise DataError(
            f"{labels} of the {tokens} tokens of a micro-batch (samples {samples}, ...) have a label, more than "
            f"train.max_label_fraction = {max_fraction}; use at least {math.ceil(1000 * labels / tokens) / 1000}, or "
            "leave it out, and start the command again"
        )


class StepReader:
    """Reads the samples of each step, and agrees with all ranks on whether the run goes on.

    `save_has_ended` tests this rank's thread of the save in flight.
    """

    def __init__(
        self, loader: Loader[Any], mesh: Mesh, preemption: PreemptionHandler, save_has_ended: Callable[[], bool]
    ) -> None:
        self._loader, self._mesh, self._preemption = loader, mesh, preemption
        self._save_has_ended = save_has_ended

    def read(self, batch: int, *, own_seconds: float = 0.0) -> StepData:
        """Reads a batch of the sample order, counted from 1. A collective on the host, which does not wait for the
        device.

        `own_seconds` is this rank's own time in an earlier step, the same one on every rank; all ranks receive it.

        A data error, SIGTERM or Ctrl-C is a reason to stop on every rank, of which a data error comes first.

        Raises:
            RankStalledError: on every rank, when ranks launched different overlapped ops. Nothing may wait for the
                device then: such launches can stop it.
        """
        mesh = self._mesh
        own = StepBatches[Any]([], torch.zeros(2, dtype=torch.int64))
        error: MegalinError | None = None
        started = time.perf_counter()
        try:
            with mesh.launches.reading():
                own = self._loader.step(batch - 1)
        except MegalinError as raised:
            error = raised
        waited = time.perf_counter() - started
        # Over all axes: ranks of other layers or shards read the same samples, each from its own disk. Only one of the
        # ranks that share samples counts in the digest.
        counts = int(max(mesh.tp.axis.rank, mesh.cp.axis.rank, mesh.pp.axis.rank) == 0)
        signals = [self._preemption.received == name for name in STOP_SIGNALS]
        stops = [error is not None, self._save_has_ended(), *signals]
        flags = torch.tensor([*stops, mesh.launch_order.residual()]).long()
        times = torch.zeros(2, world_size(), dtype=torch.int64)  # microseconds
        times[:, rank()] = torch.tensor([round(waited * 1e6), round(own_seconds * 1e6)])
        sums = sum_over_ranks(torch.cat([flags, counts * own.digest, times.flatten()]))
        failed, saved, *received, residual = sums[: len(flags)].tolist()
        digest = sums[len(flags) : -times.numel()]
        waits, owns = sums[-times.numel() :].view_as(times)
        longest = int(waits.argmax())
        if residual:
            on_every_rank(mesh.launch_order.compare)
        stop = DataFailure(error) if failed else _preemption(received)
        batches = [] if stop else [batch_to(batch, mesh.device) for batch in own.batches]
        by_rank = [microseconds / 1e6 for microseconds in owns.tolist()]
        return StepData(
            batches,
            digest,
            int(waits[longest]) / 1e6,
            longest,
            by_rank,
            stop,
            save_has_ended=saved == world_size(),
        )
