"""LayerNorm with a weight and a bias, alone and of the sum of the residual stream with a sub-layer's output."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from megalin.ops.dispatch import backend as backends
from megalin.ops.dispatch.apex import apex_layer_norm, unavailable_reason
from megalin.ops.dispatch.backend import Backend, Compiled
from megalin.ops.dispatch.custom_op import contiguous, custom_op
from megalin.ops.dispatch.dtypes import KERNEL_DTYPES, compute_dtype
from megalin.ops.dispatch.fusion import left_to_inductor
from megalin.ops.dispatch.operands import check_operands
from megalin.ops.dispatch.self_test import ROWS, compare, sample
from megalin.ops.norms.srmsnorm import unsupported

MAX_WIDTH = 8192
"""Widest row of the Triton kernel, whose backward has three rows and two partial sums in registers."""


class NormedSum(NamedTuple):
    """A sum and its norm, [..., D] each."""

    normed: Tensor
    total: Tensor


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, *, eps: float, backend: Backend = "auto") -> Tensor:
    """LayerNorm over the last dimension: y = w * (x - mean(x)) * (var(x) + eps)^(-1/2) + b.

    Args:
        x: [..., D], any float dtype; mean, variance and products are computed in at least fp32.
        weight, bias: w and b [D].
        eps: inside the root.
        backend: implementation to run. Compiled ones take fp32, bf16 and fp16, Triton's widths up to 8192, Apex's up to
            16384 and only a weight and bias of the same dtype; Apex's is left out of compiled blocks by "auto".

    Returns:
        [..., D] in the dtype of `x`.

    Raises:
        KernelError: an explicit backend that cannot run.
        OperandError: tensors with incompatible shapes, dtypes or devices.
    """
    operands = {"x": (x, "*D"), "weight": (weight, "D"), "bias": (bias, "D")}
    case = check_operands("layer_norm", operands, "D")
    limits: dict[Compiled, str] = {
        "triton": layer_norm_limit(x, weight, bias),
        "apex": "" if weight.dtype == bias.dtype == x.dtype else f"a weight of dtype {weight.dtype}",
    }
    choice = backends.choose("layer_norm", backend, x.device.type, unsupported(x), limits, case=case)
    if choice == "triton":
        return triton_layer_norm(x, None, weight, bias, eps, sum_gradient=False).normed
    if choice == "reference" or left_to_inductor("layer_norm", backend):
        return layer_norm_reference(x, weight, bias, eps=eps)
    return apex_layer_norm(x, weight, bias, eps=eps)


def layer_norm_reference(x: Tensor, weight: Tensor, bias: Tensor, *, eps: float) -> Tensor:
    """Reference of `layer_norm` in plain PyTorch."""
    wide = compute_dtype(x)
    y = functional.layer_norm(x.to(wide), x.shape[-1:], weight.to(wide), bias.to(wide), eps)
    return y.to(x.dtype)


def add_layer_norm(
    x: Tensor,
    addend: Tensor | None,
    weight: Tensor,
    bias: Tensor,
    *,
    eps: float,
    sum_gradient: bool = True,
    backend: Backend = "auto",
) -> NormedSum:
    """The sum s = x + a and its `layer_norm`, in one pass forward and one backward, which adds the gradient of s.

    Args:
        x: [..., D], the residual stream.
        addend: a [..., D], the output of a sub-layer; None: zero. The sum of x alone is x itself: its two gradients are
            then added in the backward's pass.
        weight, bias, eps: as for `layer_norm`.
        sum_gradient: whether the returned sum has a gradient. Where none is used, torch.compile would pass zeros to the
            kernel, which reads them; the self-test runs the launch of this choice.
        backend: implementation to run. Triton's takes fp32, bf16 and fp16 of widths up to 8192, and an addend of the
            dtype of x; without it the sum is torch's and the norm `layer_norm`'s.

    Returns:
        NormedSum: in the dtype of the sum.

    Raises:
        KernelError: an explicit backend that cannot run.
        OperandError: tensors with incompatible shapes, dtypes or devices.
    """
    operands = {"x": (x, "*D"), "addend": (addend, "*D"), "weight": (weight, "D"), "bias": (bias, "D")}
    case = (*check_operands("add_layer_norm", operands, "D"), ("sum_gradient", sum_gradient))
    reason = unsupported(x) or layer_norm_limit(x, weight, bias)
    if not reason and addend is not None and addend.dtype != x.dtype:
        reason = f"{addend.dtype} added to {x.dtype}"
    choice = backends.choose("add_layer_norm", backend, x.device.type, reason, case=case)
    if choice == "triton":
        return triton_layer_norm(x, addend, weight, bias, eps, sum_gradient=sum_gradient)
    total = x if addend is None else x + addend
    normed = layer_norm(total, weight, bias, eps=eps, backend=backend)
    return NormedSum(normed, total if sum_gradient else total.detach())


def add_layer_norm_reference(
    x: Tensor, addend: Tensor | None, weight: Tensor, bias: Tensor, *, eps: float
) -> NormedSum:
    """Reference of `add_layer_norm` in plain PyTorch."""
    total = x if addend is None else x + addend
    return NormedSum(layer_norm_reference(total, weight, bias, eps=eps), total)


def layer_norm_limit(x: Tensor, weight: Tensor, bias: Tensor) -> str:
    """Reason that the Triton kernel does not take these tensors, besides `unsupported`; empty where it does."""
    if x.shape[-1] > MAX_WIDTH:
        return f"a width of {x.shape[-1]}, above {MAX_WIDTH}"
    if weight.dtype not in KERNEL_DTYPES or bias.dtype != weight.dtype:
        return f"a weight of dtype {weight.dtype} and a bias of dtype {bias.dtype}"
    return ""


GateActivation = Literal["none", "sigmoid"]
"""none: the gate is a plain factor."""


def _fake_forward(x: Tensor, addend: Tensor | None, *_: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    mean, scale = (x.new_empty(x.shape[:-1], dtype=torch.float32) for _ in range(2))
    return torch.empty_like(x), x.new_empty(0) if addend is None else torch.empty_like(x), mean, scale


@custom_op("add_layer_norm", _fake_forward)
def _forward(
    x: Tensor, addend: Tensor | None, gate: Tensor | None, weight: Tensor, bias: Tensor, eps: float, activation: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x, addend, gate [..., D] contiguous -> y, the sum (empty without an addend), fp32 mean and scale [...]."""
    from megalin._triton.norms import layer_norm as kernels

    sigmoid = activation == "sigmoid"
    operands = _rows(x), _rows(addend), weight, bias, eps, _rows(gate)
    y, total, mean, scale = kernels.forward(*operands, sigmoid=sigmoid)
    total = x.new_empty(0) if total is None else total.view_as(x)
    return y.view_as(x), total, mean.view(x.shape[:-1]), scale.view(x.shape[:-1])


