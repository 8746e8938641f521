"""LayerNorm with a gate after it, the input of a linear layer, in one pass."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from megalin.ops.dispatch import backend as backends
from megalin.ops.dispatch.backend import Backend, Compiled
from megalin.ops.dispatch.dtypes import compute_dtype
from megalin.ops.dispatch.operands import check_operands
from megalin.ops.dispatch.self_test import ROWS, compare, sample
from megalin.ops.norms.layer_norm import GateActivation, layer_norm_limit, triton_layer_norm
from megalin.ops.norms.srmsnorm import unsupported


def gated_layer_norm(
    x: Tensor,
    gate: Tensor | None,
    weight: Tensor,
    bias: Tensor,
    *,
    eps: float,
    gate_activation: GateActivation = "none",
    backend: Backend = "auto",
) -> Tensor:
    """(w * (x - mean(x)) * (var(x) + eps)^(-1/2) + b) * f(g) over the last dimension.

    Args:
        x: [..., D], any float dtype; mean, variance and products are computed in at least fp32.
        gate: g [..., D]; None: f(g) is one.
        weight, bias: w and b [D].
        eps: inside the root.
        gate_activation: f, the identity or the sigmoid.
        backend: implementation to run. The compiled one takes fp32, bf16 and fp16 of widths up to 8192, and a gate of
            the dtype of x.

    Returns:
        [..., D] in the dtype of the product.

    Raises:
        KernelError: an explicit backend that cannot run.
        OperandError: tensors with incompatible shapes, dtypes or devices.
    """
    operands = {"x": (x, "*D"), "gate": (gate, "*D"), "weight": (weight, "D"), "bias": (bias, "D")}
    case = (*check_operands("gated_layer_norm", operands, "D"), ("gate_activation", gate_activation))
    reason = unsupported(x) or layer_norm_limit(x, weight, bias)
    if not reason and gate is not None and gate.dtype != x.dtype:
        reason = f"a gate of dtype {gate.dtype} with {x.dtype}"
    choice = backends.choose("gated_layer_norm", backend, x.device.type, reason, case=case)
    if choice == "reference":
        return gated_layer_norm_reference(x, gate, weight, bias, eps=eps, gate_activation=gate_activation)
    return triton_layer_norm(x, None, weight, bias, eps, gate, gate_activation, sum_gradient=False).normed


def gated_layer_norm_reference(
    x: Tensor,
    gate: Tensor | None,
    weight: Tensor,
    bias: Tensor,
    *,
    eps: float,
    gate_activation: GateActivation = "none",
) -> Tensor:
    """Reference of `gated_layer_norm` in plain PyTorch: the variance is the mean square less the squared mean, as over
    shards of the width."""
    wide = x.to(compute_dtype(x))
    sums = torch.stack([wide.sum(-1), wide.square().sum(-1)], dim=-1)  # [..., 2]
    y = layer_norm_of_moments(wide, sums / x.shape[-1], weight, bias, eps=eps).to(x.dtype)
    return apply_gate(y, gate, gate_activation)


def layer_norm_of_moments(x: Tensor, moments: Tensor, weight: Tensor, bias: Tensor, *, eps: float) -> Tensor:
    """LayerNorm of x [..., D] in its dtype, from the means of x and of x^2 [..., 2]."""
    mean, square = moments[..., None].unbind(-2)  # [..., 1]
    deviation = torch.rsqrt((square - mean.square()).clamp(min=0.0) + eps)
    return (x - mean) * deviation * weight.to(x.dtype) + bias.to(x.dtype)


def apply_gate(y: Tensor, gate: Tensor | None, activation: GateActivation) -> Tensor:
    """y f(g), [..., D]; y without a gate."""
    if gate is None:
        return y
    return y * (torch.sigmoid(gate) if activation == "sigmoid" else gate)


def _self_test(backend: Compiled, device: str, case: Mapping[str, Any]) -> str:
    assert backend == "triton", backend
    activation = case["gate_activation"]
    sizes = {"x": (ROWS, case["D"]), "gate": (ROWS, case["D"]), "weight": (case["D"],), "bias": (case["D"],)}
    names = [name for name in sizes if case.get(name) is not None]

    def kernel(**inputs: Tensor) -> Tensor:
        x, weight, bias = inputs["x"], inputs["weight"], inputs["bias"]
        gate = inputs.get("gate")
        return triton_layer_norm(x, None, weight, bias, 1e-6, gate, activation, sum_gradient=False).normed

    def reference(**inputs: Tensor) -> Tensor:
        inputs.setdefault("gate", None)  # type: ignore[arg-type]
        return gated_layer_norm_reference(**inputs, eps=1e-6, gate_activation=activation)

    return compare(
        lambda *tensors: kernel(**dict(zip(names, tensors, strict=True))),
        lambda *tensors: reference(**dict(zip(names, tensors, strict=True))),
        [sample(*sizes[name], device=device, seed=seed, dtype=case[name]) for seed, name in enumerate(names)],
    )


backends.register("gated_layer_norm", ("triton",), _self_test)
