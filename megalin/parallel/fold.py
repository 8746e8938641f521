"""The exchange of the fold over a split sequence, each way with its adjoint: all states at once, or from rank to rank.

    S_in(r) = sum over j < r of W_rj S_j,    W_rj = exp(sum of T_i over j < i < r) where r continues j's document

`continues` and `through` are those of `context.Borders`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megalin.parallel.collectives import Axis, all_gather, send_along


def fold_at_once(state: Tensor, log_decay: Tensor, continues: Tensor, through: Tensor, *, axis: Axis) -> Tensor:
    """S_in by an all-gather of every rank's state and total decay (LASP-2); arguments as `ContextParallel.fold`."""
    entering: Tensor = _AllGather.apply(state, log_decay, continues, through, axis)
    return entering


def fold_in_turn(
    state: Tensor, log_decay: Tensor, continues: Tensor, through: Tensor, *, axis: Axis, num_blocks: int
) -> Tensor:
    """S_in by states that go from rank to rank, each adding its own: S_in(r + 1) = exp(T_r) S_in(r) + S_r. A rank sends
    one state each way, however many ranks there are, and no decay; it waits for those before it.

    Args:
        num_blocks: blocks of the values that follow each other: one (LASP-1's ring), or several, so that a rank works
            on one while the next travels (ZeCO).
    """
    entering: Tensor = _Turns.apply(state, log_decay, continues, through, axis, num_blocks)
    return entering


class _AllGather(torch.autograd.Function):
    """dS_j = sum over r > j of W_rj dS_in(r): the gradient of the state that leaves rank j, so that
    dT_j = sum over V of exp(T_j) S_in(j) dS_j where one document fills the shard."""

    @staticmethod
    def forward(ctx: Any, state: Tensor, log_decay: Tensor, continues: Tensor, through: Tensor, axis: Axis) -> Tensor:
        if log_decay.dim() == 2:
            states = all_gather(state[None], axis, dim=0)  # [cp, B, H, K, V]
            totals = log_decay.expand(axis.size, 1, *log_decay.shape)  # [cp, 1, H, K or 1]
        else:
            # The decay is one more column of values.
            column = log_decay[..., None].expand(*state.shape[:-1], 1)
            gathered = all_gather(torch.cat([state, column], dim=-1)[None], axis, dim=0)
            states, totals = gathered[..., :-1], gathered[..., -1]
        others = torch.arange(axis.size, device=state.device)
        between = (others[:, None] < others) & (others < axis.rank)  # [j, i]
        entering = (_weights(totals, between, continues[axis.rank]) * states).sum(0)
        ctx.axis, ctx.decay_shape = axis, log_decay.shape
        ctx.save_for_backward(entering, totals, continues, through)
        return entering

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        entering, totals, continues, through = ctx.saved_tensors
        axis = ctx.axis
        gathered = all_gather(grads[0][None], axis, dim=0)  # [cp, B, H, K, V]
        others = torch.arange(axis.size, device=entering.device)
        between = (others > axis.rank) & (others < others[:, None])  # [r, i]
        d_state = (_weights(totals, between, continues[:, axis.rank]) * gathered).sum(0)
        d_decay = None
        if ctx.needs_input_grad[1]:
            d_decay = _decay_gradient(totals[axis.rank], entering, d_state, through, ctx.decay_shape)
        return d_state, d_decay, None, None, None


class _Turns(torch.autograd.Function):
    """The gradients go the way back: dS_j = dS_in(j + 1) + exp(T_(j + 1)) dS_(j + 1)."""

    @staticmethod
    def forward(
        ctx: Any,
        state: Tensor,
        log_decay: Tensor,
        continues: Tensor,
        through: Tensor,
        axis: Axis,
        num_blocks: int,
    ) -> Tensor:
        passed = torch.exp(log_decay)[..., None].where(through[:, None, None, None], 0.0)  # [B, H, K or 1, 1]
        kept = continues[axis.rank, axis.rank - 1]  # of no meaning on the first rank, to which nothing comes
        entering = _arrived(state, passed, kept, axis, num_blocks, step=1)
        ctx.axis, ctx.num_blocks = axis, num_blocks
        ctx.save_for_backward(entering, log_decay, passed, continues, through)
        return entering

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        entering, log_decay, passed, continues, through = ctx.saved_tensors
        axis = ctx.axis
        kept = continues[(axis.rank + 1) % axis.size, axis.rank]
        d_state = _arrived(grads[0], passed, kept, axis, ctx.num_blocks, step=-1)
        d_decay = None
        if ctx.needs_input_grad[1]:
            d_decay = _decay_gradient(log_decay, entering, d_state, through, log_decay.shape)
        return d_state, d_decay, None, None, None, None


def _arrived(state: Tensor, passed: Tensor, kept: Tensor, axis: Axis, num_blocks: int, *, step: int) -> Tensor:
    """What comes to this rank: x_in(r + step) = kept (state(r) + passed x_in(r)), zero on the first of the way.

    In each turn every rank sends the block that it made out of what came in the turn before, so that all blocks are
    on their way at once. All ranks take part in all turns, with nothing to send in some.

    Args:
        state: [B, H, K, V].
        passed: [B, H, K or 1, 1].
        kept: [B] bool.
        step: 1 to the ranks after, -1 to those before.
    """
    place = axis.rank if step == 1 else axis.size - 1 - axis.rank
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
        came, baton = send_along(payload, baton, axis, step=step, wanted=wanted)
        if wanted:
            arrived[received] = came.view_as(arrived[received]).where(kept[:, None, None, None], 0.0)
    return torch.cat(arrived, dim=-1) + baton


def _decay_gradient(
    log_decay: Tensor, entering: Tensor, d_leaving: Tensor, through: Tensor, shape: torch.Size
) -> Tensor:
    """dT = sum over V of exp(T) S_in dS_out where one document fills the shard, in the shape of T."""
    passed = torch.exp(log_decay)[..., None] * entering * d_leaving
    return passed.sum(-1).masked_fill(~through[:, None, None], 0.0).sum_to_size(shape)


def _weights(totals: Tensor, between: Tensor, continues: Tensor) -> Tensor:
    """exp(sum of T_i over the ranks i between) where the document continues, else 0: [cp, B, H, K or 1, 1].

    Args:
        totals: T [cp, B or 1, H, K or 1].
        between: [cp, cp] bool, for each other rank those between it and this one.
        continues: [cp, B] bool.
    """
    exponent = totals.where(between[..., None, None, None], 0.0).sum(1)
    return torch.exp(exponent).where(continues[..., None, None], 0.0)[..., None]
