"""The linear recurrence with a data-dependent decay per token and head (Mamba-2), in chunks.

    S_t = exp(g_t) S_{t-1} + k_t v_t^T,    o_t = S_t^T q_t,    g_t <= 0 a scalar

It is the vector-decay recurrence with equal decays in all key channels, so a chunk's scores are one matmul times one
matrix of decays. It is tested against the recurrences of vector_decay.py with g repeated, and shares their step.
Exponents and documents: as in vector_decay.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megalin.ops.dispatch import backend as backends
from megalin.ops.dispatch.backend import Backend, Compiled
from megalin.ops.dispatch.dtypes import compute_dtype
from megalin.ops.dispatch.operands import check_scan
from megalin.ops.dispatch.self_test import compare, sample
from megalin.ops.scans import scalar_decay_kernels as kernels
from megalin.ops.scans.chunks import chunk_documents, fold_states, split_chunks, sum_after, visible_decay
from megalin.ops.scans.context_parallel import SequenceShard, SingleProcessExchange
from megalin.ops.scans.fixed_decay import ScanOutput
from megalin.ops.scans.limits import WIDTH_UNIT, padded, unsupported
from megalin.ops.scans.states import selected_state
from megalin.ops.scans.vector_decay import vector_decay_step

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
    check_scan("scalar_decay_scan", (q, "BThK"), (k, "BThK"), v, decay, initial_state, document_ids)
    assert shard is None or initial_state is None, "initial_state and shard are exclusive"
    op, limit = "scalar_decay_scan", _unsupported(q, k, v)
    choice = backends.choose(op if shard is None else f"split_{op}", backend, v.device.type, limit)
    if shard is not None and choice == "reference":
        added = selected_state(k, v, log_decay[..., None], document_ids=document_ids)
        initial_state, shard = shard.fold(added, log_decay.sum(1)[..., None]), None
        choice = backends.choose(op, backend, v.device.type, limit)
    if choice == "reference":
        return scalar_decay_scan_reference(
            q, k, v, log_decay, initial_state=initial_state, document_ids=document_ids, chunk_size=chunk_size
        )
    key, value = k.shape[-1], v.shape[-1]
    q, k, v = (padded(x, -x.shape[-1] % WIDTH_UNIT) for x in (q, k, v))
    if shard is not None:
        output, state = kernels.two_phase_scan(q, k, v, log_decay.float(), document_ids, shard)
    else:
        if initial_state is not None:
            initial_state = padded(initial_state.float(), v.shape[-1] - value, k.shape[-1] - key)
        output, state, _ = kernels.scan(q, k, v, log_decay.float(), initial_state, document_ids, choice)
    return ScanOutput(output[..., :value], state[..., :key, :value])


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


def scalar_decay_step(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, state: Tensor) -> ScanOutput:
    """One decoding step: q, k [B, H or 1, K], v [B, H, V], log_decay [B, H], state [B, H, K, V] in at least fp32."""
    return vector_decay_step(q, k, v, log_decay[..., None], state)


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


def _unsupported(q: Tensor, k: Tensor, v: Tensor) -> str:
    if v.shape[-1] > MAX_VALUE_WIDTH:
        return f"heads of {v.shape[-1]} values, above {MAX_VALUE_WIDTH}"
    if q.shape[2] != k.shape[2]:
        return f"{q.shape[2]} heads of q but {k.shape[2]} of k"
    return unsupported(q, k, v)


def _self_test(backend: Compiled, device: str) -> str:
    """Two documents over several chunks, one head of q and k for two of v, in the compute dtype of models."""
    documents = (torch.arange(200, device=device) >= 150).int()[None]
    q, k = (sample(1, 200, 1, 128, device=device, seed=i).bfloat16() for i in range(2))
    inputs = [q, k, sample(1, 200, 2, 64, device=device, seed=2).bfloat16()]
    inputs += [-0.3 * sample(1, 200, 2, device=device, seed=3).abs(), sample(1, 2, 128, 64, device=device, seed=4)]
    return compare(
        lambda *x: kernels.scan(*x, documents, backend)[:2],
        lambda q, k, v, g, first: scalar_decay_scan_reference(q, k, v, g, initial_state=first, document_ids=documents),
        inputs,
    )


def _two_phase_self_test(backend: Compiled, device: str) -> str:
    """Three shards of a sequence: the second inside one document, the third with the start of another."""
    documents = (torch.arange(300, device=device) >= 230).int()[None]
    shards = documents.view(3, 100)
    q, k = (sample(1, 300, 1, 128, device=device, seed=i).bfloat16() for i in range(2))
    inputs = [q, k, sample(1, 300, 2, 64, device=device, seed=2).bfloat16()]
    inputs.append(-0.03 * sample(1, 300, 2, device=device, seed=3).abs())

    def kernel(*inputs: Tensor) -> Tensor:
        q, k, v, g = (x.unflatten(1, (3, 100))[0] for x in inputs)
        output, _ = kernels.two_phase_scan(q, k, v, g, shards, SingleProcessExchange().sequence_shard(shards))
        return output.flatten(0, 1)[None]

    def reference(*inputs: Tensor) -> Tensor:
        return scalar_decay_scan_reference(*inputs, document_ids=documents).output

    return compare(kernel, reference, inputs)


backends.register("scalar_decay_scan", ("triton",), _self_test)
backends.register("split_scalar_decay_scan", ("triton",), _two_phase_self_test)
