"""Dtypes supported by kernels and dtypes of computation, shared by all ops."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Tensor dtypes that Triton and CUDA kernels support."""
_AUTOCAST_DEVICES = ("cpu", "cuda")
_P = ParamSpec("_P")
_R = TypeVar("_R")


def compute_dtype(x: Tensor) -> torch.dtype:
    """Dtype in which norms, positions and states of `x` are computed: fp32, or fp64 where `x` is fp64."""
    return torch.promote_types(x.dtype, torch.float32)


def without_autocast(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Decorates a function that casts its operands itself: under `torch.autocast` its matmuls keep their dtypes, as
    those of kernels do. Its first tensor gives the device."""

    @functools.wraps(function)
    def wrapped(*operands: _P.args, **options: _P.kwargs) -> _R:
        device = next(x.device.type for x in (*operands, *options.values()) if isinstance(x, Tensor))
        if device not in _AUTOCAST_DEVICES or not torch.is_autocast_enabled(device):
            return function(*operands, **options)
        with torch.autocast(device, enabled=False):
            return function(*operands, **options)

    return wrapped
