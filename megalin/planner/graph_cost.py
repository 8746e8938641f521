"""Memory, memory traffic and collectives of a compiled graph, from its nodes, before kernels exist."""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Graph, Node

_VIEWS = {"aten::_unsafe_view", "aten::reshape"}
"""Views that torch does not mark as such."""
_REDUCTIONS = {"aten::sum", "aten::mean", "aten::amax", "aten::amin", "aten::var_mean", "aten::any"}
"""Operations whose consumers are fused with them where these read the same tensor again: from a cache."""
_INLINING = {*_REDUCTIONS, "aten::cat"}
"""Operations that fuse the producers of their inputs, as element-wise ones do, but write a tensor."""
_MATMULS = {"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::_scaled_mm"}
_COLLECTIVES = "_c10d_functional"
"""Namespace of torch's functional collectives and of `wait_tensor`."""
COPY = "copy"
"""Name of a transfer of async tensor parallelism: copy engines send hidden states while matmuls run."""
_CONSTANT = {"aten::full", "aten::empty", "aten::zeros", "aten::scalar_tensor", "prims::iota", "aten::arange"}
"""Operations that write no tensor."""


class CollectiveCost(NamedTuple):
    """One collective of a group."""

    name: str
    """Name in torch's functional collectives, or COPY."""
    group: str
    """Name of the group."""
    bytes: int
    """Bytes of a rank's input; of a COPY, the hidden states of all ranks [B, T, D]."""
    overlapped_flops: int = 0
    """Operations of matmuls that run during a COPY."""


class _AsyncTPOp(NamedTuple):
    """An op of `megalin.parallel.async_tensor_parallel`, called with (tensors, weight, size, group)."""

    transfers: int
    """Number of transfers of hidden states."""
    is_split: bool
    """True where the first tensor has this rank's tokens only, not all."""
    hidden_dim: int
    """Dimension of the weight with the hidden channels."""


_ASYNC_TP_OPS = {
    "megalin::all_gather_matmul": _AsyncTPOp(1, True, 1),
    "megalin::all_gather_matmul_backward": _AsyncTPOp(2, False, 1),
    "megalin::matmul_reduce_scatter": _AsyncTPOp(1, False, 0),
    "megalin::matmul_reduce_scatter_backward": _AsyncTPOp(1, True, 0),
}


class GraphCost(NamedTuple):
    """Cost of one run of a graph."""

    peak_bytes: int
    """Peak memory without parameters. Inputs are freed after their last use, outputs are kept."""
    moved_bytes: int
    """Bytes read and written by kernels except matmuls, whose traffic overlaps with their operations, and collectives,
    which take the link's time."""
    collectives: list[CollectiveCost]


def graph_cost(graph: Graph, parameters: Collection[str]) -> GraphCost:
    """Cost of a graph whose element-wise operations are fused into their consumers.

    An element-wise result is stored only for an operation that needs a tensor (a matmul, a kernel of ours, a
    collective) or for the output; all others read its inputs instead.

    Args:
        parameters: names of inputs whose memory does not count.
    """
    nodes = list(graph.nodes)
    stored = _stored(nodes)
    sources: dict[Node, set[Node]] = {}
    reduced: dict[Node, set[Node]] = {}
    ends: dict[Node, int] = {}
    moved, collectives = 0, []
    for index, node in enumerate(nodes):
        read = set[Node]().union(*(sources[argument] for argument in node.all_input_nodes))
        sources[node] = {node} if node in stored else read
        if node.op == "output" or (node in stored and node.op != "placeholder"):
            ends.update(dict.fromkeys(read, index))
            if _name(node) in _REDUCTIONS:
                reduced[node] = read
            elif node.op == "call_function":
                read = read.difference(*(reduced.get(source, ()) for source in read))
            moved += sum(map(_bytes, read)) + _bytes(node) if node.op != "output" and is_kernel(_maker(node)) else 0
        collectives += (
            collective_costs(node.target, node.args, node.kwargs, _value) if node.op == "call_function" else []
        )
    owned = [node for node in stored if node.name not in parameters]
    change = defaultdict[int, int](int)
    for node in owned:
        change[0 if node.op == "placeholder" else nodes.index(node)] += _bytes(node)
        change[ends.get(node, nodes.index(node)) + 1] -= _bytes(node)
    live = peak = 0
    for index in range(len(nodes)):
        live += change[index]
        peak = max(peak, live)
    return GraphCost(peak, moved, collectives)


