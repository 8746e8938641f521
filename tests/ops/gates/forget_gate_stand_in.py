"""PyTorch in place of the forget-gate scan's kernels in CUDA C++, for tests of its launches on a CPU."""

from typing import Any

import torch
from torch import Tensor

from megalin.ops.gates.forget_gates import forget_gates_reference

CHUNK = 64
MILD = -140.0


def call(name: str, device: torch.device, arguments: tuple[Any, ...]) -> None:
    """`cuda_launch.call` of these kernels."""
    tensors = [x[0] if isinstance(x, tuple) else x for x in arguments]
    {"gate_segments": segments, "gate_sweep": sweep, "gate_reverse": reverse}[name](*tensors)


def gates(logit: Tensor, bound: Tensor) -> tuple[Tensor, Tensor]:
    """f and 1 - f of logits [B, T, H, K] and bounds [H, K] or [B, H, K]."""
    found = []
    for x, b in zip(logit, bound.expand(len(logit), *bound.shape[-2:]), strict=True):
        k, log_decay = forget_gates_reference(x.flatten(1)[None], b.flatten())
        found.append((log_decay.exp().view_as(x), k.view_as(x)))
    f, k = (torch.stack(x) for x in zip(*found, strict=True))
    return f, k


def chunk_of(
    q: Tensor, logit: Tensor, v: Tensor, bound: Tensor, state: Tensor, starts: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Outputs [B, C, H, V] of a chunk, and the state after it; `starts` [B, C]: tokens that start a document."""
    outputs = []
    f, k = gates(logit, bound)
    for t in range(q.shape[1]):
        state = torch.where(starts[:, t, None, None, None], 0.0, state) * f[:, t, ..., None]
        state = state + k[:, t, ..., None] * v[:, t, :, None]
        outputs.append(scale * torch.einsum("bhk,bhkv->bhv", q[:, t], state))
    return torch.stack(outputs, 1), state


def starts_of(documents: Tensor | None, like: Tensor) -> Tensor:
    starts = torch.zeros(like.shape[:2], dtype=torch.bool)
    if documents is not None:
        starts[:, 1:] = documents[:, 1:] != documents[:, :-1]
    return starts


def chunks_of(length: int, segment: int, chunks: int) -> range:
    return range(segment * chunks, min((segment + 1) * chunks, -(-length // CHUNK)))


def kinds_of(logit: Tensor, bound: Tensor, starts: Tensor) -> Tensor:
    """[B, H, N], as the kernels define them."""
    found = []
    for place in range(0, logit.shape[1], CHUNK):
        steep = (gates(logit[:, place : place + CHUNK], bound)[0].clamp(min=1e-38).log().sum(1) < MILD).any(-1)
        inside = starts[:, place + 1 : place + CHUNK].any(1)[:, None]
        found.append(torch.where(steep | inside, 0, torch.where(starts[:, place], 1, 2)[:, None]))
    return torch.stack(found, 2)


def middle_of(logit: Tensor, bound: Tensor, kind: Tensor) -> Tensor:
    """2^m [B, H, K] of one chunk, 1 if steep, and 0 if another document's state enters."""
    total = gates(logit, bound)[0].clamp(min=1e-38).log().sum(1)
    return torch.where(kind[..., None] == 0, 1.0, torch.exp(0.5 * total))


def segments(
    q: Tensor, logit: Tensor, v: Tensor, bound: Tensor, documents: Tensor | None, kinds: Tensor | None,
    updates: Tensor, decays: Tensor, batch: int, length: int, heads: int, width: int, number: int, chunks: int,
    scale: float, reverse: bool, last: bool,
) -> None:  # fmt: skip
    q, logit, v = (x.double() for x in (q, logit, v))
    starts = starts_of(documents, q)
    f, k = gates(logit, bound)
    if kinds is not None:
        kinds.copy_(torch.minimum(kinds, kinds_of(logit, bound, starts)))
    for segment in range(number):
        if not last and segment == (0 if reverse else number - 1):
            continue
        state, decay = torch.zeros(batch, heads, width, width).double(), torch.ones(batch, heads, width).double()
        tokens = [t for c in chunks_of(length, segment, chunks) for t in range(c * CHUNK, min(length, (c + 1) * CHUNK))]
        for t in reversed(tokens) if reverse else tokens:
            kept = torch.where(starts[:, t, None, None], 0.0, f[:, t])
            if reverse:
                state = kept[..., None] * (state + scale * q[:, t, ..., None] * v[:, t, :, None])
            else:
                state = kept[..., None] * state + k[:, t, ..., None] * v[:, t, :, None]
            decay = decay * kept
        updates[:, :, segment], decays[:, :, segment] = state, decay


def sweep(
    q: Tensor, logit: Tensor, v: Tensor, bound: Tensor, documents: Tensor | None, scores: Tensor, kinds: Tensor,
    updates: Tensor, decays: Tensor, entering: Tensor | None, output: Tensor, states: Tensor | None, final: Tensor,
    batch: int, length: int, heads: int, width: int, number: int, chunks: int, scale: float,
) -> None:  # fmt: skip
    q, logit, v, bound = (x.double() for x in (q, logit, v, bound))
    starts = starts_of(documents, q)
    for segment in range(number):
        state = torch.zeros(batch, heads, width, width).double() if entering is None else entering.double()
        for before in range(segment):
            state = state * decays[:, :, before, :, None] + updates[:, :, before]
        for chunk in chunks_of(length, segment, chunks):
            place = slice(chunk * CHUNK, (chunk + 1) * CHUNK)
            kind = kinds[:, :, chunk]
            if states is not None:
                middle = middle_of(logit[:, place], bound, kind)
                states[:, :, chunk] = torch.where(kind[..., None] == 1, 0.0, middle)[..., None] * state
            output[:, place], state = chunk_of(
                q[:, place], logit[:, place], v[:, place], bound, state, starts[:, place], scale
            )
        if segment == number - 1:
            final.copy_(state)
    rows = kinds.repeat_interleave(CHUNK, 2) == 0
    assert scores[rows].isfinite().all()  # of steep chunks


def reverse(
    q: Tensor, logit: Tensor, v: Tensor, d_output: Tensor, bound: Tensor, documents: Tensor | None, scores: Tensor,
    kinds: Tensor, states: Tensor, updates: Tensor, decays: Tensor, d_leaving: Tensor | None, dq: Tensor,
    d_logit: Tensor, dv: Tensor, d_bound: Tensor, d_states: Tensor, d_entering: Tensor, batch: int, length: int,
    heads: int, width: int, number: int, chunks: int, scale: float,
) -> None:  # fmt: skip
    starts = starts_of(documents, q)
    for segment in range(number):
        d_state = torch.zeros(batch, heads, width, width).double() if d_leaving is None else d_leaving.double()
        for after in range(number - 1, segment, -1):
            d_state = d_state * decays[:, :, after, :, None] + updates[:, :, after]
        for chunk in reversed(chunks_of(length, segment, chunks)):
            place, kind = slice(chunk * CHUNK, (chunk + 1) * CHUNK), kinds[:, :, chunk]
            middle = middle_of(logit[:, place].double(), bound.double(), kind)
            state = states[:, :, chunk].double() / middle[..., None]
            bounds = bound.double().expand(batch, -1, -1)
            inputs = [x.double() for x in (q[:, place], logit[:, place], v[:, place], bounds, state)]
            inputs = [x.clone().requires_grad_() for x in inputs]
            with torch.enable_grad():
                x, y, z, b, s = inputs
                found = chunk_of(x, y, z, b, s, starts[:, place], scale)
            grads = torch.autograd.grad(found, inputs, [d_output[:, place].double(), d_state])
            mild = kind != 0
            for target, grad in ((dq, grads[0]), (d_logit, grads[1])):
                target[:, place] = torch.where(mild[:, None, :, None], grad, target[:, place].double())
            dv[:, place] = grads[2]
            d_bound[:, :, chunk] = torch.where(mild[..., None], grads[3], d_bound[:, :, chunk].double())
            d_states[:, :, chunk] = torch.where(mild[..., None, None], d_states[:, :, chunk].double(), d_state)
            d_state = grads[4]
        if segment == 0:
            d_entering.copy_(d_state)
