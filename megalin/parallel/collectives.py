"""Collectives over one axis of the mesh, plain and differentiable.

All are functional (`torch.distributed._functional_collectives`), so autograd and torch.compile can trace them: torch
2.11 silently compiles an in-place all-reduce inside an autograd.Function to a zero gradient. A result is waited on at
its first use; `wait_tensor_with_grad` waits before a compiled module. On an axis of size 1 every collective is the
identity.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor
from torch._dispatch.python import enable_python_dispatcher
from torch.autograd.function import FunctionCtx
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import tree_leaves, tree_map_only

from megalin.parallel.heartbeats import current
from megalin.parallel.observers import CollectiveObserver

# torch 2.12 renamed these two; the old names warn there, the new ones do not exist in 2.11.
_gather: Any = getattr(functional, "all_gather_single", None) or functional.all_gather_tensor
_scatter: Any = getattr(functional, "reduce_scatter_single", None) or functional.reduce_scatter_tensor


@dataclass(frozen=True)
class Axis:
    """One axis of the mesh from this rank's view: its size, this rank's index on it, and its process group's name."""

    name: str
    size: int = 1
    rank: int = 0
    group_name: str = ""


COLLECTIVE_TIMEOUT = timedelta(minutes=10)
"""Longest time that a rank of a run waits for another one in a collective."""


SYNCHRONOUS_DEVICES = frozenset({"cpu"})
"""Devices on which every collective is waited for at once. Gloo runs in threads of its own: small all-gathers, some of
them dropped without a wait, ended in a segmentation fault (torch 2.13), and there is nothing to overlap."""


def _launch(op: str, x: Tensor, axis: Axis, collective: Callable[[], Tensor]) -> Tensor:
    """Launches a collective on `x`, and waits for it on synchronous devices. The heartbeat records it, except in a
    compiled graph, whose block it records."""
    if x.is_meta:  # a trace without values: torch then returns a plain tensor, not one that waits at its first use
        with enable_python_dispatcher():
            return wait_tensor(collective())
    if torch.compiler.is_compiling():
        return _wait_at_once(collective(), x)
    heartbeat = current()
    if x.device.type not in SYNCHRONOUS_DEVICES:
        heartbeat.record(op, axis.name, x.shape)
        if heartbeat.observer is None:
            return collective()
        return _ObservedResult.of(collective(), _ObservedWait(heartbeat.observer, op, axis.name, x.shape))
    heartbeat.start_wait(op, axis.name, x.shape)
    result = wait_tensor(collective())
    heartbeat.end_wait()
    return result


class _ObservedWait:
    """The compute stream's wait for a collective, which is observed once."""

    def __init__(self, observer: CollectiveObserver, op: str, axis: str, shape: Sequence[int]) -> None:
        self._observer, self._what, self._is_over = observer, (op, axis, shape), False

    def observed(self) -> AbstractContextManager[None]:
        """Observes the wait that the body launches."""
        before, self._is_over = self._is_over, True
        return nullcontext() if before else self._observer.collective(*self._what, waits=True)


class _ObservedResult(functional.AsyncCollectiveTensor):
    """Pending result of a collective whose wait is observed. Views of it are such results too."""

    __slots__ = ["observed_wait"]
    observed_wait: _ObservedWait

    @classmethod
    def of(cls, result: Tensor, observed_wait: _ObservedWait) -> Tensor:
        """The pending result of a collective, observed; other tensors as they are."""
        if not isinstance(result, functional.AsyncCollectiveTensor):
            return result
        found = cls(result.elem)
        found.completed, found.observed_wait = result.completed, observed_wait
        return found

    def trigger_wait(self) -> Tensor:
        """Waits at the first call; returns the plain tensor."""
        with self.observed_wait.observed():
            return super().trigger_wait()

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        waits = [each.observed_wait for each in tree_leaves((args, kwargs)) if isinstance(each, cls)]
        result = super().__torch_dispatch__(func, types, args, kwargs)
        return tree_map_only(functional.AsyncCollectiveTensor, lambda view: cls.of(view, waits[0]), result)


