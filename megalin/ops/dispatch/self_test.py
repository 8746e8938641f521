"""Self-test of a compiled op at its first use: values, gradients and determinism against its reference in fp64.

A self-test takes the widths and dtypes of the call. Its number of tokens is a multiple of 16, as in most calls, and it
has as many heads as `few` says: Triton compiles sizes of 1 and multiples of 16 separately.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Function = Callable[..., Tensor | Sequence[Tensor]]

BOUND = 1e-2
"""Relative error above which a kernel is broken rather than rounded, in bf16 with tf32 matmuls allowed."""

ROWS = 48
"""Rows of a self-test of a kernel that works row by row."""


def sample(*shape: int, device: str, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Fixed random tensor; does not advance the run's random generators."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def few(size: int) -> int:
    """A number of at most 17 that kernels compile the same code for as for `size`: tiles have up to 16 of them."""
    return size if size <= 16 else 16 if size % 16 == 0 else 17


def compare(
    kernel: Function,
    reference: Function,
    inputs: Sequence[Tensor],
    *,
    bound: float = BOUND,
    differentiable: int | None = None,
) -> str:
    """Error of `kernel` against `reference`; empty where it passes.

    Compares the outputs, and the gradient of every floating-point input for a fixed random weighting of the first
    `differentiable` outputs (None: of all; 0: no gradients), with `reference` on fp64 copies by
    ||actual - expected|| / ||expected||; a second call must give the same bits.
    """
    wide = [x.double() if x.is_floating_point() else x for x in inputs]
    expected = _run(reference, wide, differentiable)
    first, second = (_run(kernel, inputs, differentiable) for _ in range(2))
    for name, truth in expected.items():
        scale = truth.norm().item() or 1.0
        error = (first[name].double() - truth).norm().item() / scale
        if not error <= bound:
            return f"self-test: {name} is off by {error:.1e} (bound {bound:.0e})"
        if not torch.equal(first[name], second[name]):
            return f"self-test: {name} differs between two equal calls"
    return ""


def bound_of(dtype: torch.dtype) -> float:
    """Bound of kernels without matmuls: rounding of the outputs in their dtype."""
    return 1e-5 if dtype == torch.float32 else BOUND


def _run(function: Function, inputs: Sequence[Tensor], differentiable: int | None) -> dict[str, Tensor]:
    leaves = [x.detach().clone().requires_grad_(differentiable != 0 and x.is_floating_point()) for x in inputs]
    result = function(*leaves)
    outputs = [result] if isinstance(result, Tensor) else list(result)
    found = {f"output {i}": y.detach() for i, y in enumerate(outputs)}
    if differentiable == 0:
        return found
    generator = torch.Generator().manual_seed(1)
    loss = sum(
        (y.double() * torch.randn(y.shape, generator=generator).to(y.device)).sum() for y in outputs[:differentiable]
    )
    assert isinstance(loss, Tensor)
    loss.backward()
    for i, leaf in enumerate(leaves):
        if leaf.grad is not None:
            found[f"gradient {i}"] = leaf.grad
    return found
