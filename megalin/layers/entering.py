"""What enters a rank's tokens from the ranks before it: states of selected decays, and inputs of convolutions."""

from __future__ import annotations

from torch import Tensor

from megalin.layers.mixers.base import SequenceContext
from megalin.ops.scan_states import selected_state
from megalin.parallel.context import ContextParallel


def entering_state(
    k: Tensor, v: Tensor, log_decay: Tensor, context: SequenceContext, cp: ContextParallel
) -> Tensor | None:
    """The state [B, H, K, V] before the first token of a scan, folded from the ranks before; None where this rank has
    the whole sequence.

    Args:
        k: [B, T, H or 1, K].
        v: [B, T, H, V].
        log_decay: [B, T, H, K or 1].
    """
    if context.borders is None:
        return None
    added = selected_state(k, v, log_decay, document_ids=context.document_ids)
    return cp.fold(added, log_decay.sum(1), context.borders)


def entering_inputs(x: Tensor, context: SequenceContext, cp: ContextParallel, *, taps: int) -> Tensor | None:
    """The taps - 1 inputs [B, taps - 1, D] of a convolution before the first of x [B, T, D]; None where this rank has
    the whole sequence."""
    if context.borders is None:
        return None
    return cp.halo(x, context.borders, context.document_ids, width=taps - 1)
