"""Helpers of chunkwise scans: sequences cut into chunks, decays inside chunks, states between chunks."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def split_chunks(x: Tensor, chunk: int) -> Tensor:
    """Cuts [B, T, H, D] into [B, H, N, C, D], zero-padded at the end: a zero key adds nothing to any state."""
    padded = functional.pad(x.transpose(1, 2), (0, 0, 0, -x.shape[1] % chunk))
    return padded.unflatten(2, (-1, chunk))


def chunk_documents(document_ids: Tensor | None, length: int, chunk: int, device: torch.device) -> Tensor:
    """Document of each token, [1 or B, N, C]; padding continues the last document."""
    num_chunks = -(-length // chunk)
    if document_ids is None:
        return torch.zeros(1, num_chunks, chunk, dtype=torch.int32, device=device)
    padding = num_chunks * chunk - length
    return torch.cat([document_ids, document_ids[:, -1:].expand(-1, padding)], dim=1).unflatten(1, (-1, chunk))


def sum_after(g: Tensor) -> Tensor:
    """Exclusive reverse cumulative sum along dimension -2: the sum over all later tokens."""
    later = torch.cat([g[..., 1:, :], torch.zeros_like(g[..., :1, :])], dim=-2)
    return later.flip(-2).cumsum(-2).flip(-2)


def visible_decay(exponent: Tensor, visible: Tensor) -> Tensor:
    """exp(exponent) where `visible`, else 0; `visible` broadcasts over the last dimension.

    Between two tokens of one document lie only that document's tokens: no other document's decay changes the result.
    """
    return torch.exp(exponent.masked_fill(~visible[..., None], float("-inf")))


def fold_states(through: Tensor, update: Tensor, initial_state: Tensor | None) -> Tensor:
    """States entering chunks 0..N-1 and leaving the last, [B, H, N + 1, K, V], from the decay through each chunk
    [B, H, N, K or 1] and its update [B, H, N, K, V].

    S_{n+1} = through_n * S_n + update_n is an associative scan of pairs (through, update), by doubling: log2(N) passes.
    """
    first = torch.zeros_like(update[:, :, 0]) if initial_state is None else initial_state.to(update.dtype)
    decay = torch.cat([torch.zeros_like(through[:, :, :1]), through], dim=2)[..., None]  # [B, H, N + 1, K, 1]
    state = torch.cat([first[:, :, None], update], dim=2)
    distance = 1
    while distance < state.shape[2]:
        head, tail = decay[:, :, :distance], decay[:, :, distance:]
        state = torch.cat([state[:, :, :distance], state[:, :, distance:] + tail * state[:, :, :-distance]], dim=2)
        decay = torch.cat([head, tail * decay[:, :, :-distance]], dim=2)
        distance *= 2
    return state
