"""AdamW's update by the kernel: errors against torch's, copies, skipped updates, scaled gradients."""

import math

import pytest
import torch

from megalin.errors import KernelError
from megalin.ops.adamw_update import (
    AdamWOptions,
    UpdateTables,
    UpdateTensors,
    adamw_update,
    adamw_update_reference,
    choose_update,
)

OPTIONS = AdamWOptions(lr=1e-3, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1)
SHAPES = ((33, 70), (1,), (0,), (3, 1025))
STEPS = 100


def make_tensors(dtype=torch.float32, copies=None):
    weights = [0.02 * torch.randn(shape) for shape in SHAPES]
    return UpdateTensors(
        weights,
        [torch.randn(shape).to(dtype) for shape in SHAPES],
        [torch.zeros(shape) for shape in SHAPES],
        [torch.zeros(shape) for shape in SHAPES],
        [torch.zeros(()) for _ in SHAPES],
        [None if copies is None else weight.to(copies) for weight in weights],
    )


def clone(tensors, dtype=None):
    return UpdateTensors(*([None if x is None else x.clone().to(dtype or x.dtype) for x in each] for each in tensors))


def update(tensors, *, scale=1.0, skip=0.0, tables=None, **options):
    for step in tensors.steps:
        step.add_(1 - skip)
    scalars = {"scale": torch.tensor(scale), "skip": torch.tensor(skip)}
    adamw_update(tensors, **scalars, options=OPTIONS._replace(**options), tables=tables or UpdateTables())


def last_places(actual, expected):
    """Largest distance in units in the last place of the largest element of a row."""
    unit = torch.finfo(torch.float32).eps * 2.0 ** torch.log2(expected.abs().amax()).floor()
    return ((actual.double() - expected.double()).abs().amax() / unit).item()


def train_on_noise(weight_decay):
    """Weights after 100 updates with random gradients: by the kernel, by torch's AdamW, by the reference in fp64."""
    tensors, tables, options = make_tensors(), UpdateTables(), OPTIONS._replace(weight_decay=weight_decay)
    exact = clone(tensors, torch.float64)
    parameters = [torch.nn.Parameter(weight.clone()) for weight in tensors.weights]
    optimizer = torch.optim.AdamW(parameters, lr=1e-3, betas=(0.9, 0.95), weight_decay=weight_decay, fused=True)
    for _ in range(STEPS):
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape)
        gradients = [parameter.grad.clone() for parameter in parameters]
        update(tensors._replace(gradients=gradients), tables=tables, weight_decay=weight_decay)
        optimizer.step()
        exact = exact._replace(gradients=gradients, steps=tensors.steps)
        adamw_update_reference(exact, scale=torch.tensor(1.0), skip=torch.tensor(0.0), options=options)
    torch_s = [parameter.detach() for parameter in parameters]
    return [x for x in zip(tensors.weights, torch_s, exact.weights, strict=True) if x[0].numel()]


@pytest.mark.parametrize("weight_decay", [0.1, 0.0])
def test_weights_are_as_exact_as_torch_s_over_100_steps(weight_decay):
    """Torch's AdamW has the kernel's operations on CUDA (tests/gpu); on the CPU it rounds 1 - lr wd to fp32."""
    results = train_on_noise(weight_decay)
    found, torch_s = (max(last_places(each[i], each[2]) for each in results) for i in (0, 1))
    assert found <= 2 * torch_s
    assert found <= 8


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_scale_is_folded_with_the_bits_of_a_separate_pass(dtype):
    folded, tables = make_tensors(dtype, copies=torch.bfloat16), UpdateTables()
    separate = clone(folded)
    for _ in range(3):
        update(folded, scale=0.3, tables=tables)
        scaled = [gradient.float().mul_(torch.tensor(0.3)) for gradient in folded.gradients]
        update(separate._replace(gradients=scaled))
    for found, expected in zip(folded, separate, strict=True):
        if found is not folded.gradients:
            assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_copies_are_the_rounded_weights(dtype):
    tensors = make_tensors(copies=dtype)
    tensors.copies[1] = None
    before = clone(tensors)
    update(tensors)
    for weight, old, copy in zip(tensors.weights, before.weights, tensors.copies, strict=True):
        assert not weight.numel() or not torch.equal(weight, old)
        assert copy is None or torch.equal(copy, weight.to(dtype))


def test_a_skipped_update_writes_nothing():
    tensors = make_tensors(copies=torch.bfloat16)
    update(tensors)
    before = clone(tensors)
    tensors.gradients[0].fill_(math.nan)
    update(tensors, skip=1.0)
    for found, expected in zip(tensors, before, strict=True):
        if found is not tensors.gradients:
            assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))


def test_tensors_at_odd_addresses():
    tensors = make_tensors()
    odd = UpdateTensors(
        *(
            [torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape) if x.dim() else x.clone() for x in each]
            for each in (*tensors[:5], tensors.weights)
        )
    )
    update(tensors)
    update(odd)
    for found, expected in zip(odd[:4], tensors[:4], strict=True):
        assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))


def test_tables_follow_new_gradients_and_hyperparameters():
    tensors, tables = make_tensors(), UpdateTables()
    fresh = clone(tensors)
    for rate, decay in ((1e-3, 0.1), (2e-3, 0.1), (2e-3, 0.3)):
        gradients = [torch.randn(shape) for shape in SHAPES]
        update(tensors._replace(gradients=gradients), tables=tables, lr=rate, weight_decay=decay)
        update(fresh._replace(gradients=gradients), lr=rate, weight_decay=decay)
    assert all(torch.equal(x, y) for x, y in zip(tensors.weights, fresh.weights, strict=True))


def test_only_fp32_weights_have_a_kernel():
    double = [torch.zeros(2, dtype=torch.float64)]
    assert choose_update(double, torch.float64) == "reference"
    assert choose_update([torch.zeros(2)], torch.bfloat16) == "reference"
    with pytest.raises(KernelError, match=r"does not take weights of torch\.float64 dtype"):
        choose_update(double, torch.float64, "triton")
