"""Power-of-two block sizes for kernels that hold a full row in registers."""

from __future__ import annotations

import triton


def split(width: int) -> tuple[int, int]:
    """Powers of two whose sum covers a row: one and zero, or two where a single one would be wide and largely empty."""
    block = triton.next_power_of_2(width)
    if block <= 8192 or width > block * 3 // 4:
        return block, 0
    return block // 2, triton.next_power_of_2(width - block // 2)
