"""Memory, memory traffic and collectives of one block, run on meta with the kernels of a GPU."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._functorch import config as functorch_config
from torch.fx import Graph
from torch.fx._lazy_graph_module import _make_graph_module, _use_lazy_graph_module
from torch.utils._python_dispatch import TorchDispatchMode

from megalin.layers.mixers.base import FullPrecision
from megalin.planner.graph_cost import CollectiveCost, collective_costs, graph_cost, is_kernel
from megalin.planner.joint_graph import JointGraph, record_joint_graph
from megalin.planner.joint_graph_passes import merge_equal_operations, simplify


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


def materialize(module: nn.Module, dtype: torch.dtype) -> None:
    """Gives a module on meta the compute dtypes of FSDP: `dtype`, and fp32 in `FullPrecision` modules."""
    for submodule in module.modules():
        own = torch.promote_types(dtype, torch.float32) if isinstance(submodule, FullPrecision) else dtype
        for name, parameter in submodule.named_parameters(recurse=False):
            submodule.register_parameter(name, nn.Parameter(parameter.to(own)))


class _CostCounter(TorchDispatchMode):
    """Counts memory, memory traffic and collectives of eager operations."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = self.moved = 0
        self.collectives: list[CollectiveCost] = []
        self._known: dict[int, weakref.ref[Any]] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False: no wrapper around each operation, which torch would import dynamo for."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default:  # every read of `.device`: most calls, and no operation
            return func(*args)
        result = func(*args, **(kwargs or {}))
        self.collectives += collective_costs(func, args, kwargs or {}, lambda value: value)
        new = [value for value in _tensors(result) if self._track(value)]
        if new and is_kernel(func):
            self.moved += sum(map(_bytes, [*_tensors(args), *_tensors(kwargs), *new]))
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


def _tensors(value: Any) -> list[Tensor]:
    """The tensors among an operation's arguments or results."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [tensor for each in value for tensor in _tensors(each)] if isinstance(value, list | tuple) else []


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
    """Like `trace`, for a compiled `module`: inductor's partitioner splits the joint graph of forward and backward, and
    the fusion of operations is taken into account."""
    joint = record_joint_graph(module, run, x)
    simplify(joint.graph)
    merge_equal_operations(joint.graph)
    forward, backward = _partition(joint)
    saved = _SavedTensors(module)
    for node in forward.output_node().args[0][1:]:  # type: ignore[index, union-attr]
        saved.pack(node.meta["val"])  # type: ignore[union-attr]
    costs = graph_cost(forward, joint.parameters), graph_cost(backward, joint.parameters)
    return RunCost(
        sum(saved.bytes.values()),
        costs[1].peak_bytes,
        costs[0].moved_bytes + costs[1].moved_bytes,
        costs[0].collectives,
        costs[1].collectives,
    )


def _partition(joint: JointGraph) -> tuple[Graph, Graph]:
    """Forward graph, which returns y and the saved tensors, and backward graph."""
    from torch._functorch.partitioners import min_cut_rematerialization_partition  # slow import: over a second

    inputs = [node.name for node in joint.graph.find_nodes(op="placeholder")]
    parameters = [index for index, name in enumerate(inputs) if name in joint.parameters]
    with _use_lazy_graph_module(True), functorch_config.patch(cse=False):  # the graphs are not run, and have no equals
        module = _make_graph_module(nn.Module(), joint.graph)
        forward, backward = min_cut_rematerialization_partition(
            module, None, num_fwd_outputs=1, static_lifetime_input_indices=parameters
        )
    return forward.graph, backward.graph
