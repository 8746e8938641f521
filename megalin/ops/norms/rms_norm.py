"""RMSNorm with a weight, whose gradient is summed without atomics."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from megalin.ops.dispatch import backend as backends
from megalin.ops.dispatch.apex import apex_rms_norm, unavailable_reason
from megalin.ops.dispatch.backend import Backend, Compiled
from megalin.ops.dispatch.custom_op import custom_op
from megalin.ops.dispatch.dtypes import KERNEL_DTYPES, compute_dtype
from megalin.ops.dispatch.fusion import left_to_inductor
from megalin.ops.dispatch.operands import check_operands
from megalin.ops.dispatch.self_test import ROWS, compare, sample
from megalin.ops.norms.srmsnorm import srmsnorm_reference, unsupported


def rms_norm(x: Tensor, weight: Tensor, *, eps: float, backend: Backend = "auto") -> Tensor:
    """RMSNorm over the last dimension: y = w * x * (mean(x^2) + eps)^(-1/2).

    Args:
        x: [..., D], any float dtype; the mean, the root and the products are computed in at least fp32.
        weight: w [D].
        eps: inside the root.
        backend: implementation to run; in compiled blocks "auto" leaves the reference to inductor.
            Compiled ones take fp32, bf16 and fp16 of widths up to 16384, Apex's only weights of the same dtype.

    Returns:
        [..., D] in the dtype of `x`.

    Raises:
        KernelError: an explicit backend that cannot run.
        OperandError: tensors with incompatible shapes, dtypes or devices.
    """
    case = check_operands("rms_norm", {"x": (x, "*D"), "weight": (weight, "D")}, "D")
    reason = unsupported(x) or ("" if weight.dtype in KERNEL_DTYPES else f"a weight of dtype {weight.dtype}")
    limits: dict[Compiled, str] = {"apex": "" if weight.dtype == x.dtype else f"a weight of dtype {weight.dtype}"}
    choice = backends.choose("rms_norm", backend, x.device.type, reason, limits, case=case)
    if choice == "reference" or left_to_inductor("rms_norm", backend):
        return rms_norm_reference(x, weight, eps=eps)
    if choice == "apex":
        return apex_rms_norm(x, weight, eps=eps)
    return _forward(x.contiguous(), weight.contiguous(), eps)[0]


def rms_norm_reference(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    """Reference of `rms_norm` in plain PyTorch: tests the kernels and runs on CPUs."""
    wide = compute_dtype(x)
    return (srmsnorm_reference(x.to(wide), eps=eps) * weight.to(wide)).to(x.dtype)


@custom_op("rms_norm", lambda x, *_: (torch.empty_like(x), x.new_empty(x.shape[:-1], dtype=torch.float32)))
def _forward(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x [..., D] contiguous -> y, and the fp32 scale [...]."""
    from megalin._triton.norms import rms_norm as kernels

    y, scale = kernels.forward(x.view(-1, x.shape[-1]), weight, eps)
    return y.view_as(x), scale.view(x.shape[:-1])


@custom_op("rms_norm_backward", lambda dy, x, weight, scale: (torch.empty_like(x), torch.empty_like(weight)))
def _backward(dy: Tensor, x: Tensor, weight: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    from megalin._triton.norms import rms_norm as kernels

    width = x.shape[-1]
    dy = dy.contiguous().view(-1, width)
    dx, dweight = kernels.backward(dy, x.view(-1, width), weight, scale.view(-1))
    return dx.view_as(x), dweight


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, weight, _ = inputs
    ctx.save_for_backward(x, weight, output[1])


def _differentiate(ctx: Any, dy: Tensor, _: Tensor | None) -> tuple[Tensor, Tensor, None]:
    dx, dweight = _backward(dy, *ctx.saved_tensors)
    return dx, dweight, None


torch.library.register_autograd(_forward, _differentiate, setup_context=_save)


def _self_test(backend: Compiled, device: str, case: Mapping[str, Any]) -> str:
    if backend == "apex" and (reason := unavailable_reason("fused_layer_norm_cuda")):
        return reason
    width = case["D"]
    return compare(
        lambda x, weight: apex_rms_norm(x, weight, eps=1e-6) if backend == "apex" else _forward(x, weight, 1e-6)[0],
        lambda x, weight: rms_norm_reference(x, weight, eps=1e-6),
        [
            sample(ROWS, width, device=device, dtype=case["x"]),
            sample(width, device=device, seed=1, dtype=case["weight"]),
        ],
    )


backends.register("rms_norm", ("triton", "apex"), _self_test)
