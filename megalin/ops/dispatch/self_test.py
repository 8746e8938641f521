"""Self-test of a compiled op at its first use: values, gradients and determinism against its reference in fp64."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Function = Callable[..., Tensor | Sequence[Tensor]]

BOUND = 1e-2
"""Relative error above which a kernel is broken rather than rounded, in bf16 with tf32 matmuls allowed."""


def sample(*shape: int, device: str, seed: int = 0) -> Tensor:
    """Fixed random fp32 tensor; does not advance the run's random generators."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device)


def compare(kernel: Function, reference: Function, inputs: Sequence[Tensor], *, bound: float = BOUND) -> str:
    """Error of `kernel` against `reference`; empty where it passes.

    Compares the outputs, and the gradient of every floating-point input for a fixed random weighting of the outputs,
    with `reference` on fp64 copies by ||actual - expected|| / ||expected||; a second call must give the same bits.
    """
    expected = _run(reference, [x.double() if x.is_floating_point() else x for x in inputs])
    first, second = _run(kernel, inputs), _run(kernel, inputs)
    for name, truth in expected.items():
        scale = truth.norm().item() or 1.0
        error = (first[name].double() - truth).norm().item() / scale
        if not error <= bound:
            return f"self-test: {name} is off by {error:.1e} (bound {bound:.0e})"
        if not torch.equal(first[name], second[name]):
            return f"self-test: {name} differs between two equal calls"
    return ""


def _run(function: Function, inputs: Sequence[Tensor]) -> dict[str, Tensor]:
    leaves = [x.detach().clone().requires_grad_(x.is_floating_point()) for x in inputs]
    result = function(*leaves)
    outputs = [result] if isinstance(result, Tensor) else list(result)
    generator = torch.Generator().manual_seed(1)
    loss = sum((y.double() * torch.randn(y.shape, generator=generator).to(y.device)).sum() for y in outputs)
    assert isinstance(loss, Tensor)
    loss.backward()
    found = {f"output {i}": y.detach() for i, y in enumerate(outputs)}
    for i, leaf in enumerate(leaves):
        if leaf.grad is not None:
            found[f"gradient {i}"] = leaf.grad
    return found
