"""Calls of the CUDA extension, whose functions take addresses."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor

DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""As csrc/cuda/rows.cuh numbers them."""


def launch(name: str, first: Tensor, *arguments: Tensor | float | None) -> None:
    """megalin._C.<name>(first, *arguments, dtype of `first`, stream), as `call` on the device of `first`."""
    call(name, first.device, first, *arguments, DTYPE_CODES[first.dtype])


def call(name: str, device: torch.device, *arguments: object) -> None:
    """megalin._C.<name>(*arguments, stream) on `device` and its current stream.

    Tensors go as addresses, None as zero, in tuples too: the caller has checked shapes, contiguity and that all lie on
    one device.
    """
    extension = importlib.import_module("megalin._C")

    with torch.cuda.device(device):
        getattr(extension, name)(*map(_address, arguments), torch.cuda.current_stream().cuda_stream)


def _address(argument: object) -> Any:
    if isinstance(argument, tuple):
        return tuple(map(_address, argument))
    return argument.data_ptr() if isinstance(argument, Tensor) else argument or 0
