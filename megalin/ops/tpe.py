"""TPE, cosFormer2's input layer: each channel becomes a sum of its past under many exponential decays at once.

    H_t[c, k] = lambda_k H_{t-1}[c, k] + B[c, k] x_t[c],    y_t[c] = sum_k H_t[c, k]

`tpe` is the chunkwise form, the one that models call; `tpe_recurrent` is the truth it is tested against. Every
exponent is a distance times log lambda, hence <= 0. Documents: as in decay_scan.py.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from megalin.ops.chunks import chunk_documents, split_chunks
from megalin.ops.srmsnorm import compute_dtype


class TPEOutput(NamedTuple):
    """Outputs [B, T, D] in the dtype of x, and the state [B, D, E] after the last token in at least fp32."""

    output: Tensor
    state: Tensor


def tpe(
    x: Tensor,
    coefficients: Tensor,
    log_decay: Tensor,
    *,
    state: Tensor | None = None,
    document_ids: Tensor | None = None,
    chunk_size: int = 64,
) -> TPEOutput:
    """The recurrence above in chunks of C tokens: a window of C taps inside a chunk, states only between chunks.

    States are kept once a chunk, so memory is that of E / C copies of x, not of E.

    Args:
        x: [B, T, D].
        coefficients: B [D, E].
        log_decay: log lambda [E], <= 0, at least fp32.
        state: [B, D, E] before the first token; None for zeros.
        document_ids: [B, T] integers; None when each row is one document.
        chunk_size: C; the result does not depend on it beyond rounding. T need not be a multiple of it.

    Returns:
        TPEOutput; everything is computed in at least fp32.
    """
    length, wide = x.shape[1], compute_dtype(x)
    chunk = min(chunk_size, length)
    coefficients, log_decay = coefficients.to(wide), log_decay.to(wide)
    u = split_chunks(x.to(wide)[:, :, None], chunk)[:, 0]  # [B, N, C, D]
    documents = chunk_documents(document_ids, length, chunk, x.device)  # [1 or B, N, C]
    index = torch.arange(chunk, device=x.device)
    # Tokens before the start of chunk i, i = 0..N: the last chunk ends with the last real token, not with the padding.
    starts = (torch.arange(u.shape[1] + 1, device=x.device) * chunk).clamp(max=length)
    ends = starts[1:, None] - starts[:-1, None] - 1  # [N, 1] index of each chunk's last real token
    leaving = torch.cat([documents[:, :1, 0], documents[..., -1]], dim=1)  # [1 or B, N + 1] document of each state

    taps = coefficients @ _powers(log_decay, index).mT  # [D, C]
    local = _window(u, taps, documents)

    kept = (documents == leaving[:, 1:, None])[..., None]  # [1 or B, N, C, 1]
    to_end = _powers(log_decay, (ends - index).clamp(min=0)) * kept  # [1 or B, N, C, E]
    update = (to_end.mT @ u) * coefficients.mT  # [B, N, E, D]
    first = torch.zeros_like(update[:, 0]) if state is None else state.to(wide).mT
    sources = torch.cat([first[:, None], update], dim=1).transpose(1, 2)  # [B, E, N + 1, D]
    distance = starts[:, None] - starts
    flowing = (leaving[:, :, None] == leaving[:, None, :]).tril()[:, None]  # [1 or B, 1, N + 1, N + 1]
    flows = _powers(log_decay, distance.clamp(min=0)).permute(2, 0, 1) * flowing  # [1 or B, E, N + 1, N + 1]
    states = (flows @ sources).transpose(1, 2)  # [B, N + 1, E, D]: entering chunk i; the last one leaves the sequence

    seen = (documents == leaving[:, :-1, None])[..., None]
    carried = (_powers(log_decay, index + 1) * seen) @ states[:, :-1]  # [B, N, C, D]
    output = (local + carried).flatten(1, 2)[:, :length]
    return TPEOutput(output.to(x.dtype), states[:, -1].mT.contiguous())


def tpe_step(x: Tensor, coefficients: Tensor, log_decay: Tensor, state: Tensor) -> TPEOutput:
    """One token of the recurrence: x [B, D], state [B, D, E] in at least fp32; output [B, D] in the dtype of x."""
    wide = state.dtype
    state = state * torch.exp(log_decay.to(wide)) + coefficients.to(wide) * x.to(wide)[..., None]
    return TPEOutput(state.sum(-1).to(x.dtype), state)


def tpe_recurrent(
    x: Tensor,
    coefficients: Tensor,
    log_decay: Tensor,
    *,
    state: Tensor | None = None,
    document_ids: Tensor | None = None,
) -> TPEOutput:
    """The recurrence token by token; arguments and result as `tpe`."""
    memory = x.new_zeros(x.shape[0], *coefficients.shape, dtype=compute_dtype(x))
    if state is not None:
        memory = memory + state
    outputs = []
    for t in range(x.shape[1]):
        if document_ids is not None and t > 0:
            memory = memory.masked_fill((document_ids[:, t] != document_ids[:, t - 1])[:, None, None], 0.0)
        output, memory = tpe_step(x[:, t], coefficients, log_decay, memory)
        outputs.append(output)
    return TPEOutput(torch.stack(outputs, dim=1), memory)


def tpe_flops(*, hidden_size: int, num_decays: int) -> int:
    """Forward floating-point operations a token: 4 D E, which is what the recurrence costs and the paper counts.

    The chunkwise form's products with the state cost as much: 2 D E to form it, 2 D E to read it. Its window inside a
    chunk, its taps and the fold of states between chunks are artefacts of this implementation and are not counted.
    """
    return 4 * hidden_size * num_decays


def _powers(log_decay: Tensor, distance: Tensor) -> Tensor:
    """lambda_k^n for n >= 0 in `distance` [...]; [..., E]."""
    return torch.exp(distance[..., None] * log_decay)


def _window(u: Tensor, taps: Tensor, documents: Tensor) -> Tensor:
    """y_t = sum over lags i of taps_i u_{t-i}, inside the chunk and t's document; [B, N, C, D].

    Lag by lag: autograd keeps views of `u` and masks, where a matrix a channel and chunk would keep C copies of it.
    """
    total = u * taps[:, 0]
    for lag in range(1, u.shape[2]):
        other = (documents[..., lag:] != documents[..., :-lag])[..., None]
        term = (u[:, :, :-lag] * taps[:, lag]).masked_fill(other, 0.0)
        total = total + functional.pad(term, (0, 0, lag, 0))
    return total
