"""Low-rank sigmoid gate fused with its product: Rodimus' input gate."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from megalin.ops.dispatch import backend as backends
from megalin.ops.dispatch.backend import Backend, Compiled
from megalin.ops.dispatch.custom_op import custom_op
from megalin.ops.dispatch.dtypes import KERNEL_DTYPES, compute_dtype
from megalin.ops.dispatch.operands import check_operands
from megalin.ops.dispatch.self_test import compare, sample

MAX_RANK = 128


def low_rank_gate(x: Tensor, code: Tensor, weight: Tensor, bias: Tensor, *, backend: Backend = "auto") -> Tensor:
    """Computes sigmoid(c W^T + b) x.

    Args:
        x: [..., D].
        code: c [..., L], in the dtype of x.
        weight: W [D, L], in the dtype of x.
        bias: b [D].
        backend: implementation to run; compiled ones take fp32, bf16 and fp16 of L up to 128.

    Returns:
        [..., D] in the dtype of x; sums, sigmoid and product are computed in at least fp32. The backward keeps x and
        c, and recomputes the gate.

    Raises:
        KernelError: an explicit backend that cannot run.
        OperandError: tensors with incompatible shapes, dtypes or devices.

    Source: Rodimus section 3.
    """
    operands = {"x": (x, "*D"), "code": (code, "*L"), "weight": (weight, "DL"), "bias": (bias, "D")}
    case = check_operands("low_rank_gate", operands, "DL")
    choice = backends.choose("low_rank_gate", backend, x.device.type, _unsupported(x, code, weight, bias), case=case)
    if choice == "reference":
        return low_rank_gate_reference(x, code, weight, bias)
    return _forward(_rows(x), _rows(code), weight.contiguous(), bias.contiguous()).view(x.shape)


def low_rank_gate_reference(x: Tensor, code: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Reference of `low_rank_gate` in plain PyTorch: tests the kernels and runs on CPUs."""
    wide = compute_dtype(x)
    logits = code.to(wide) @ weight.to(wide).mT + bias.to(wide)
    return (torch.sigmoid(logits) * x.to(wide)).to(x.dtype)


def _unsupported(x: Tensor, code: Tensor, weight: Tensor, bias: Tensor) -> str:
    dtypes = [tensor.dtype for tensor in (x, code, weight)]
    if x.dtype not in KERNEL_DTYPES or len(set(dtypes)) > 1 or bias.dtype not in KERNEL_DTYPES:
        return "dtypes " + ", ".join(str(dtype) for dtype in (*dtypes, bias.dtype))
    if code.shape[-1] > MAX_RANK:
        return f"a rank of {code.shape[-1]}, above {MAX_RANK}"
    return "an empty tensor" if x.numel() == 0 or code.numel() == 0 else ""


def _rows(x: Tensor) -> Tensor:
    """[..., D] as [rows, D] with contiguous rows; a view where the strides allow."""
    x = x.reshape(-1, x.shape[-1])
    return x if x.stride(1) == 1 else x.contiguous()


@custom_op("low_rank_gate", lambda x, *_: x.new_empty(x.shape))
def _forward(x: Tensor, code: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    from megalin._triton.gates import low_rank_gate as kernels

    return kernels.forward(x, code, weight, bias)


def _fake_backward(_dy: Tensor, x: Tensor, code: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
    return x.new_empty(x.shape), code.new_empty(code.shape), *map(torch.empty_like, weights)


@custom_op("low_rank_gate_backward", _fake_backward)
def _backward(
    dy: Tensor, x: Tensor, code: Tensor, weight: Tensor, bias: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x, code, weight and bias."""
    from megalin._triton.gates import low_rank_gate as kernels

    return kernels.backward(_rows(dy), x, code, weight, bias)


def _save(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _differentiate(ctx: Any, dy: Tensor) -> tuple[Tensor, ...]:
    return _backward(dy, *ctx.saved_tensors)


torch.library.register_autograd(_forward, _differentiate, setup_context=_save)


def _self_test(backend: Compiled, device: str, case: Mapping[str, Any]) -> str:
    rows, width, rank = 80, case["D"], case["L"]
    sizes = {"x": (rows, width), "code": (rows, rank), "weight": (width, rank), "bias": (width,)}
    inputs = [
        sample(*size, device=device, seed=seed, dtype=case[name]) for seed, (name, size) in enumerate(sizes.items())
    ]
    return compare(_forward, low_rank_gate_reference, inputs)


backends.register("low_rank_gate", ("triton",), _self_test)