def _fake_backward(
    _dy: Tensor, _dtotal: Tensor | None, total: Tensor, gate: Tensor | None, weight: Tensor, *_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    dgate = total.new_empty(0) if gate is None else torch.empty_like(gate)
    return torch.empty_like(total), weight.new_empty(2, *weight.shape), dgate


@custom_op("add_layer_norm_backward", _fake_backward)
def _backward(
    dy: Tensor,
    dtotal: Tensor | None,
    total: Tensor,
    gate: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    mean: Tensor,
    scale: Tensor,
    activation: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """dx, the gradients of weight and bias [2, D], and that of the gate (empty without one)."""
    from megalin._triton.norms import layer_norm as kernels

    rows = _rows(dy.contiguous()), _rows(contiguous(dtotal)), _rows(total)
    found = kernels.backward(
        *rows, weight, mean.view(-1), scale.view(-1), _rows(gate), bias, sigmoid=activation == "sigmoid"
    )
    dgate = total.new_empty(0) if found.gate is None else found.gate.view_as(total)
    return found.x.view_as(total), found.vectors, dgate


def _rows(x: Any) -> Any:
    """[..., D] -> [rows, D]; None of None."""
    return None if x is None else x.view(-1, x.shape[-1])


class _LayerNorm(torch.autograd.Function):
    """Kernels of both directions. The sum of x alone is returned as x itself, which the formula of an op cannot do."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        addend: Tensor | None,
        gate: Tensor | None,
        weight: Tensor,
        bias: Tensor,
        eps: float,
        activation: GateActivation,
        sum_gradient: bool,
    ) -> tuple[Tensor, Tensor]:
        normed, total, mean, scale = _forward(x, addend, gate, weight, bias, eps, activation)
        total = x if addend is None else total
        ctx.adds, ctx.activation, ctx.sum_gradient = addend is not None, activation, sum_gradient
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(total, gate, weight, None if gate is None else bias, mean, scale)
        if not sum_gradient:
            ctx.mark_non_differentiable(total)
        return normed, total

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, dtotal: Tensor | None) -> tuple[Tensor | None, ...]:
        gate = ctx.saved_tensors[1]
        dtotal = dtotal if ctx.sum_gradient else None
        if dy is None:
            return dtotal, dtotal if ctx.adds else None, *(None,) * 6
        dx, dvectors, dgate = _backward(dy, dtotal, *ctx.saved_tensors, ctx.activation)
        dgate = None if gate is None else dgate
        return dx, dx if ctx.adds else None, dgate, dvectors[0], dvectors[1], *(None,) * 3


def triton_layer_norm(
    x: Tensor,
    addend: Tensor | None,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    gate: Tensor | None = None,
    activation: GateActivation = "none",
    *,
    sum_gradient: bool,
) -> NormedSum:
    """The Triton kernels, with gradients: layer_norm(x + addend) f(gate), and the sum, whose gradient is one of them if
    `sum_gradient`."""
    rows = x.contiguous(), contiguous(addend), contiguous(gate)
    vectors = weight.contiguous(), bias.contiguous()
    return NormedSum(*_LayerNorm.apply(*rows, *vectors, eps, activation, sum_gradient))


def _samples(case: Mapping[str, Any], device: str) -> list[Tensor]:
    """Inputs of a self-test: x, an addend if the case has one, weight and bias."""
    sizes = {"x": (ROWS, case["D"]), "addend": (ROWS, case["D"]), "weight": (case["D"],), "bias": (case["D"],)}
    names = [name for name in sizes if case.get(name) is not None]
    return [sample(*sizes[name], device=device, seed=seed, dtype=case[name]) for seed, name in enumerate(names)]


def _self_test(backend: Compiled, device: str, case: Mapping[str, Any]) -> str:
    if backend == "apex" and (reason := unavailable_reason("fused_layer_norm_cuda")):
        return reason
    return compare(
        lambda x, weight, bias: (
            apex_layer_norm(x, weight, bias, eps=1e-6)
            if backend == "apex"
            else triton_layer_norm(x, None, weight, bias, 1e-6, sum_gradient=False).normed
        ),
        lambda x, weight, bias: layer_norm_reference(x, weight, bias, eps=1e-6),
        _samples(case, device),
    )


def _self_test_of_sum(backend: Compiled, device: str, case: Mapping[str, Any]) -> str:
    assert backend == "triton", backend

    def split(tensors: tuple[Tensor, ...]) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
        x, *addend, weight, bias = tensors
        return x, addend[0] if addend else None, weight, bias

    return compare(
        lambda *tensors: triton_layer_norm(*split(tensors), 1e-6, sum_gradient=case["sum_gradient"]),
        lambda *tensors: add_layer_norm_reference(*split(tensors), eps=1e-6),
        _samples(case, device),
        differentiable=None if case["sum_gradient"] else 1,
    )


backends.register("layer_norm", ("triton", "apex"), _self_test)
backends.register("add_layer_norm", ("triton",), _self_test_of_sum)
