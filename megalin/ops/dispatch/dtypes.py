"""Dtypes supported by kernels and dtypes of computation, shared by all ops."""

from __future__ import annotations

import torch
from torch import Tensor

KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Tensor dtypes that Triton and CUDA kernels support."""


def compute_dtype(x: Tensor) -> torch.dtype:
    """Dtype in which norms, positions and states of `x` are computed: fp32, or fp64 where `x` is fp64."""
    return torch.promote_types(x.dtype, torch.float32)
