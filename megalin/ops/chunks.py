"""Cutting sequences into chunks: what every chunkwise scan starts with."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def split_chunks(x: Tensor, chunk: int) -> Tensor:
    """[B, T, H, D] -> [B, H, N, C, D], padded at the end with zeros: a zero key adds nothing to any state."""
    padded = functional.pad(x.transpose(1, 2), (0, 0, 0, -x.shape[1] % chunk))
    return padded.unflatten(2, (-1, chunk))


def chunk_documents(document_ids: Tensor | None, length: int, chunk: int, device: torch.device) -> Tensor:
    """[1 or B, N, C] document of each token; padding continues the last document."""
    num_chunks = -(-length // chunk)
    if document_ids is None:
        return torch.zeros(1, num_chunks, chunk, dtype=torch.int32, device=device)
    padding = num_chunks * chunk - length
    return torch.cat([document_ids, document_ids[:, -1:].expand(-1, padding)], dim=1).unflatten(1, (-1, chunk))
