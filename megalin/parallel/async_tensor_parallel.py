"""Products of sequence parallelism in parts, beside the copies that they wait for: all-gather and matmul, matmul and
reduce-scatter ("async tensor parallelism").

A rank multiplies its own tokens while copy engines bring the others', and multiplies the others' first where sums go to
them. No multiprocessor waits or sends (docs/adr/0015-async-tensor-parallelism.md). The adjoint of each op is the other
one, with the gradient of the weight beside its copies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from types import TracebackType
from typing import Any, Literal, Self
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from megalin.errors import ConfigError
from megalin.parallel.collectives import Axis
from megalin.parallel.symmetric_memory import OpenMemory, open_symmetric_memory

TPOverlapName = Literal["auto", "symmetric_memory", "none"]

SHORT_MATMUL = 4096
"""Products over fewer channels than this take about as long as the copy of their result (H200: 2048 channels), so what
goes to a rank is sent in two parts, the first beside the second's product."""

_NUM_SIGNALS = 3
_READY, _GATHERED, _SUMMED = range(_NUM_SIGNALS)
"""Signals: this rank's memory may be written; its tokens are in the other's; its partial sums are."""


class AsyncTPBuffers:
    """The residual stream's way between the ranks of an axis of one host, by copy engines.

    Args:
        group_name: of the axis's process group; the ops of that axis use this object while it lives.
        rank, size: of the axis.
        open_memory: memory of so many elements of a dtype on each rank; a collective.
        timeout: how long a stream waits for another rank.
        stream: on which this rank sends and waits; None: the current one.
    """

    def __init__(
        self,
        group_name: str,
        rank: int,
        size: int,
        open_memory: Callable[[int, torch.dtype], OpenMemory],
        *,
        timeout: timedelta,
        stream: torch.cuda.Stream | None = None,
    ) -> None:
        self.rank, self.size, self.stream = rank, size, stream
        self.milliseconds = round(timeout.total_seconds() * 1000)
        self._open_memory = open_memory
        self._numel: dict[torch.dtype, int] = {}
        self._memory: dict[torch.dtype, OpenMemory] = {}
        self._exchanges: dict[tuple[torch.Size, torch.dtype], _Exchange] = {}
        _OPEN[group_name] = self

    def exchange(self, shape: torch.Size, dtype: torch.dtype) -> _Exchange:
        """What one op sends of a stream [B, T, D], for the body of a `with`; a collective. Ops of all shapes take the
        same memory, twice the largest stream's; a larger one gets new memory, at least twice as much as before."""
        key = shape, dtype
        if key not in self._exchanges:
            needed, there = 2 * shape.numel(), self._numel.get(dtype, 0)
            if needed > there:
                self._numel[dtype] = max(needed, 2 * there)
                self._memory[dtype] = self._open_memory(self._numel[dtype], dtype)
            self._exchanges[key] = _Exchange(self, self._memory[dtype], shape, dtype)
        return self._exchanges[key]


_OPEN: WeakValueDictionary[str, AsyncTPBuffers] = WeakValueDictionary()
"""By the name of the group, which an op can be given."""


