"""Work whose result or error all ranks share: if it fails on one rank, every rank raises the same error.

Without a process group the process is rank 0 of 1 and nothing is sent.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from megalin import errors
from megalin.errors import MegalinError, StorageError
from megalin.parallel.heartbeats import current
from megalin.parallel.messages import broadcast_bytes, decode, encode, gather_bytes

ResultT = TypeVar("ResultT")

_ERRORS: dict[str, type[MegalinError]] = {
    cls.__name__: cls for cls in vars(errors).values() if isinstance(cls, type) and issubclass(cls, MegalinError)
}


_log = logging.getLogger(__name__)


class Channel(Protocol):
    """Messages between all ranks on another way than the default group's collectives, for a thread of its own."""

    def broadcast(self, data: bytes | None) -> bytes:
        """Rank 0's bytes on every rank; the others pass None."""

    def gather(self, data: bytes) -> list[bytes]:
        """Every rank's bytes, by rank."""

    def beat(self) -> None:
        """Records progress of the thread."""


class _Outcome(NamedTuple):
    result: Any
    error: MegalinError | None


def distributed() -> bool:
    """True where this process belongs to a process group."""
    return dist.is_available() and dist.is_initialized()


def rank() -> int:
    """This process's rank in the default group, 0 without one."""
    return dist.get_rank() if distributed() else 0


def world_size() -> int:
    """Number of ranks in the default group, 1 without one."""
    return dist.get_world_size() if distributed() else 1


def on_rank_zero(work: Callable[[], ResultT], kind: Any = None, *, channel: Channel | None = None) -> ResultT:
    """Runs `work` on rank 0; every rank returns its result. One message (two broadcasts).

    Args:
        kind: the type of a result that is not plain JSON, as in `messages.encode`.
        channel: sends the message, in place of collectives of the default group.

    Raises:
        MegalinError: on every rank when `work` raised one on rank 0 (an OSError as StorageError; with a channel, which
            must not lose a rank, any other exception as MegalinError).
    """
    outcome = _attempt(work, channel) if rank() == 0 else None
    if distributed():
        data = None if outcome is None else _encode(outcome, kind)
        outcome = _decode(broadcast_bytes(data) if channel is None else channel.broadcast(data), kind)
    assert outcome is not None
    if outcome.error is not None:
        raise outcome.error
    return outcome.result


def on_every_rank(work: Callable[[], ResultT], kind: Any = None, *, channel: Channel | None = None) -> list[ResultT]:
    """Runs `work` on every rank; every rank returns all results by rank. One message (two all-gathers).

    Args:
        kind, channel: as in `on_rank_zero`.

    Raises:
        MegalinError: on every rank when any rank's `work` raised one (an OSError as StorageError; with a channel any
            other exception as MegalinError); names the ranks.
    """
    outcomes = [_attempt(work, channel)]
    if distributed():
        data = _encode(outcomes[0], kind)
        gathered = gather_bytes(data, None) if channel is None else channel.gather(data)
        outcomes = [_decode(each, kind) for each in gathered]
    failures = [(number, outcome.error) for number, outcome in enumerate(outcomes) if outcome.error is not None]
    if failures:
        first = failures[0][1]
        if len(failures) == len(outcomes) and len({str(error) for _, error in failures}) == 1:
            raise first
        raise type(first)("\n".join(f"rank {number}: {error}" for number, error in failures))
    return [outcome.result for outcome in outcomes]


def sum_over_ranks(values: Tensor) -> Tensor:
    """Sum over all ranks of a tensor in host memory. One all-reduce on the CPU, which does not wait for the device."""
    total = values.clone()
    if distributed():
        with current().waiting("all_reduce", "host", total.shape):
            dist.all_reduce(total)
    return total


def max_over_ranks(values: Tensor) -> Tensor:
    """Maximum over all ranks of each element of a tensor in host memory. One all-reduce on the CPU."""
    largest = values.clone()
    if distributed():
        with current().waiting("all_reduce max", "host", largest.shape):
            dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return largest


def equal_over_ranks(data: bytes) -> bool:
    """Whether all ranks have the same bytes, by their sha256. One all-reduce of 64 bytes on the CPU."""
    digest = torch.frombuffer(bytearray(hashlib.sha256(data).digest()), dtype=torch.int64)
    # The maximum of the complement is the complement of the minimum.
    largest, complement = max_over_ranks(torch.stack([digest, ~digest]))
    return bool((largest == ~complement).all())


def gather_over_ranks(values: Tensor) -> Tensor:
    """The tensors of all ranks, [ranks, ...], each in host memory and of the same shape. One all-gather on the CPU."""
    gathered = [torch.empty_like(values) for _ in range(world_size())]
    if not distributed():
        return values[None]
    with current().waiting("all_gather", "host", values.shape):
        dist.all_gather(gathered, values)
    return torch.stack(gathered)


def encode_error(error: MegalinError) -> bytes:
    """The error as bytes, for `decode_error`."""
    return encode([_error_name(error), str(error)])


def decode_error(data: bytes) -> MegalinError:
    """The inverse of `encode_error`, with the class of errors.py that the error's class is or derives from."""
    name, text = decode(data)
    return _ERRORS[name](text)


def _attempt(work: Callable[[], Any], channel: Channel | None) -> _Outcome:
    try:
        return _Outcome(work() if channel is None else _translate_bugs(work), None)
    except MegalinError as error:
        return _Outcome(None, error)
    except OSError as error:
        return _Outcome(None, StorageError(str(error)))


def _translate_bugs(work: Callable[[], ResultT]) -> ResultT:
    try:
        return work()
    except (MegalinError, OSError):
        raise
    except Exception as error:
        _log.warning("rank %d: an error of megalin in a thread", rank(), exc_info=True)
        raise MegalinError(f"{type(error).__name__}: {error}") from error


def _encode(outcome: _Outcome, kind: Any) -> bytes:
    """A byte that is 1 for an error, then the result or the error's class and text as JSON."""
    if outcome.error is None:
        return b"\0" + encode(outcome.result, kind)
    return b"\1" + encode_error(outcome.error)


def _decode(data: bytes, kind: Any) -> _Outcome:
    if data[:1] == b"\0":
        return _Outcome(decode(data[1:], kind), None)
    return _Outcome(None, decode_error(data[1:]))


def _error_name(error: MegalinError) -> str:
    """The name of the error's class, or of the class in errors.py that it derives from."""
    return next(base.__name__ for base in type(error).__mro__ if base.__name__ in _ERRORS)
