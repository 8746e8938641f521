"""Short convolution of a part of a projection on a GPU against fp64: lengths, documents, readers, compiled use."""

from functools import partial

import pytest
import torch
from torch.nn import functional

from megalin.ops.dispatch.projection_part import tensor_of
from megalin.ops.norms.skip_gated_squares import skip_gated_squares
from megalin.ops.scans.projected_conv import projected_conv
from tests.numerics import outputs_and_gradients
from tests.ops.kernels import assert_as_good_as_the_reference
from tests.ops.scans.test_projected_conv import KERNEL_CASES


def make_inputs(batch, length, width, dtype):
    shapes = {"projection": (batch, length, 2 * width), "weight": (width, 4), "bias": (width,)}
    return {name: torch.randn(shape, device="cuda").to(dtype) for name, shape in shapes.items()}


def make_documents(batch, length):
    """Ids of documents that start at one token in 16, and at the first token of a tile."""
    starts = torch.rand(batch, length, device="cuda") < 1 / 16
    starts[:, 64::128] = True
    starts[:, 129::128] = True
    return starts.cumsum(1, dtype=torch.int32)


def flat(projection, weight, bias, **options):
    found = projected_conv(projection, weight, bias, **options)
    readers = [x.square() * (reader + 1) for reader, x in enumerate(found.inputs)]
    return [found.output, tensor_of(found.other).square(), *readers]


@pytest.mark.parametrize(("dtype", "part", "readers", "packed"), KERNEL_CASES)
@pytest.mark.parametrize(
    ("batch", "length", "width"), [(3, 1, 4096), (2, 63, 528), (2, 64, 4096), (3, 65, 96), (2, 1000, 1003)]
)
def test_values_and_gradients_are_as_good_as_the_reference(batch, length, width, part, readers, packed, dtype):
    options = {"part": part, "readers": readers, "document_ids": make_documents(batch, length) if packed else None}
    kernel, inputs = partial(flat, **options, backend="triton"), make_inputs(batch, length, width, dtype)
    assert_as_good_as_the_reference(kernel, partial(flat, **options, backend="reference"), inputs)
    first, second = outputs_and_gradients(kernel, inputs), outputs_and_gradients(kernel, inputs)
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_compiled_use_with_a_gate(dtype):
    def run(x, matrix, weight, bias, backend):
        conv = projected_conv(functional.linear(x, matrix), weight, bias, part=1, readers=2, backend=backend)
        scan = conv.output * torch.sigmoid(conv.inputs[0]) + conv.inputs[1].square()
        return list(skip_gated_squares(scan, conv.output, bias, conv.other, bias, backend=backend))

    inputs = make_inputs(2, 200, 256, dtype)
    del inputs["projection"]
    inputs |= {"x": torch.randn(2, 200, 64, device="cuda").to(dtype)}
    inputs |= {"matrix": 0.1 * torch.randn(512, 64, device="cuda").to(dtype)}
    compiled = torch.compile(partial(run, backend="triton"), fullgraph=True, dynamic=False)
    assert_as_good_as_the_reference(compiled, partial(run, backend="reference"), inputs)
