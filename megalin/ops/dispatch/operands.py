"""Validation of an op's tensors: matching sizes, named by letters, one device, and the kind of dtype."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from megalin.errors import OperandError

_KINDS: dict[str, tuple[str, Callable[[torch.dtype], bool]]] = {
    "": ("floating point", lambda dtype: dtype.is_floating_point),
    "int": ("integers", lambda dtype: not dtype.is_floating_point and not dtype.is_complex),
    "bool": ("bools", lambda dtype: dtype == torch.bool),
}


def check_operands(op: str, operands: Mapping[str, tuple[Tensor | None, str]]) -> None:
    """Validates operand shapes, dtypes and devices before a kernel reads out of bounds or an op broadcasts wrongly.

    Args:
        operands: name -> a tensor (None: omitted, not checked) and its sizes: "BTHK" for four dimensions, "*D" for any
            number followed by D. The first tensor with a letter sets its size, with "*" all leading sizes; a lower-case
            letter may be 1 instead. "BT int" requires integers, "BT bool" bools, others floating point. T is not 0.

    Raises:
        OperandError: for the first invalid tensor.
    """
    sizes: dict[str, tuple[int | tuple[int, ...], str]] = {}
    device = None
    for name, (tensor, described) in operands.items():
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
) -> None:
    """Runs `check_operands` for a scan: v [B, T, H, V], initial_state [B, H, K, V], document_ids [B, T] integers; q and
    k with the given sizes, the decay with its name, tensor and sizes. Raises OperandError."""
    operands = {
        "v": (v, "BTHV"),
        "q": q,
        "k": k,
        decay[0]: decay[1:],
        "initial_state": (initial_state, "BHKV"),
        "document_ids": (document_ids, "BT int"),
    }
    check_operands(op, operands)


def _format_shape(letters: str) -> str:
    return "[" + ", ".join("..." if x == "*" else f"{x.upper()} or 1" if x.islower() else x for x in letters) + "]"
