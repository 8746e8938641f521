"""Calls into the CUDA extension, passing tensors as addresses."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor

DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""Codes of csrc/cuda/rows.cuh."""


def launch(name: str, first: Tensor, *arguments: Tensor | float | None) -> None:
    """Calls megalin._C.<name>(first, *arguments, dtype of `first`, CUDA stream) on the device of `first`."""
    call(name, first.device, first, *arguments, DTYPE_CODES[first.dtype])


def call(name: str, device: torch.device, *arguments: object) -> None:
    """Calls megalin._C.<name>(*arguments, CUDA stream) on `device` and its current CUDA stream.

    Passes tensors as addresses and None as zero, also within tuples. The caller must have checked shapes, contiguity
    and that all tensors are on one device.
    """
    extension = importlib.import_module("megalin._C")

    with torch.cuda.device(device):
        getattr(extension, name)(*map(_address, arguments), torch.cuda.current_stream().cuda_stream)


def _address(argument: object) -> Any:
    if isinstance(argument, tuple):
        return tuple(map(_address, argument))
    return argument.data_ptr() if isinstance(argument, Tensor) else argument or 0
