"""One block run without values, as a GPU with every kernel would run it: what it keeps, holds, moves and sends."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._functorch import config as functorch_config
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule
from torch.utils._python_dispatch import TorchDispatchMode

from megalin.layers.mixers.base import FullPrecision
from megalin.ops.dispatch.backend import assume_kernels
from megalin.planner.graph_cost import CollectiveCost, GraphCost, exchanged, graph_cost, is_kernel


class RunCost(NamedTuple):
    """Forward and backward of a function of a tensor."""

    saved_bytes: int
    """What the forward keeps for the backward, beside parameters."""
    backward_bytes: int
    """Most that is held during the backward, what the forward kept included."""
    moved_bytes: int
    """Read and written in both by kernels other than matrix products and collectives."""
    forward: list[CollectiveCost]
    """What the forward sends."""
    backward: list[CollectiveCost]
    """What the backward sends."""


@contextmanager
def without_values() -> Iterator[None]:
    """For the body, tensors have no values, and ops take the kernels that a GPU has."""
    with assume_kernels(), FakeTensorMode(allow_non_fake_inputs=True):
        yield


def take_shape(module: nn.Module, dtype: torch.dtype) -> None:
    """Gives a module on meta its computing dtypes on the device of the trace, as sharded data parallelism casts: to
    `dtype`, to fp32 in what is `FullPrecision`."""
    for part in module.modules():
        own = torch.promote_types(dtype, torch.float32) if isinstance(part, FullPrecision) else dtype
        for name, parameter in part.named_parameters(recurse=False):
            part.register_parameter(name, nn.Parameter(torch.empty(parameter.shape, dtype=own)))
        for name, buffer in part.named_buffers(recurse=False):
            part.register_buffer(name, torch.empty(buffer.shape, dtype=buffer.dtype))


class _Counting(TorchDispatchMode):
    """Counts what eager operations hold, move and send."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = self.moved = 0
        self.exchanges: list[CollectiveCost] = []
        self._known: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.exchanges += exchanged(func, args, kwargs or {}, lambda value: value)
        made = [value for value in torch.utils._pytree.tree_leaves(result) if isinstance(value, Tensor)]
        new = [value for value in made if self._hold(value)]
        if new and is_kernel(func):
            read = [value for value in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
            self.moved += sum(map(_bytes, [*read, *new]))
        return result

    def _hold(self, value: Tensor) -> bool:
        """Whether the tensor's storage is a new one; it then counts until it is freed."""
        storage = value.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self._known:
            return False

        def free(_: Any) -> None:
            self.live -= size
            del self._known[key]

        self._known[key] = weakref.ref(storage, free)
        self.live += size
        self.peak = max(self.peak, self.live)
        return True


def _bytes(value: Tensor) -> int:
    return value.numel() * value.element_size()


class _Saved:
    """The bytes of what is saved for a backward, each storage once, those of a module's parameters left out."""

    def __init__(self, module: nn.Module) -> None:
        self._parameters = {parameter.untyped_storage()._cdata for parameter in module.parameters()}
        self.bytes: dict[int, int] = {}

    def keep(self, value: Tensor) -> Tensor:
        """Notes a tensor, and is it."""
        storage = value.untyped_storage()
        if storage._cdata not in self._parameters:
            self.bytes[storage._cdata] = storage.nbytes()
        return value

    def hooks(self) -> torch.autograd.graph.saved_tensors_hooks:
        """For the forward."""
        return torch.autograd.graph.saved_tensors_hooks(self.keep, lambda value: value)


def trace(module: nn.Module, run: Callable[[Tensor], Tensor], x: Tensor) -> RunCost:
    """What `run(x)`, which reads parameters of `module`, and its backward cost as eager operations."""
    saved, counting = _Saved(module), _Counting()
    with counting:
        with saved.hooks():
            y = run(x)
        forward, counting.exchanges, counting.peak = counting.exchanges, [], counting.live
        torch.autograd.backward(y, torch.empty_like(y))
    entered = saved.bytes.get(x.untyped_storage()._cdata, 0)
    # The result is held by who called, and counts where something keeps it.
    backward = counting.peak + entered - _bytes(y)
    return RunCost(sum(saved.bytes.values()), backward, counting.moved, forward, counting.exchanges)


def trace_compiled(module: nn.Module, run: Callable[[Tensor], Tensor], x: Tensor) -> RunCost:
    """`trace` where `module`, which `run` calls once, is compiled: as inductor's front end cuts it into a forward and a
    backward, with all that its kernels will fuse."""
    from torch._inductor.compile_fx import compile_fx  # takes seconds, which other commands need not wait for

    saved = _Saved(module)
    costs: list[GraphCost] = []
    parameters: set[str] = set()

    def count(graph: GraphModule, inputs: Any, *, is_backward: bool = False, **options: Any) -> Callable[[Any], Any]:
        if not is_backward:
            names = [node.name for node in graph.graph.nodes if node.op == "placeholder"]
            parameters.update(names[index] for index in options.get("static_input_idxs", ()))
        costs.append(graph_cost(graph.graph, parameters))

        def call(arguments: list[Any]) -> Any:
            return graph(*arguments)

        call._boxed_call = True  # type: ignore[attr-defined]
        return call

    torch._dynamo.reset()  # a layer of another size is no other call of the same code
    inner: Any = count  # torch's own annotation asks for more than it reads
    front_end = partial(compile_fx, inner_compile=inner)
    module.compile(backend=front_end, fullgraph=True, dynamic=False)
    with functorch_config.patch(enable_autograd_cache=False):
        with saved.hooks():
            y = run(x)
        torch.autograd.backward(y, torch.empty_like(y))
    forward, backward = costs
    return RunCost(
        sum(saved.bytes.values()),
        backward.peak_bytes,
        forward.moved_bytes + backward.moved_bytes,
        forward.exchanges,
        backward.exchanges,
    )
