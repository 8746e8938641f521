"""Passes on a joint graph: those of inductor and of torch's partitioner that change the cost of a block."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, Node

aten = torch.ops.aten
_CONVERT = torch.ops.prims.convert_element_type.default
_COPIES = {
    aten.clone.default,
    aten.slice.Tensor,
    aten.view.default,
    aten.cat.default,
    aten.constant_pad_nd.default,
    aten.repeat.default,
    _CONVERT,
}
"""Operations that return their input's values where dtype, shape and strides are the same."""
_UNINITIALIZED = {aten.empty.memory_format}
_FLOATS = {torch.float16, torch.bfloat16, torch.float32, torch.float64}


def simplify(graph: Graph) -> None:
    """Removes copies and views that change nothing, pairs of views or permutations that cancel, and intermediate
    conversions of dtypes."""
    for node in list(graph.nodes):
        if node.target in _COPIES:
            source = node.args[0]
            if node.target is aten.cat.default:
                source = source[0] if len(source) == 1 else None
            if source is not None and _has_same_layout(node, source):
                _replace(node, source)
    for node in reversed(list(graph.nodes)):
        if not node._erased and node.target in (aten.view.default, aten.permute.default):
            _cancel(node)
    for node in reversed(list(graph.nodes)):
        if not node._erased and node.target is _CONVERT:
            _convert_once(node)


def merge_equal_operations(graph: Graph) -> None:
    """Common subexpression elimination, except of outputs. That of torch's partitioner imports all of inductor."""
    graph.eliminate_dead_code()
    outputs = {_storage(node) for node in graph.output_node().all_input_nodes}
    known: dict[Any, Node] = {}
    for node in list(graph.nodes):
        if node.op != "call_function" or _storage(node) in outputs or node.target in _UNINITIALIZED:
            continue
        same = known.setdefault((node.target, _key(node.args), _key(node.kwargs)), node)
        if same is not node:
            _replace(node, same)


def _storage(node: Node) -> int | None:
    """Identity of the storage of a node's tensor; None for an operation of several tensors."""
    value = node.meta["val"]
    return value.untyped_storage()._cdata if isinstance(value, torch.Tensor) else None


def _key(argument: Any) -> Any:
    """Hashable form of arguments; 1, 1.0 and True are different."""
    if isinstance(argument, tuple | list):
        return tuple(map(_key, argument))
    if isinstance(argument, dict):
        return tuple((name, _key(value)) for name, value in argument.items())
    return type(argument), argument


def _cancel(node: Node) -> None:
    source = _argument(node)
    if node.target is aten.view.default and _shape(source) == _shape(node):
        _replace(node, source)
    elif source.target is node.target and len(source.users) == 1:
        first = _argument(source)
        if node.target is aten.view.default:
            cancels = _shape(first) == _shape(node)
        else:
            dims: list[list[int]] = [each.args[1] for each in (source, node)]  # type: ignore[misc]
            cancels = [dims[0][dim] for dim in dims[1]] == sorted(dims[0])
        if cancels:
            _replace(node, first)
            node.graph.erase_node(source)


def _convert_once(node: Node) -> None:
    """Replaces a conversion of a conversion, unless the first one saves memory."""
    source = _argument(node)
    if source.target is not _CONVERT or len(source.users) > 1:
        return
    first = _argument(source)
    dtypes = [each.meta["val"].dtype for each in (first, source, node)]
    if set(dtypes) <= _FLOATS and dtypes[1].itemsize >= dtypes[2].itemsize:
        with node.graph.inserting_before(node):
            direct = node.graph.call_function(_CONVERT, (first, dtypes[2]))
        direct.meta = dict(node.meta)
        _replace(node, direct)
        node.graph.erase_node(source)


def _argument(node: Node) -> Node:
    argument = node.args[0]
    assert isinstance(argument, Node), node
    return argument


def _shape(node: Node) -> torch.Size:
    shape: torch.Size = node.meta["val"].shape
    return shape


def _has_same_layout(node: Node, source: Node) -> bool:
    one, two = node.meta["val"], source.meta["val"]
    return bool(
        one.dtype == two.dtype
        and one.shape == two.shape
        and one.stride() == two.stride()
        and one.storage_offset() == two.storage_offset()
    )


def _replace(node: Node, other: Node) -> None:
    node.replace_all_uses_with(other)
    node.graph.erase_node(node)
