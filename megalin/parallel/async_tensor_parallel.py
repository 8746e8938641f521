"""Async tensor parallelism: all-gather + matmul and matmul + reduce-scatter with the communication overlapped.

All-gather: a rank multiplies its own shard of the sequence while copy engines bring the others'. Reduce-scatter: it
multiplies the other ranks' shards first, and its own while their sums are copied. No multiprocessor waits or sends
(docs/adr/0015-async-tensor-parallelism.md). Each op is the adjoint of the other; the gradient of the weight overlaps
with the copies too.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from types import TracebackType
from typing import Any, Self
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from megalin.errors import ConfigError
from megalin.ops.dispatch.custom_op import custom_op
from megalin.parallel.heartbeats import Heartbeat, current
from megalin.parallel.launch_order import LaunchOrder
from megalin.parallel.symmetric_memory import OpenMemory, open_symmetric_memory

SHORT_MATMUL = 4096
"""A matmul over fewer channels than this takes about as long as the copy of its result (H200: 2048 channels), so the
result for a rank is sent in two chunks, the first during the second's matmul."""

_NUM_SIGNALS = 3
_READY, _GATHERED, _SUMMED = range(_NUM_SIGNALS)
"""Signals: this rank's memory may be written; its tokens are in the other rank's memory; its partial sums are."""


class AsyncTPBuffers:
    """Buffers through which copy engines move hidden states between the ranks of an axis on one host.

    Args:
        group_name: of the axis's process group.
        rank, size: of the axis.
        open_memory: allocates so many elements of a dtype on each rank; a collective.
        order: the record of launches on the axis.
        timeout: longest time that a CUDA stream waits for another rank.
        cuda_stream: the stream on which this rank sends and waits; None: the current one.
    """

    def __init__(
        self,
        group_name: str,
        rank: int,
        size: int,
        open_memory: Callable[[int, torch.dtype], OpenMemory],
        order: LaunchOrder,
        *,
        timeout: timedelta,
        cuda_stream: torch.cuda.Stream | None = None,
    ) -> None:
        self.rank, self.size, self.order, self.cuda_stream = rank, size, order, cuda_stream
        self.milliseconds = round(timeout.total_seconds() * 1000)
        self._open_memory = open_memory
        self._numel: dict[torch.dtype, int] = {}
        self._memory: dict[torch.dtype, OpenMemory] = {}
        self._ops: dict[tuple[torch.Size, torch.dtype], _AsyncTPOp] = {}
        self.name = next(name for n in itertools.count() if (name := f"{group_name}.{n}") not in _OPEN)
        """Name of these buffers among those of all groups, which the ops take as an argument."""
        _OPEN[self.name] = self

    def op(self, shape: torch.Size, dtype: torch.dtype) -> _AsyncTPOp:
        """Context manager of one op on hidden states [B, T, D]; a collective. Ops of all shapes use the same memory,
        twice the largest hidden states; larger ones get new memory, at least twice as much as before.

        Raises:
            RankStalledError: not all ranks open memory at the same launch; see `LaunchOrder.compare`.
        """
        key = shape, dtype
        if key not in self._ops:
            needed, there = 2 * shape.numel(), self._numel.get(dtype, 0)
            if needed > there:
                numel = max(needed, 2 * there)
                self.order.record("open_memory", (numel,))
                self.order.compare(f"opens memory for {numel} elements of {dtype}")
                self._memory[dtype], self._numel[dtype] = self._open_memory(numel, dtype), numel
            self._ops[key] = _AsyncTPOp(self, self._memory[dtype], shape, dtype)
        return self._ops[key]


_OPEN: WeakValueDictionary[str, AsyncTPBuffers] = WeakValueDictionary()
"""By their name: torch.library ops take no other objects."""