def _wait_at_once(result: Tensor, x: Tensor) -> Tensor:
    return wait_tensor(result) if x.device.type in SYNCHRONOUS_DEVICES else result


def all_reduce(x: Tensor, axis: Axis, *, operation: str = "sum") -> Tensor:
    """Element-wise sum (or "max") of `x` over the axis, on every rank. Not differentiable."""
    if axis.size == 1:
        return x
    return _launch(
        "all_reduce",
        x,
        axis,
        lambda: functional.all_reduce(x.contiguous(), operation, axis.group_name),  # type: ignore[arg-type]
    )


def all_gather(x: Tensor, axis: Axis, *, dim: int) -> Tensor:
    """Concatenation of every rank's `x` along `dim`, in rank order. Not differentiable."""
    if axis.size == 1:
        return x
    gathered = _launch("all_gather", x, axis, lambda: _gather(x.contiguous(), 0, axis.group_name))
    # torch 2.11 cannot trace the concatenation that its own function makes for another dim.
    return gathered if dim == 0 else torch.cat(gathered.chunk(axis.size), dim)


def reduce_scatter(x: Tensor, axis: Axis, *, dim: int) -> Tensor:
    """This rank's slice along `dim` of the sum of `x` over the axis. Not differentiable."""
    if axis.size == 1:
        return x
    return _launch("reduce_scatter", x, axis, lambda: _scatter(x.contiguous(), "sum", dim, axis.group_name))


def all_to_all(x: Tensor, axis: Axis, *, split_dim: int, concat_dim: int) -> Tensor:
    """Sends equal chunks of `x` along `split_dim` to one rank each, in rank order, and concatenates the received ones
    along `concat_dim`, in rank order too. Not differentiable."""
    if axis.size == 1:
        return x
    chunks = x.contiguous() if split_dim == 0 else torch.cat(x.chunk(axis.size, split_dim))
    received = _launch(
        "all_to_all",
        x,
        axis,
        lambda: functional.all_to_all_single(chunks, None, None, axis.group_name),  # type: ignore[arg-type]
    )
    return received if concat_dim == 0 else torch.cat(received.chunk(axis.size), concat_dim)


def ring_shift(x: Tensor, token: Tensor, axis: Axis, *, step: int, num_expected: int) -> tuple[Tensor, Tensor]:
    """Sends `x` to the rank `step` further and receives from the rank `step` before. Not differentiable.

    Every rank of the axis calls it. The token, one zero, travels along; the caller passes it to the next call and adds
    it to the result. Without it a compiled graph may reorder the calls, or drop one whose result a rank does not use.

    Args:
        x: [N], may be empty.
        token: [1], zero.
        num_expected: elements to receive.

    Returns:
        [num_expected], and the next token.
    """
    sizes_to, sizes_from = [0] * axis.size, [0] * axis.size
    sizes_to[(axis.rank + step) % axis.size] = x.numel() + 1
    sizes_from[(axis.rank - step) % axis.size] = num_expected + 1
    sent = torch.cat([x, token])
    received = _launch(
        "ring_shift",
        sent,
        axis,
        lambda: functional.all_to_all_single(sent, sizes_from, sizes_to, axis.group_name),  # type: ignore[arg-type]
    )
    return received[:-1], received[-1:]


def local_slice(x: Tensor, axis: Axis, *, dim: int) -> Tensor:
    """This rank's equal slice of `x` along `dim`, a view."""
    return x.chunk(axis.size, dim)[axis.rank]


class _Copy(torch.autograd.Function):
    """y = x on every rank; dx = all-reduce(dy)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return all_reduce(grads[0], ctx.axis), None


class _Reduce(torch.autograd.Function):
    """y = all-reduce(x); dx = dy."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, axis: Axis) -> Tensor:
        return all_reduce(x, axis)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


