"""The linear recurrence that decays along keys and values, in chunks of plain PyTorch on every device.

    S_t = diag(exp(a_t)) S_{t-1} diag(exp(b_t)) + k_t v_t^T,    o_t = scale S_t^T q_t,    a_t, b_t <= 0

No matmul computes the pairs of a chunk, since their weights differ in every value channel: the work and the memory of a
chunk of C tokens grow with C^2 V, and there is no kernel. Exponents and documents: as in vector_decay.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megalin.ops.dispatch.dtypes import compute_dtype, without_autocast
from megalin.ops.dispatch.operands import check_operands
from megalin.ops.scans.chunks import chunk_documents, split_chunks, sum_after, visible_decay
from megalin.ops.scans.context_parallel import SequenceShard
from megalin.ops.scans.driver import ScanOutput, fold
from megalin.ops.scans.transition import TwoSidedDecay

CHUNK = 16
"""Tokens of a chunk: C V numbers a token and head are kept for the backward."""


@without_autocast
def two_sided_scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_decay: Tensor | None,
    value_decay: Tensor,
    *,
    scale: float = 1.0,
    initial_state: Tensor | None = None,
    shard: SequenceShard | None = None,
    document_ids: Tensor | None = None,
) -> ScanOutput:
    """The recurrence above in chunks of 16 tokens.

    Args:
        q, k: [B, T, H, K].
        v: [B, T, H, V].
        key_decay: a [B, T, H, K], <= 0, at least fp32; None for no decay along keys.
        value_decay: b [B, T, H, V], <= 0, at least fp32.
        scale: factor on the output.
        initial_state: [B, H, K, V]; None for zeros.
        shard: this rank's shard under context parallelism: the initial state then comes from the ranks before. The
            state exchange sends K V + K + V numbers a head.
        document_ids: [B, T] integers; None if each sequence is one document.

    Returns:
        ScanOutput. Everything is computed in fp32 (fp64 for fp64 inputs).

    Raises:
        OperandError: mismatched shapes, kinds or devices.

    Source: Rodimus eq. 14 and Table 16.
    """
    operands = {"v": (v, "BTHV"), "q": (q, "BTHK"), "k": (k, "BTHK"), "key_decay": (key_decay, "BTHK")}
    operands |= {"value_decay": (value_decay, "BTHV"), "initial_state": (initial_state, "BHKV")}
    check_operands("two_sided_scan", operands | {"document_ids": (document_ids, "BT int")})
    assert shard is None or initial_state is None, "initial_state and shard are exclusive"
    wide, length = compute_dtype(v), v.shape[1]
    key_decay = torch.zeros_like(k, dtype=wide) if key_decay is None else key_decay.to(wide)
    if shard is not None:
        initial_state = _entering(k.to(wide), v.to(wide), key_decay, value_decay.to(wide), document_ids, shard)
    chunk = min(CHUNK, length)
    q, k, values, a, b = (split_chunks(x.to(wide), chunk) for x in (q, k, v, key_decay, value_decay))
    documents = chunk_documents(document_ids, length, chunk, v.device)[:, None]  # [1 or B, 1, N, C]
    visible = (documents[..., :, None] == documents[..., None, :]).tril()
    scores = (q[..., :, None, :] * k[..., None, :, :] * visible_decay(_between(a), visible)).sum(-1)
    local = (scores[..., None] * visible_decay(_between(b), visible) * values[..., None, :, :]).sum(-2)

    # Document of the state entering chunk n (that of the previous chunk's last token), and of the final state.
    leaving = torch.cat([documents[..., :1, 0], documents[..., -1]], dim=-1)  # [1 or B, 1, N + 1]
    starts, ends = documents == leaving[..., :-1, None], documents == leaving[..., 1:, None]
    update = (k * visible_decay(sum_after(a), ends)).mT @ (values * torch.exp(sum_after(b)))  # [B, H, N, K, V]
    through = visible_decay(a.sum(-2), leaving[..., 1:] == leaving[..., :-1]), torch.exp(b.sum(-2))
    states = _states(*through, update, initial_state)  # [B, H, N + 1, K, V]
    carried = ((q * visible_decay(a.cumsum(-2), starts)) @ states[:, :, :-1]) * torch.exp(b.cumsum(-2))
    output = (scale * (local + carried)).flatten(2, 3)[:, :, :length].transpose(1, 2)
    return ScanOutput(output.to(v.dtype), states[:, :, -1].clone())


def two_sided_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_decay: Tensor | None,
    value_decay: Tensor,
    state: Tensor,
    *,
    scale: float = 1.0,
) -> ScanOutput:
    """One token of `two_sided_scan`: q, k, key_decay [B, H, K], v, value_decay [B, H, V], state [B, H, K, V]."""
    wide = state.dtype
    decay = torch.exp(value_decay.to(wide))[..., None, :]
    if key_decay is not None:
        decay = decay * torch.exp(key_decay.to(wide))[..., None]
    state = decay * state + k.to(wide)[..., None] * v.to(wide)[..., None, :]
    output = (q.to(wide)[..., None, :] @ state).squeeze(-2) * scale
    return ScanOutput(output.to(v.dtype), state)


def _between(g: Tensor) -> Tensor:
    """Sum of g_j over s < j <= t: [..., C, D] -> [..., C, C, D]."""
    chunk = g.shape[-2]
    after = torch.ones(chunk, chunk, dtype=torch.bool, device=g.device).tril(-1)[..., None]  # [t, s, 1]
    return g[..., :, None, :].where(after, 0.0).cumsum(-3)


def _states(through_keys: Tensor, through_values: Tensor, update: Tensor, initial_state: Tensor | None) -> Tensor:
    """`fold_states` with the decay of a chunk as two factors, [B, H, N, K] and [B, H, N, V]."""
    first = torch.zeros_like(update[:, :, 0]) if initial_state is None else initial_state.to(update.dtype)
    state = torch.cat([first[:, :, None], update], dim=2)
    decays = [torch.cat([torch.zeros_like(x[:, :, :1]), x], dim=2) for x in (through_keys, through_values)]
    distance = 1
    while distance < state.shape[2]:
        keys, values = (x[:, :, distance:] for x in decays)
        added = keys[..., None] * values[..., None, :] * state[:, :, :-distance]
        state = torch.cat([state[:, :, :distance], state[:, :, distance:] + added], dim=2)
        decays = [torch.cat([x[:, :, :distance], x[:, :, distance:] * x[:, :, :-distance]], dim=2) for x in decays]
        distance *= 2
    return state


def _entering(k: Tensor, v: Tensor, a: Tensor, b: Tensor, document_ids: Tensor | None, shard: SequenceShard) -> Tensor:
    """The state after the previous ranks' tokens, from each rank's own state and its total decays."""
    last = torch.ones(1, k.shape[1], 1, dtype=torch.bool, device=k.device)
    if document_ids is not None:
        last = (document_ids == document_ids[:, -1:])[..., None]
    to_end = [torch.exp(sum_after(x.transpose(1, 2)).transpose(1, 2)) for x in (a, b)]  # [B, T, H, K or V]
    added = torch.einsum("bthk,bthv->bhkv", (k * to_end[0]).where(last[..., None], 0.0), v * to_end[1])
    return fold(added, TwoSidedDecay(a.sum(1), b.sum(1)), shard)
