"""The linear recurrence with a data-dependent decay per token and head (Mamba-2), in chunks.

    S_t = exp(g_t) S_{t-1} + k_t v_t^T,    o_t = S_t^T q_t,    g_t <= 0 a scalar

It is the vector-decay recurrence with equal decays in all key channels, so a chunk's scores are one matmul times one
matrix of decays. It is tested against the recurrences of vector_decay.py with g repeated, and shares their step.
Exponents and documents: as in vector_decay.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from megalin.ops.dispatch import backend as backends
from megalin.ops.dispatch.backend import Backend, Compiled
from megalin.ops.dispatch.custom_op import contiguous, custom_op
from megalin.ops.dispatch.dtypes import compute_dtype, without_autocast
from megalin.ops.dispatch.operands import check_scan, static
from megalin.ops.dispatch.self_test import compare, sample
from megalin.ops.scans.chunks import chunk_documents, fold_states, split_chunks, sum_after, visible_decay
from megalin.ops.scans.context_parallel import SequenceShard
from megalin.ops.scans.driver import Begun, Finished, Inputs, ScanOutput, fold_padded, run_scan
from megalin.ops.scans.limits import WIDTH_UNIT, padded, unsupported
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
from megalin.ops.scans.vector_decay_step import vector_decay_step

MAX_VALUE_WIDTH = 128


def scalar_decay_scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    *,
    initial_state: Tensor | None = None,
    shard: SequenceShard | None = None,
    document_ids: Tensor | None = None,
    state_gradient: bool = True,
    chunk_size: int = 64,
    backend: Backend = "auto",
) -> ScanOutput:
    """The recurrence above in chunks of C tokens.

    Args:
        q, k: [B, T, H or 1, K]; with 1, all heads of v share it.
        v: [B, T, H, V].
        log_decay: g [B, T, H], <= 0, at least fp32; -20 per token and below is safe.
        initial_state: [B, H, K, V]; None for zeros.
        shard: this rank's shard under context parallelism: the initial state then comes from the ranks before, and the
            returned state has no gradient; None for full sequences.
        document_ids: [B, T] integers; None if each sequence is one document.
        state_gradient: whether the returned state of a full sequence has a gradient; it costs time in compiled blocks.
        chunk_size: C of the reference, kernels have their own; the result does not depend on it beyond rounding.
        backend: implementation to run; compiled ones take q, k, v of one dtype, fp32, bf16 or fp16, with K up to 256
            and V up to 128.

    Returns:
        ScanOutput. Decays, matmul accumulators and states are computed in fp32 (fp64 for fp64 inputs); for bf16 inputs,
        the kernels' matmul operands and the states they save between chunks are bf16.

    Raises:
        KernelError: an explicit backend that cannot run.
        OperandError: mismatched shapes, kinds or devices.
    """
    decay = ("log_decay", log_decay, "BTH")
    case = check_scan("scalar_decay_scan", (q, "BThK"), (k, "BThK"), v, decay, initial_state, document_ids)
    case = (*case, ("key_heads", static(k.shape[2])), ("state_gradient", state_gradient))
    assert shard is None or initial_state is None, "initial_state and shard are exclusive"
    op, limit = "scalar_decay_scan", _unsupported(q, k, v)
    choice = backends.choose(op if shard is None else f"split_{op}", backend, v.device.type, limit, case=case)
    if shard is not None and choice == "reference":
        added = selected_state(k, v, log_decay[..., None], document_ids=document_ids)
        initial_state = fold_padded(added, DiagonalDecay(log_decay.sum(1)[..., None]), shard)
        shard, case = None, (*case, ("initial_state", initial_state.dtype))
        choice = backends.choose(op, backend, v.device.type, limit, case=case)
    options: dict[str, Any] = {"initial_state": initial_state, "document_ids": document_ids}
    if choice == "reference":
        return scalar_decay_scan_reference(q, k, v, log_decay, chunk_size=chunk_size, **options)
    return _compiled_scan(q, k, v, log_decay, shard=shard, state_gradient=state_gradient, **options)


def _compiled_scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    *,
    document_ids: Tensor | None,
    initial_state: Tensor | None = None,
    shard: SequenceShard | None = None,
    state_gradient: bool = True,
) -> ScanOutput:
    """`scalar_decay_scan` by the kernels."""
    key, value = k.shape[-1], v.shape[-1]
    q, k, v = (padded(x, -x.shape[-1] % WIDTH_UNIT) for x in (q, k, v))
    if initial_state is not None:
        initial_state = padded(initial_state.float(), v.shape[-1] - value, k.shape[-1] - key)
    inputs = (q, k, v, log_decay.float(), document_ids)
    output, state = run_scan(KERNELS, inputs, initial_state=initial_state, shard=shard, state_gradient=state_gradient)
    return ScanOutput(output[..., :value], state[..., :key, :value])


@without_autocast
def scalar_decay_scan_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    *,
    initial_state: Tensor | None = None,
    document_ids: Tensor | None = None,
    chunk_size: int = 64,
) -> ScanOutput:
    """`scalar_decay_scan` in plain PyTorch; T need not be a multiple of C.

    Decays, scores and states are computed in fp32 (fp64 for fp64 inputs); the matmul of the scores with v runs in the
    dtype of v.
    """
    length = v.shape[1]
    chunk = min(chunk_size, length)
    wide = compute_dtype(v)
    q, k, v, g = (split_chunks(x, chunk) for x in (q.to(wide), k.to(wide), v, log_decay.to(wide)[..., None]))
    documents = chunk_documents(document_ids, length, chunk, v.device)[:, None]  # [1 or B, 1, N, C]
    scores = (q @ k.mT) * _decay_between(g, documents)  # [B, H, N, C, C]

    # Document of the state entering chunk n (that of the previous chunk's last token), and of the final state.
    leaving = torch.cat([documents[..., :1, 0], documents[..., -1]], dim=-1)  # [1 or B, 1, N + 1]
    from_start = visible_decay(g.cumsum(-2), documents == leaving[..., :-1, None])  # [B, H, N, C, 1]
    to_end = visible_decay(sum_after(g), documents == leaving[..., 1:, None])
    update = k.mT @ (v.to(wide) * to_end)  # [B, H, N, K, V]
    through = visible_decay(g.sum(-2), leaving[..., 1:] == leaving[..., :-1])  # [B, H, N, 1]
    states = fold_states(through, update, initial_state)  # [B, H, N + 1, K, V]

    carried = (q @ states[:, :, :-1]) * from_start
    output = scores.to(v.dtype) @ v + carried.to(v.dtype)
    return ScanOutput(output.flatten(2, 3)[:, :, :length].transpose(1, 2), states[:, :, -1].clone())


def scalar_decay_step(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, state: Tensor, *, in_place: bool = False
) -> ScanOutput:
    """One decoding step: q, k [B, H or 1, K], v [B, H, V], log_decay [B, H], state [B, H, K, V] in at least fp32;
    `in_place` as in `vector_decay_step`."""
    return vector_decay_step(q, k, v, log_decay[..., None], state, in_place=in_place)


def scalar_decay_scan_flops(
    length: int, *, num_heads: int, num_key_heads: int, key_dim: int, value_dim: int, chunk_size: int
) -> int:
    """Forward FLOPs per token of the chunkwise form: 2 C K per head of q and k, 2 C V + 4 K V per head of v.

    Exponentials, cumulative sums and the states between chunks are not counted.
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


