"""Linear maps of decoding: of few rows by matrix-vector kernels, and joined with the norms and sums around them.

With SRMSNorm's scale r(x) = (mean(x^2) + eps)^(-1/2), which commutes with a linear map,

    few_row_linear: x W^T        normed_glu: act(r(x) x W_g^T) * (r(x) x W_v^T)        add_linear: z + s x W^T

and s the scale of the summed squares of a norm before x. With up to MAX_ROWS rows each is one kernel, bound by the
weight's bytes; with more, a matmul and one kernel after it. None has a backward.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from megalin.ops.choices import Activation
from megalin.ops.dispatch import backend as backends
from megalin.ops.dispatch.backend import Backend, Compiled
from megalin.ops.dispatch.dtypes import KERNEL_DTYPES, compute_dtype
from megalin.ops.dispatch.operands import check_operands, static
from megalin.ops.dispatch.self_test import Function, compare, sample
from megalin.ops.gates.gated_product import gated_product_reference

MAX_ROWS = 4
"""Rows up to which a matrix-vector kernel a row takes the place of a matmul."""
MAX_INNER = 16384
"""Widest input of these kernels, whose loop over it is unrolled."""
OP = "decode_linear"


def few_row_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, backend: Backend = "auto") -> Tensor:
    """x W^T (+ b): x [..., K], weight [N, K], bias [N] -> [..., N], accumulated in at least fp32.

    The kernel may read the weight while the kernel launched just before it ends, which therefore must not write it.

    Raises:
        KernelError: an explicit backend that cannot run.
    """
    rows = x.numel() // max(x.shape[-1], 1)
    if bias is not None or _differentiated() or rows > MAX_ROWS or _choose(backend, "linear", x, weight) == "reference":
        return functional.linear(x, weight, bias)
    return _linear(x, weight)


def normed_glu(x: Tensor, weight: Tensor, *, eps: float, activation: Activation, backend: Backend = "auto") -> Tensor:
    """The gated linear unit of SRMSNorm(x): x [..., D], weight [2 F, D] (the gate's rows first) -> [..., F].

    Raises:
        KernelError: an explicit backend that cannot run.
        OperandError: tensors with incompatible shapes, dtypes or devices.
    """
    check_operands("normed_glu", {"x": (x, "*D"), "weight": (weight, "FD")})
    if _choose(backend, activation, x, weight) == "reference":
        return normed_glu_reference(x, weight, eps=eps, activation=activation)
    return _glu(x, weight, eps, activation)


def normed_glu_reference(x: Tensor, weight: Tensor, *, eps: float, activation: Activation) -> Tensor:
    """`normed_glu` in plain PyTorch: tests the kernels and runs on CPUs."""
    scale = scale_of(x.to(compute_dtype(x)).square().sum(-1), x.shape[-1], eps)[..., None]
    return gated_product_reference((functional.linear(x, weight) * scale).to(x.dtype), activation=activation)


def add_linear(
    residual: Tensor,
    x: Tensor,
    weight: Tensor,
    squares: Tensor | None = None,
    *,
    width: int = 1,
    eps: float = 0.0,
    backend: Backend = "auto",
) -> Tensor:
    """residual + s x W^T: residual [..., N], x [..., K], weight [N, K] -> [..., N] in the dtype of `residual`.

    Args:
        squares: [..., P] partial sums of squares, at least fp32: s = (sum / width + eps)^(-1/2); None: s = 1.

    Raises:
        KernelError: an explicit backend that cannot run.
        OperandError: tensors with incompatible shapes, dtypes or devices.
    """
    check_operands("add_linear", {"x": (x, "*K"), "residual": (residual, "*N"), "weight": (weight, "NK")})
    check_operands("add_linear", {"x": (x, "*K"), "squares": (squares, "*P")})
    sums = 0 if squares is None else static(squares.shape[-1])
    if _choose(backend, "add", x, weight, residual, sums=sums, width=width) == "reference":
        return add_linear_reference(residual, x, weight, squares, width=width, eps=eps)
    return _add(residual, x, weight, squares, width, eps)


def add_linear_reference(
    residual: Tensor, x: Tensor, weight: Tensor, squares: Tensor | None = None, *, width: int = 1, eps: float = 0.0
) -> Tensor:
    """`add_linear` in plain PyTorch: tests the kernels and runs on CPUs."""
    y = functional.linear(x, weight)
    if squares is not None:
        y = y * scale_of(squares.sum(-1), width, eps)[..., None]
    return (residual + y).to(residual.dtype)


def scale_of(squares: Tensor, width: int, eps: float) -> Tensor:
    """SRMSNorm's scale from sums of squares."""
    return torch.rsqrt(squares / width + eps)


def _differentiated() -> bool:
    return torch.is_grad_enabled() or torch.compiler.is_compiling()


def _choose(backend: Backend, form: str, *tensors: Tensor, sums: int = 0, width: int = 1) -> str:
    """Backend of a call. `form`: "linear", "add" of `sums` partial sums over `width` channels, or the activation of a
    GLU."""
    x, weight, *_ = tensors
    unsupported = ""
    for tensor in tensors:
        if tensor.dtype not in KERNEL_DTYPES or tensor.dtype != x.dtype:
            unsupported = f"dtypes {' and '.join(str(each.dtype) for each in tensors)}"
    if x.shape[-1] > MAX_INNER:
        unsupported = f"a width of {x.shape[-1]}, above {MAX_INNER}"
    if _differentiated():
        unsupported = "tensors that may need gradients, or a compiled block"
    if not weight.is_contiguous():
        unsupported = "a weight that is not contiguous"
    # Outputs have a program each: of many, a few show the same.
    outputs, inner = static(weight.shape[0]), static(x.shape[-1])
    outputs = outputs if outputs <= 512 else 256 + outputs % 256
    rows = min(x.numel() // max(inner, 1), MAX_ROWS + 1)
    case = (("form", form), ("rows", rows), ("N", outputs), ("K", inner), ("sums", sums), ("width", width))
    reason = unsupported or ("no rows" if x.numel() == 0 else "")
    return backends.choose(OP, backend, x.device.type, reason, case=(*case, ("x", x.dtype)))


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1]).contiguous()


