"""Simulated process group: one process on one GPU runs as rank 0 of several, without waiting for others.

Collectives copy this rank's own tensors in place of the others', so values keep a realistic magnitude. The steps do not
train: sums over ranks are this rank's values alone. So tokens and labels must lie in this rank's slice of the
vocabulary (`with_own_vocabulary`): the other ranks' rows of the tables do not exist.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _create_work_from_future
from torch.futures import Future

from megalin.parallel.embedding import padded_rows
from megalin.train.config import RunConfig


def _done(result: Any) -> Any:
    future: Future[Any] = Future()
    future.set_result(result)
    return _create_work_from_future(future)


class SimulatedProcessGroup(dist.ProcessGroup):
    """Process group whose collectives are copies of the own tensors, enqueued on the current CUDA stream."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._size = size

    def size(self) -> int:
        return self._size

    def getBackendName(self) -> str:  # noqa: N802
        return "simulated"

    @property
    def pg_name(self) -> str:
        return dist.distributed_c10d._world.pg_names[self]

    group_name = pg_name

    def allreduce(self, tensors: Sequence[Tensor], options: Any = None) -> Any:
        return _done(tensors)

    allreduce_coalesced = broadcast = allreduce

    def barrier(self, options: Any = None) -> Any:
        return _done(None)

    def allgather(self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], options: Any = None) -> Any:
        for received, sent in zip(outputs, inputs, strict=True):
            for target in received:
                target.copy_(sent)
        return _done(outputs)

    def all_gather_single(self, output: Tensor, sent: Tensor, options: Any = None) -> Any:
        output.view(self._size, -1).copy_(sent.reshape(1, -1).expand(self._size, -1))
        return _done(output)

    def reduce_scatter_single(self, output: Tensor, sent: Tensor, options: Any = None) -> Any:
        output.view(-1).copy_(sent.view(self._size, -1)[0])
        return _done(output)

    def all_to_all_single(self, output: Tensor, sent: Tensor, *splits: Any) -> Any:
        output.view(-1).copy_(sent.view(-1))
        return _done(output)

    def all_gather_single_coalesced(
        self, outputs: Sequence[Tensor], sent: Sequence[Tensor], options: Any = None
    ) -> Any:
        for pair in zip(outputs, sent, strict=True):
            self.all_gather_single(*pair)
        return _done(outputs)

    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[Tensor], sent: Sequence[Tensor], options: Any = None
    ) -> Any:
        for pair in zip(outputs, sent, strict=True):
            self.reduce_scatter_single(*pair)
        return _done(outputs)

    # Names of torch before 2.12.
    _allgather_base, _reduce_scatter_base, alltoall_base = all_gather_single, reduce_scatter_single, all_to_all_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced


@contextmanager
def simulated_ranks(size: int, device: torch.device) -> Iterator[None]:
    """Creates a default process group of `size` ranks, with this process as rank 0 and the only one."""
    if not hasattr(dist.Backend, "SIMULATED"):
        dist.Backend.register_backend(
            "simulated", lambda store, rank, size, timeout: SimulatedProcessGroup(rank, size), devices=["cpu", "cuda"]
        )
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("simulated", store=dist.HashStore(), rank=0, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def with_own_vocabulary(run: RunConfig) -> RunConfig:
    """The run with a vocabulary of the token ids whose rows rank 0 holds under tensor parallelism, to draw tokens from:
    no rank would have the logit of another label, and the loss would be infinite."""
    size = min(run.model.vocab_size, padded_rows(run.model.vocab_size) // run.parallel.tp)
    return run.model_copy(update={"model": run.model.model_copy(update={"vocab_size": size})})
