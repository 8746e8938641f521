"""Work whose result or error all ranks share: if it fails on one rank, every rank raises the same error.

Without a process group the process is rank 0 of 1 and nothing is sent.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from megalin.errors import MegalinError, StorageError

ResultT = TypeVar("ResultT")


class _Failure(NamedTuple):
    kind: type[MegalinError]
    message: str


def distributed() -> bool:
    """True where this process belongs to a process group."""
    return dist.is_available() and dist.is_initialized()


def rank() -> int:
    """This process's rank in the default group, 0 without one."""
    return dist.get_rank() if distributed() else 0


def world_size() -> int:
    """Number of ranks in the default group, 1 without one."""
    return dist.get_world_size() if distributed() else 1


def on_rank_zero(work: Callable[[], ResultT]) -> ResultT:
    """Runs `work` on rank 0; every rank returns its result. One broadcast.

    Raises:
        MegalinError: on every rank when `work` raised one on rank 0 (an OSError as StorageError).
    """
    outcome = [_attempt(work) if rank() == 0 else None]
    if distributed():
        dist.broadcast_object_list(outcome, src=0)
    result: Any = outcome[0]
    if isinstance(result, _Failure):
        raise result.kind(result.message)
    return result


def on_every_rank(work: Callable[[], ResultT]) -> list[ResultT]:
    """Runs `work` on every rank; every rank returns all results by rank. One all-gather.

    Raises:
        MegalinError: on every rank when any rank's `work` raised one (an OSError as StorageError); names the ranks.
    """
    mine = _attempt(work)
    outcomes: list[Any] = [mine]
    if distributed():
        outcomes = [None] * world_size()
        dist.all_gather_object(outcomes, mine)
    failures = [(number, outcome) for number, outcome in enumerate(outcomes) if isinstance(outcome, _Failure)]
    if failures:
        if len(failures) == len(outcomes) and len({failure.message for _, failure in failures}) == 1:
            raise failures[0][1].kind(failures[0][1].message)
        raise failures[0][1].kind("\n".join(f"rank {number}: {failure.message}" for number, failure in failures))
    return outcomes


def sum_over_ranks(values: Tensor) -> Tensor:
    """Sum over all ranks of a tensor in host memory. One all-reduce on the CPU, which does not wait for the device."""
    total = values.clone()
    if distributed():
        dist.all_reduce(total)
    return total


def max_over_ranks(values: Tensor) -> Tensor:
    """Maximum over all ranks of each element of a tensor in host memory. One all-reduce on the CPU."""
    largest = values.clone()
    if distributed():
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return largest


def gather_over_ranks(values: Tensor) -> Tensor:
    """The tensors of all ranks, [ranks, ...], each in host memory and of the same shape. One all-gather on the CPU."""
    gathered = [torch.empty_like(values) for _ in range(world_size())]
    if not distributed():
        return values[None]
    dist.all_gather(gathered, values)
    return torch.stack(gathered)


def gather_texts(text: str) -> list[str]:
    """The texts of all ranks. Two all-gathers on the CPU, without pickled objects."""
    data = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8) if text else torch.empty(0, dtype=torch.uint8)
    sizes = gather_over_ranks(torch.tensor([len(data)])).flatten().tolist()
    padded = torch.nn.functional.pad(data, (0, max(sizes) - len(data)))
    rows = gather_over_ranks(padded)
    return [bytes(row[:size].tolist()).decode() for row, size in zip(rows, sizes, strict=True)]


def _attempt(work: Callable[[], ResultT]) -> ResultT | _Failure:
    try:
        return work()
    except MegalinError as error:
        return _Failure(type(error), str(error))
    except OSError as error:
        return _Failure(StorageError, str(error))