class _Exchange:
    """What one op sends. From its begin every rank's memory may be written; at its end what this rank sent has left."""

    def __init__(self, copies: AsyncTPBuffers, opened: OpenMemory, shape: torch.Size, dtype: torch.dtype) -> None:
        self._stream, self._milliseconds = copies.stream, copies.milliseconds
        self._memory, self._kept_memory = opened
        rank, size = copies.rank, copies.size
        batch, length, width = shape
        part = length // size
        self._tokens = [slice(rank * part, (rank + 1) * part) for rank in range(size)]
        self.own = self._tokens[rank]
        """This rank's part of the sequence."""
        self._targets = [(rank + step) % size for step in range(1, size)]
        """The other ranks, in the order in which this one sends to them."""
        self._sources = self._targets[::-1]
        """The other ranks, in the order in which what they send comes."""
        get = self._memory.get_buffer
        self._whole = [get(rank, tuple(shape), dtype, 0) for rank in range(size)]
        """Of each rank: all tokens, [B, T, D]."""
        partial = [get(rank, (size, batch, part, width), dtype, shape.numel()) for rank in range(size)]
        self._partial_there = {target: partial[target][rank] for target in self._targets}
        self._partial_here = {source: partial[rank][source] for source in self._sources}
        """Partial sums of a rank's tokens, [B, T/tp, D]: from this rank, and for it."""
        self._rank = rank
        self._arrived: dict[tuple[int, int], torch.cuda.Event | None] = {}
        self._all_tokens_here: torch.cuda.Event | None = None
        self._in_use: list[Tensor] = []

    def __enter__(self) -> Self:
        with _after_current(self._stream):
            self._memory.barrier(_READY, self._milliseconds)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)
        self._in_use.clear()

    def send_tokens(self, x: Tensor, *, keep: bool = False) -> None:
        """Sends this rank's tokens [B, T/tp, D], formed before the exchange began, to all others; where `all_tokens` is
        wanted, to itself too."""
        with _on(self._stream):
            for target in self._targets:
                _copy_rows(self._whole[target][:, self.own], x)
                self._memory.put_signal(target, _GATHERED, self._milliseconds)
            self._expect(_GATHERED)
            if keep:  # after what products wait for
                _copy_rows(self._whole[self._rank][:, self.own], x)
                self._all_tokens_here = _event(self._stream)

    def others_tokens(self) -> Iterator[tuple[slice, Tensor]]:
        """The others' tokens in the order in which they come: their part of the sequence, and [B, T/tp, D]. The current
        stream waits for each."""
        for source in self._sources:
            _wait(self._arrived[source, _GATHERED])
            part = self._tokens[source]
            yield part, self._whole[self._rank][:, part]

    def all_tokens(self) -> Tensor:
        """[B, T, D] of all ranks, after `send_tokens` that keeps; until the exchange ends."""
        _wait(self._all_tokens_here)
        return self._whole[self._rank]

    def send_products(self, x: Tensor, weight: Tensor) -> None:
        """Sends the others x W of their tokens, partial sums: x [B, T, K], W [K, D]."""
        for target in self._targets:
            tokens, slots = x[:, self._tokens[target]], self._partial_there[target]
            count, dim = 2 if len(weight) < SHORT_MATMUL else 1, 0 if len(x) > 1 else 1
            for part, slot in zip(tokens.chunk(count, dim), slots.chunk(count, dim), strict=True):
                product = _matmul(part, weight)
                self._in_use.append(product)
                with _after_current(self._stream):
                    slot.copy_(product, non_blocking=True)
            with _on(self._stream):
                self._memory.put_signal(target, _SUMMED, self._milliseconds)
        with _on(self._stream):
            self._expect(_SUMMED)

    def received_sum(self) -> tuple[Tensor, torch.cuda.Event | None]:
        """The sum of the others' partial sums of this rank's tokens, [B, T/tp, D], and the event that it is formed."""
        first, *rest = self._partial_here.values()
        total = torch.empty_like(first)
        with _after_current(self._stream):
            total.copy_(first)
            for received in rest:
                total.add_(received)
            return total, _event(self._stream)

    def add_received(self, y: Tensor) -> None:
        """Adds the others' partial sums of this rank's tokens to y [B, T/tp, D]."""
        for source, received in self._partial_here.items():
            _wait(self._arrived[source, _SUMMED])
            y.add_(received)

    def _expect(self, signal: int) -> None:
        for source in self._sources:
            self._memory.wait_signal(source, signal, self._milliseconds)
            self._arrived[source, signal] = _event(self._stream)


def _on(stream: torch.cuda.Stream | None) -> AbstractContextManager[None]:
    return nullcontext() if stream is None else torch.cuda.stream(stream)


def _after_current(stream: torch.cuda.Stream | None) -> AbstractContextManager[None]:
    """`stream` for the body, after what the current one was given so far."""
    if stream is not None:
        stream.wait_stream(torch.cuda.current_stream())
    return _on(stream)


def _event(stream: torch.cuda.Stream | None) -> torch.cuda.Event | None:
    return None if stream is None else stream.record_event()


def _wait(event: torch.cuda.Event | None) -> None:
    if event is not None:
        torch.cuda.current_stream().wait_event(event)