class _AsyncTPOp:
    """Communication of one op. On entry every rank's memory may be written; on exit this rank's sends have finished."""

    def __init__(self, buffers: AsyncTPBuffers, opened: OpenMemory, shape: torch.Size, dtype: torch.dtype) -> None:
        self._cuda_stream, self._milliseconds = buffers.cuda_stream, buffers.milliseconds
        self._memory, self._kept_memory = opened
        rank, size = buffers.rank, buffers.size
        batch, length, width = shape
        local_length = length // size
        self._tokens = [slice(rank * local_length, (rank + 1) * local_length) for rank in range(size)]
        self.own = self._tokens[rank]
        """This rank's shard of the sequence."""
        self._targets = [(rank + step) % size for step in range(1, size)]
        """The other ranks, in the order in which this one sends to them."""
        self._sources = self._targets[::-1]
        """The other ranks, in the order in which their data arrives."""
        get = self._memory.get_buffer
        self._sequences = [get(rank, tuple(shape), dtype, 0) for rank in range(size)]
        """By rank: the buffer of all tokens, [B, T, D]."""
        partial = [get(rank, (size, batch, local_length, width), dtype, shape.numel()) for rank in range(size)]
        self._outgoing_sums = {target: partial[target][rank] for target in self._targets}
        self._incoming_sums = {source: partial[rank][source] for source in self._sources}
        """By rank, [B, T/tp, D]: the buffer there for this rank's partial sums, and the buffer here for that rank's."""
        self._rank = rank
        self._arrived: dict[tuple[int, int], torch.cuda.Event | None] = {}
        self._full_sequence_ready: torch.cuda.Event | None = None
        self._in_use: list[Tensor] = []
        self.name = ""
        """Name of the op that runs next."""

    def __enter__(self) -> Self:
        with _after_current(self._cuda_stream), self._observed():
            self._memory.barrier(_READY, self._milliseconds)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._cuda_stream is not None:
            torch.cuda.current_stream().wait_stream(self._cuda_stream)
        self._in_use.clear()

    def send_shard(self, x: Tensor, *, keep: bool = False) -> None:
        """Sends this rank's tokens [B, T/tp, D], computed before the op began, to all other ranks; with `keep` to its
        own buffer too, for `full_sequence`."""
        with _on(self._cuda_stream):
            for target in self._targets:
                _copy_sequences(self._sequences[target][:, self.own], x)
                self._memory.put_signal(target, _GATHERED, self._milliseconds)
            self._expect(_GATHERED)
            if keep:  # after the copies that matmuls wait for
                _copy_sequences(self._sequences[self._rank][:, self.own], x)
                self._full_sequence_ready = _event(self._cuda_stream)

    def remote_shards(self) -> Iterator[tuple[slice, Tensor]]:
        """Yields the other ranks' shards as they arrive: their slice of the sequence, and tokens [B, T/tp, D]. The
        current CUDA stream waits for each."""
        for source in self._sources:
            _wait(self._arrived[source, _GATHERED])
            shard = self._tokens[source]
            yield shard, self._sequences[self._rank][:, shard]

    def full_sequence(self) -> Tensor:
        """All ranks' tokens [B, T, D], after `send_shard(x, keep=True)`; valid until the op ends."""
        _wait(self._full_sequence_ready)
        return self._sequences[self._rank]

    def send_partial_sums(self, x: Tensor, weight: Tensor) -> None:
        """Sends every other rank the partial sum x W of its tokens: x [B, T, K], W [K, D]."""
        for target in self._targets:
            tokens, slots = x[:, self._tokens[target]], self._outgoing_sums[target]
            count, dim = 2 if len(weight) < SHORT_MATMUL else 1, 0 if len(x) > 1 else 1
            for chunk, slot in zip(tokens.chunk(count, dim), slots.chunk(count, dim), strict=True):
                partial_sum = _matmul(chunk, weight)
                self._in_use.append(partial_sum)
                with _after_current(self._cuda_stream):
                    slot.copy_(partial_sum, non_blocking=True)
            with _on(self._cuda_stream):
                self._memory.put_signal(target, _SUMMED, self._milliseconds)
        with _on(self._cuda_stream):
            self._expect(_SUMMED)

    def received_sum(self) -> tuple[Tensor, torch.cuda.Event | None]:
        """The sum [B, T/tp, D] of the other ranks' partial sums of this rank's tokens, and the event of its end."""
        first, *rest = self._incoming_sums.values()
        total = torch.empty_like(first)
        with _after_current(self._cuda_stream):
            total.copy_(first)
            for received in rest:
                total.add_(received)
            return total, _event(self._cuda_stream)

    def add_received(self, y: Tensor) -> None:
        """Adds the other ranks' partial sums of this rank's tokens to y [B, T/tp, D]."""
        for source, received in self._incoming_sums.items():
            _wait(self._arrived[source, _SUMMED])
            y.add_(received)

    def _expect(self, signal: int) -> None:
        for source in self._sources:
            with self._observed():
                self._memory.wait_signal(source, signal, self._milliseconds)
                self._arrived[source, signal] = _event(self._cuda_stream)

    def _observed(self) -> AbstractContextManager[None]:
        """Observes a wait for another rank."""
        observer, shape = current().observer, self._sequences[0].shape
        return nullcontext() if observer is None else observer.collective(self.name, "tp", shape)


def _on(cuda_stream: torch.cuda.Stream | None) -> AbstractContextManager[None]:
    return nullcontext() if cuda_stream is None else torch.cuda.stream(cuda_stream)


