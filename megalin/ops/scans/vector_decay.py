"""The linear recurrence with a data-dependent decay per token and key channel: recurrent, parallel and chunkwise forms.

    S_t = diag(exp(g_t)) S_{t-1} + k_t v_t^T,    o_t = scale S_t^T q_t,    g_t <= 0

`vector_decay_scan` is the chunkwise form, the one that models call. `vector_decay_scan_recurrent` and
`vector_decay_scan_parallel` compute the same function token by token and pair by pair; it is tested against them.

No form divides by a cumulative decay or subtracts cumulative sums: the decay between two tokens is exp of the sum of g
over the tokens between, and every such sum is <= 0. A difference of cumulative sums would lose a weak decay among
strong ones, and its gradient would be the rounding error of terms that cancel.
Documents: as in fixed_decay.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megalin.ops.dispatch import backend as backends
from megalin.ops.dispatch.backend import Backend, Compiled
from megalin.ops.dispatch.custom_op import contiguous, custom_op
from megalin.ops.dispatch.dtypes import compute_dtype, without_autocast
from megalin.ops.dispatch.operands import check_scan
from megalin.ops.dispatch.self_test import compare, sample
from megalin.ops.scans.chunks import chunk_documents, fold_states, split_chunks, sum_after, visible_decay
from megalin.ops.scans.context_parallel import SequenceShard
from megalin.ops.scans.driver import Begun, Finished, Inputs, ScanOutput, fold, run_scan
from megalin.ops.scans.self_tests import (
    TOKENS,
    compare_shards,
    differentiable,
    documents_of,
    heads_of,
    initial_state_of,
)
from megalin.ops.scans.states import selected_state
from megalin.ops.scans.transition import DiagonalDecay
from megalin.ops.scans.vector_decay_step import unsupported_vectors, vector_decay_step_reference

SUB_BLOCK = 16
"""Tokens in a sub-block of a chunk: scores within one are computed element by element, across two through a pivot."""


def vector_decay_scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    *,
    scale: float = 1.0,
    initial_state: Tensor | None = None,
    shard: SequenceShard | None = None,
    document_ids: Tensor | None = None,
    state_gradient: bool = True,
    chunk_size: int = 64,
    backend: Backend = "auto",
) -> ScanOutput:
    """The recurrence above in chunks of C tokens.

    Args:
        q, k: [B, T, H, K].
        v: [B, T, H, V].
        log_decay: g [B, T, H, K], <= 0, at least fp32; -20 per token and below is safe.
        scale: factor on the output.
        initial_state: [B, H, K, V]; None for zeros.
        shard: this rank's shard under context parallelism: the initial state then comes from the ranks before, and the
            returned state has no gradient; None for full sequences.
        document_ids: [B, T] integers; None if each sequence is one document.
        state_gradient: whether the returned state of a full sequence has a gradient; it costs time in compiled blocks.
        chunk_size: C of the reference, rounded up to a multiple of 16 (kernels: 64); it changes the rounding only.
        backend: implementation to run; compiled ones take fp32, bf16 and fp16 with K up to 256.

    Returns:
        ScanOutput. Decays and states are computed in fp32 (fp64 for fp64 inputs). The reference computes scores in fp32
        too, and multiplies them with v in the dtype of v; kernels run all matmuls in the dtype of v, with fp32
        accumulators.

    Raises:
        KernelError: an explicit backend that cannot run.
        OperandError: mismatched shapes, kinds or devices.
    """
    g = ("log_decay", log_decay, "BTHK")
    case = check_scan("vector_decay_scan", (q, "BTHK"), (k, "BTHK"), v, g, initial_state, document_ids)
    case = (*case, ("state_gradient", state_gradient))
    assert shard is None or initial_state is None, "initial_state and shard are exclusive"
    op, limit = "vector_decay_scan", unsupported_vectors(q, k, v, log_decay)
    choice = backends.choose(op if shard is None else f"split_{op}", backend, v.device.type, limit, case=case)
    if shard is not None and choice == "reference":
        added = selected_state(k, v, log_decay, document_ids=document_ids)
        initial_state, shard = fold(added, DiagonalDecay(log_decay.sum(1)), shard), None
        case = (*case, ("initial_state", initial_state.dtype))
        choice = backends.choose(op, backend, v.device.type, limit, case=case)
    options: dict[str, Any] = {"scale": scale, "initial_state": initial_state, "document_ids": document_ids}
    if choice == "reference":
        return vector_decay_scan_reference(q, k, v, log_decay, chunk_size=chunk_size, **options)
    return compiled_scan(q, k, v, log_decay, shard=shard, state_gradient=state_gradient, **options)


def compiled_scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    *,
    scale: float,
    document_ids: Tensor | None,
    initial_state: Tensor | None = None,
    shard: SequenceShard | None = None,
    state_gradient: bool = True,
    gates: bool = False,
) -> ScanOutput:
    """`vector_decay_scan` by the kernels; with `gates`, `forget_gate_scan` of logits k and bounds log_decay [H, K]."""
    wide = v.float() if v.dtype == torch.float16 else v  # fp16 has no range for states and for sums of decays
    documents = None if document_ids is None else document_ids.to(torch.int32).contiguous()
    inputs = (_rows(q), _rows(k), _rows(wide), _rows(log_decay.float()), documents)
    first = None if initial_state is None else initial_state.float()
    output, state = run_scan(
        _Kernels(scale, gates), inputs, initial_state=first, shard=shard, state_gradient=state_gradient
    )
    return ScanOutput(output.to(v.dtype), state)


@without_autocast
def vector_decay_scan_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    *,
    scale: float = 1.0,
    initial_state: Tensor | None = None,
    document_ids: Tensor | None = None,
    chunk_size: int = 64,
) -> ScanOutput:
    """`vector_decay_scan` in plain PyTorch; the CPU backend."""
    length = q.shape[1]
    chunk = -(-min(chunk_size, length) // SUB_BLOCK) * SUB_BLOCK
    wide = compute_dtype(v)
    q, k, v, g = (split_chunks(x, chunk) for x in (q.to(wide), k.to(wide), v, log_decay.to(wide)))
    documents = chunk_documents(document_ids, length, chunk, v.device)[:, None]  # [1 or B, 1, N, C]
    scores = _scores(q, k, g, documents)  # [B, H, N, C, C]

    # Document of the state entering chunk n (that of the previous chunk's last token), and of the final state.
    leaving = torch.cat([documents[..., :1, 0], documents[..., -1]], dim=-1)  # [1 or B, 1, N + 1]
    from_start = visible_decay(g.cumsum(-2), documents == leaving[..., :-1, None])  # [B, H, N, C, K]
    to_end = visible_decay(sum_after(g), documents == leaving[..., 1:, None])
    update = (k * to_end).mT @ v.to(wide)  # [B, H, N, K, V]
    through = visible_decay(g.sum(-2), leaving[..., 1:] == leaving[..., :-1])  # [B, H, N, K]
    states = fold_states(through, update, initial_state)  # [B, H, N + 1, K, V]

    output = (scores * scale).to(v.dtype) @ v + ((q * from_start) @ states[:, :, :-1] * scale).to(v.dtype)
    return ScanOutput(output.flatten(2, 3)[:, :, :length].transpose(1, 2), states[:, :, -1].clone())


def vector_decay_scan_recurrent(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    *,
    scale: float = 1.0,
    initial_state: Tensor | None = None,
    document_ids: Tensor | None = None,
) -> ScanOutput:
    """The recurrence token by token; arguments and result as `vector_decay_scan`."""
    state = q.new_zeros(q.shape[0], q.shape[2], q.shape[3], v.shape[3], dtype=compute_dtype(v))
    if initial_state is not None:
        state = state + initial_state
    outputs = []
    for t in range(q.shape[1]):
        if document_ids is not None and t > 0:
            state = state.masked_fill((document_ids[:, t] != document_ids[:, t - 1])[:, None, None, None], 0.0)
        output, state = vector_decay_step_reference(q[:, t], k[:, t], v[:, t], log_decay[:, t], state, scale=scale)
        outputs.append(output)
    return ScanOutput(torch.stack(outputs, dim=1), state)


def vector_decay_scan_parallel(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, *, scale: float = 1.0, document_ids: Tensor | None = None
) -> Tensor:
    """O = A V, A_ts = scale sum_i q_ti k_si exp(sum of g_ji over s < j <= t) for s <= t of one document; [B, T, H, V].

    Every exponent is its own sum, so memory grows with B H K T^3: for short sequences.
    """
    length = q.shape[1]
    t = torch.arange(length, device=q.device)
    between = (t > t[:, None]) & (t <= t[:, None, None])  # [t, s, j]
    exponent = torch.einsum("tsj,bjhk->bhtsk", between.to(log_decay.dtype), log_decay)
    scores = torch.einsum("bthk,bshk,bhtsk->bhts", q, k, torch.exp(exponent)).tril()
    if document_ids is not None:
        scores = scores * (document_ids[:, None, :, None] == document_ids[:, None, None, :])
    return torch.einsum("bhts,bshv->bthv", scores * scale, v)


def _scores(q: Tensor, k: Tensor, g: Tensor, documents: Tensor) -> Tensor:
    """A_ts = sum_i q_ti k_si exp(sum of g_ji over s < j <= t) for s <= t of one document, else 0; [B, H, N, C, C]."""
    blocks = [x.unflatten(-2, (-1, SUB_BLOCK)) for x in (q, k, g)]
    diagonal = _diagonal_scores(blocks[0], blocks[1], blocks[2], documents)
    rows = []
    for index in range(q.shape[-2] // SUB_BLOCK):
        start, end = index * SUB_BLOCK, (index + 1) * SUB_BLOCK
        parts = [diagonal[..., index, :, :]]
        if index:
            # The pivot is the token before this block. Queries and keys of other documents than its own form no pair.
            document = documents[..., start - 1 : start]
            from_pivot = visible_decay(g[..., start:end, :].cumsum(-2), documents[..., start:end] == document)
            to_pivot = visible_decay(sum_after(g[..., :start, :]), documents[..., :start] == document)
            parts.insert(0, (q[..., start:end, :] * from_pivot) @ (k[..., :start, :] * to_pivot).mT)
        if end < q.shape[-2]:
            parts.append(q.new_zeros(*q.shape[:-2], SUB_BLOCK, q.shape[-2] - end))
        rows.append(torch.cat(parts, dim=-1))
    return torch.cat(rows, dim=-2)


def _diagonal_scores(q: Tensor, k: Tensor, g: Tensor, documents: Tensor) -> Tensor:
    """Scores inside each sub-block, pair by pair: q, k, g [B, H, N, C/16, 16, K] -> [B, H, N, C/16, 16, 16]."""
    blocks = documents.unflatten(-1, (-1, SUB_BLOCK))
    visible = (blocks[..., :, None] == blocks[..., None, :]).tril()
    after = torch.ones(SUB_BLOCK, SUB_BLOCK, dtype=torch.bool, device=g.device).tril(-1)[..., None]  # [t, s, 1]
    between = g[..., :, None, :].where(after, 0.0).cumsum(-3)  # [B, H, N, C/16, 16, 16, K]
    return (q[..., :, None, :] * k[..., None, :, :] * visible_decay(between, visible)).sum(-1)


def _rows(x: Tensor) -> Tensor:
    """`x`, or a copy if its last dimension is not contiguous."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _fake_begin(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, _: Any, total: bool, *__: Any) -> list[Tensor]:
    from megalin._triton.scans import vector_decay as kernels

    state = (q.shape[0], q.shape[2], q.shape[3], v.shape[3])
    sums = [log_decay.new_empty(x) for x in ((state, state[:3]) if total else (0, 0))]
    return [*sums, *kernels.empty_chunks(q, v), *kernels.empty_segments(v, q.shape[3], last=total)]


