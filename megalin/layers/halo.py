"""Halo of a short convolution under context parallelism: the last inputs of the previous ranks."""

from __future__ import annotations

from torch import Tensor

from megalin.layers.mixers.base import MixerContext
from megalin.parallel.context_parallel import ContextParallel


def entering_inputs(x: Tensor, context: MixerContext, cp: ContextParallel, *, taps: int) -> Tensor | None:
    """The taps - 1 inputs [B, taps - 1, D] of a convolution that precede x [B, T/cp, D], zero across documents.

    One all-gather forward, one reduce-scatter backward; None where this rank has the full sequence.
    """
    if context.documents.shard is None:
        return None
    return cp.halo(x, context.documents.shard, context.documents.ids, width=taps - 1)