def _copy_rows(into: Tensor, x: Tensor) -> None:
    """One copy a sequence: a copy engine takes what is contiguous."""
    for target, row in zip(into, x, strict=True):
        target.copy_(row, non_blocking=True)


def _matmul(x: Tensor, weight: Tensor, out: Tensor | None = None) -> Tensor:
    """x W of x [B, T, K], which may be a part of longer sequences, and W [K, N]; into `out`, which may be one too."""
    if x.is_contiguous() and (out is None or out.is_contiguous()):
        flat = torch.mm(x.flatten(0, 1), weight, out=None if out is None else out.view(-1, out.shape[-1]))
        return flat.view(*x.shape[:2], -1)
    if _in_batches(x):
        return torch.bmm(x, weight.expand(len(x), *weight.shape), out=out)
    product = _matmul(x.contiguous(), weight)
    return product if out is None else out.copy_(product)


def _accumulate(y: Tensor, x: Tensor, weight: Tensor) -> None:
    """Adds x W to y: y [B, T, N] contiguous, x and W as `_matmul` takes them."""
    if x.is_contiguous() or not _in_batches(x):
        y.view(-1, y.shape[-1]).addmm_(x.flatten(0, 1), weight)
    else:
        y.baddbmm_(x, weight.expand(len(x), *weight.shape))


def _in_batches(x: Tensor) -> bool:
    """Whether sequences that lie apart are multiplied where they lie. In fp32 they are brought together: over 8192
    channels cuBLAS's batched product has 2.4 times the error of one product."""
    return x.element_size() < 4


def _weight_gradient(dy: Tensor, x: Tensor) -> Tensor:
    """dy [B, T, N], x [B, T, K] -> [N, K]."""
    return dy.flatten(0, 1).t() @ x.flatten(0, 1)


def _exchange(group_name: str, x: Tensor, length: int, width: int) -> _Exchange:
    return _OPEN[group_name].exchange(torch.Size((len(x), length, width)), x.dtype)


@torch.library.custom_op("megalin::all_gather_matmul", mutates_args=())
def _all_gather_matmul(x: Tensor, weight: Tensor, size: int, group_name: str) -> Tensor:
    """x [B, T/tp, D], weight [N, D] -> x W^T of all tokens, [B, T, N]."""
    batch, length, width = x.shape
    x = x.contiguous()
    with _exchange(group_name, x, length * size, width) as exchange:
        exchange.send_tokens(x)
        y = x.new_empty(batch, length * size, len(weight))
        _matmul(x, weight.t(), out=y[:, exchange.own])
        for part, tokens in exchange.others_tokens():
            _matmul(tokens, weight.t(), out=y[:, part])
    return y


@_all_gather_matmul.register_fake
def _(x: Tensor, weight: Tensor, size: int, group_name: str) -> Tensor:
    return x.new_empty(x.shape[0], x.shape[1] * size, len(weight))


@torch.library.custom_op("megalin::all_gather_matmul_backward", mutates_args=())
def _all_gather_matmul_backward(
    dy: Tensor, x: Tensor, weight: Tensor, size: int, group_name: str
) -> tuple[Tensor, Tensor]:
    """dy [B, T, N] -> dx [B, T/tp, D], summed over the axis, and the gradient of the weight."""
    dy, x = dy.contiguous(), x.contiguous()
    with _exchange(group_name, x, x.shape[1] * size, x.shape[2]) as exchange:
        exchange.send_tokens(x, keep=True)
        exchange.send_products(dy, weight)
        dx, formed = exchange.received_sum()
        dweight = _weight_gradient(dy, exchange.all_tokens())
        _wait(formed)
        _accumulate(dx, dy[:, exchange.own], weight)
    return dx, dweight


@_all_gather_matmul_backward.register_fake
def _(dy: Tensor, x: Tensor, weight: Tensor, size: int, group_name: str) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), torch.empty_like(weight)


