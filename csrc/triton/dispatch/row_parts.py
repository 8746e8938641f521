"""How kernels that hold a whole row in registers cut it into powers of two."""

from __future__ import annotations

import triton


def split(width: int) -> tuple[int, int]:
    """Powers of two that together hold a row: one, or two where a single one would be wide and largely empty."""
    block = triton.next_power_of_2(width)
    if block <= 8192 or width > block * 3 // 4:
        return block, 0
    return block // 2, triton.next_power_of_2(width - block // 2)