def _after_current(cuda_stream: torch.cuda.Stream | None) -> AbstractContextManager[None]:
    """Runs the body on `cuda_stream`, after the work queued on the current stream so far."""
    if cuda_stream is not None:
        cuda_stream.wait_stream(torch.cuda.current_stream())
    return _on(cuda_stream)


def _event(cuda_stream: torch.cuda.Stream | None) -> torch.cuda.Event | None:
    return None if cuda_stream is None else cuda_stream.record_event()


def _wait(event: torch.cuda.Event | None) -> None:
    if event is not None:
        torch.cuda.current_stream().wait_event(event)


def _copy_sequences(into: Tensor, x: Tensor) -> None:
    """Makes one copy a sequence: a copy engine takes contiguous memory."""
    for target, sequence in zip(into, x, strict=True):
        target.copy_(sequence, non_blocking=True)


def _matmul(x: Tensor, weight: Tensor, out: Tensor | None = None) -> Tensor:
    """x W of x [B, T, K], which may be a slice of longer sequences, and W [K, N]; into `out`, which may be one too."""
    if x.is_contiguous() and (out is None or out.is_contiguous()):
        flat = torch.mm(x.flatten(0, 1), weight, out=None if out is None else out.view(-1, out.shape[-1]))
        return flat.view(*x.shape[:2], -1)
    if _uses_bmm(x):
        return torch.bmm(x, weight.expand(len(x), *weight.shape), out=out)
    y = _matmul(x.contiguous(), weight)
    return y if out is None else out.copy_(y)


def _accumulate(y: Tensor, x: Tensor, weight: Tensor) -> None:
    """Adds x W to y: y [B, T, N] contiguous, x and W as in `_matmul`."""
    if x.is_contiguous() or not _uses_bmm(x):
        y.view(-1, y.shape[-1]).addmm_(x.flatten(0, 1), weight)
    else:
        y.baddbmm_(x, weight.expand(len(x), *weight.shape))


def _uses_bmm(x: Tensor) -> bool:
    """True where sequences that are not contiguous are multiplied as a batch. In fp32 they are first copied together:
    over 8192 channels cuBLAS's batched matmul has 2.4 times the error of a single one."""
    return x.element_size() < 4


def _weight_gradient(dy: Tensor, x: Tensor) -> Tensor:
    """dy [B, T, N], x [B, T, K] -> dW = dy^T x [N, K]."""
    return dy.flatten(0, 1).t() @ x.flatten(0, 1)


def _op(name: str, buffers: str, x: Tensor, length: int, width: int, channels: int) -> _AsyncTPOp:
    """Communication of an op between hidden states [B, T, D] and [B, T, N] of all ranks, recorded by its name.

    Args:
        length, width, channels: T, D and N.
    """
    shape = len(x), length, width, channels
    _OPEN[buffers].order.record(name, shape)
    op = _OPEN[buffers].op(torch.Size(shape[:3]), x.dtype)
    op.name = name
    return op


def _fake_backward(_dy: Tensor, x: Tensor, weight: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), torch.empty_like(weight)


@custom_op("all_gather_matmul", lambda x, weight, size, _: x.new_empty(x.shape[0], x.shape[1] * size, len(weight)))
def _all_gather_matmul(x: Tensor, weight: Tensor, size: int, buffers: str) -> Tensor:
    """x [B, T/tp, D], weight [N, D] -> x W^T of all tokens, [B, T, N]."""
    batch, length, width = x.shape
    x = x.contiguous()
    with _op("all_gather_matmul", buffers, x, length * size, width, len(weight)) as op:
        op.send_shard(x)
        y = x.new_empty(batch, length * size, len(weight))
        _matmul(x, weight.t(), out=y[:, op.own])
        for shard, tokens in op.remote_shards():
            _matmul(tokens, weight.t(), out=y[:, shard])
    return y


@custom_op("all_gather_matmul_backward", _fake_backward)
def _all_gather_matmul_backward(
    dy: Tensor, x: Tensor, weight: Tensor, size: int, buffers: str
) -> tuple[Tensor, Tensor]:
    """dy [B, T, N] -> dx [B, T/tp, D], summed over the axis, and the gradient of the weight."""
    dy, x = dy.contiguous(), x.contiguous()
    with _op("all_gather_matmul_backward", buffers, x, x.shape[1] * size, x.shape[2], len(weight)) as op:
        op.send_shard(x, keep=True)
        op.send_partial_sums(dy, weight)
        dx, summed = op.received_sum()
        dweight = _weight_gradient(dy, op.full_sequence())
        _wait(summed)
        _accumulate(dx, dy[:, op.own], weight)
    return dx, dweight


