"""Decoding step of the recurrence with a data-dependent decay per token and key channel (vector_decay.py)."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megalin.ops.dispatch import backend as backends
from megalin.ops.dispatch.backend import Backend, Compiled
from megalin.ops.dispatch.custom_op import custom_op
from megalin.ops.dispatch.dtypes import KERNEL_DTYPES, without_autocast
from megalin.ops.dispatch.operands import check_operands, static
from megalin.ops.dispatch.self_test import bound_of, compare, few, sample
from megalin.ops.scans.driver import ScanOutput

MAX_KEY_DIM = 256


def vector_decay_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    state: Tensor,
    *,
    scale: float = 1.0,
    in_place: bool = False,
    backend: Backend = "auto",
) -> ScanOutput:
    """One token of the recurrence, the decoding step.

    Args:
        q, k: [B, H or 1, K]; v: [B, H, V]; log_decay: [B, H, K or 1]; state: [B, H, K, V] in at least fp32.
        scale: factor on the output.
        in_place: write the next state over a contiguous fp32 `state` and return that tensor; the reference never does.
        backend: implementation to run; compiled ones have no backward.

    Returns:
        ScanOutput with output [B, H, V] in the dtype of v and the next state.

    Raises:
        KernelError: an explicit backend that cannot run.
        OperandError: mismatched shapes, kinds or devices.
    """
    operands = {"v": (v, "BHV"), "q": (q, "BhK"), "k": (k, "BhK"), "log_decay": (log_decay, "BHk")}
    case = check_operands("vector_decay_step", operands | {"state": (state, "BHKV")}, "HKV")
    case = (*case, ("key_heads", static(k.shape[1])), ("decays", static(log_decay.shape[2])))
    tensors = (q, k, v, log_decay, state)
    unsupported = unsupported_vectors(*tensors)
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        unsupported = "tensors that need gradients"
    if backends.choose("vector_decay_step", backend, v.device.type, unsupported, case=case) == "reference":
        return vector_decay_step_reference(q, k, v, log_decay, state, scale=scale)
    q, k, log_decay = (x.expand(*state.shape[:3]) for x in (q, k, log_decay))
    if in_place and state.is_contiguous() and state.dtype == torch.float32:
        from megalin._triton.scans import vector_decay_step as kernels

        return ScanOutput(*kernels.step(q, k, v, log_decay, state, scale, following=state))
    return ScanOutput(*_step(q, k, v, log_decay, state.float().contiguous(), scale))


@without_autocast
def vector_decay_step_reference(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, state: Tensor, *, scale: float = 1.0
) -> ScanOutput:
    """`vector_decay_step` in plain PyTorch."""
    wide = state.dtype
    state = state * torch.exp(log_decay.to(wide))[..., None] + k.to(wide)[..., None] * v.to(wide)[..., None, :]
    output = (q.to(wide)[..., None, :] @ state).squeeze(-2) * scale
    return ScanOutput(output.to(v.dtype), state)


def unsupported_vectors(q: Tensor, k: Tensor, v: Tensor, *others: Tensor) -> str:
    """Reason that the kernels of vector decays do not take these tensors; empty if they do."""
    for x in (q, k, v, *others):
        if x.dtype not in KERNEL_DTYPES:
            return f"dtype {x.dtype}"
    if q.shape[-1] > MAX_KEY_DIM:
        return f"keys of width {q.shape[-1]}, above {MAX_KEY_DIM}"
    return "an empty tensor" if v.numel() == 0 or q.numel() == 0 else ""


@custom_op("vector_decay_step", lambda q, k, v, g, state, scale: (v.new_empty(v.shape), torch.empty_like(state)))
def _step(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, state: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    from megalin._triton.scans import vector_decay_step as kernels

    return kernels.step(q, k, v, log_decay, state, scale)


def _step_self_test(backend: Compiled, device: str, case: Mapping[str, Any]) -> str:
    heads, key = few(case["H"]), case["K"]
    keys = (1 if case["key_heads"] == 1 else heads, key)
    sizes = {"q": keys, "k": keys, "v": (heads, case["V"]), "log_decay": (heads, case["decays"])}
    q, k, v, g = (sample(2, *size, device=device, seed=seed) for seed, size in enumerate(sizes.values()))
    inputs = [x.to(case[name]) for name, x in zip(sizes, (q, k, v, -g.exp()), strict=True)]

    def kernel(q: Tensor, k: Tensor, v: Tensor, g: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        q, k, g = (x.expand(*state.shape[:3]) for x in (q, k, g))
        return _step(q, k, v, g, state, 0.5)

    return compare(
        kernel,
        partial(vector_decay_step_reference, scale=0.5),
        [*inputs, sample(2, heads, key, case["V"], device=device, seed=4)],
        bound=bound_of(case["v"]),
        differentiable=0,
    )


backends.register("vector_decay_step", ("triton",), _step_self_test)
