"""Checks that every compiled op shares: a backend against the reference, with fp64 truth."""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from tests.numerics import errors, outputs_and_gradients

FLOOR = {torch.float32: 2.4e-7, torch.float16: 9.8e-4, torch.bfloat16: 7.8e-3}
"""The eps of a half dtype, two of fp32 (docs/adr/0005-kernel-bounds.md): a reference may keep in fp32 what a matrix
unit reads in the inputs' dtype, and be exact by chance."""


def assert_as_good_as_the_reference(
    kernel: Callable[..., Sequence[Tensor]],
    reference: Callable[..., Sequence[Tensor]],
    inputs: Mapping[str, Tensor],
) -> None:
    """Outputs and all gradients: the kernel's error against fp64 is at most twice that of the same-dtype reference."""
    dtype = next(x.dtype for x in inputs.values() if x.is_floating_point())
    exact = {name: x.double() if x.is_floating_point() else x for name, x in inputs.items()}
    truth = outputs_and_gradients(reference, exact)
    same = errors(outputs_and_gradients(reference, inputs), truth)
    found = errors(outputs_and_gradients(kernel, inputs), truth)
    bad = {name: (found[name], same[name]) for name in truth if not found[name] <= max(2 * same[name], FLOOR[dtype])}
    assert not bad, f"(error, reference's error): {bad}"