@custom_op("matmul_reduce_scatter", lambda x, weight, size, _: x.new_empty(x.shape[0], x.shape[1] // size, len(weight)))
def _matmul_reduce_scatter(x: Tensor, weight: Tensor, size: int, buffers: str) -> Tensor:
    """x [B, T, K], weight [D, K] -> x W^T of this rank's tokens, summed over the axis, [B, T/tp, D]."""
    x = x.contiguous()
    with _op("matmul_reduce_scatter", buffers, x, x.shape[1], len(weight), x.shape[2]) as op:
        op.send_partial_sums(x, weight.t())
        y = _matmul(x[:, op.own], weight.t())
        op.add_received(y)
    return y


@custom_op("matmul_reduce_scatter_backward", _fake_backward)
def _matmul_reduce_scatter_backward(
    dy: Tensor, x: Tensor, weight: Tensor, size: int, buffers: str
) -> tuple[Tensor, Tensor]:
    """dy [B, T/tp, D] -> dx [B, T, K] and the gradient of the weight."""
    dy, x = dy.contiguous(), x.contiguous()
    with _op("matmul_reduce_scatter_backward", buffers, dy, x.shape[1], dy.shape[2], x.shape[2]) as op:
        op.send_shard(dy, keep=True)
        dx = torch.empty_like(x)
        _matmul(dy, weight, out=dx[:, op.own])
        for shard, tokens in op.remote_shards():
            _matmul(tokens, weight, out=dx[:, shard])
        dweight = _weight_gradient(op.full_sequence(), x)
    return dx, dweight


def _save(ctx: Any, inputs: tuple[Tensor, Tensor, int, str], output: Tensor) -> None:
    x, weight, *ctx.axis = inputs
    ctx.save_for_backward(x, weight)


def _differentiate_gather(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None, None]:
    return *_all_gather_matmul_backward(dy, *ctx.saved_tensors, *ctx.axis), None, None


def _differentiate_scatter(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None, None]:
    return *_matmul_reduce_scatter_backward(dy, *ctx.saved_tensors, *ctx.axis), None, None


torch.library.register_autograd(_all_gather_matmul, _differentiate_gather, setup_context=_save)
torch.library.register_autograd(_matmul_reduce_scatter, _differentiate_scatter, setup_context=_save)


def all_gather_matmul(x: Tensor, weight: Tensor, buffers: AsyncTPBuffers) -> Tensor:
    """y = all-gather(x) W^T along the sequence: x [B, T/tp, D], weight [N, D] -> [B, T, N]. Differentiable in both; the
    gradient of x is summed over the axis. A collective; equals `gather_from_axis` and a matmul up to rounding."""
    return _all_gather_matmul(x, weight, buffers.size, buffers.name)


def matmul_reduce_scatter(x: Tensor, weight: Tensor, buffers: AsyncTPBuffers) -> Tensor:
    """y = reduce-scatter(x W^T) along the sequence: x [B, T, K], weight [D, K] -> [B, T/tp, D]. Differentiable in both.
    A collective; equals a matmul and `reduce_scatter_to_axis` up to rounding."""
    return _matmul_reduce_scatter(x, weight, buffers.size, buffers.name)


def open_async_tp_buffers(
    device: torch.device, *, group: dist.ProcessGroup, timeout: timedelta, launches: Heartbeat
) -> AsyncTPBuffers | str:
    """Opens the buffers of both ops on this group's axis; the ops use them while the caller keeps them. A collective.

    Args:
        launches: records the launches of the ops.

    Returns:
        The buffers; or the reason why there are none, the same on every rank.
    """

    def open_memory(numel: int, dtype: torch.dtype) -> OpenMemory:
        opened = open_symmetric_memory(numel, dtype, device, group, num_signals=_NUM_SIGNALS)
        if isinstance(opened, str):
            raise ConfigError(
                f"cannot allocate {numel} elements of symmetric memory for the hidden states: {opened}; use "
                'parallel.tp_overlap = "none"'
            )
        return opened

    tried = open_symmetric_memory(1, torch.float32, device, group, num_signals=_NUM_SIGNALS)
    if isinstance(tried, str):
        return tried
    cuda_stream = torch.cuda.Stream(device, priority=-1)
    name, rank, size = group.group_name, group.rank(), group.size()
    order = LaunchOrder(launches, "tp", group, timeout=timeout)
    return AsyncTPBuffers(name, rank, size, open_memory, order, timeout=timeout, cuda_stream=cuda_stream)
