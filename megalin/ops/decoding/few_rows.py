"""Linear maps of decoding: of few rows by matrix-vector kernels, and joined with the norms and sums around them.

With SRMSNorm's scale r(x) = (mean(x^2) + eps)^(-1/2), which commutes with a linear map,

    few_row_linear: x W^T        normed_glu: act(r(x) x W_g^T) * (r(x) x W_v^T)        add_linear: z + s x W^T

and s the scale of the summed squares of a norm before x. With up to MAX_ROWS rows each is one kernel, bound by the
weight's bytes; with more, a matmul and one kernel after it. None has a backward.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from megalin.ops.choices import Activation
from megalin.ops.dispatch import backend as backends
from megalin.ops.dispatch.backend import Backend, Compiled
from megalin.ops.dispatch.dtypes import KERNEL_DTYPES, compute_dtype
from megalin.ops.dispatch.operands import check_operands
from megalin.ops.dispatch.self_test import sample
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
    if bias is not None or _differentiated() or rows > MAX_ROWS or _choose(backend, x, weight) == "reference":
        return functional.linear(x, weight, bias)
    return _linear(x, weight)


def normed_glu(x: Tensor, weight: Tensor, *, eps: float, activation: Activation, backend: Backend = "auto") -> Tensor:
    """The gated linear unit of SRMSNorm(x): x [..., D], weight [2 F, D] (the gate's rows first) -> [..., F].

    Raises:
        KernelError: an explicit backend that cannot run.
        OperandError: tensors with incompatible shapes, dtypes or devices.
    """
    check_operands("normed_glu", {"x": (x, "*D"), "weight": (weight, "FD")})
    if _choose(backend, x, weight) == "reference":
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
    if _choose(backend, x, weight, residual) == "reference":
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


def _choose(backend: Backend, *tensors: Tensor) -> str:
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
    return backends.choose(OP, backend, x.device.type, unsupported or ("no rows" if x.numel() == 0 else ""))


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
def _self_test(backend: Compiled, device: str) -> str:
    """Few rows and more of them, with all that surrounds a linear map, in bf16."""
    for rows in (2, MAX_ROWS + 3):
        x, residual = (sample(rows, 200, device=device, seed=seed).bfloat16() for seed in (0, 1))
        weight, squares = sample(400, 200, device=device, seed=2).bfloat16() / 14, sample(rows, 3, device=device) ** 2
        truth = [x.double() for x in (x, residual, weight)]
        results = {
            "few_row_linear": (_linear(x, weight), functional.linear(truth[0], truth[2])),
            "normed_glu": (
                _glu(x, weight, 1e-3, "silu"),
                normed_glu_reference(truth[0], truth[2], eps=1e-3, activation="silu"),
            ),
            "add_linear": (
                _add(residual, x, weight[:200], squares, 200, 1e-3),
                add_linear_reference(truth[1], truth[0], truth[2][:200], squares.double(), width=200, eps=1e-3),
            ),
        }
        for name, (found, expected) in results.items():
            error = ((found.double() - expected).norm() / expected.norm()).item()
            if not error <= 1e-2:
                return f"self-test: {name} of {rows} rows is off by {error:.1e} (bound 1e-02)"
    return ""


backends.register(OP, ("triton",), _self_test)
