"""The exchange of the fold over a split sequence, forward and backward: all states at once, or from rank to rank.

Forward (step 1) a rank receives of those before it, x_in(r) = sum over j < r of W_rj x_j; backward (step -1) of those
after it, x_in(j) = sum over r > j of W_rj x_r. Each is the other's adjoint; W as in `ops.split`.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from megalin.ops.scans.context_parallel import ShardDocuments
from megalin.parallel.collectives import Axis, all_gather, ring_shift

Direction = Literal[1, -1]


def all_gather_states(
    state: Tensor, log_decay: Tensor, borders: ShardDocuments, *, axis: Axis, step: Direction
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
        continues = borders.continues[axis.rank]
    else:
        between = (others > axis.rank) & (others < others[:, None])  # [r, i]
        continues = borders.continues[:, axis.rank]
    return (_weights(totals, between, continues) * states).sum(0)


def ring_states(
    state: Tensor, log_decay: Tensor, borders: ShardDocuments, *, axis: Axis, step: Direction, num_blocks: int
) -> Tensor:
    """x_in [B, H, K, V] by states that go from rank to rank, each adding its own:
    x_in(r + step) = x(r) + exp(T_r) x_in(r) where the document goes on. A rank sends one state each way, however many
    ranks there are, and no decay; it waits for those before it.

    In each turn every rank sends the block that it made out of what came in the turn before, so that all blocks are
    on their way at once. All ranks take part in all turns, with nothing to send in some.

    Args:
        num_blocks: blocks of the values that follow each other: one (LASP-1's ring), or several, so that a rank works
            on one while the next travels (ZeCO).
    """
    passed = torch.exp(log_decay)[..., None].where(borders.through[:, None, None, None], 0.0)  # [B, H, K or 1, 1]
    place, sender = (axis.rank, axis.rank - 1) if step == 1 else (axis.size - 1 - axis.rank, axis.rank + 1)
    own = state.tensor_split(num_blocks, dim=-1)
    arrived = [torch.zeros_like(block) for block in own]
    # Zero, but of the state: what a rank sends that has nothing to send must not look as if it could be sent before the
    # state is there, or a compiled graph of the backward moves it into the forward.
    baton = state[0, 0, 0, :1].clamp(0.0, 0.0)
    for turn in range(axis.size - 1 + num_blocks - 1):
        sent, received = turn - place, turn - (place - 1)
        payload, wanted = state.new_empty(0), 0
        if place < axis.size - 1 and 0 <= sent < num_blocks:
            payload = (own[sent] + passed * arrived[sent]).flatten()
        if place > 0 and 0 <= received < num_blocks:
            wanted = arrived[received].numel()
        came, baton = ring_shift(payload, baton, axis, step=step, wanted=wanted)
        if wanted:
            kept = borders.continues[max(axis.rank, sender), min(axis.rank, sender)]
            arrived[received] = came.view_as(arrived[received]).where(kept[:, None, None, None], 0.0)
    return torch.cat(arrived, dim=-1) + baton


def _weights(totals: Tensor, between: Tensor, continues: Tensor) -> Tensor:
    """exp(sum of T_i over the ranks i between) where the document continues, else 0: [cp, B, H, K or 1, 1].

    Args:
        totals: T [cp, B or 1, H, K or 1].
        between: [cp, cp] bool, for each other rank those between it and this one.
        continues: [cp, B] bool.
    """
    exponent = totals.where(between[..., None, None, None], 0.0).sum(1)
    return torch.exp(exponent).where(continues[..., None, None], 0.0)[..., None]
