"""Tiles of [B, T, H, D] tensors for Hopper's copy engine: what alignment it wants, and the descriptors."""

from __future__ import annotations

import torch
from torch import Tensor

from triton.tools.tensor_descriptor import TensorDescriptor


def aligned(x: Tensor) -> Tensor:
    """`x`, or a copy where the channels of a token do not lie side by side in pieces of 16 bytes; D % 8 = 0."""
    steps = [stride for size, stride in zip(x.shape[:3], x.stride()[:3], strict=True) if size > 1]
    if x.stride(3) == 1 and x.data_ptr() % 16 == 0 and all(step * x.element_size() % 16 == 0 for step in steps):
        return x
    return x.clone(memory_format=torch.contiguous_format)


def tiled(x: Tensor, chunk: int, width: int) -> TensorDescriptor:
    """`aligned` x in tiles of [chunk, width] of one head; outside of it, tiles read zeros and write nothing."""
    x = x.transpose(1, 2)  # [B, H, T, D]
    # A dimension of size one may have any stride.
    strides = [stride if size > 1 else x.shape[3] for size, stride in zip(x.shape, x.stride(), strict=True)]
    return TensorDescriptor(x, list(x.shape), [*strides[:3], 1], [1, 1, chunk, width])
