"""Decoding step of the recurrence with a fixed scalar decay a head (fixed_decay.py)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from megalin.ops.dispatch import backend as backends
from megalin.ops.dispatch.backend import Backend, Compiled
from megalin.ops.dispatch.custom_op import custom_op
from megalin.ops.dispatch.dtypes import without_autocast
from megalin.ops.dispatch.operands import check_operands
from megalin.ops.dispatch.self_test import compare, sample
from megalin.ops.scans.driver import ScanOutput
from megalin.ops.scans.limits import unsupported
from megalin.ops.scans.self_tests import heads_of, samples_of, slopes_of


def decay_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slopes: Tensor | None,
    state: Tensor,
    *,
    in_place: bool = False,
    backend: Backend = "auto",
) -> ScanOutput:
    """One token of the recurrence, the decoding step.

    Args:
        q, k: [B, H, K]; v: [B, H, V]; slopes: [H] or None; state: [B, H, K, V] in at least fp32.
        in_place: write the next state over a contiguous `state` and return that tensor; the reference never does.
        backend: implementation to run; compiled ones take q, k and v of one dtype, fp32, bf16 or fp16, and an fp32
            state with K and V up to 256, and have no backward.

    Returns:
        ScanOutput with output [B, H, V] in the dtype of v and the next state.

    Raises:
        KernelError: an explicit backend that cannot run.
        OperandError: mismatched shapes, kinds or devices.
    """
    operands = {"v": (v, "BHV"), "q": (q, "BHK"), "k": (k, "BHK"), "slopes": (slopes, "H"), "state": (state, "BHKV")}
    case = check_operands("decay_step", operands, "HKV")
    choice = backends.choose("decay_step", backend, v.device.type, _unsupported(q, k, v, state), case=case)
    if choice == "reference":
        return decay_step_reference(q, k, v, slopes, state)
    slopes = None if slopes is None else slopes.float().contiguous()
    if in_place and state.is_contiguous():
        from megalin._triton.scans import fixed_decay_step as kernels

        return ScanOutput(*kernels.step(*(x.contiguous() for x in (q, k, v)), slopes, state, following=state))
    return ScanOutput(*_step(q, k, v, slopes, state))


@without_autocast
def decay_step_reference(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor | None, state: Tensor) -> ScanOutput:
    """`decay_step` in plain PyTorch."""
    wide = state.dtype
    if slopes is not None:
        state = state * torch.exp(-slopes.to(wide))[:, None, None]
    state = state + k.to(wide)[..., :, None] * v.to(wide)[..., None, :]
    return ScanOutput((q.to(wide)[..., None, :] @ state).squeeze(-2).to(v.dtype), state)


@custom_op("decay_step", lambda q, k, v, slopes, state: (v.new_empty(v.shape), state.new_empty(state.shape)))
def _step(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor | None, state: Tensor) -> tuple[Tensor, Tensor]:
    from megalin._triton.scans import fixed_decay_step as kernels

    return kernels.step(*(x.contiguous() for x in (q, k, v)), slopes, state.contiguous())


def _unsupported(q: Tensor, k: Tensor, v: Tensor, state: Tensor) -> str:
    if torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v, state)):
        return "inputs that require gradients"
    return unsupported(q, k, v) or (f"a state of {state.dtype}" if state.dtype != torch.float32 else "")


def _self_test(backend: Compiled, device: str, case: Mapping[str, Any]) -> str:
    slopes = slopes_of(case, 0.3, device)
    wide = None if slopes is None else slopes.float()
    return compare(
        lambda q, k, v, state: _step(q, k, v, wide, state),
        lambda q, k, v, state: decay_step_reference(q, k, v, slopes, state),
        [*samples_of(case, 2, device=device), sample(2, heads_of(case), case["K"], case["V"], device=device, seed=3)],
        differentiable=0,
    )


backends.register("decay_step", ("triton",), _self_test)
