"""State exchange of context parallelism, forward and backward: an all-gather of all states, or a ring.

Forward (step 1) a rank receives from those before it, x_in(r) = sum over j < r of W_rj x_j; backward (step -1) from
those after it, x_in(j) = sum over r > j of W_rj x_r. Each is the other's adjoint; W as in `ops.scans.context_parallel`.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from megalin.ops.scans.context_parallel import ShardDocuments
from megalin.parallel.collectives import Axis, all_gather, ring_shift

Direction = Literal[1, -1]


def all_gather_states(
    state: Tensor, log_decay: Tensor, documents: ShardDocuments, *, axis: Axis, step: Direction
) -> Tensor:
    """x_in [B, H, K, V] by an all-gather of every rank's x [B, H, K, V] and total decay (LASP-2)."""
    if log_decay.dim() == 2:
        states = all_gather(state[None], axis, dim=0)  # [cp, B, H, K, V]
        totals = log_decay.expand(axis.size, 1, *log_decay.shape)  # [cp, 1, H, K or 1]
    else:
        # The decay is one more column of values.
        column = log_decay[..., None].expand(*state.shape[:-1], 1)
        gathered = all_gather(torch.cat([state, column], dim=-1)[None], axis, dim=0)
        states, totals = gathered[..., :-1], gathered[..., -1]
    others = torch.arange(axis.size, device=state.device)
    if step == 1:
        between = (others[:, None] < others) & (others < axis.rank)  # [j, i]
        continues = documents.continues[axis.rank]
    else:
        between = (others > axis.rank) & (others < others[:, None])  # [r, i]
        continues = documents.continues[:, axis.rank]
    return (_weights(totals, between, continues) * states).sum(0)


def ring_states(state: Tensor, log_decay: Tensor, documents: ShardDocuments, *, axis: Axis, step: Direction) -> Tensor:
    """x_in [B, H, K, V] by a ring, in which each rank adds its own state to the received one:
    x_in(r + step) = x(r) + exp(T_r) x_in(r) where the document continues (LASP-1). A rank sends one state each way,
    however many ranks there are, and no decay; it waits for those before it. All ranks take part in all turns, in most
    with nothing to send.
    """
    decay = torch.exp(log_decay)[..., None].where(documents.through[:, None, None, None], 0.0)  # [B, H, K or 1, 1]
    place, sender = (axis.rank, axis.rank - 1) if step == 1 else (axis.size - 1 - axis.rank, axis.rank + 1)
    entering = torch.zeros_like(state)
    # A zero that depends on the state: without it a compiled graph could hoist the sends of a rank that has nothing to
    # send above the state's computation, and moves those of the backward into the forward.
    token = state[0, 0, 0, :1].clamp(0.0, 0.0)
    for turn in range(axis.size - 1):
        payload = (state + decay * entering).flatten() if turn == place else state.new_empty(0)
        num_expected = state.numel() if turn == place - 1 else 0
        received, token = ring_shift(payload, token, axis, step=step, num_expected=num_expected)
        if num_expected:
            continues = documents.continues[max(axis.rank, sender), min(axis.rank, sender)]
            entering = received.view_as(state).where(continues[:, None, None, None], 0.0)
    return entering + token


def _weights(totals: Tensor, between: Tensor, continues: Tensor) -> Tensor:
    """exp(sum of T_i over the ranks i between) where the document continues, else 0: [cp, B, H, K or 1, 1].

    Args:
        totals: T [cp, B or 1, H, K or 1].
        between: [cp, cp] bool, for each other rank the ranks between it and this one.
        continues: [cp, B] bool.
    """
    exponent = totals.where(between[..., None, None, None], 0.0).sum(1)
    return torch.exp(exponent).where(continues[..., None, None], 0.0)[..., None]
