"""A token drawn from softmax(logits / temperature) by the inverse of its distribution function at a uniform number."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from megalin.ops.dispatch import backend as backends
from megalin.ops.dispatch.backend import Backend, Compiled
from megalin.ops.dispatch.dtypes import KERNEL_DTYPES, compute_dtype
from megalin.ops.dispatch.operands import check_operands
from megalin.ops.dispatch.self_test import sample

SMALLEST_TEMPERATURE = 1e-30
"""Least temperature of a draw: logits up to 10^8 divided by it are finite in fp32. Unequal logits that differ by more
than 10^-28 have the probabilities 1 and 0 there, so that below it the likeliest id is the draw."""
_BLOCK = 128
"""Ids a block of the reference's sums."""


def draw_tokens(logits: Tensor, uniform: Tensor, *, temperature: float, backend: Backend = "auto") -> Tensor:
    """The first id of each row whose cumulative probability, in the order of the ids, exceeds the uniform number.

    Args:
        logits: [B, V], at least one of a row finite; -inf for impossible tokens, which are never drawn.
        uniform: [B] in [0, 1), fp64.
        temperature: at least SMALLEST_TEMPERATURE, divides the logits.
        backend: implementation to run; the compiled one takes fp32, bf16 and fp16.

    Returns:
        [B] int64. Exponentials are computed in at least fp32 and summed in fp64, those of the kernel's blocks of ids in
        fp32.

    Raises:
        KernelError: an explicit backend that cannot run.
        OperandError: tensors with incompatible shapes, dtypes or devices.
    """
    case = check_operands("draw_tokens", {"logits": (logits, "BV"), "uniform": (uniform, "B")}, "V")
    assert temperature >= SMALLEST_TEMPERATURE, temperature
    unsupported = "" if logits.dtype in KERNEL_DTYPES else f"dtype {logits.dtype}"
    if logits.numel() == 0 or uniform.dtype != torch.float64:
        unsupported = f"{logits.numel()} logits and uniform numbers of {uniform.dtype}"
    if backends.choose("draw_tokens", backend, logits.device.type, unsupported, case=case) == "reference":
        return draw_tokens_reference(logits, uniform, temperature=temperature)
    return _draw(logits, uniform, temperature)


def draw_tokens_reference(logits: Tensor, uniform: Tensor, *, temperature: float) -> Tensor:
    """`draw_tokens` in plain PyTorch: tests the kernel and runs on CPUs."""
    logits = logits.to(compute_dtype(logits)) / temperature
    weights = torch.exp(logits - logits.amax(-1, keepdim=True))
    blocks = functional.pad(weights, (0, -weights.shape[-1] % _BLOCK)).unflatten(-1, (-1, _BLOCK))
    sums = blocks.sum(-1, dtype=torch.float64)
    index, rest = _first_above(sums, uniform[:, None] * sums.sum(-1, keepdim=True))
    chosen = blocks.gather(1, index[..., None].expand(-1, 1, _BLOCK)).squeeze(1)
    place, _ = _first_above(chosen.double(), rest)
    return (index * _BLOCK + place).squeeze(1)


def _first_above(weights: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Index [B, 1] of the first cumulative sum of weights [B, N] above target [B, 1], and the target less the sum
    before it."""
    sums = weights.cumsum(-1)
    # Rounding must not choose an entry of no weight: the last one with weight is the bound.
    last = torch.where(weights > 0, torch.arange(weights.shape[-1], device=weights.device), 0).amax(-1, keepdim=True)
    index = torch.minimum((sums <= target).sum(-1, keepdim=True), last)
    return index, target - (sums.gather(1, index) - weights.gather(1, index))


def _draw(logits: Tensor, uniform: Tensor, temperature: float) -> Tensor:
    from megalin._triton.decoding import sampling as kernels

    return kernels.draw(logits.contiguous(), uniform.contiguous(), temperature)


def _self_test(backend: Compiled, device: str, case: Mapping[str, Any]) -> str:
    """Draws away from the steps of the distribution function, where rounding cannot change them."""
    width = case["V"]
    logits = sample(64, width, device=device, dtype=case["logits"])
    logits[:, width // 2 + 1 : width * 4 // 5] = float("-inf")
    cumulative = (logits.double() / 0.7).softmax(-1).cumsum(-1)
    expected = torch.arange(64, device=device) * (width // 2) // 63
    before = cumulative.gather(1, (expected - 1).clamp(min=0)[:, None]).squeeze(1).where(expected > 0, 0.0)
    uniform = (before + cumulative.gather(1, expected[:, None]).squeeze(1)) / 2
    found = _draw(logits, uniform, 0.7)
    wrong = int((found != expected).sum())
    return f"self-test: {wrong} of 64 draws differ" if wrong else ""


backends.register("draw_tokens", ("triton",), _self_test)