class _Gather(torch.autograd.Function):
    """y = all-gather(x) along dim; dx = reduce-scatter(dy)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, dim: int) -> Tensor:
        ctx.axis, ctx.dim = axis, dim
        return all_gather(x, axis, dim=dim)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return reduce_scatter(grads[0], ctx.axis, dim=ctx.dim), None, None


class _ReduceScatter(torch.autograd.Function):
    """y = reduce-scatter(x) along dim; dx = all-gather(dy)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, dim: int) -> Tensor:
        ctx.axis, ctx.dim = axis, dim
        return reduce_scatter(x, axis, dim=dim)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return all_gather(grads[0], ctx.axis, dim=ctx.dim), None, None


class _AllToAll(torch.autograd.Function):
    """y = all-to-all(x); dx = all-to-all(dy) with split_dim and concat_dim swapped."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, split_dim: int, concat_dim: int) -> Tensor:
        ctx.axis, ctx.split_dim, ctx.concat_dim = axis, split_dim, concat_dim
        return all_to_all(x, axis, split_dim=split_dim, concat_dim=concat_dim)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return all_to_all(grads[0], ctx.axis, split_dim=ctx.concat_dim, concat_dim=ctx.split_dim), None, None, None


class _WaitTensor(torch.autograd.Function):
    """y = x as a plain tensor; dx = dy."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return wait_tensor(x) if isinstance(x, functional.AsyncCollectiveTensor) else x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


def wait_tensor(x: Tensor) -> Tensor:
    """`x` as a plain tensor; waits where it is the pending result of a collective. Not differentiable."""
    if not isinstance(x, functional.AsyncCollectiveTensor):
        return x
    if isinstance(x, _ObservedResult):
        return x.trigger_wait()
    with current().measure_wait():
        return x.trigger_wait()


def wait_tensor_with_grad(x: Tensor) -> Tensor:
    """`wait_tensor` with identity backward, for inputs of a compiled module: there a pending result would lose its
    gradient without an error."""
    return _WaitTensor.apply(x)


def copy_to_axis(x: Tensor, axis: Axis) -> Tensor:
    """Enters a sharded region: identity forward, all-reduce of the gradient backward."""
    return x if axis.size == 1 else _Copy.apply(x, axis)


def reduce_from_axis(x: Tensor, axis: Axis) -> Tensor:
    """Leaves a sharded region: all-reduce of partial sums forward, identity backward."""
    return x if axis.size == 1 else _Reduce.apply(x, axis)


def gather_from_axis(x: Tensor, axis: Axis, *, dim: int) -> Tensor:
    """All-gather along `dim` forward, reduce-scatter of the gradient backward."""
    return x if axis.size == 1 else _Gather.apply(x, axis, dim)


def reduce_scatter_to_axis(x: Tensor, axis: Axis, *, dim: int) -> Tensor:
    """Reduce-scatter of partial sums along `dim` forward, all-gather of the gradient backward."""
    return x if axis.size == 1 else _ReduceScatter.apply(x, axis, dim)


def all_to_all_over_axis(x: Tensor, axis: Axis, *, split_dim: int, concat_dim: int) -> Tensor:
    """All-to-all that shards `split_dim` and gathers `concat_dim` forward, the inverse for the gradient backward."""
    return x if axis.size == 1 else _AllToAll.apply(x, axis, split_dim, concat_dim)


def axis_of(name: str, group: dist.ProcessGroup) -> Axis:
    """The axis of a process group, from this rank's view."""
    return Axis(name, group.size(), group.rank(), group.group_name)


def covering_axes(mesh: DeviceMesh) -> list[Axis]:
    """Axes over which successive reductions cover all ranks of a device mesh: one where these are all of the run, else
    one a dimension."""
    world = dist.group.WORLD
    assert world is not None, mesh
    groups = [world] if mesh.size() == world.size() else mesh.get_all_groups()
    return [axis_of("mesh", group) for group in groups]
