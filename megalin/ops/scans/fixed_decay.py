"""The linear recurrence with no decay or a fixed scalar decay a head: recurrent, parallel and chunkwise forms.

    S_t = exp(-s) S_{t-1} + k_t v_t^T,    o_t = S_t^T q_t    (s >= 0 a head)

`decay_scan` is the chunkwise form, the one that models call. `decay_scan_recurrent` and `decay_scan_parallel`
compute the same function token by token and as one masked matrix; `decay_scan` is tested against them.

No form divides by a cumulative decay: every exponent is a difference of positions times -s, hence <= 0.
Documents: `document_ids` is non-decreasing along T; a token attends to the tokens of its own document only, and
`initial_state` belongs to the document of the first token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from megalin.ops.dispatch import backend as backends
from megalin.ops.dispatch.backend import Backend, Compiled
from megalin.ops.dispatch.custom_op import contiguous, custom_op
from megalin.ops.dispatch.dtypes import compute_dtype, without_autocast
from megalin.ops.dispatch.operands import check_scan
from megalin.ops.dispatch.self_test import compare
from megalin.ops.scans import fixed_decay_cuda
from megalin.ops.scans.chunks import chunk_documents, split_chunks
from megalin.ops.scans.context_parallel import SequenceShard
from megalin.ops.scans.driver import Begun, Finished, Inputs, ScanOutput, fold_padded, run_scan
from megalin.ops.scans.fixed_decay_step import decay_step_reference
from megalin.ops.scans.limits import WIDTH_UNIT, padded, unsupported
from megalin.ops.scans.self_tests import (
    TOKENS,
    compare_shards,
    differentiable,
    documents_of,
    initial_state_of,
    samples_of,
    slopes_of,
)
from megalin.ops.scans.states import decay_state
from megalin.ops.scans.transition import DiagonalDecay


def decay_scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slopes: Tensor | None,
    *,
    initial_state: Tensor | None = None,
    shard: SequenceShard | None = None,
    document_ids: Tensor | None = None,
    state_gradient: bool = True,
    chunk_size: int = 64,
    backend: Backend = "auto",
) -> ScanOutput:
    """The recurrence above in chunks of C tokens: matmuls inside a chunk, states between chunks.

    Args:
        q, k: [B, T, H, K].
        v: [B, T, H, V].
        slopes: [H], s >= 0 in nats a token, at least fp32 (a buffer: it gets no gradient); None for no decay.
        initial_state: [B, H, K, V]; None for zeros.
        shard: this rank's shard under context parallelism: the initial state then comes from the ranks before, and the
            returned state has no gradient; None for full sequences.
        document_ids: [B, T] integers; None if each sequence is one document.
        state_gradient: whether the returned state of a full sequence has a gradient; it costs time in compiled blocks.
        chunk_size: C of the reference, kernels have their own; the result does not depend on it beyond rounding.
        backend: implementation to run; compiled ones take q, k, v of one dtype, fp32, bf16 or fp16, with K and V up to
            256, the CUDA one only bf16.

    Returns:
        ScanOutput. Matmuls take operands in the dtype of v, that of q and k in the wider of theirs, and accumulate in
        fp32; states are accumulated in fp32 (fp64 for fp64 inputs).

    Raises:
        KernelError: an explicit backend that cannot run.
        OperandError: mismatched shapes, kinds or devices.
    """
    decay = ("slopes", slopes, "H")
    case = check_scan("decay_scan", (q, "BTHK"), (k, "BTHK"), v, decay, initial_state, document_ids)
    case = (*case, ("state_gradient", state_gradient))
    assert shard is None or initial_state is None, "initial_state and shard are exclusive"
    op, limit = "decay_scan" if shard is None else "split_decay_scan", unsupported(q, k, v)
    limits: dict[Compiled, str] = {"cuda": fixed_decay_cuda.limit(op, backend, q, k, v)}
    choice = backends.choose(op, backend, v.device.type, limit, limits, case=case)
    if shard is not None and choice == "reference":
        added = decay_state(k, v, slopes, document_ids=document_ids)
        initial_state, shard = fold_padded(added, total_decay(k, slopes), shard), None
        case = (*case, ("initial_state", initial_state.dtype))
        choice = backends.choose("decay_scan", backend, v.device.type, limit, limits, case=case)
    options: dict[str, Any] = {"initial_state": initial_state, "document_ids": document_ids}
    if choice == "reference":
        return decay_scan_reference(q, k, v, slopes, chunk_size=chunk_size, **options)
    return _compiled_scan(choice, q, k, v, slopes, shard=shard, state_gradient=state_gradient, **options)


def _compiled_scan(
    backend: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slopes: Tensor | None,
    *,
    document_ids: Tensor | None,
    initial_state: Tensor | None = None,
    shard: SequenceShard | None = None,
    state_gradient: bool = True,
) -> ScanOutput:
    """`decay_scan` by the kernels of a backend."""
    key, value = k.shape[-1], v.shape[-1]
    q, k, v = (padded(x, -x.shape[-1] % WIDTH_UNIT) for x in (q, k, v))
    if initial_state is not None:
        initial_state = padded(initial_state.float(), v.shape[-1] - value, k.shape[-1] - key)
    inputs = (q, k, v, None if slopes is None else slopes.float().contiguous(), document_ids)
    output, state = run_scan(
        KERNELS[backend], inputs, initial_state=initial_state, shard=shard, state_gradient=state_gradient
    )
    return ScanOutput(output[..., :value], state[..., :key, :value])


@without_autocast
def decay_scan_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slopes: Tensor | None,
    *,
    initial_state: Tensor | None = None,
    document_ids: Tensor | None = None,
    chunk_size: int = 64,
) -> ScanOutput:
    """`decay_scan` in plain PyTorch; T need not be a multiple of C.

    q k^T is computed in the wider dtype of q and k, the matmuls with v in the dtype of v, and states in fp32 (fp64 for
    fp64 inputs).
    """
    length, heads = q.shape[1:3]
    chunk = min(chunk_size, length)
    wide, common = compute_dtype(v), torch.promote_types(q.dtype, k.dtype)
    s = torch.zeros(heads, dtype=wide, device=v.device) if slopes is None else slopes.to(wide)
    q, k, v = (split_chunks(x, chunk) for x in (q.to(common), k.to(common), v))  # [B, H, N, C, K or V]
    documents = chunk_documents(document_ids, length, chunk, v.device)  # [1 or B, N, C]
    index = torch.arange(chunk, device=v.device)
    # Tokens before the start of chunk i, i = 0..N: the last chunk ends with the last real token, not with the padding.
    starts = (torch.arange(q.shape[2] + 1, device=v.device) * chunk).clamp(max=length)
    ends = starts[1:, None] - starts[:-1, None] - 1  # [N, 1] index of each chunk's last real token

    same = (documents[..., :, None] == documents[..., None, :])[:, None]  # [1 or B, 1, N, C, C]
    scores = (q @ k.mT) * _causal_decay(index, s)[:, None]  # [B, H, N, C, C]
    local = scores.masked_fill(~same, 0.0).to(v.dtype) @ v  # [B, H, N, C, V]

    # A chunk adds the keys of its last document, decayed to its end. States pass between chunks by the same decay.
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
        output, state = decay_step_reference(q[:, t], k[:, t], v[:, t], slopes, state)
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
    """Forward FLOPs per token of the chunkwise form, a multiply-add counted as two.

    Per head: 2 C (K + V) for q k^T and its matmul with v inside a chunk, 2 K V to form the state, 2 K V to read it.
    Passing states between chunks, this implementation's 2 K V N / C per token with N = T / C chunks, is not counted.
    """
    chunk = min(chunk_size, length)
    return num_heads * (2 * chunk * (key_dim + value_dim) + 4 * key_dim * value_dim)


def _causal_decay(positions: Tensor, s: Tensor) -> Tensor:
    """Causal decay [H, n, n]: exp(-s_h (p_t - p_s)) where p_t >= p_s, else 0; `positions` p [n] is non-decreasing."""
    distance = positions[:, None] - positions[None, :]
    decay = torch.exp(-s[:, None, None] * distance.clamp(min=0))
    return decay.masked_fill(torch.ones_like(distance, dtype=torch.bool).triu(1), 0.0)


def total_decay(k: Tensor, slopes: Tensor | None) -> DiagonalDecay:
    """The transition of the tokens of k [B, T, H, K], equal on all ranks: T [H, 1]."""
    if slopes is None:
        return DiagonalDecay(k.new_zeros(k.shape[2], 1, dtype=torch.float32))
    return DiagonalDecay(-k.shape[1] * slopes[:, None])


def _launches(backend: str) -> Any:
    if backend == "cuda":
        return fixed_decay_cuda
    from megalin._triton.scans import fixed_decay

    return fixed_decay


def _fake_begin(
    k: Tensor, v: Tensor, slopes: Tensor | None, documents: Tensor | None, reverse: bool, total: bool, backend: str
) -> tuple[Tensor, Tensor]:
    shape = _launches(backend).parts_shape(*k.shape, v.shape[3], reverse=reverse, total=total)
    parts = k.new_empty(shape, dtype=torch.float32)
    return parts.new_empty(*shape[:2], *shape[3:]) if total else parts.new_empty(0), parts


@custom_op("decay_scan_begin", _fake_begin)
def _begin(
    k: Tensor, v: Tensor, slopes: Tensor | None, documents: Tensor | None, reverse: bool, total: bool, backend: str
) -> tuple[Tensor, Tensor]:
    return _launches(backend).begin(k, v, slopes, contiguous(documents), reverse=reverse, total=total)


def _fake_finish(q: Tensor, k: Tensor, v: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor]:
    (batch, length, heads, key), value = k.shape, v.shape[3]
    state, launches = k.new_empty(batch, heads, key, value, dtype=torch.float32), _launches(others[-1])
    return v.new_empty(v.shape), state, state.new_empty(launches.saved_shape(batch, length, heads, key, value))


@custom_op("decay_scan_finish", _fake_finish)
def _finish(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slopes: Tensor | None,
    documents: Tensor | None,
    entering: Tensor | None,
    parts: Tensor,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    return _launches(backend).finish(q, k, v, slopes, contiguous(entering), contiguous(documents), parts)


def _fake_finish_backward(d_output: Tensor, d_leaving: Any, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> list[Tensor]:
    d_entering = k.new_empty(k.shape[0], *k.shape[2:], v.shape[3], dtype=torch.float32)
    return [*(x.new_empty(x.shape) for x in (q, k, v)), d_entering]


@custom_op("decay_scan_finish_backward", _fake_finish_backward)
def _finish_backward(
    d_output: Tensor,
    d_leaving: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slopes: Tensor | None,
    documents: Tensor | None,
    entering: Tensor | None,
    states: Tensor,
    parts: Tensor,
    backend: str,
) -> list[Tensor]:
    entering, d_leaving, documents = (contiguous(x) for x in (entering, d_leaving, documents))
    inputs = (d_output, d_leaving, q, k, v, slopes, entering, documents, states, parts)
    return list(_launches(backend).finish_backward(*inputs))


class _Kernels:
    """`ScanKernels` of the inputs q, k, v, slopes [H] fp32 and document_ids [B, T]."""

    def __init__(self, backend: Compiled) -> None:
        self.backend = backend

    def begin(self, inputs: Inputs, *, exchange: bool) -> Begun:
        _, k, v, slopes, documents = inputs
        state, parts = _begin(k, v, slopes, documents, False, exchange, self.backend)
        return Begun((state, total_decay(k, slopes)) if exchange else None, [parts])

    def finish(self, inputs: Inputs, entering: Tensor | None, begun: Begun, *, keep: bool) -> Finished:
        output, state, states = _finish(*inputs, entering, *begun.handed, self.backend)
        return Finished(output, state, [entering, states])

    def begin_backward(self, d_output: Tensor, inputs: Inputs, saved: Inputs, *, exchange: bool) -> Begun:
        q, k, _, slopes, documents = inputs
        gradient, parts = _begin(q, d_output, slopes, documents, True, exchange, self.backend)
        return Begun((gradient, total_decay(k, slopes)) if exchange else None, [parts])

    def finish_backward(
        self, d_output: Tensor, d_leaving: Tensor | None, inputs: Inputs, saved: Inputs, begun: Begun
    ) -> tuple[list[Tensor | None], Tensor]:
        *gradients, d_entering = _finish_backward(d_output, d_leaving, *inputs, *saved, *begun.handed, self.backend)
        return [*gradients, None, None], d_entering


KERNELS = {backend: _Kernels(backend) for backend in ("cuda", "triton")}


def _self_test(backend: Compiled, device: str, case: Mapping[str, Any]) -> str:
    """One block of two chunks, and two blocks."""

    def test() -> str:
        return _self_test_of(112, backend, device, case) or _self_test_of(208, backend, device, case)

    return _of_right_tiles(backend, test)


def _of_right_tiles(backend: Compiled, test: Callable[[], str]) -> str:
    """Error of a test; where tiles that were found by timing fail, that of the next ones."""
    if backend == "cuda":
        return test()
    from megalin._triton.dispatch import tuning

    with tuning.without_search():
        while (error := test()) and tuning.reject("decay_scan"):
            pass
    return error


def _self_test_of(length: int, backend: Compiled, device: str, case: Mapping[str, Any]) -> str:
    slopes, documents = slopes_of(case, 0.3, device), documents_of(case, length, device)

    def kernel(q: Tensor, k: Tensor, v: Tensor, first: Tensor | None = None) -> ScanOutput:
        options: dict[str, Any] = {"initial_state": first, "document_ids": documents}
        return _compiled_scan(backend, q, k, v, slopes, **options, state_gradient=case["state_gradient"])

    def reference(q: Tensor, k: Tensor, v: Tensor, first: Tensor | None = None) -> ScanOutput:
        return decay_scan_reference(q, k, v, slopes, initial_state=first, document_ids=documents)

    inputs = [*samples_of(case, 1, length, device=device), *initial_state_of(case, device)]
    return compare(kernel, reference, inputs, differentiable=differentiable(case))


def _shards_self_test(backend: Compiled, device: str, case: Mapping[str, Any]) -> str:
    slopes, inputs = slopes_of(case, 0.005, device), samples_of(case, 1, TOKENS, device=device)

    def kernel(shard: SequenceShard, documents: Tensor | None, q: Tensor, k: Tensor, v: Tensor) -> ScanOutput:
        return _compiled_scan(backend, q, k, v, slopes, document_ids=documents, shard=shard)

    def reference(documents: Tensor | None, q: Tensor, k: Tensor, v: Tensor) -> ScanOutput:
        return decay_scan_reference(q, k, v, slopes, document_ids=documents)

    return _of_right_tiles(backend, lambda: compare_shards(kernel, reference, inputs, case))


backends.register("decay_scan", ("cuda", "triton"), _self_test)
backends.register("split_decay_scan", ("cuda", "triton"), _shards_self_test)
