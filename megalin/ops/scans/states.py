"""Final states of scans from a zero initial state, the summands of the state exchange between sequence shards.

Each function is its scan without the outputs: one matmul of keys and values, each token decayed to the end of the
sequence, over the last token's document only. Exponents are sums of log decays over the tokens between, <= 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from megalin.ops.dispatch import backend as backends
from megalin.ops.dispatch.backend import Backend, Compiled
from megalin.ops.dispatch.custom_op import custom_op
from megalin.ops.dispatch.dtypes import compute_dtype, without_autocast
from megalin.ops.dispatch.operands import check_operands
from megalin.ops.dispatch.self_test import compare, few, sample
from megalin.ops.scans.chunks import sum_after, visible_decay
from megalin.ops.scans.limits import WIDTH_UNIT, unsupported


def decay_state(
    k: Tensor,
    v: Tensor,
    slopes: Tensor | None,
    *,
    document_ids: Tensor | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """Final state of `decay_scan` from zero: sum_t exp(-s (T - 1 - t)) k_t v_t^T.

    Args:
        k: [B, T, H, K].
        v: [B, T, H, V].
        slopes: [H], s >= 0, at least fp32 (a buffer: it gets no gradient); None for no decay.
        document_ids: [B, T] integers; None if each sequence is one document.
        backend: implementation to run; the compiled one takes k and v of bf16, with K and V multiples of 8 up to 256.

    Returns:
        [B, H, K, V] in at least fp32.

    Raises:
        KernelError: an explicit backend that cannot run.
        OperandError: mismatched shapes, kinds or devices.
    """
    operands = {"k": (k, "BTHK"), "v": (v, "BTHV"), "slopes": (slopes, "H"), "document_ids": (document_ids, "BT int")}
    case = check_operands("decay_state", operands, "HKV")
    if backends.choose("decay_state", backend, v.device.type, _unsupported(k, v), case=case) == "reference":
        return decay_state_reference(k, v, slopes, document_ids=document_ids)
    return _state(k, v, None if slopes is None else slopes.float().contiguous(), document_ids)


@without_autocast
def decay_state_reference(k: Tensor, v: Tensor, slopes: Tensor | None, *, document_ids: Tensor | None = None) -> Tensor:
    """`decay_state` in plain PyTorch."""
    wide = compute_dtype(v)
    weight = _weights(k, slopes, document_ids, wide)
    return torch.einsum("bthk,bthv->bhkv", k.to(wide) * weight[..., None], v.to(wide))


def _weights(k: Tensor, slopes: Tensor | None, document_ids: Tensor | None, wide: torch.dtype) -> Tensor:
    """exp(-s (T - 1 - t)) for tokens of the last token's document, else 0: [1 or B, T, 1 or H]."""
    weight = _in_last_document(document_ids, k)[..., None].to(wide)
    if slopes is None:
        return weight
    to_end = torch.arange(k.shape[1] - 1, -1, -1, device=k.device)
    return weight * torch.exp(-to_end[:, None] * slopes.to(wide))


def _unsupported(k: Tensor, v: Tensor) -> str:
    """Reason why the kernel does not take these inputs; empty if it does."""
    if k.dtype != v.dtype or v.dtype != torch.bfloat16:
        return f"k, v of {k.dtype}, {v.dtype}"
    if k.shape[-1] % WIDTH_UNIT or v.shape[-1] % WIDTH_UNIT:
        return f"heads of {k.shape[-1]} keys and {v.shape[-1]} values, not multiples of {WIDTH_UNIT}"
    return unsupported(k, k, v)


def _fake_state(k: Tensor, v: Tensor, *_: Any) -> Tensor:
    return k.new_empty(k.shape[0], *k.shape[2:], v.shape[3], dtype=torch.float32)


@custom_op("decay_state", _fake_state)
def _state(k: Tensor, v: Tensor, slopes: Tensor | None, documents: Tensor | None) -> Tensor:
    from megalin._triton.scans import fixed_decay_state as kernels

    return kernels.state(k, v, slopes, None if documents is None else documents.contiguous())


