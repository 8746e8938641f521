"""LayerNorm with a weight and a bias: PyTorch's own, or NVIDIA Apex's, if installed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.nn import functional

from megalin.ops.dispatch import backend as backends
from megalin.ops.dispatch.apex import apex_layer_norm, unavailable_reason
from megalin.ops.dispatch.backend import Backend, Compiled
from megalin.ops.dispatch.dtypes import compute_dtype
from megalin.ops.dispatch.fusion import left_to_inductor
from megalin.ops.dispatch.operands import check_operands
from megalin.ops.dispatch.self_test import ROWS, compare, sample
from megalin.ops.norms.srmsnorm import unsupported


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, *, eps: float, backend: Backend = "auto") -> Tensor:
    """LayerNorm over the last dimension: y = w * (x - mean(x)) * (var(x) + eps)^(-1/2) + b.

    Args:
        x: [..., D], any float dtype; mean, variance and products are computed in at least fp32.
        weight, bias: w and b [D].
        eps: inside the root.
        backend: implementation to run; in compiled blocks "auto" leaves the reference to inductor. Apex's takes
            fp32, bf16 and fp16 of widths up to 16384, with weight and bias of the same dtype.

    Returns:
        [..., D] in the dtype of `x`.

    Raises:
        KernelError: an explicit backend that cannot run.
        OperandError: tensors with incompatible shapes, dtypes or devices.
    """
    operands = {"x": (x, "*D"), "weight": (weight, "D"), "bias": (bias, "D")}
    case = check_operands("layer_norm", operands, "D")
    reason = unsupported(x) or ("" if weight.dtype == bias.dtype == x.dtype else f"a weight of dtype {weight.dtype}")
    choice = backends.choose("layer_norm", backend, x.device.type, reason, case=case)
    if choice == "reference" or left_to_inductor("layer_norm", backend):
        return layer_norm_reference(x, weight, bias, eps=eps)
    return apex_layer_norm(x, weight, bias, eps=eps)


def layer_norm_reference(x: Tensor, weight: Tensor, bias: Tensor, *, eps: float) -> Tensor:
    """Reference of `layer_norm` in plain PyTorch."""
    wide = compute_dtype(x)
    y = functional.layer_norm(x.to(wide), x.shape[-1:], weight.to(wide), bias.to(wide), eps)
    return y.to(x.dtype)


def _self_test(backend: Compiled, device: str, case: Mapping[str, Any]) -> str:
    assert backend == "apex", backend
    sizes = {"x": (ROWS, case["D"]), "weight": (case["D"],), "bias": (case["D"],)}
    return unavailable_reason("fused_layer_norm_cuda") or compare(
        lambda x, weight, bias: apex_layer_norm(x, weight, bias, eps=1e-6),
        lambda x, weight, bias: layer_norm_reference(x, weight, bias, eps=1e-6),
        [sample(*size, device=device, seed=seed, dtype=case[name]) for seed, (name, size) in enumerate(sizes.items())],
    )


backends.register("layer_norm", ("apex",), _self_test)
