"""Joint graph of a module's forward and backward as torch.compile would have it, recorded from one run on meta.

torch.compile gets the same operations from bytecode (dynamo) and a second run under FakeTensor (AOTAutograd), which
takes seconds a block. Tests compare the cost of blocks in this graph with that of torch.compile's own graphs.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._dispatch.python import enable_python_dispatcher
from torch.fx import Graph, Node
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy

from megalin.ops.dispatch.backend import assume_kernels

aten = torch.ops.aten
_SAME_VALUE = {aten.detach.default, aten.alias.default, aten.lift_fresh.default}
"""Operations whose result is their input."""
TANGENT = "tangents_1"
"""Name of the output's gradient, by which torch's partitioner finds the backward."""


class JointGraph(NamedTuple):
    """Forward and backward of a function y = f(x) of one tensor, which reads other tensors too."""

    graph: Graph
    """Inputs: the tensors that it reads, then dy. Outputs: y, then the gradients. Nodes have torch.compile's `meta`:
    "val", "partitioner_tag", and "recompute" in activation checkpoints."""
    parameters: set[str]
    """Names of the inputs that are parameters or buffers of the module."""


def record_joint_graph(module: nn.Module, run: Callable[[Tensor], Tensor], x: Tensor) -> JointGraph:
    """Records `run(x)` and its backward under the decompositions of inductor.

    Args:
        module: its parameters and buffers are inputs of the graph if `run` reads them.
        x: a meta tensor that requires a gradient.
    """
    recorder = _Recorder()
    parameters = {recorder.add_input(value).name for value in (*module.parameters(), *module.buffers())}
    recorder.add_input(x)
    # As for torch.compile, saved tensors have no hooks; those of an activation checkpoint mark its operations.
    torch._C._autograd._saved_tensors_hooks_set_tracing(True)
    try:
        with assume_kernels(compiled=True), recorder, enable_python_dispatcher():
            y = run(x)
            inputs = [node for node in recorder.graph.nodes if node.op == "placeholder" and _needs_gradient(node)]
            recorder.is_backward, dy = True, torch.empty_like(y, requires_grad=False)
            recorder.add_input(dy, TANGENT)
            gradients = torch.autograd.grad(y, [node.meta["val"] for node in inputs], dy, allow_unused=True)
    finally:
        torch._C._autograd._saved_tensors_hooks_set_tracing(False)
    graph = recorder.graph
    graph.output(tuple(value if value is None else recorder.node_of(value) for value in (y, *gradients)))
    for node in graph.find_nodes(op="placeholder"):
        if not node.users and node.name != TANGENT:
            graph.erase_node(node)
    return JointGraph(graph, parameters)


def _needs_gradient(node: Node) -> bool:
    return bool(node.meta["val"].requires_grad)


class _Recorder(TorchDispatchMode):
    """Records each operation below autograd as a node, decomposed and without mutation."""

    def __init__(self) -> None:
        from torch._inductor.decomposition import select_decomp_table  # slow import: over a second

        super().__init__()
        self.graph, self.is_backward = Graph(), False
        self._decompositions = select_decomp_table()
        self._nodes: dict[int, Node] = {}
        self._values: list[Tensor] = []  # keeps the ids in `_nodes` unique
        self._first_views: dict[int, int] = {}  # by storage, the id of its first tensor
        self._last_input: Node | None = None

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False: no wrapper around each operation, which torch would import dynamo for."""
        return False

    def add_input(self, value: Tensor, name: str = "") -> Node:
        """Adds an input after the others."""
        assert not self.is_backward or name, f"the backward reads a tensor {list(value.shape)} of no recorded operation"
        after = self.graph._root if self._last_input is None else self._last_input
        with self.graph.inserting_after(after):
            self._last_input = node = self.graph.placeholder(name or f"primals_{len(self._values)}")
        self._bind(value, node)
        return node

    def node_of(self, value: Any) -> Any:
        """Arguments with each tensor's node in its place, a new input for an unknown tensor."""
        if isinstance(value, Tensor):
            return self._nodes.get(id(value)) or self.add_input(value)
        if isinstance(value, tuple | list):
            return type(value)(map(self.node_of, value))
        return {name: self.node_of(each) for name, each in value.items()} if isinstance(value, dict) else value

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.prim.device.default:
            return func(*args)
        if func._schema.is_mutable:
            custom = func.namespace != "aten"
            return self._mutate_by_custom_op(func, args) if custom else self._mutate(func, args, kwargs)
        if func is aten.scalar_tensor.default:  # inductor folds constants: equal ones are one operation
            func, args = aten.full.default, ([], float(args[0]))
        decompose = self._decompositions.get(func, func.decompose)
        with self:
            result = decompose(*args, **kwargs)
        if result is not NotImplemented:
            return result
        result = func(*args, **kwargs)
        if func in _SAME_VALUE:
            self._bind(result, self.node_of(args[0]))
            return result
        node = self._call(func, self.node_of(args), self.node_of(kwargs), result)
        if isinstance(result, tuple | list):
            for index, value in enumerate(result):
                if isinstance(value, Tensor):
                    self._bind(value, self._call(operator.getitem, (node, index), {}, value))
        else:
            self._bind(result, node)
        return result

    def _call(self, target: Any, args: Any, kwargs: Any, result: Any) -> Node:
        node = self.graph.call_function(target, tuple(args), kwargs)
        node.meta["val"] = result
        node.meta["partitioner_tag"] = "is_backward" if self.is_backward else "is_forward"
        if not self.is_backward and torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
            node.meta |= {"recompute": CheckpointPolicy.PREFER_RECOMPUTE, "ac_graph_id": 1}
        return node

    def _mutate(self, func: Any, args: Any, kwargs: Any) -> Tensor:
        """Records an in-place operation on a tensor without views as the operation that returns a new one."""
        mutated: Tensor = args[0]
        name = func._schema.name.removeprefix("aten::")
        assert name.endswith("_"), f"{func}: not an in-place operation of a tensor"
        first = self._first_views.get(mutated.untyped_storage()._cdata, id(mutated))
        assert first == id(mutated), f"{func} changes a view {list(mutated.shape)}"
        with self:
            result = getattr(getattr(aten, name[:-1]), func._overloadname)(*args, **kwargs)
        self._nodes[id(mutated)] = self.node_of(result)
        return mutated

    def _mutate_by_custom_op(self, func: Any, args: Any) -> tuple[Tensor, ...]:
        """Records a custom op that writes one of its arguments as AOTAutograd does: as an operation that returns the
        op's results and the new value of that tensor."""
        names = [argument.name for argument in func._schema.arguments]
        written = [argument.name for argument in func._schema.arguments if argument.is_write]
        assert len(written) == 1, f"{func} writes {written}"
        results = func(*args)
        results = results if isinstance(results, tuple) else (results,)
        nodes = dict(zip(names, map(self.node_of, args), strict=True))
        mutated = args[names.index(written[0])]
        bases = {f"_{written[0]}_base_index": 0, "_all_bases": [nodes.pop(written[0])]}
        node = self._call(torch.ops.higher_order.auto_functionalized_v2, (func,), nodes | bases, (*results, mutated))
        for index, value in enumerate((*results, mutated)):
            self._bind(value, self._call(operator.getitem, (node, index), {}, value))
        return results

    def _bind(self, value: Tensor, node: Node) -> None:
        node.meta.setdefault("val", value)
        self._nodes[id(value)] = node
        self._values.append(value)
        self._first_views.setdefault(value.untyped_storage()._cdata, id(value))