@custom_op("decay_state_backward", lambda d_state, k, v, *_: (k.new_empty(k.shape), v.new_empty(v.shape)))
def _backward(
    d_state: Tensor, k: Tensor, v: Tensor, slopes: Tensor | None, documents: Tensor | None
) -> tuple[Tensor, Tensor]:
    from megalin._triton.scans import fixed_decay_state as kernels

    documents = None if documents is None else documents.contiguous()
    return kernels.gradient(d_state.contiguous(), k, v, slopes, documents)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _differentiate(ctx: Any, d_state: Tensor) -> tuple[Tensor | None, ...]:
    return *_backward(d_state, *ctx.saved_tensors), None, None


torch.library.register_autograd(_state, _differentiate, setup_context=_save)


def _self_test(backend: Compiled, device: str, case: Mapping[str, Any]) -> str:
    """Several parts, of which the first two are of another document if the call has documents."""
    heads, length = few(case["H"]), 336
    slopes = None if case["slopes"] is None else torch.linspace(0.0, 0.3, heads, device=device)
    dtype = case["document_ids"]
    documents = None if dtype is None else (torch.arange(length, device=device) >= 150).to(dtype)[None]
    inputs = [
        sample(1, length, heads, case[width], device=device, seed=seed, dtype=case[name])
        for seed, (name, width) in enumerate((("k", "K"), ("v", "V")))
    ]
    return compare(
        lambda k, v: [_state(k, v, slopes, documents)],
        lambda k, v: [decay_state_reference(k, v, slopes, document_ids=documents)],
        inputs,
    )


backends.register("decay_state", ("triton",), _self_test)


@without_autocast
def selected_state(k: Tensor, v: Tensor, log_decay: Tensor, *, document_ids: Tensor | None = None) -> Tensor:
    """Final state of the vector- and scalar-decay scans from zero: sum_t (exp(sum of g_j over j > t) k_t) v_t^T.

    Args:
        k: [B, T, H, K], or [B, T, 1, K] shared by all heads of v, for one decay per head.
        v: [B, T, H, V].
        log_decay: g [B, T, H, K], or [B, T, H, 1] for one decay per head; <= 0, at least fp32.
        document_ids: [B, T] integers; None if each sequence is one document.

    Returns:
        [B, H, K, V] in at least fp32.

    Raises:
        OperandError: mismatched shapes, kinds or devices.
    """
    operands = {"v": (v, "BTHV"), "k": (k, "BThK"), "log_decay": (log_decay, "BTHk")}
    check_operands("selected_state", operands | {"document_ids": (document_ids, "BT int")})
    wide = compute_dtype(v)
    exponent = sum_after(log_decay.to(wide).transpose(1, 2))  # [B, H, T, K or 1]
    to_end = visible_decay(exponent, _in_last_document(document_ids, k)[:, None]).transpose(1, 2)
    k, v = k.to(wide), v.to(wide)
    # One decay per head is applied to the values, as all heads may share one head of keys.
    k, v = (k, v * to_end) if log_decay.shape[-1] == 1 else (k * to_end, v)
    return torch.einsum("bthk,bthv->bhkv", k, v)


@without_autocast
def tpe_state(x: Tensor, coefficients: Tensor, log_decay: Tensor, *, document_ids: Tensor | None = None) -> Tensor:
    """Final state of `tpe` from zero: B[c, e] sum_t lambda_e^(T - 1 - t) x_t[c].

    Args:
        x: [B, T, D].
        coefficients: B [D, E].
        log_decay: log lambda [E], <= 0, at least fp32.
        document_ids: [B, T] integers; None if each sequence is one document.

    Returns:
        [B, D, E] in at least fp32.

    Raises:
        OperandError: mismatched shapes, kinds or devices.
    """
    operands = {"x": (x, "BTD"), "coefficients": (coefficients, "DE"), "log_decay": (log_decay, "E")}
    check_operands("tpe_state", operands | {"document_ids": (document_ids, "BT int")})
    wide = compute_dtype(x)
    to_end = torch.arange(x.shape[1] - 1, -1, -1, device=x.device)
    powers = (
        torch.exp(to_end[:, None] * log_decay.to(wide)) * _in_last_document(document_ids, x)[..., None]
    )  # [1 or B, T, E]
    return coefficients.to(wide) * (x.to(wide).mT @ powers)


def _in_last_document(document_ids: Tensor | None, x: Tensor) -> Tensor:
    """[1 or B, T] bool, True for tokens of the last token's document."""
    if document_ids is None:
        return torch.ones(1, x.shape[1], dtype=torch.bool, device=x.device)
    return document_ids == document_ids[:, -1:]