def _fake_begin(
    k: Tensor, v: Tensor, log_decay: Tensor, documents: Tensor | None, reverse: bool, total: bool
) -> list[Tensor]:
    from megalin._triton.scans import scalar_decay as kernels

    shape = (v.shape[0], v.shape[2], k.shape[3], v.shape[3])
    sums = [log_decay.new_empty(x) for x in ((shape, shape[:2]) if total else (0, 0))]
    decays, parts = kernels.empty_intermediates(k, v, log_decay, total=total)
    return [*sums, *decays, *parts]


@custom_op("scalar_decay_scan_begin", _fake_begin)
def _begin(
    k: Tensor, v: Tensor, log_decay: Tensor, documents: Tensor | None, reverse: bool, total: bool
) -> list[Tensor]:
    """The state update and decay of all tokens, empty unless `total`, and Decays and Parts for `_finish`."""
    from megalin._triton.scans import scalar_decay as kernels

    g, documents = log_decay.contiguous(), contiguous(documents)
    state, decay, decays, parts = kernels.begin(k, v, g, documents, reverse=reverse, total=total)
    return [state, decay, *decays, *parts]


def _fake_finish(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    from megalin._triton.scans import scalar_decay as kernels

    state = v.new_empty(v.shape[0], v.shape[2], k.shape[3], v.shape[3], dtype=torch.float32)
    return v.new_empty(v.shape), state, state.new_empty(kernels.saved_shape(k, v))


@custom_op("scalar_decay_scan_finish", _fake_finish)
def _finish(
    q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None, entering: Tensor | None, begun: list[Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    from megalin._triton.scans import scalar_decay as kernels

    found = kernels.Decays(*begun[:4]), kernels.Parts(*begun[4:])
    return kernels.finish(q, k, v, contiguous(entering), contiguous(documents), *found)


def _fake_finish_backward(
    d_output: Tensor, d_leaving: Tensor | None, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, *_: Any
) -> list[Tensor]:
    d_entering = v.new_empty(v.shape[0], v.shape[2], k.shape[3], v.shape[3], dtype=torch.float32)
    return [*(x.new_empty(x.shape) for x in (q, k, v, log_decay)), d_entering]


@custom_op("scalar_decay_scan_finish_backward", _fake_finish_backward)
def _finish_backward(
    d_output: Tensor,
    d_leaving: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    documents: Tensor | None,
    entering: Tensor | None,
    saved: Tensor,
    begun: list[Tensor],
    exact: bool,
) -> list[Tensor]:
    from megalin._triton.scans import scalar_decay as kernels

    found = kernels.Decays(*begun[:4]), kernels.Parts(*begun[4:])
    entering, d_leaving, documents = (contiguous(x) for x in (entering, d_leaving, documents))
    inputs = (d_output, d_leaving, q, k, v, log_decay.contiguous(), entering, documents, saved, *found)
    return list(kernels.finish_backward(*inputs, exact=exact))


class _Kernels:
    """`ScanKernels` of the inputs q, k, v, log_decay [B, T, H] fp32 and document_ids [B, T]."""

    def begin(self, inputs: Inputs, *, exchange: bool) -> Begun:
        state, decay, *begun = _begin(*inputs[1:], False, exchange)
        return Begun((state, DiagonalDecay(decay.log()[..., None])) if exchange else None, begun)

    def finish(self, inputs: Inputs, entering: Tensor | None, begun: Begun, *, keep: bool) -> Finished:
        q, k, v, _, documents = inputs
        output, state, saved = _finish(q, k, v, documents, entering, begun.handed)
        transition = () if begun.exchanged is None else begun.exchanged[1].tensors()
        return Finished(output, state, [entering, saved, *transition])

    def begin_backward(self, d_output: Tensor, inputs: Inputs, saved: Inputs, *, exchange: bool) -> Begun:
        q, _, _, log_decay, documents = inputs
        gradient, _, *begun = _begin(q, d_output, log_decay, documents, True, exchange)
        return Begun((gradient, DiagonalDecay(saved[2])) if exchange else None, begun)

    def finish_backward(
        self, d_output: Tensor, d_leaving: Tensor | None, inputs: Inputs, saved: Inputs, begun: Begun
    ) -> tuple[list[Tensor | None], Tensor]:
        exact = begun.exchanged is None  # docs/adr/0016
        *gradients, d_entering = _finish_backward(d_output, d_leaving, *inputs, *saved[:2], begun.handed, exact)
        return [*gradients, None], d_entering


KERNELS = _Kernels()


def _unsupported(q: Tensor, k: Tensor, v: Tensor) -> str:
    if v.shape[-1] > MAX_VALUE_WIDTH:
        return f"heads of {v.shape[-1]} values, above {MAX_VALUE_WIDTH}"
    if q.shape[2] != k.shape[2]:
        return f"{q.shape[2]} heads of q but {k.shape[2]} of k"
    return unsupported(q, k, v)


def _samples(case: Mapping[str, Any], length: int, strength: float, device: str) -> list[Tensor]:
    """q, k, v and log_decay, with decays of about `strength`."""
    heads = heads_of(case)
    keys = (1 if case["key_heads"] == 1 else heads, case["K"])
    sizes = {"q": keys, "k": keys, "v": (heads, case["V"]), "log_decay": (heads,)}
    q, k, v, decay = (sample(1, length, *size, device=device, seed=seed) for seed, size in enumerate(sizes.values()))
    return [x.to(case[name]) for name, x in zip(sizes, (q, k, v, -strength * decay.abs()), strict=True)]


def _self_test(backend: Compiled, device: str, case: Mapping[str, Any]) -> str:
    """One block of several chunks, and two blocks."""
    return _self_test_of(208, device, case) or _self_test_of(272, device, case)


def _self_test_of(length: int, device: str, case: Mapping[str, Any]) -> str:
    documents = documents_of(case, length, device)

    def kernel(q: Tensor, k: Tensor, v: Tensor, g: Tensor, first: Tensor | None = None) -> ScanOutput:
        options: dict[str, Any] = {"initial_state": first, "document_ids": documents}
        return _compiled_scan(q, k, v, g, **options, state_gradient=case["state_gradient"])

    def reference(q: Tensor, k: Tensor, v: Tensor, g: Tensor, first: Tensor | None = None) -> ScanOutput:
        return scalar_decay_scan_reference(q, k, v, g, initial_state=first, document_ids=documents)

    inputs = [*_samples(case, length, 0.3, device), *initial_state_of(case, device)]
    return compare(kernel, reference, inputs, differentiable=differentiable(case))


def _shards_self_test(backend: Compiled, device: str, case: Mapping[str, Any]) -> str:
    return compare_shards(
        lambda shard, documents, *x: _compiled_scan(*x, document_ids=documents, shard=shard),
        lambda documents, *x: scalar_decay_scan_reference(*x, document_ids=documents),
        _samples(case, TOKENS, 0.03, device),
        case,
    )


backends.register("scalar_decay_scan", ("triton",), _self_test)
backends.register("split_scalar_decay_scan", ("triton",), _shards_self_test)