def _stored(nodes: list[Node]) -> dict[Node, None]:
    """Nodes stored as tensors, in order; found from last to first, by their consumers."""
    needs: set[Node] = set()  # nodes that some consumer needs as a tensor
    for node in reversed(nodes):
        fused = _is_pointwise(node) or _name(node) in _INLINING or (_is_view(node) and node not in needs)
        if node.op == "output" or (node.op == "call_function" and not fused):
            needs.update(node.all_input_nodes)
    return {
        node: None
        for node in nodes
        if node.op == "placeholder"
        or (
            node.op == "call_function"
            and not _is_view(node)
            and _name(node) not in _CONSTANT
            and (node in needs or not _is_pointwise(node))
        )
    }


def _name(node: Node) -> str:
    return _target_name(node.target)


def _maker(node: Node) -> Any:
    """Operation that makes a node's tensor; for one of several results, the operation that returns them."""
    producer = node.args[0] if node.target is operator.getitem else node
    return producer.target if isinstance(producer, Node) else node.target


def _target_name(target: Any) -> str:
    return str(getattr(getattr(target, "_schema", None), "name", ""))


def is_kernel(target: Any) -> bool:
    """True for operations bound by memory traffic: neither a matmul, with or without overlapped copies, nor a
    collective or the wait for one."""
    name = _target_name(target)
    return name not in _MATMULS and name not in _ASYNC_TP_OPS and not name.startswith(f"{_COLLECTIVES}::")


def _is_view(node: Node) -> bool:
    return bool(getattr(node.target, "is_view", False)) or _name(node) in _VIEWS


def _is_pointwise(node: Node) -> bool:
    return torch.Tag.pointwise in getattr(node.target, "tags", ())


def _value(argument: Any) -> Any:
    return argument.meta.get("val") if isinstance(argument, Node) else argument


def _bytes(value: Any) -> int:
    """Bytes of a node's tensor; 0 for a tuple, whose elements are nodes of their own."""
    value = _value(value)
    return value.numel() * value.element_size() if isinstance(value, Tensor) else 0


def collective_costs(target: Any, args: Any, kwargs: Any, value: Callable[[Any], Any]) -> list[CollectiveCost]:
    """Collectives of a call of `target`, in order; `value` gives the tensor of an argument."""
    if op := _ASYNC_TP_OPS.get(_target_name(target)):
        return _copy_costs(op, args, value)
    if getattr(target, "namespace", "") != _COLLECTIVES or "wait" in target.name():
        return []
    group = next(each for each in [*kwargs.values(), *reversed(args)] if isinstance(each, str))
    return [CollectiveCost(target.name().split("::")[1].split(".")[0], group, _bytes(value(args[0])))]


def _copy_costs(op: _AsyncTPOp, args: Any, value: Callable[[Any], Any]) -> list[CollectiveCost]:
    """Each transfer overlaps with the matmul of the other ranks' tokens. The own tokens' matmul does not count: it runs
    before the last tokens are used, or after the last sums have been sent."""
    *tensors, weight, size, group = args
    first, weight = value(tensors[0]), value(weight)
    tokens = first.shape[0] * first.shape[1] * (size if op.is_split else 1)
    flops = 2 * tokens * weight.numel() * (size - 1) // size
    hidden_bytes = tokens * weight.shape[op.hidden_dim] * first.element_size()
    return [CollectiveCost(COPY, group, hidden_bytes, flops)] * op.transfers
