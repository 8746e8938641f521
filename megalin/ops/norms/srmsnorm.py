"""SRMSNorm: the weightless root-mean-square norm of TransNormerLLM."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from megalin.ops.dispatch import backend as backends
from megalin.ops.dispatch.backend import Backend, Compiled
from megalin.ops.dispatch.cuda_launch import launch
from megalin.ops.dispatch.custom_op import custom_op
from megalin.ops.dispatch.dtypes import KERNEL_DTYPES, compute_dtype
from megalin.ops.dispatch.fusion import left_to_inductor
from megalin.ops.dispatch.operands import Case, static
from megalin.ops.dispatch.self_test import ROWS, compare, sample

MAX_WIDTH = 16384


def srmsnorm(x: Tensor, *, eps: float, backend: Backend = "auto") -> Tensor:
    """SRMSNorm (TransNormerLLM eq. 8) over the last dimension: y = x * (mean(x^2) + eps)^(-1/2).

    Args:
        x: [..., D], any float dtype; the mean and the root are computed in at least fp32.
        eps: inside the root, so that a row of zeros gives zeros and a gradient of at most eps^(-1/2).
        backend: implementation to run; in compiled blocks "auto" leaves the reference to inductor.
            Compiled ones take fp32, bf16 and fp16 of widths up to 16384.

    Returns:
        [..., D] in the dtype of `x`.

    Raises:
        KernelError: an explicit backend that cannot run.
    """
    choice = backends.choose("srmsnorm", backend, x.device.type, unsupported(x), case=width_case(x))
    if choice == "reference" or left_to_inductor("srmsnorm", backend):
        return srmsnorm_reference(x, eps=eps)
    return _forward(x.contiguous(), eps, choice)[0]


def srmsnorm_reference(x: Tensor, *, eps: float) -> Tensor:
    """Reference of `srmsnorm` in plain PyTorch: tests the kernels and runs on CPUs."""
    wide = x.to(compute_dtype(x))
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)


def width_case(x: Tensor) -> Case:
    """Properties of x [..., D] that select the code of a norm's kernels."""
    return (("D", static(x.shape[-1])), ("x", x.dtype))


def unsupported(x: Tensor) -> str:
    """Reason that no row-wise kernel supports `x`; empty where they do."""
    if x.dtype not in KERNEL_DTYPES:
        return f"dtype {x.dtype}"
    if x.shape[-1] > MAX_WIDTH:
        return f"a width of {x.shape[-1]}, above {MAX_WIDTH}"
    return "an empty tensor" if x.numel() == 0 else ""


@custom_op("srmsnorm", lambda x, *_: (torch.empty_like(x), x.new_empty(x.shape[:-1], dtype=torch.float32)))
def _forward(x: Tensor, eps: float, backend: str) -> tuple[Tensor, Tensor]:
    """x [..., D] contiguous -> y, and the fp32 scale [...]."""
    width = x.shape[-1]
    if backend == "cuda":
        y, scale = torch.empty_like(x), x.new_empty(x.shape[:-1], dtype=torch.float32)
        launch("srmsnorm_forward", x, y, scale, scale.numel(), width, eps)
        return y, scale
    from megalin._triton.norms import srmsnorm as kernels

    y, scale = kernels.forward(x.view(-1, width), eps)
    return y.view_as(x), scale.view(x.shape[:-1])


@custom_op("srmsnorm_backward", lambda dy, x, *_: torch.empty_like(x))
def _backward(dy: Tensor, x: Tensor, scale: Tensor, backend: str) -> Tensor:
    dy, width = dy.contiguous(), x.shape[-1]
    if backend == "cuda":
        dx = torch.empty_like(x)
        launch("srmsnorm_backward", dy, x, scale, dx, scale.numel(), width)
        return dx
    from megalin._triton.norms import srmsnorm as kernels

    return kernels.backward(dy.view(-1, width), x.view(-1, width), scale.view(-1)).view_as(x)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, _, ctx.backend = inputs
    ctx.save_for_backward(x, output[1])


def _differentiate(ctx: Any, dy: Tensor, _: Tensor | None) -> tuple[Tensor, None, None]:
    x, scale = ctx.saved_tensors
    return _backward(dy, x, scale, ctx.backend), None, None


torch.library.register_autograd(_forward, _differentiate, setup_context=_save)


def _self_test(backend: Compiled, device: str, case: Mapping[str, Any]) -> str:
    return compare(
        lambda x: _forward(x, 1e-6, backend)[0],
        lambda x: srmsnorm_reference(x, eps=1e-6),
        [sample(ROWS, case["D"], device=device, dtype=case["x"])],
    )


backends.register("srmsnorm", ("triton", "cuda"), _self_test)