@torch.library.custom_op("megalin::matmul_reduce_scatter", mutates_args=())
def _matmul_reduce_scatter(x: Tensor, weight: Tensor, size: int, group_name: str) -> Tensor:
    """x [B, T, K], weight [D, K] -> x W^T of this rank's tokens, summed over the axis, [B, T/tp, D]."""
    x = x.contiguous()
    with _exchange(group_name, x, x.shape[1], len(weight)) as exchange:
        exchange.send_products(x, weight.t())
        y = _matmul(x[:, exchange.own], weight.t())
        exchange.add_received(y)
    return y


@_matmul_reduce_scatter.register_fake
def _(x: Tensor, weight: Tensor, size: int, group_name: str) -> Tensor:
    return x.new_empty(x.shape[0], x.shape[1] // size, len(weight))


@torch.library.custom_op("megalin::matmul_reduce_scatter_backward", mutates_args=())
def _matmul_reduce_scatter_backward(
    dy: Tensor, x: Tensor, weight: Tensor, size: int, group_name: str
) -> tuple[Tensor, Tensor]:
    """dy [B, T/tp, D] -> dx [B, T, K] and the gradient of the weight."""
    dy, x = dy.contiguous(), x.contiguous()
    with _exchange(group_name, dy, x.shape[1], dy.shape[2]) as exchange:
        exchange.send_tokens(dy, keep=True)
        dx = torch.empty_like(x)
        _matmul(dy, weight, out=dx[:, exchange.own])
        for part, tokens in exchange.others_tokens():
            _matmul(tokens, weight, out=dx[:, part])
        dweight = _weight_gradient(exchange.all_tokens(), x)
    return dx, dweight


@_matmul_reduce_scatter_backward.register_fake
def _(dy: Tensor, x: Tensor, weight: Tensor, size: int, group_name: str) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), torch.empty_like(weight)


def _save(ctx: Any, inputs: tuple[Tensor, Tensor, int, str], output: Tensor) -> None:
    x, weight, *ctx.axis = inputs
    ctx.save_for_backward(x, weight)


def _differentiate_gather(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None, None]:
    return *_all_gather_matmul_backward(dy, *ctx.saved_tensors, *ctx.axis), None, None


def _differentiate_scatter(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None, None]:
    return *_matmul_reduce_scatter_backward(dy, *ctx.saved_tensors, *ctx.axis), None, None


_all_gather_matmul.register_autograd(_differentiate_gather, setup_context=_save)
_matmul_reduce_scatter.register_autograd(_differentiate_scatter, setup_context=_save)


def all_gather_matmul(x: Tensor, weight: Tensor, axis: Axis) -> Tensor:
    """y = all-gather(x) W^T along the sequence, x [B, T/tp, D], weight [N, D] -> [B, T, N]; both gradients, that of x
    summed over the axis. A collective; equals `gather_from_axis` and a product up to rounding."""
    return _all_gather_matmul(x, weight, axis.size, axis.group_name)


def matmul_reduce_scatter(x: Tensor, weight: Tensor, axis: Axis) -> Tensor:
    """y = reduce-scatter(x W^T) along the sequence, x [B, T, K], weight [D, K] -> [B, T/tp, D]; both gradients. A
    collective; equals a product and `reduce_scatter_to_axis` up to rounding."""
    return _matmul_reduce_scatter(x, weight, axis.size, axis.group_name)


def open_async_tp_buffers(
    device: torch.device, *, group: dist.ProcessGroup, timeout: timedelta
) -> AsyncTPBuffers | str:
    """What both ops need on this group's axis; they work while the caller keeps it. A collective.

    Returns:
        The copies; or, the same on every rank, why there are none.
    """

    def open_memory(numel: int, dtype: torch.dtype) -> OpenMemory:
        opened = open_symmetric_memory(numel, dtype, device, group, num_signals=_NUM_SIGNALS)
        if isinstance(opened, str):
            raise ConfigError(f'{numel} elements for copies of the stream: {opened}; use tp_overlap = "none"')
        return opened

    tried = open_symmetric_memory(1, torch.float32, device, group, num_signals=_NUM_SIGNALS)
    if isinstance(tried, str):
        return tried
    stream = torch.cuda.Stream(device, priority=-1)
    return AsyncTPBuffers(group.group_name, group.rank(), group.size(), open_memory, timeout=timeout, stream=stream)
