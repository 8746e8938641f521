"""What a compiled graph holds, moves and sends, read from its nodes before there are kernels."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Graph, Node

_VIEWS = {"aten::_unsafe_view", "aten::reshape"}
"""Views beside those that torch marks so."""
_INLINING = {"aten::sum", "aten::mean", "aten::amax", "aten::amin", "aten::var_mean", "aten::cat", "aten::any"}
"""Operations that form what they read on the way, as element-wise ones do, but make a tensor."""
_PRODUCTS = {"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm"}
_CONSTANT = {"aten::full", "aten::empty", "aten::zeros", "aten::scalar_tensor", "prims::iota", "aten::arange"}
"""Operations of which no tensor is made."""


class Exchange(NamedTuple):
    """One collective: its name in torch's functional collectives, its group's name, and the bytes a rank puts in."""

    collective: str
    group: str
    bytes: int


class GraphCost(NamedTuple):
    """One run of a graph."""

    peak_bytes: int
    """Most that is held at once, without parameters. Inputs go after their last use, outputs stay."""
    moved_bytes: int
    """Read and written by kernels other than matrix products, whose bytes pass while they compute."""
    exchanges: list[Exchange]


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
            moved += 0 if node.op == "output" or is_product(node.target) else sum(map(_bytes, read)) + _bytes(node)
        exchanges += exchange(node.target, node.args, node.kwargs, _bytes) if node.op == "call_function" else []
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
    return str(getattr(getattr(node.target, "_schema", None), "name", ""))


def is_product(target: Any) -> bool:
    """Whether an operation of torch is a matrix product."""
    return str(getattr(getattr(target, "_schema", None), "name", "")) in _PRODUCTS


def _is_view(node: Node) -> bool:
    return bool(getattr(node.target, "is_view", False)) or _name(node) in _VIEWS


def _is_pointwise(node: Node) -> bool:
    return torch.Tag.pointwise in getattr(node.target, "tags", ())


def _bytes(value: Any) -> int:
    """Bytes of a node's tensor, 0 for several: what takes them apart has each."""
    value = value.meta.get("val") if isinstance(value, Node) else value
    return value.numel() * value.element_size() if isinstance(value, Tensor) else 0


def exchange(target: Any, args: Any, kwargs: Any, size: Any) -> list[Exchange]:
    """The collective that a call of `target` is, if it is one; `size` gives the bytes of an argument."""
    if getattr(target, "namespace", "") != "_c10d_functional" or "wait" in target.name():
        return []
    group = next(value for value in [*kwargs.values(), *reversed(args)] if isinstance(value, str))
    return [Exchange(target.name().split("::")[1].split(".")[0], group, size(args[0]))]
