"""Products of sequence parallelism in parts, beside the copies that they wait for: all-gather and matmul, matmul and
reduce-scatter ("async tensor parallelism").

A rank multiplies its own tokens while copy engines bring the others', and multiplies the others' first where sums go to
them. No multiprocessor waits or sends, so products keep their speed, and neither way is seen in a step but for what the
sums cost (docs/adr/0015-products-beside-copies.md). The adjoint of each op is the other one, with the gradient of the
weight beside its copies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import TracebackType
from typing import Any, Literal, Self
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from megalin.errors import ConfigError
from megalin.parallel.collectives import Axis
from megalin.parallel.peer_memory import OpenMemory, PeerMemory, open_peer_memory

StreamTransferName = Literal["auto", "copy", "collective"]

SHORT_PRODUCT = 4096
"""Products over fewer channels than this take about as long as the copy of their result (H200: 2048 channels), so what
goes to a rank is sent in two parts, the first beside the second's product."""

_READY, _GATHERED, _SUMMED = range(3)
_NUM_SIGNALS = 3
"""Signals: this rank's memory may be written; its tokens are in the other's; its partial sums are."""


class StreamCopies:
    """The residual stream's way between the ranks of an axis of one host, by copy engines.

    Args:
        group_name: of the axis's process group; the ops of that axis use this object while it lives.
        rank, size: of the axis.
        open_memory: memory of so many elements of a dtype on each rank; a collective.
        timeout: how long a stream waits for another rank.
        stream: on which this rank sends and waits; None: the one that computes.
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
        self._memories: dict[tuple[torch.Size, torch.dtype], OpenMemory] = {}
        _OPEN[group_name] = self

    def exchange(self, shape: torch.Size, dtype: torch.dtype) -> _Exchange:
        """What one op sends of a stream [B, T, D], for the body of a `with`. The first of a shape is a collective, and
        its memory, twice the stream's, is kept."""
        key = shape, dtype
        if key not in self._memories:
            self._memories[key] = self._open_memory(2 * shape.numel(), dtype)
        return _Exchange(self, self._memories[key].memory, shape, dtype)


_OPEN: WeakValueDictionary[str, StreamCopies] = WeakValueDictionary()
"""By the name of the group, which an op can be given."""


class _Exchange:
    """What one op sends. From its begin every rank's memory may be written; at its end all that this rank sends has
    left. Beside what the computing stream does goes what a method sends, after what that stream was given before."""

    def __init__(self, copies: StreamCopies, memory: PeerMemory, shape: torch.Size, dtype: torch.dtype) -> None:
        self._stream, self._milliseconds, self._memory = copies.stream, copies.milliseconds, memory
        self._rank, self._size = copies.rank, copies.size
        batch, length, width = shape
        self._length = length // self._size
        parts = (self._size, batch, self._length, width)
        ranks = range(self._size)
        self._whole = [memory.get_buffer(rank, tuple(shape), dtype, 0) for rank in ranks]
        """Of each rank: all tokens, [B, T, D]."""
        self._partial = [memory.get_buffer(rank, parts, dtype, shape.numel()) for rank in ranks]
        """Of each rank: partial sums of its tokens by source, [tp, B, T/tp, D]."""
        self._arrived: dict[tuple[int, int], torch.cuda.Event | None] = {}
        self._sent: list[Tensor] = []

    def __enter__(self) -> Self:
        with self._beside():
            self._memory.barrier(_READY, self._milliseconds)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)
        self._sent.clear()

    def tokens(self, rank: int | None = None) -> slice:
        """A rank's part of the sequence; None: this one's."""
        first = self._length * (self._rank if rank is None else rank)
        return slice(first, first + self._length)

    def send_tokens(self, x: Tensor, *, keep: bool = False) -> None:
        """Sends this rank's tokens [B, T/tp, D] to all others; to itself as well where `all_tokens` is wanted."""
        with self._beside():
            for peer in self._others():
                _copy_rows(self._whole[peer][:, self.tokens()], x)
                self._memory.put_signal(peer, _GATHERED, self._milliseconds)
            if keep:
                _copy_rows(self._whole[self._rank][:, self.tokens()], x)
        self._expect(_GATHERED)

    def others_tokens(self) -> Iterator[tuple[slice, Tensor]]:
        """The others' tokens in the order in which they come: their part of the sequence, and [B, T/tp, D]."""
        for source in self._sources():
            self._wait(self._arrived[source, _GATHERED])
            part = self.tokens(source)
            yield part, self._whole[self._rank][:, part]

    def all_tokens(self) -> Tensor:
        """[B, T, D] of all ranks, after `send_tokens` that keeps; until the exchange ends."""
        for source in self._sources():
            self._wait(self._arrived[source, _GATHERED])
        return self._whole[self._rank]

    def send_products(self, x: Tensor, weight: Tensor, *, collect: bool = False) -> None:
        """Sends the others x W of their tokens, partial sums: x [B, T, K], W [K, D]. What comes from them is added up
        where `collected_sums` is wanted."""
        for peer in self._others():
            own, into = x[:, self.tokens(peer)], self._partial[peer][self._rank]
            count, dim = 2 if len(weight) < SHORT_PRODUCT else 1, 0 if len(x) > 1 else 1
            for part, slot in zip(own.chunk(count, dim), into.chunk(count, dim), strict=True):
                product = _matmul(part, weight)
                self._sent.append(product)
                with self._beside():
                    slot.copy_(product, non_blocking=True)
            with self._beside():
                self._memory.put_signal(peer, _SUMMED, self._milliseconds)
        self._expect(_SUMMED)
        if collect:
            received = self._partial[self._rank]
            self._collected = torch.empty_like(received[self._rank])
            with self._beside():
                first, *rest = self._sources()
                self._collected.copy_(received[first])
                for source in rest:
                    self._collected.add_(received[source])
                self._formed = self._event()

    def collected_sums(self) -> Tensor:
        """The others' partial sums of this rank's tokens together, [B, T/tp, D]: `send_products` collected them."""
        self._wait(self._formed)
        return self._collected

    def add_received(self, y: Tensor) -> None:
        """Adds the others' partial sums of this rank's tokens to y [B, T/tp, D]."""
        for source in self._sources():
            self._wait(self._arrived[source, _SUMMED])
            y.add_(self._partial[self._rank][source])

    def _others(self) -> list[int]:
        """In the order in which this rank sends to them."""
        return [(self._rank + step) % self._size for step in range(1, self._size)]

    def _sources(self) -> list[int]:
        """The others in the order in which what they send to this rank comes."""
        return self._others()[::-1]

    def _expect(self, signal: int) -> None:
        """Waits for the others beside what follows."""
        for source in self._sources():
            with self._beside():
                self._memory.wait_signal(source, signal, self._milliseconds)
                self._arrived[source, signal] = self._event()

    def _event(self) -> torch.cuda.Event | None:
        return None if self._stream is None else self._stream.record_event()

    def _wait(self, event: torch.cuda.Event | None) -> None:
        if event is not None:
            torch.cuda.current_stream().wait_event(event)

    @contextmanager
    def _beside(self) -> Iterator[None]:
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            yield


