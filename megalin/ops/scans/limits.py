"""Limits of the scan kernels: dtypes and widths."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from megalin.ops.dispatch.dtypes import KERNEL_DTYPES

MAX_WIDTH = 256
WIDTH_UNIT = 8
"""Kernels load 16 bytes at a time: widths are zero-padded to a multiple of 8."""


def unsupported(q: Tensor, k: Tensor, v: Tensor) -> str:
    """Reason why no scan kernel takes these inputs; empty if one does."""
    if not q.dtype == k.dtype == v.dtype or v.dtype not in KERNEL_DTYPES:
        return f"q, k, v of {q.dtype}, {k.dtype}, {v.dtype}"
    if max(k.shape[-1], v.shape[-1]) > MAX_WIDTH:
        return f"heads of {k.shape[-1]} keys and {v.shape[-1]} values, above {MAX_WIDTH}"
    return "an empty tensor" if 0 in (q.numel(), v.numel()) else ""


def padded(x: Tensor, columns: int, rows: int = 0) -> Tensor:
    """Zero-pads the last two dimensions of `x` at the end by `rows` and `columns`."""
    return functional.pad(x, (0, columns, 0, rows)) if rows or columns else x
