"""Common check of compiled ops: a backend's error against the reference's, both against fp64."""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from tests.numerics import errors, outputs_and_gradients

FLOOR = {torch.float32: 2.4e-7, torch.float16: 9.8e-4, torch.bfloat16: 7.8e-3}
"""Error that is always allowed: the eps of a half dtype, two of fp32 (docs/adr/0005-kernel-bounds.md). A reference may
keep in fp32 an operand that a matrix unit reads in the inputs' dtype, and be exact by chance."""


def assert_as_good_as_the_reference(
    kernel: Callable[..., Sequence[Tensor]],
    reference: Callable[..., Sequence[Tensor]],
    inputs: Mapping[str, Tensor],
    *,
    fp32_floors: Mapping[str, float] | None = None,
) -> None:
    """Asserts that errors of outputs and gradients against fp64 are at most twice those of the same-dtype reference.

    Args:
        fp32_floors: errors that are always allowed in fp32, by output or gradient, in place of FLOOR.
    """
    dtype = next(x.dtype for x in inputs.values() if x.is_floating_point())
    exact = {name: x.double() if x.is_floating_point() else x for name, x in inputs.items()}
    truth = outputs_and_gradients(reference, exact)
    same = errors(outputs_and_gradients(reference, inputs), truth)
    found = errors(outputs_and_gradients(kernel, inputs), truth)
    floors = dict.fromkeys(truth, FLOOR[dtype]) | dict(fp32_floors or {} if dtype == torch.float32 else {})
    bad = {name: (found[name], same[name]) for name in truth if not found[name] <= max(2 * same[name], floors[name])}
    assert not bad, f"(error, reference's error): {bad}"
