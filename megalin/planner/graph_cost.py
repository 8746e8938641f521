"""What a compiled graph holds, moves and sends, read from its nodes before there are kernels."""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Graph, Node

_VIEWS = {"aten::_unsafe_view", "aten::reshape"}
"""Views beside those that torch marks so."""
_INLINING = {"aten::sum", "aten::mean", "aten::amax", "aten::amin", "aten::var_mean", "aten::cat", "aten::any"}
"""Operations that form what they read on the way, as element-wise ones do, but make a tensor."""
_PRODUCTS = {"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm"}
_COLLECTIVES = "_c10d_functional"
"""The namespace of torch's functional collectives, and of waiting for one."""
COPY = "copy"
"""As the name of a collective: copy engines send the residual stream while products run."""
_CONSTANT = {"aten::full", "aten::empty", "aten::zeros", "aten::scalar_tensor", "prims::iota", "aten::arange"}
"""Operations of which no tensor is made."""


class CollectiveCost(NamedTuple):
    """What the ranks of a group send each other at one place."""

    collective: str
    """Its name in torch's functional collectives; or COPY."""
    group: str
    """The group's name."""
    bytes: int
    """What a rank puts in; of a COPY, the stream of all ranks [B, T, D]."""
    overlapped_flops: int = 0
    """Operations of products that run while a COPY is on its way."""


class _AsyncTPOp(NamedTuple):
    """An op of `megalin.parallel.async_tensor_parallel`, called with (tensors, weight, size, group)."""

    transfers: int
    """How often it sends the stream."""
    is_split: bool
    """Whether the first tensor is of this rank's tokens, not of all."""
    hidden_dim: int
    """The weight's dimension along which the stream's channels lie."""


_ASYNC_TP_OPS = {
    "megalin::all_gather_matmul": _AsyncTPOp(1, True, 1),
    "megalin::all_gather_matmul_backward": _AsyncTPOp(2, False, 1),
    "megalin::matmul_reduce_scatter": _AsyncTPOp(1, False, 0),
    "megalin::matmul_reduce_scatter_backward": _AsyncTPOp(1, True, 0),
}


class GraphCost(NamedTuple):
    """One run of a graph."""

    peak_bytes: int
    """Most that is held at once, without parameters. Inputs go after their last use, outputs stay."""
    moved_bytes: int
    """Read and written by kernels: not by matrix products, whose bytes pass while they compute, nor by collectives,
    whose bytes take the wire's time."""
    exchanges: list[CollectiveCost]


def graph_cost(graph: Graph, parameters: Collection[str]) -> GraphCost:
    """What a graph costs where element-wise operations are formed inside of what reads them.

    An element-wise result becomes a tensor only for an operation that needs one (a matrix product, a kernel of ours, a
    collective) or for the output; all others read what it is made of.

    Args:
        parameters: names of inputs that are not held for this graph.
    """
    nodes = list(graph.nodes)
    stored = _stored(nodes)
    sources: dict[Node, set[Node]] = {}
    ends: dict[Node, int] = {}
    moved, exchanges = 0, []
    for index, node in enumerate(nodes):
        read = set[Node]().union(*(sources[argument] for argument in node.all_input_nodes))
        sources[node] = {node} if node in stored else read
        if node.op == "output" or (node in stored and node.op != "placeholder"):
            ends.update(dict.fromkeys(read, index))
            moved += sum(map(_bytes, read)) + _bytes(node) if node.op != "output" and is_kernel(_maker(node)) else 0
        exchanges += exchanged(node.target, node.args, node.kwargs, _value) if node.op == "call_function" else []
    owned = [node for node in stored if node.name not in parameters]
    change = defaultdict[int, int](int)
    for node in owned:
        change[0 if node.op == "placeholder" else nodes.index(node)] += _bytes(node)
        change[ends.get(node, nodes.index(node)) + 1] -= _bytes(node)
    live = peak = 0
    for index in range(len(nodes)):
        live += change[index]
        peak = max(peak, live)
    return GraphCost(peak, moved, exchanges)


def _stored(nodes: list[Node]) -> dict[Node, None]:
    """The nodes that are tensors of their own, in order: found from the last to the first, by who reads them."""
    needs: set[Node] = set()  # what some reader needs as a tensor
    for node in reversed(nodes):
        formed = _is_pointwise(node) or _name(node) in _INLINING or (_is_view(node) and node not in needs)
        if node.op == "output" or (node.op == "call_function" and not formed):
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
    """What makes a node's tensor: of one of several results the operation that has them."""
    made = node.args[0] if node.target is operator.getitem else node
    return made.target if isinstance(made, Node) else node.target


def _target_name(target: Any) -> str:
    return str(getattr(getattr(target, "_schema", None), "name", ""))


def is_kernel(target: Any) -> bool:
    """Whether an operation takes the time of the bytes that it reads and writes: neither a matrix product, alone or
    beside copies, nor a collective or the wait for one."""
    name = _target_name(target)
    return name not in _PRODUCTS and name not in _ASYNC_TP_OPS and not name.startswith(f"{_COLLECTIVES}::")


def _is_view(node: Node) -> bool:
    return bool(getattr(node.target, "is_view", False)) or _name(node) in _VIEWS


def _is_pointwise(node: Node) -> bool:
    return torch.Tag.pointwise in getattr(node.target, "tags", ())


def _value(argument: Any) -> Any:
    return argument.meta.get("val") if isinstance(argument, Node) else argument


def _bytes(value: Any) -> int:
    """Bytes of a node's tensor, 0 for several: what takes them apart has each."""
    value = _value(value)
    return value.numel() * value.element_size() if isinstance(value, Tensor) else 0


def exchanged(target: Any, args: Any, kwargs: Any, value: Callable[[Any], Any]) -> list[CollectiveCost]:
    """What a call of `target` sends, in order; `value` gives the tensor of an argument."""
    if op := _ASYNC_TP_OPS.get(_target_name(target)):
        return _copies(op, args, value)
    if getattr(target, "namespace", "") != _COLLECTIVES or "wait" in target.name():
        return []
    group = next(each for each in [*kwargs.values(), *reversed(args)] if isinstance(each, str))
    return [CollectiveCost(target.name().split("::")[1].split(".")[0], group, _bytes(value(args[0])))]


def _copies(op: _AsyncTPOp, args: Any, value: Callable[[Any], Any]) -> list[CollectiveCost]:
    """Beside each transfer runs the product of the other ranks' tokens: the own ones' comes before what follows the
    last token, or after the last sum has left."""
    *tensors, weight, size, group = args
    first, weight = value(tensors[0]), value(weight)
    tokens = first.shape[0] * first.shape[1] * (size if op.is_split else 1)
    flops = 2 * tokens * weight.numel() * (size - 1) // size
    stream = tokens * weight.shape[op.hidden_dim] * first.element_size()
    return [CollectiveCost(COPY, group, stream, flops)] * op.transfers
