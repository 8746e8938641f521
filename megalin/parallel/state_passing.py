"""State exchange of context parallelism, forward and backward: an all-gather of all states, or a ring.

Forward (step 1) a rank receives from those before it, x_in(r) = sum over j < r of W_rj x_j; backward (step -1) from
those after it, x_in(j) = sum over r > j of W_rj^T x_r. Each is the other's adjoint; W as in
`ops.scans.context_parallel`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megalin.ops.scans.transition import Direction, ShardDocuments, Transition
from megalin.parallel.collectives import Axis, all_gather, ring_shift


def all_gather_states(
    state: Tensor, transition: Transition, documents: ShardDocuments, *, axis: Axis, step: Direction
) -> Tensor:
    """x_in [B, H, K, V] by one all-gather of all ranks' x [B, H, K, V] and transitions, unless known (LASP-2)."""
    tensors = transition.tensors()
    sent, known = [state, *tensors[: transition.num_sent]], tensors[transition.num_sent :]
    gathered = all_gather(torch.cat([x.flatten() for x in sent])[None], axis, dim=0)  # [cp, numbers]
    parts = gathered.split([x.numel() for x in sent], dim=1)
    states, *others = (part.view(axis.size, *x.shape) for part, x in zip(parts, sent, strict=True))
    wide = [x.expand(axis.size, *x.shape) for x in known]
    return type(transition)(*others, *wide).fold(states, documents, rank=axis.rank, step=step)


def ring_states(
    state: Tensor, transition: Transition, documents: ShardDocuments, *, axis: Axis, step: Direction
) -> Tensor:
    """x_in [B, H, K, V] by a ring, in which each rank adds its own state to the received one:
    x_in(r + step) = x(r) + A_r x_in(r), in the backward A_r^T, where the document continues (LASP-1). A rank sends one
    state each way, however many ranks there are, and no transition; it waits for those before it. All ranks take part
    in all turns, in most with nothing to send.
    """
    apply = transition.apply if step == 1 else transition.apply_adjoint
    place, sender = (axis.rank, axis.rank - 1) if step == 1 else (axis.size - 1 - axis.rank, axis.rank + 1)
    entering = torch.zeros_like(state)
    # A zero that depends on the state: without it a compiled graph could hoist the sends of a rank that has nothing to
    # send above the state's computation, and moves those of the backward into the forward.
    token = state[0, 0, 0, :1].clamp(0.0, 0.0)
    for turn in range(axis.size - 1):
        payload, num_expected = state.new_empty(0), state.numel() if turn == place - 1 else 0
        if turn == place:
            payload = (state + apply(entering).where(documents.through[:, None, None, None], 0.0)).flatten()
        received, token = ring_shift(payload, token, axis, step=step, num_expected=num_expected)
        if num_expected:
            continues = documents.continues[max(axis.rank, sender), min(axis.rank, sender)]
            entering = received.view_as(state).where(continues[:, None, None, None], 0.0)
    return entering + token
