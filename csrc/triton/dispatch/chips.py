"""Properties of the GPU by which launches are chosen; without one, those of the GPU of the measured tables."""

from __future__ import annotations

import torch

MEASURED_ON = (9, 0)
"""Compute capability of the measured tables."""
SHARED_BYTES = {(8, 0): 166_912, (8, 6): 101_376, (8, 9): 101_376, (9, 0): 232_448, (10, 0): 232_448, (12, 0): 101_376}
"""Largest shared memory of a thread block, by compute capability."""


def capability() -> tuple[int, int]:
    """Compute capability of the current GPU."""
    return torch.cuda.get_device_capability() if torch.cuda.is_available() else MEASURED_ON


def shared_bytes() -> int:
    """Largest shared memory of a thread block in bytes; the least of all where the chip is not known."""
    return SHARED_BYTES.get(capability(), min(SHARED_BYTES.values()))


def has_tensor_memory() -> bool:
    """Whether matmuls leave their results in tensor memory (compute capability 10.x), as tcgen05 does.

    There Triton 3.7 compiles neither a sum over all elements of such a result (its pass OptimizeTMemLayouts fails) nor
    a loop in stages that stores a tile by descriptor before a matmul.
    """
    return capability()[0] == 10
