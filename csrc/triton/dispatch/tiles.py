"""Tensor descriptors of [B, T, H, D] tensors for Hopper's copy engine (TMA), and the alignment that it needs."""

from __future__ import annotations

import torch
from torch import Tensor

from triton.tools.tensor_descriptor import TensorDescriptor


def aligned(x: Tensor) -> Tensor:
    """Returns `x`, or a copy if its channels are not contiguous or not aligned to 16 bytes, or its memory is repeated;
    D % 8 = 0."""
    steps = [stride * x.element_size() for size, stride in zip(x.shape[:3], x.stride()[:3], strict=True) if size > 1]
    if x.stride(3) == 1 and x.data_ptr() % 16 == 0 and all(step > 0 and step % 16 == 0 for step in steps):
        return x
    return x.clone(memory_format=torch.contiguous_format)


def tiled(x: Tensor, chunk: int, width: int) -> TensorDescriptor:
    """Descriptor of an `aligned` x, tiles [chunk, width] of one head; out of bounds reads zeros and writes nothing."""
    if x.is_cuda:
        # Triton encodes descriptors before it makes the device's context current, which a thread's first launch, such
        # as autograd's, may be without. This query does that, also while a CUDA graph is captured.
        torch.cuda.is_current_stream_capturing()
    x = x.transpose(1, 2)  # [B, H, T, D]
    # A dimension of size one may have any stride.
    strides = [stride if size > 1 else x.shape[3] for size, stride in zip(x.shape, x.stride(), strict=True)]
    return TensorDescriptor(x, list(x.shape), [*strides[:3], 1], [1, 1, chunk, width])
