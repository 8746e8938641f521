"""The inputs of convolutions that enter a rank's tokens from the ranks before it."""

from __future__ import annotations

from torch import Tensor

from megalin.layers.mixers.base import SequenceContext
from megalin.parallel.context_parallel import ContextParallel


def entering_inputs(x: Tensor, context: SequenceContext, cp: ContextParallel, *, taps: int) -> Tensor | None:
    """The taps - 1 inputs [B, taps - 1, D] of a convolution before the first of x [B, T, D]; None where this rank has
    the whole sequence."""
    if context.borders is None:
        return None
    return cp.halo(x, context.borders, context.document_ids, width=taps - 1)
