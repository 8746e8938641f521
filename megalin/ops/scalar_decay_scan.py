"""The linear recurrence with a data-dependent decay per token and head, Mamba-2's, in chunks.

    S_t = exp(g_t) S_{t-1} + k_t v_t^T,    o_t = S_t^T q_t,    g_t <= 0 a scalar

It is the vector-decay recurrence with equal decays in all key channels, so that a chunk's scores are one product times
one matrix of decays. The recurrences of vector_decay_scan.py with g repeated are its truth, its step is theirs.
Exponents and documents: as there.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megalin.ops.chunks import chunk_documents, fold_states, split_chunks, sum_after, visible_decay
from megalin.ops.decay_scan import ScanOutput
from megalin.ops.srmsnorm import compute_dtype
from megalin.ops.vector_decay_scan import vector_decay_step


def scalar_decay_scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    *,
    initial_state: Tensor | None = None,
    document_ids: Tensor | None = None,
    chunk_size: int = 64,
) -> ScanOutput:
    """The recurrence above in chunks of C tokens.

    Args:
        q, k: [B, T, H or 1, K]; one head of them serves all heads of v.
        v: [B, T, H, V].
        log_decay: g [B, T, H], <= 0, at least fp32; -20 a token and below is safe.
        initial_state: [B, H, K, V]; None for zeros.
        document_ids: [B, T] integers; None when each row is one document.
        chunk_size: C; the result does not depend on it beyond rounding. T need not be a multiple of it.

    Returns:
        ScanOutput. Decays, scores, states and their fold are computed in fp32 (fp64 for fp64 inputs); the product of
        the scores with v runs in the dtype of v.
    """
    length = v.shape[1]
    chunk = min(chunk_size, length)
    wide = compute_dtype(v)
    q, k, v, g = (split_chunks(x, chunk) for x in (q.to(wide), k.to(wide), v, log_decay.to(wide)[..., None]))
    documents = chunk_documents(document_ids, length, chunk, v.device)[:, None]  # [1 or B, 1, N, C]
    scores = (q @ k.mT) * _decay_between(g, documents)  # [B, H, N, C, C]

    # Document of the state that enters chunk n (the last row's document of the chunk before), and of the last to leave.
    leaving = torch.cat([documents[..., :1, 0], documents[..., -1]], dim=-1)  # [1 or B, 1, N + 1]
    from_start = visible_decay(g.cumsum(-2), documents == leaving[..., :-1, None])  # [B, H, N, C, 1]
    to_end = visible_decay(sum_after(g), documents == leaving[..., 1:, None])
    update = k.mT @ (v.to(wide) * to_end)  # [B, H, N, K, V]
    through = visible_decay(g.sum(-2), leaving[..., 1:] == leaving[..., :-1])  # [B, H, N, 1]
    states = fold_states(through, update, initial_state)  # [B, H, N + 1, K, V]

    carried = (q @ states[:, :, :-1]) * from_start
    output = scores.to(v.dtype) @ v + carried.to(v.dtype)
    return ScanOutput(output.flatten(2, 3)[:, :, :length].transpose(1, 2), states[:, :, -1].clone())


def scalar_decay_step(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, state: Tensor) -> ScanOutput:
    """One token: q, k [B, H or 1, K], v [B, H, V], log_decay [B, H], state [B, H, K, V] in at least fp32."""
    return vector_decay_step(q, k, v, log_decay[..., None], state)


def scalar_decay_scan_flops(
    length: int, *, num_heads: int, num_key_heads: int, key_dim: int, value_dim: int, chunk_size: int
) -> int:
    """Forward floating-point operations a token of the chunkwise form: 2 C K a head of q and k, 2 C V + 4 K V a head.

    The exponentials, the cumulative sums and the fold between chunks are not counted.
    """
    chunk = min(chunk_size, length)
    return 2 * chunk * key_dim * num_key_heads + num_heads * (2 * chunk * value_dim + 4 * key_dim * value_dim)


def _decay_between(g: Tensor, documents: Tensor) -> Tensor:
    """exp(sum of g_j over s < j <= t) for s <= t of one document, else 0: g [B, H, N, C, 1] -> [B, H, N, C, C]."""
    chunk = g.shape[-2]
    after = torch.ones(chunk, chunk, dtype=torch.bool, device=g.device).tril(-1)  # [t, s]
    between = g.where(after, 0.0).cumsum(-2)  # [B, H, N, C, C]
    visible = (documents[..., :, None] == documents[..., None, :]).tril()
    return torch.exp(between.masked_fill(~visible, float("-inf")))
