"""The linear recurrence with no decay or a fixed scalar decay a head: recurrent, parallel and chunkwise forms.

    S_t = exp(-s) S_{t-1} + k_t v_t^T,    o_t = S_t^T q_t    (s >= 0 a head)

`decay_scan` is the chunkwise form, the one that models call. `decay_scan_recurrent` and `decay_scan_parallel`
compute the same function token by token and as one masked matrix; they are the truth it is tested against.

No form divides by a cumulative decay: every exponent is a difference of positions times -s, hence <= 0.
Documents: `document_ids` is non-decreasing along T; a token sees the tokens of its own document only, and
`initial_state` belongs to the document of the first token.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from megalin.ops.chunks import chunk_documents, split_chunks
from megalin.ops.srmsnorm import compute_dtype


class ScanOutput(NamedTuple):
    """Outputs [B, T, H, V] in the dtype of v, and the state [B, H, K, V] after the last token in at least fp32."""

    output: Tensor
    state: Tensor


def decay_scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slopes: Tensor | None,
    *,
    initial_state: Tensor | None = None,
    document_ids: Tensor | None = None,
    chunk_size: int = 64,
) -> ScanOutput:
    """The recurrence above in chunks of C tokens: matrix products inside a chunk, a fold of states between chunks.

    Args:
        q, k: [B, T, H, K].
        v: [B, T, H, V].
        slopes: [H], s >= 0 in nats a token, at least fp32 (a buffer: it gets no gradient); None for no decay.
        initial_state: [B, H, K, V]; None for zeros.
        document_ids: [B, T] integers; None when each row is one document.
        chunk_size: C; the result does not depend on it beyond rounding. T need not be a multiple of it.

    Returns:
        ScanOutput. q k^T and the products with v stay in the dtype of v; states are formed and folded in fp32
        (fp64 for fp64 inputs).
    """
    length, heads = q.shape[1:3]
    chunk = min(chunk_size, length)
    wide = compute_dtype(v)
    s = torch.zeros(heads, dtype=wide, device=v.device) if slopes is None else slopes.to(wide)
    q, k, v = (split_chunks(x, chunk) for x in (q, k, v))  # [B, H, N, C, K or V]
    documents = chunk_documents(document_ids, length, chunk, v.device)  # [1 or B, N, C]
    index = torch.arange(chunk, device=v.device)
    # Tokens before the start of chunk i, i = 0..N: the last chunk ends with the last real token, not with the padding.
    starts = (torch.arange(q.shape[2] + 1, device=v.device) * chunk).clamp(max=length)
    ends = starts[1:, None] - starts[:-1, None] - 1  # [N, 1] index of each chunk's last real token

    same = (documents[..., :, None] == documents[..., None, :])[:, None]  # [1 or B, 1, N, C, C]
    scores = (q @ k.mT) * _causal_decay(index, s)[:, None]  # [B, H, N, C, C]
    local = scores.masked_fill(~same, 0.0).to(v.dtype) @ v  # [B, H, N, C, V]

    # A chunk adds the keys of its last document, decayed to its end. The fold over chunks is the same causal decay.
    leaving = torch.cat([documents[:, :1, 0], documents[..., -1]], dim=1)  # [1 or B, N + 1] document of each state
    to_end = torch.exp(-s[:, None, None] * (ends - index).clamp(min=0))  # [H, N, C]
    kept = (documents == leaving[:, 1:, None])[:, None]  # [1 or B, 1, N, C]
    update = (k.to(wide) * (to_end * kept)[..., None]).mT @ v.to(wide)  # [B, H, N, K, V]
    first = torch.zeros_like(update[:, :, 0]) if initial_state is None else initial_state.to(wide)
    flows = _causal_decay(starts, s) * (leaving[:, None, :, None] == leaving[:, None, None, :])  # [., H, N + 1, N + 1]
    sources = torch.cat([first[:, :, None], update], dim=2)  # [B, H, N + 1, K, V]
    states = (flows @ sources.flatten(-2)).view_as(sources)  # state entering chunk i; the last one leaves the sequence

    from_start = torch.exp(-s[:, None, None] * (index + 1))  # [H, 1, C]
    seen = (documents == leaving[:, :-1, None])[:, None]  # [1 or B, 1, N, C]
    carried = (q.to(wide) * (from_start * seen)[..., None]) @ states[:, :, :-1]  # [B, H, N, C, V]
    output = (local + carried.to(v.dtype)).flatten(2, 3)[:, :, :length].transpose(1, 2)
    return ScanOutput(output, states[:, :, -1].clone())


def decay_step(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor | None, state: Tensor) -> ScanOutput:
    """One token of the recurrence, the decoding step.

    Args:
        q, k: [B, H, K]; v: [B, H, V]; slopes: [H] or None; state: [B, H, K, V] in at least fp32.

    Returns:
        ScanOutput with output [B, H, V] in the dtype of v and the next state.
    """
    wide = state.dtype
    if slopes is not None:
        state = state * torch.exp(-slopes.to(wide))[:, None, None]
    state = state + k.to(wide)[..., :, None] * v.to(wide)[..., None, :]
    return ScanOutput((q.to(wide)[..., None, :] @ state).squeeze(-2).to(v.dtype), state)


def decay_scan_recurrent(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slopes: Tensor | None,
    *,
    initial_state: Tensor | None = None,
    document_ids: Tensor | None = None,
) -> ScanOutput:
    """The recurrence token by token; arguments and result as `decay_scan`."""
    state = q.new_zeros(q.shape[0], q.shape[2], q.shape[3], v.shape[3], dtype=compute_dtype(v))
    if initial_state is not None:
        state = state + initial_state
    outputs = []
    for t in range(q.shape[1]):
        if document_ids is not None and t > 0:
            state = state.masked_fill((document_ids[:, t] != document_ids[:, t - 1])[:, None, None, None], 0.0)
        output, state = decay_step(q[:, t], k[:, t], v[:, t], slopes, state)
        outputs.append(output)
    return ScanOutput(torch.stack(outputs, dim=1), state)


def decay_scan_parallel(
    q: Tensor, k: Tensor, v: Tensor, slopes: Tensor | None, *, document_ids: Tensor | None = None
) -> Tensor:
    """O = (Q K^T * M) V with M_ts = exp(-s (t - s)) for s <= t of the same document; [B, T, H, V], no state."""
    s = torch.zeros(q.shape[2], dtype=q.dtype, device=q.device) if slopes is None else slopes.to(q.dtype)
    mask = _causal_decay(torch.arange(q.shape[1], device=q.device), s)
    scores = torch.einsum("bthk,bshk->bhts", q, k) * mask
    if document_ids is not None:
        scores = scores * (document_ids[:, None, :, None] == document_ids[:, None, None, :])
    return torch.einsum("bhts,bshv->bthv", scores, v)


def decay_scan_flops(length: int, *, num_heads: int, key_dim: int, value_dim: int, chunk_size: int) -> int:
    """Forward floating-point operations a token of the chunkwise form, multiply and add counted as two.

    2 C (K + V) for q k^T and its product with v inside a chunk, 2 K V to form the state, 2 K V to read it, a head.
    The fold of states between chunks, 2 K V N / C a token with N = T / C chunks, is an artefact of this
    implementation and is not counted.
    """
    chunk = min(chunk_size, length)
    return num_heads * (2 * chunk * (key_dim + value_dim) + 4 * key_dim * value_dim)


def _causal_decay(positions: Tensor, s: Tensor) -> Tensor:
    """[H, n, n] exp(-s_h (p_t - p_s)) where p_t >= p_s, else 0; `positions` [n] is non-decreasing."""
    distance = positions[:, None] - positions[None, :]
    decay = torch.exp(-s[:, None, None] * distance.clamp(min=0))
    return decay.masked_fill(torch.ones_like(distance, dtype=torch.bool).triu(1), 0.0)
