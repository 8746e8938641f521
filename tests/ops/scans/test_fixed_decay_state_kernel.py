"""Triton kernels of the state in the interpreter, against the reference: lengths that fill parts or not."""

import pytest
import torch

from megalin.errors import KernelError
from megalin.ops.scans.states import decay_state, decay_state_reference
from tests.ops.kernels import assert_as_good_as_the_reference

SLOPES = {"none": None, "mild": (0.0, 0.07), "strong": (20.0, 3.0)}


@pytest.fixture(autouse=True, params=[1, 6], ids=["one part", "parts"])
def _few_programs(monkeypatch, request):
    from megalin._triton.scans import fixed_decay_state as kernels

    monkeypatch.setattr(kernels, "PROGRAMS", request.param)


def compare(length, slopes, *, packed, value=40):
    inputs = {name: torch.randn(2, length, 2, width).bfloat16() for name, width in {"k": 24, "v": value}.items()}
    slopes, ids = None if slopes is None else torch.tensor(slopes), None
    if packed:
        ids = torch.stack([torch.arange(length) >= length // 3, torch.arange(length) == length - 1]).int()
    assert_as_good_as_the_reference(
        lambda **x: [decay_state(slopes=slopes, document_ids=ids, backend="triton", **x)],
        lambda **x: [decay_state_reference(slopes=slopes, document_ids=ids, **x)],
        inputs,
    )


@pytest.mark.parametrize("decay", SLOPES)
@pytest.mark.parametrize("length", [1, 65, 300])
@pytest.mark.parametrize("packed", [False, True], ids=["one document", "packed"])
def test_the_kernel_is_as_good_as_the_reference(length, decay, packed):
    compare(length, SLOPES[decay], packed=packed)


def test_more_values_than_a_tile_of_the_gradient_holds():
    compare(65, SLOPES["mild"], packed=True, value=200)


@pytest.mark.parametrize(
    ("width", "dtype", "message"),
    [
        (16, torch.float32, "k, v of torch.float32"),
        (12, torch.bfloat16, "heads of 12 keys and 12 values, not multiples"),
    ],
)
def test_what_the_kernel_does_not_take(width, dtype, message):
    x = torch.randn(1, 4, 1, width).to(dtype)
    with pytest.raises(KernelError, match=message):
        decay_state(x, x, None, backend="triton")
    assert decay_state(x, x, None).shape == (1, 1, width, width)
