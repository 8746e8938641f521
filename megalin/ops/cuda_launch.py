"""Calls of the CUDA extension, whose functions take addresses."""

from __future__ import annotations

import importlib

import torch
from torch import Tensor

DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""As csrc/cuda/rows.cuh numbers them."""


def launch(name: str, first: Tensor, *arguments: Tensor | float | None) -> None:
    """megalin._C.<name>(first, *arguments, dtype of `first`, stream) on the device and the current stream of `first`.

    Tensors go as addresses, None as zero: the caller has checked shapes, contiguity and that all lie on one device.
    """
    extension = importlib.import_module("megalin._C")

    addresses = [x.data_ptr() if isinstance(x, Tensor) else x or 0 for x in (first, *arguments)]
    with torch.cuda.device(first.device):
        getattr(extension, name)(*addresses, DTYPE_CODES[first.dtype], torch.cuda.current_stream().cuda_stream)
