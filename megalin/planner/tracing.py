"""Memory, memory traffic and collectives of one block, run on fake tensors with the kernels of a GPU."""

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
from megalin.planner.graph_cost import CollectiveCost, GraphCost, collective_costs, graph_cost, is_kernel


class RunCost(NamedTuple):
    """Cost of forward and backward of a function of a tensor."""

    saved_bytes: int
    """Bytes saved for the backward, without parameters."""
    backward_bytes: int
    """Peak during the backward, saved bytes included."""
    moved_bytes: int
    """Bytes read and written in forward and backward by kernels other than matmuls and collectives."""
    forward: list[CollectiveCost]
    """Collectives of the forward."""
    backward: list[CollectiveCost]
    """Collectives of the backward."""


@contextmanager
def fake_execution() -> Iterator[None]:
    """Context in which tensors have no values and ops choose the kernels of a GPU."""
    with assume_kernels(), FakeTensorMode(allow_non_fake_inputs=True):
        yield


def materialize(module: nn.Module, dtype: torch.dtype) -> None:
    """Allocates a module on meta on the device of the trace, in the compute dtypes of FSDP: `dtype`, and fp32
    in `FullPrecision` modules."""
    for submodule in module.modules():
        own = torch.promote_types(dtype, torch.float32) if isinstance(submodule, FullPrecision) else dtype
        for name, parameter in submodule.named_parameters(recurse=False):
            submodule.register_parameter(name, nn.Parameter(torch.empty(parameter.shape, dtype=own)))
        for name, buffer in submodule.named_buffers(recurse=False):
            submodule.register_buffer(name, torch.empty(buffer.shape, dtype=buffer.dtype))


class _CostCounter(TorchDispatchMode):
    """Counts memory, memory traffic and collectives of eager operations."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = self.moved = 0
        self.collectives: list[CollectiveCost] = []
        self._known: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default:  # every read of `.device`: most calls, and no operation
            return func(*args)
        result = func(*args, **(kwargs or {}))
        self.collectives += collective_costs(func, args, kwargs or {}, lambda value: value)
        made = [value for value in torch.utils._pytree.tree_leaves(result) if isinstance(value, Tensor)]
        new = [value for value in made if self._track(value)]
        if new and is_kernel(func):
            read = [value for value in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
            self.moved += sum(map(_bytes, [*read, *new]))
        return result

    def _track(self, value: Tensor) -> bool:
        """True where the tensor's storage is new; it then counts until it is freed."""
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


class _SavedTensors:
    """Bytes of tensors saved for the backward, each storage once, without a module's parameters."""

    def __init__(self, module: nn.Module) -> None:
        self._parameters = {parameter.untyped_storage()._cdata for parameter in module.parameters()}
        self.bytes: dict[int, int] = {}

    def pack(self, value: Tensor) -> Tensor:
        """Pack hook: counts a tensor and returns it."""
        storage = value.untyped_storage()
        if storage._cdata not in self._parameters:
            self.bytes[storage._cdata] = storage.nbytes()
        return value

    def hooks(self) -> torch.autograd.graph.saved_tensors_hooks:
        """Hooks to run the forward under."""
        return torch.autograd.graph.saved_tensors_hooks(self.pack, lambda value: value)


def trace(module: nn.Module, run: Callable[[Tensor], Tensor], x: Tensor) -> RunCost:
    """Cost of `run(x)`, which reads parameters of `module`, and its backward as eager operations."""
    saved, counting = _SavedTensors(module), _CostCounter()
    with counting:
        with saved.hooks():
            y = run(x)
        forward, counting.collectives, counting.peak = counting.collectives, [], counting.live
        torch.autograd.backward(y, torch.empty_like(y))
    saved_input = saved.bytes.get(x.untyped_storage()._cdata, 0)
    # The caller holds the result; it counts only if something saves it.
    backward = counting.peak + saved_input - _bytes(y)
    return RunCost(sum(saved.bytes.values()), backward, counting.moved, forward, counting.collectives)


def trace_compiled(module: nn.Module, run: Callable[[Tensor], Tensor], x: Tensor) -> RunCost:
    """Like `trace`, for a compiled `module` that `run` calls once: inductor's front end splits it into a forward and a
    backward graph, whose fusion is taken into account."""
    from torch._inductor.compile_fx import compile_fx  # slow import: seconds

    saved = _SavedTensors(module)
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

    torch._dynamo.reset()  # otherwise a layer of another size counts as a recompilation of the same code
    inner: Any = count  # torch's annotation is stricter than its use
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
        forward.collectives,
        backward.collectives,
    )
