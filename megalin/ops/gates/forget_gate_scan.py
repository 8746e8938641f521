"""HGRN2's recurrence: the vector-decay scan (vector_decay.py) whose keys and decays are tied forget gates.

    S_t = diag(f_t) S_{t-1} + (1 - f_t) v_t^T,    o_t = scale S_t^T q_t,    f_t = b + (1 - b) sigmoid(l_t)

The kernels of that scan compute the gates from l, so that 1 - f, log f and their gradients are never in memory. In bf16
they read and write 30 bytes an element less than `forget_gates` and `vector_decay_scan`, and keep 6 less.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from megalin.ops.dispatch import backend as backends
from megalin.ops.dispatch.backend import Backend, Compiled
from megalin.ops.dispatch.operands import check_operands
from megalin.ops.dispatch.self_test import compare, sample
from megalin.ops.gates import forget_gate_cuda
from megalin.ops.gates.forget_gates import forget_gates, forget_gates_reference
from megalin.ops.scans import vector_decay
from megalin.ops.scans.context_parallel import SequenceShard
from megalin.ops.scans.driver import ScanOutput
from megalin.ops.scans.self_tests import (
    TOKENS,
    compare_shards,
    differentiable,
    documents_of,
    heads_of,
    initial_state_of,
)
from megalin.ops.scans.vector_decay_step import unsupported_vectors


def forget_gate_scan(
    q: Tensor,
    logit: Tensor,
    v: Tensor,
    bound: Tensor,
    *,
    scale: float = 1.0,
    initial_state: Tensor | None = None,
    shard: SequenceShard | None = None,
    document_ids: Tensor | None = None,
    state_gradient: bool = True,
    chunk_size: int = 64,
    backend: Backend = "auto",
) -> ScanOutput:
    """The recurrence above in chunks.

    Args:
        q: [B, T, H, K].
        logit: l [B, T, H, K].
        v: [B, T, H, V].
        bound: lower bounds b [H, K] in [0, 1), at least fp32. Where it is 0, it gets no gradient through log b.
        scale, initial_state, shard, document_ids, state_gradient, chunk_size: as in `vector_decay_scan`.
        backend: implementation to run; that in Triton takes fp32, bf16 and fp16 with K up to 256, that in CUDA C++ bf16
            with K = V of 64 or 128 on compute capability 9.0. Where "auto" takes none, `forget_gates` and
            `vector_decay_scan` choose theirs.

    Returns:
        ScanOutput. Gates, decays and states are computed in fp32 (fp64 for fp64 inputs). Kernels run all matmuls in the
        dtype of v, with fp32 accumulators, and sum the gradient of b in fp32, always in the same order.

    Raises:
        KernelError: an explicit backend that cannot run.
        OperandError: mismatched shapes, kinds or devices.

    Source: HGRN2 section 3.
    """
    operands = {"v": (v, "BTHV"), "q": (q, "BTHK"), "logit": (logit, "BTHK"), "bound": (bound, "HK")}
    optional = {"initial_state": (initial_state, "BHKV"), "document_ids": (document_ids, "BT int")}
    case = check_operands("forget_gate_scan", operands | optional, "HKV")
    case = (*case, ("state_gradient", state_gradient))
    assert shard is None or initial_state is None, "initial_state and shard are exclusive"
    op = "forget_gate_scan" if shard is None else "split_forget_gate_scan"
    limits: dict[Compiled, str] = {"cuda": forget_gate_cuda.limit(q, logit, v)}
    choice = backends.choose(op, backend, v.device.type, _unsupported(q, logit, v, bound), limits=limits, case=case)
    options: dict[str, Any] = {"scale": scale, "initial_state": initial_state, "document_ids": document_ids}
    options |= {"shard": shard, "state_gradient": state_gradient}
    if choice != "reference":
        return _compiled_scan(choice, q, logit, v, bound, **options)
    backend = "reference" if backend == "reference" else "auto"
    k, log_decay = (x.view_as(logit) for x in forget_gates(logit.flatten(2), bound.flatten(), backend=backend))
    return vector_decay.vector_decay_scan(q, k, v, log_decay, chunk_size=chunk_size, backend=backend, **options)


def forget_gate_scan_reference(
    q: Tensor,
    logit: Tensor,
    v: Tensor,
    bound: Tensor,
    *,
    scale: float = 1.0,
    initial_state: Tensor | None = None,
    document_ids: Tensor | None = None,
    chunk_size: int = 64,
) -> ScanOutput:
    """`forget_gate_scan` in plain PyTorch; the CPU backend."""
    k, log_decay = (x.view_as(logit) for x in forget_gates_reference(logit.flatten(2), bound.flatten()))
    options: dict[str, Any] = {"scale": scale, "initial_state": initial_state, "document_ids": document_ids}
    return vector_decay.vector_decay_scan_reference(q, k, v, log_decay, chunk_size=chunk_size, **options)


def _compiled_scan(backend: str, q: Tensor, logit: Tensor, v: Tensor, bound: Tensor, **options: Any) -> ScanOutput:
    """`forget_gate_scan` by the kernels."""
    if backend == "cuda":
        return forget_gate_cuda.scan(q, logit, v, bound, **options)
    return vector_decay.compiled_scan(q, logit, v, bound.contiguous(), gates=True, **options)


def _unsupported(q: Tensor, logit: Tensor, v: Tensor, bound: Tensor) -> str:
    """Reason that the kernels do not take these tensors; empty if they do."""
    if bound.dtype != torch.float32:
        return f"bounds of {bound.dtype}"
    return unsupported_vectors(q, logit, v)


def _samples(case: Mapping[str, Any], length: int, shift: Tensor | float, device: str) -> list[Tensor]:
    """q, logits around `shift`, v and bounds, zero in the first channel."""
    sizes = {"q": case["K"], "logit": case["K"], "v": case["V"]}
    heads = heads_of(case)
    q, logit, v = (sample(1, length, heads, size, device=device, seed=seed) for seed, size in enumerate(sizes.values()))
    inputs = [x.to(case[name]) for name, x in zip(sizes, (q, logit + shift, v), strict=True)]
    bound = 0.1 * sample(heads, case["K"], device=device, seed=5).sigmoid()
    bound[:, 0] = 0.0
    return [*inputs, bound]


def _self_test(backend: Compiled, device: str, case: Mapping[str, Any]) -> str:
    """Three chunks: one of mild decays, one with the start of a document, and one of steep decays."""
    length = 144
    shift = torch.where(torch.arange(length, device=device) < 128, 2.0, -20.0)[:, None, None]
    documents = documents_of(case, length, device)

    def kernel(q: Tensor, logit: Tensor, v: Tensor, bound: Tensor, first: Tensor | None = None) -> ScanOutput:
        options: dict[str, Any] = {"scale": 0.5, "initial_state": first, "document_ids": documents}
        return _compiled_scan(backend, q, logit, v, bound, **options, state_gradient=case["state_gradient"])

    def reference(q: Tensor, logit: Tensor, v: Tensor, bound: Tensor, first: Tensor | None = None) -> ScanOutput:
        return forget_gate_scan_reference(
            q, logit, v, bound, scale=0.5, initial_state=first, document_ids=documents, chunk_size=16
        )

    inputs = [*_samples(case, length, shift, device), *initial_state_of(case, device)]
    return compare(kernel, reference, inputs, differentiable=differentiable(case))


def _shards_self_test(backend: Compiled, device: str, case: Mapping[str, Any]) -> str:
    *inputs, bound = _samples(case, TOKENS, 3.0, device)

    def kernel(shard: SequenceShard, documents: Tensor | None, q: Tensor, logit: Tensor, v: Tensor) -> ScanOutput:
        return _compiled_scan(backend, q, logit, v, bound, scale=0.5, document_ids=documents, shard=shard)

    def reference(documents: Tensor | None, q: Tensor, logit: Tensor, v: Tensor) -> ScanOutput:
        wide = bound.to(logit.dtype)
        return forget_gate_scan_reference(q, logit, v, wide, scale=0.5, document_ids=documents, chunk_size=16)

    return compare_shards(kernel, reference, inputs, case)


backends.register("forget_gate_scan", ("cuda", "triton"), _self_test)
backends.register("split_forget_gate_scan", ("cuda", "triton"), _shards_self_test)
