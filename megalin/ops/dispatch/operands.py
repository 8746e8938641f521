"""Validation of an op's tensors: matching sizes, named by letters, one device, and the kind of dtype."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from megalin.errors import OperandError

Case = tuple[tuple[str, Any], ...]
"""Properties of a call that select a kernel's code, by name: a size by its letter ("K", 128), the dtype of an operand
by its name (None: omitted), and options of the op. A constant to torch.compile, which builds no NamedTuple as one."""

_KINDS: dict[str, tuple[str, Callable[[torch.dtype], bool]]] = {
    "": ("floating point", lambda dtype: dtype.is_floating_point),
    "int": ("integers", lambda dtype: not dtype.is_floating_point and not dtype.is_complex),
    "bool": ("bools", lambda dtype: dtype == torch.bool),
}


def check_operands(op: str, operands: Mapping[str, tuple[Tensor | None, str]], widths: str = "") -> Case:
    """Validates operand shapes, dtypes and devices before a kernel reads out of bounds or an op broadcasts wrongly.

    Args:
        operands: name -> a tensor (None: omitted, not checked) and its sizes: "BTHK" for four dimensions, "*D" for any
            number followed by D. The first tensor with a letter sets its size, with "*" all leading sizes; a lower-case
            letter may be 1 instead. "BT int" requires integers, "BT bool" bools, others floating point. T is not 0.
        widths: letters of the sizes that select a kernel's code.

    Returns:
        The sizes in `widths`, and the dtype of each operand, None of an omitted one.

    Raises:
        OperandError: for the first invalid tensor.
    """
    sizes: dict[str, tuple[int | tuple[int, ...], str]] = {}
    dtypes: list[tuple[str, torch.dtype | None]] = []
    device = None
    for name, (tensor, described) in operands.items():
        dtypes.append((name, None if tensor is None else tensor.dtype))
        if tensor is None:
            continue
        letters, _, kind = described.partition(" ")
        shape = tuple(tensor.shape)
        expected, fits = _KINDS[kind]
        if not fits(tensor.dtype):
            raise OperandError(f"{op}: {name} has dtype {tensor.dtype}, but must be {expected}")
        if device is None:
            device = (tensor.device, name)
        if tensor.device != device[0]:
            raise OperandError(
                f"{op}: {name} is on {tensor.device}, {device[1]} on {device[0]}; move both to one device"
            )
        named = letters.removeprefix("*")
        leading = len(shape) - len(named)
        if leading < 0 or (leading > 0 and named == letters):
            raise OperandError(f"{op}: {name} has shape {shape}, but must be {_format_shape(letters)}")
        found: list[tuple[str, int | tuple[int, ...]]] = [("*", shape[:leading])] if named != letters else []
        found += zip(named, shape[leading:], strict=True)
        for letter, size in found:
            if letter.islower() and size == 1:
                continue
            known, owner = sizes.setdefault(letter.upper(), (size, name))
            if size != known:
                what = "leading sizes" if letter == "*" else letter.upper()
                raise OperandError(
                    f"{op}: {name} has shape {shape} = {_format_shape(letters)}, but {what} = {known} in {owner}; "
                    "they must be equal"
                )
            if letter == "T" and size == 0:
                raise OperandError(f"{op}: {name} has shape {shape} and no tokens; give at least one")
    return (*[(letter, static(sizes[letter][0])) for letter in widths], *dtypes)


def static(size: Any) -> int:
    """The size of a dimension as a constant to torch.compile, which may have made it symbolic."""
    return operator.index(size)


def check_one_dtype(op: str, **tensors: Tensor) -> None:
    """Raises OperandError unless all tensors, given by name, have the dtype of the first."""
    (first, like), *others = tensors.items()
    for name, tensor in others:
        if tensor.dtype != like.dtype:
            raise OperandError(f"{op}: {name} has dtype {tensor.dtype}, {first} {like.dtype}; they must be equal")


def check_scan(
    op: str,
    q: tuple[Tensor, str],
    k: tuple[Tensor, str],
    v: Tensor,
    decay: tuple[str, Tensor | None, str],
    initial_state: Tensor | None,
    document_ids: Tensor | None,
) -> Case:
    """Runs `check_operands` for a scan, with its sizes H, K and V: v [B, T, H, V], initial_state [B, H, K, V],
    document_ids [B, T] integers; q and k with the given sizes, the decay with its name, tensor and sizes. Raises
    OperandError."""
    operands = {
        "v": (v, "BTHV"),
        "q": q,
        "k": k,
        decay[0]: decay[1:],
        "initial_state": (initial_state, "BHKV"),
        "document_ids": (document_ids, "BT int"),
    }
    return check_operands(op, operands, "HKV")


def _format_shape(letters: str) -> str:
    return "[" + ", ".join("..." if x == "*" else f"{x.upper()} or 1" if x.islower() else x for x in letters) + "]"