def _copy_rows(into: Tensor, x: Tensor) -> None:
    """One copy a sequence: a copy engine takes what is contiguous."""
    for target, row in zip(into, x, strict=True):
        target.copy_(row, non_blocking=True)


def _matmul(x: Tensor, weight: Tensor, out: Tensor | None = None) -> Tensor:
    """x W of x [B, T, K], which may be a part of longer sequences, and W [K, N]; into `out`, which may be one too."""
    if x.is_contiguous() and (out is None or out.is_contiguous()):
        flat = torch.mm(x.flatten(0, 1), weight, out=None if out is None else out.view(-1, out.shape[-1]))
        return flat.view(*x.shape[:2], -1)
    return torch.bmm(x, weight.expand(len(x), *weight.shape), out=out)


def _accumulate(y: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """y + x W in place: y [B, T, N] contiguous, x and W as `_matmul` takes them."""
    if x.is_contiguous():
        y.view(-1, y.shape[-1]).addmm_(x.flatten(0, 1), weight)
        return y
    return y.baddbmm_(x, weight.expand(len(x), *weight.shape))


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
        _matmul(x, weight.t(), out=y[:, exchange.tokens()])
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
        exchange.send_products(dy, weight, collect=True)
        dweight = _weight_gradient(dy, exchange.all_tokens())
        dx = _accumulate(exchange.collected_sums(), dy[:, exchange.tokens()], weight)
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
        y = _matmul(x[:, exchange.tokens()], weight.t())
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
        _matmul(dy, weight, out=dx[:, exchange.tokens()])
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


def open_stream_copies(device: torch.device, *, group: dist.ProcessGroup, timeout: timedelta) -> StreamCopies | str:
    """What both ops need on this group's axis; they work while the caller keeps it. A collective.

    Returns:
        The copies; or, the same on every rank, why there are none.
    """

    def open_memory(numel: int, dtype: torch.dtype) -> OpenMemory:
        opened = open_peer_memory(numel, dtype, device, group, num_signals=_NUM_SIGNALS)
        if isinstance(opened, str):
            raise ConfigError(f'{numel} elements for copies of the stream: {opened}; use tp_transfer = "collective"')
        return opened

    tried = open_peer_memory(1, torch.float32, device, group, num_signals=_NUM_SIGNALS)
    if isinstance(tried, str):
        return tried
    stream = torch.cuda.Stream(device, priority=-1)
    return StreamCopies(group.group_name, group.rank(), group.size(), open_memory, timeout=timeout, stream=stream)