@custom_op("vector_decay_scan_begin", _fake_begin)
def _begin(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, documents: Tensor | None, total: bool, scale: float, gates: bool
) -> list[Tensor]:
    """The state update and decay of all tokens, empty unless `total`, and Chunks and Segments for `_finish`."""
    from megalin._triton.scans import vector_decay as kernels

    state, decay, chunks, segments = kernels.begin(q, k, v, log_decay, scale, documents, total=total, gates=gates)
    return [state, decay, *chunks, *segments]


def _fake_finish(v: Tensor, entering: Tensor | None, begun: list[Tensor], keep: bool) -> tuple[Tensor, Tensor, Tensor]:
    (batch, heads, chunks, width), value = begun[3].shape, v.shape[3]
    states = v.new_empty(batch, heads, chunks, width, value) if keep else v.new_empty(0)
    return v.new_empty(v.shape), begun[3].new_empty(batch, heads, width, value), states


@custom_op("vector_decay_scan_finish", _fake_finish)
def _finish(v: Tensor, entering: Tensor | None, begun: list[Tensor], keep: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Output, final state, and if `keep` the states entering chunks."""
    from megalin._triton.scans import vector_decay as kernels

    return kernels.finish(v, contiguous(entering), kernels.Chunks(*begun[:5]), kernels.Segments(*begun[5:]), keep)


def _fake_begin_backward(d_output: Tensor, chunks: list[Tensor], total: bool) -> list[Tensor]:
    from megalin._triton.scans import vector_decay as kernels

    (batch, heads, _, width), value = chunks[3].shape, d_output.shape[3]
    gradient = chunks[3].new_empty((batch, heads, width, value) if total else 0)
    return [gradient, *kernels.empty_segments(d_output, width, last=total)]


@custom_op("vector_decay_scan_begin_backward", _fake_begin_backward)
def _begin_backward(d_output: Tensor, chunks: list[Tensor], total: bool) -> list[Tensor]:
    """The output's contribution to the gradient of S_in, empty unless `total`, and Segments for `_finish_backward`."""
    from megalin._triton.scans import vector_decay as kernels

    gradient, segments = kernels.begin_backward(_rows(d_output), kernels.Chunks(*chunks), total=total)
    return [gradient, *segments]


def _fake_finish_backward(
    d_output: Tensor, d_leaving: Any, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, *_: Any
) -> list[Tensor]:
    d_decay = log_decay.new_empty(log_decay.shape)
    d_entering = d_decay.new_empty(q.shape[0], *q.shape[2:], v.shape[3])
    return [*(x.new_empty(x.shape) for x in (q, k, v)), d_decay, d_entering]


@custom_op("vector_decay_scan_finish_backward", _fake_finish_backward)
def _finish_backward(
    d_output: Tensor,
    d_leaving: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    documents: Tensor | None,
    saved: list[Tensor],
    segments: list[Tensor],
    scale: float,
    gates: bool,
) -> list[Tensor]:
    from megalin._triton.scans import vector_decay as kernels

    chunks, states = kernels.Chunks(*saved[:5]), saved[5]
    inputs = (_rows(d_output), contiguous(d_leaving), q, k, v, log_decay, scale, documents)
    return list(kernels.finish_backward(*inputs, chunks, states, kernels.Segments(*segments), gates=gates))


class _Kernels(NamedTuple):
    """`ScanKernels` of the inputs q, k, v, log_decay [B, T, H, K] fp32 and document_ids [B, T]; with `gates`, of
    logits [B, T, H, K] and bounds [H, K] fp32 in place of k and log_decay."""

    scale: float
    gates: bool

    def begin(self, inputs: Inputs, *, exchange: bool) -> Begun:
        state, decay, *begun = _begin(*inputs, exchange, self.scale, self.gates)
        return Begun((state, DiagonalDecay(decay.log())) if exchange else None, begun)

    def finish(self, inputs: Inputs, entering: Tensor | None, begun: Begun, *, keep: bool) -> Finished:
        output, state, states = _finish(inputs[2], entering, begun.handed, keep)
        transition = () if begun.exchanged is None else begun.exchanged[1].tensors()
        return Finished(output, state, [*begun.handed[:5], states, *transition])

    def begin_backward(self, d_output: Tensor, inputs: Inputs, saved: Inputs, *, exchange: bool) -> Begun:
        gradient, *segments = _begin_backward(d_output, saved[:5], exchange)
        return Begun((gradient, DiagonalDecay(saved[6])) if exchange else None, segments)

    def finish_backward(
        self, d_output: Tensor, d_leaving: Tensor | None, inputs: Inputs, saved: Inputs, begun: Begun
    ) -> tuple[list[Tensor | None], Tensor]:
        options = (self.scale, self.gates)
        *found, d_entering = _finish_backward(d_output, d_leaving, *inputs, saved[:6], begun.handed, *options)
        return [*found, None], d_entering


def _samples(case: Mapping[str, Any], length: int, strength: Tensor | float, device: str) -> list[Tensor]:
    """q, k, v and log_decay, with decays of about `strength`."""
    sizes = {"q": case["K"], "k": case["K"], "v": case["V"], "log_decay": case["K"]}
    q, k, v, decay = (
        sample(1, length, heads_of(case), size, device=device, seed=seed) for seed, size in enumerate(sizes.values())
    )
    inputs = (q, k, v, -decay.exp() * strength)
    return [x.to(case[name]) for name, x in zip(sizes, inputs, strict=True)]


def _self_test(backend: Compiled, device: str, case: Mapping[str, Any]) -> str:
    """Three chunks: one of mild decays, one with the start of a document, and one of steep decays."""
    length = 144
    strength = torch.where(torch.arange(length, device=device) < 128, 0.1, 20.0)[:, None, None]
    documents = documents_of(case, length, device)

    def kernel(q: Tensor, k: Tensor, v: Tensor, g: Tensor, first: Tensor | None = None) -> ScanOutput:
        options: dict[str, Any] = {"scale": 0.5, "initial_state": first, "document_ids": documents}
        return compiled_scan(q, k, v, g, **options, state_gradient=case["state_gradient"])

    def reference(q: Tensor, k: Tensor, v: Tensor, g: Tensor, first: Tensor | None = None) -> ScanOutput:
        return vector_decay_scan_reference(
            q, k, v, g, scale=0.5, initial_state=first, document_ids=documents, chunk_size=16
        )

    inputs = [*_samples(case, length, strength, device), *initial_state_of(case, device)]
    return compare(kernel, reference, inputs, differentiable=differentiable(case))


def _shards_self_test(backend: Compiled, device: str, case: Mapping[str, Any]) -> str:
    def kernel(shard: SequenceShard, documents: Tensor | None, *x: Tensor) -> ScanOutput:
        return compiled_scan(*x, scale=0.5, document_ids=documents, shard=shard)

    def reference(documents: Tensor | None, *x: Tensor) -> ScanOutput:
        return vector_decay_scan_reference(*x, scale=0.5, document_ids=documents, chunk_size=16)

    return compare_shards(kernel, reference, _samples(case, TOKENS, 0.05, device), case)


backends.register("vector_decay_scan", ("triton",), _self_test)
backends.register("split_vector_decay_scan", ("triton",), _shards_self_test)
