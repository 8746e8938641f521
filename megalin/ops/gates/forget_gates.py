"""HGRN2's tied gates: one logit gives the forget gate, above a lower bound, and the input gate."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from megalin.ops.dispatch import backend as backends
from megalin.ops.dispatch.backend import Backend, Compiled
from megalin.ops.dispatch.custom_op import custom_op
from megalin.ops.dispatch.dtypes import KERNEL_DTYPES, compute_dtype
from megalin.ops.dispatch.operands import check_operands
from megalin.ops.dispatch.self_test import ROWS, bound_of, compare, sample


class ForgetGates(NamedTuple):
    """Inputs of the scan, each [..., D]."""

    key: Tensor
    """1 - f in the dtype of the logit."""
    log_decay: Tensor
    """log f, at least fp32."""


def forget_gates(logit: Tensor, bound: Tensor, *, backend: Backend = "auto") -> ForgetGates:
    """Computes 1 - f and log f with f = b + (1 - b) sigmoid(l), in forms that stay exact at both ends.

    Args:
        logit: l [..., D].
        bound: b [D] in [0, 1), at least fp32. Where it is 0, it gets no gradient through log b.
        backend: implementation to run; compiled ones take fp32, bf16 and fp16.

    Returns:
        ForgetGates, computed in at least fp32. The backward keeps only l, and sums the gradient of b in fp32, always
        in the same order.

    Raises:
        KernelError: an explicit backend that cannot run.
        OperandError: tensors with incompatible shapes, dtypes or devices.

    Source: HGRN2 section 3.
    """
    case = check_operands("forget_gates", {"logit": (logit, "*D"), "bound": (bound, "D")}, "D")
    choice = backends.choose("forget_gates", backend, logit.device.type, _unsupported(logit, bound), case=case)
    if choice == "reference":
        return forget_gates_reference(logit, bound)
    return ForgetGates(*(gate.view(logit.shape) for gate in _forward(_rows(logit), bound.contiguous())))


def forget_gates_reference(logit: Tensor, bound: Tensor) -> ForgetGates:
    """Reference of `forget_gates` in plain PyTorch: log f = logaddexp(log b, log(1 - b) + logsigmoid(l)) and
    1 - f = (1 - b) sigmoid(-l). Tests the kernels and runs on CPUs."""
    wide = logit.to(compute_dtype(logit))
    # Avoids the infinite gradient of log 0: a bound of 0 gets none.
    log_bound = bound.clamp(min=torch.finfo(bound.dtype).tiny).log()
    log_decay = torch.logaddexp(log_bound, torch.log1p(-bound) + functional.logsigmoid(wide))
    return ForgetGates(((1.0 - bound) * torch.sigmoid(-wide)).to(logit.dtype), log_decay)


def _unsupported(logit: Tensor, bound: Tensor) -> str:
    if logit.dtype not in KERNEL_DTYPES or bound.dtype != torch.float32:
        return f"dtypes {logit.dtype} and {bound.dtype}"
    return "an empty tensor" if logit.numel() == 0 else ""


def _rows(x: Tensor) -> Tensor:
    """[..., D] as [rows, D] with contiguous rows; a view where the strides allow."""
    x = x.reshape(-1, x.shape[-1])
    return x if x.stride(1) == 1 else x.contiguous()


@custom_op("forget_gates", lambda x, bound: (x.new_empty(x.shape), x.new_empty(x.shape, dtype=torch.float32)))
def _forward(logit: Tensor, bound: Tensor) -> tuple[Tensor, Tensor]:
    from megalin._triton.gates import forget_gates as kernels

    return kernels.forward(logit, bound)


@custom_op("forget_gates_backward", lambda dk, dg, x, bound: (x.new_empty(x.shape), torch.empty_like(bound)))
def _backward(dkey: Tensor, dlog_decay: Tensor, logit: Tensor, bound: Tensor) -> tuple[Tensor, Tensor]:
    from megalin._triton.gates import forget_gates as kernels

    return kernels.backward(_rows(dkey), _rows(dlog_decay), logit, bound)


def _save(ctx: Any, inputs: tuple[Tensor, Tensor], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs)


def _differentiate(ctx: Any, dkey: Tensor, dlog_decay: Tensor) -> tuple[Tensor, Tensor]:
    return _backward(dkey, dlog_decay, *ctx.saved_tensors)


torch.library.register_autograd(_forward, _differentiate, setup_context=_save)


def _self_test(backend: Compiled, device: str, case: Mapping[str, Any]) -> str:
    logit = (8.0 * sample(ROWS, case["D"], device=device)).to(case["logit"])
    bound = sample(case["D"], device=device, seed=1).sigmoid()
    bound[:4] = 0.0
    return compare(_forward, forget_gates_reference, [logit, bound], bound=bound_of(logit.dtype))


backends.register("forget_gates", ("triton",), _self_test)
