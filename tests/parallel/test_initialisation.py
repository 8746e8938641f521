"""Initial weights as functions of (seed, name, part)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megalin.parallel.initialisation import Initializer, constant, normal


def drawn(*shape: int, seed: int = 0, prefix: str = "a", name: str = "weight", dtype=torch.float32) -> Tensor:
    parameter = nn.Parameter(torch.empty(shape, dtype=dtype))
    Initializer(seed).child(prefix)(parameter, name, normal(0.5))
    return parameter.detach()


def test_a_draw_repeats_and_ignores_the_global_generator():
    first = drawn(40, 30)
    torch.manual_seed(99)
    torch.rand(5)
    assert torch.equal(drawn(40, 30), first)


def test_seed_and_name_and_module_change_it():
    others = [drawn(40, 30, seed=1), drawn(40, 30, name="bias"), drawn(40, 30, prefix="b"), drawn(40, 30, prefix="")]
    tensors = [drawn(40, 30), *others]
    assert not any(torch.equal(a, b) for i, a in enumerate(tensors) for b in tensors[:i])


def test_parts_of_a_fused_parameter_are_drawn_one_by_one():
    fused, single = drawn(3, 40, 30), drawn(40, 30)
    assert torch.equal(fused[0], single)
    assert not torch.equal(fused[1], fused[0])
    # Each part has its own generator, so its offset in the fused tensor does not matter.
    assert torch.equal(drawn(3, 80, 30)[:, :40], fused)


def test_the_distribution_is_as_asked():
    weights = drawn(200, 200)
    assert abs(weights.mean()) < 0.01
    assert abs(weights.std() - 0.5) < 0.01


def test_wider_parameters_hold_the_fp32_draw():
    assert torch.equal(drawn(40, 30, dtype=torch.float64), drawn(40, 30).double())


def test_constants_of_numbers_and_tensors():
    parameter = nn.Parameter(torch.empty(2, 3))
    Initializer(0)(parameter, "x", constant(2.5))
    assert parameter.eq(2.5).all()
    Initializer(0)(parameter, "x", constant(torch.arange(6.0).view(2, 3)))
    assert parameter.flatten().tolist() == [0, 1, 2, 3, 4, 5]