def _linear(x: Tensor, weight: Tensor) -> Tensor:
    from megalin._triton.decoding import few_rows as kernels

    return kernels.linear(_rows(x), weight).view(*x.shape[:-1], -1)


def _glu(x: Tensor, weight: Tensor, eps: float, activation: Activation) -> Tensor:
    from megalin._triton.decoding import few_rows as kernels

    rows = _rows(x)
    if len(rows) <= MAX_ROWS:
        product = kernels.linear(rows, weight, eps=eps, glu=activation)
    else:
        product = kernels.scaled_product(functional.linear(rows, weight), rows, eps, silu=activation == "silu")
    return product.view(*x.shape[:-1], -1)


def _add(residual: Tensor, x: Tensor, weight: Tensor, squares: Tensor | None, width: int, eps: float) -> Tensor:
    from megalin._triton.decoding import few_rows as kernels

    rows, sums, scale = _rows(x), _rows(residual), None if squares is None else _rows(squares)
    if len(rows) <= MAX_ROWS:
        y = kernels.linear(rows, weight, residual=sums, squares=scale, width=width, eps=eps)
    else:
        y = kernels.scaled_sum(functional.linear(rows, weight), sums, scale, width=width, eps=eps)
    return y.view(residual.shape)


@torch.no_grad()
def _self_test(backend: Compiled, device: str, case: Mapping[str, Any]) -> str:
    """The linear map with all that surrounds it."""
    form, rows, outputs, inner, sums, width = (case[name] for name in ("form", "rows", "N", "K", "sums", "width"))
    inputs = [sample(rows, inner, device=device), sample(outputs, inner, device=device, seed=2) / inner**0.5]
    if form == "linear":
        return _compare(_linear, functional.linear, inputs, case)
    if form == "add":
        inputs.append(sample(rows, outputs, device=device, seed=1))
        squares = sample(rows, sums, device=device, seed=3).square() * (width / sums) if sums else None

        def kernel(x: Tensor, weight: Tensor, residual: Tensor) -> Tensor:
            return _add(residual, x, weight, squares, width, 1e-3)

        def reference(x: Tensor, weight: Tensor, residual: Tensor) -> Tensor:
            return add_linear_reference(residual, x, weight, squares, width=width, eps=1e-3)

        return _compare(kernel, reference, inputs, case)
    return _compare(
        lambda x, weight: _glu(x, weight, 1e-3, form),
        lambda x, weight: normed_glu_reference(x, weight, eps=1e-3, activation=form),
        inputs,
        case,
    )


def _compare(kernel: Function, reference: Function, inputs: list[Tensor], case: Mapping[str, Any]) -> str:
    return compare(kernel, reference, [x.to(case["x"]) for x in inputs], differentiable=0)


backends.register(OP, ("triton",), _self_test)
