"""Errors between tensors, and a function's outputs with all its gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

Tensors = dict[str, Tensor]


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """||actual - expected|| / ||expected|| in fp64 (absolute where `expected` is zero); inf for another shape."""
    if actual.shape != expected.shape:
        return float("inf")
    actual, expected = actual.detach().double(), expected.detach().double()
    scale = expected.norm().item()
    return (actual - expected).norm().item() / (scale or 1.0)


def errors(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> dict[str, float]:
    """The relative error of each tensor; both hold the same names."""
    assert actual.keys() == expected.keys(), actual.keys() ^ expected.keys()
    return {name: relative_error(actual[name], expected[name]) for name in expected}


def assert_close(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor], bound: float) -> None:
    """Asserts that every tensor's relative error is at most `bound`; NaN fails."""
    too_far = {name: error for name, error in errors(actual, expected).items() if not error <= bound}
    assert not too_far, f"above {bound}: {too_far}"


def outputs_and_gradients(function: Callable[..., Sequence[Tensor]], inputs: Mapping[str, Tensor]) -> Tensors:
    """The outputs of `function(**inputs)`, and the gradient of a fixed weighted sum of them for each float input."""
    leaves = {
        name: tensor.detach().clone().requires_grad_(tensor.is_floating_point()) for name, tensor in inputs.items()
    }
    outputs = function(**leaves)
    generator = torch.Generator().manual_seed(7)
    loss = sum(
        (output.double() * torch.randn(output.shape, generator=generator, dtype=torch.float64).to(output.device)).sum()
        for output in outputs
    )
    assert isinstance(loss, Tensor)
    loss.backward()
    result = {f"output.{index}": output.detach() for index, output in enumerate(outputs)}
    for name, leaf in leaves.items():
        if leaf.requires_grad:
            assert leaf.grad is not None, name
            result[f"gradient.{name}"] = leaf.grad
    return result
