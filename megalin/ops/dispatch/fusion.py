"""Which ops stay plain PyTorch in a block that is being compiled."""

from __future__ import annotations

import torch

from megalin.ops.dispatch.backend import Backend, requested


def left_to_inductor(op: str, backend: Backend) -> bool:
    """Whether `auto` means the reference here: inductor fuses it with the additions, gates and casts around it.

    A kernel of ours ends such a fusion. For the norms whose reference inductor reads once, what surrounds them costs
    more than the kernel gains: the figures are in docs/benchmarks/.
    """
    return torch.compiler.is_compiling() and _left_open(op, backend)


@torch.compiler.assume_constant_result
def _left_open(op: str, backend: Backend) -> bool:
    return backend == "auto" and requested(op) == "auto"
