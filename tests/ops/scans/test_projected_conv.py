"""Short convolution of a part of a projection, whose gradients are joined: against its parts, in one memory."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from megalin._triton.norms import skip_gated_squares as skip_gated_squares_kernels
from megalin._triton.scans import short_conv_gradient
from megalin.errors import KernelError, OperandError
from megalin.ops.dispatch.projection_part import tensor_of
from megalin.ops.norms.skip_gated_squares import skip_gated_squares
from megalin.ops.scans import projected_conv as module
from megalin.ops.scans.projected_conv import projected_conv
from megalin.ops.scans.short_conv import short_conv_recurrent
from tests.numerics import Tensors, assert_close, outputs_and_gradients
from tests.ops.kernels import assert_as_good_as_the_reference

BATCH, LENGTH, WIDTH, TAPS = 2, 70, 10, 4
KERNEL_CASES = [
    (torch.float32, 0, 2, True),
    (torch.float32, 1, 0, False),
    (torch.bfloat16, 0, 2, False),
    (torch.bfloat16, 1, 0, True),
    (torch.float16, 1, 1, True),
]
"""The dtype, the part, its readers, and whether there are documents."""


def make_inputs(dtype: torch.dtype = torch.float64, *, length: int = LENGTH) -> Tensors:
    generator = torch.Generator().manual_seed(length)
    shapes = {"projection": (BATCH, length, 2 * WIDTH), "weight": (WIDTH, TAPS), "bias": (WIDTH,)}
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}


def make_documents(length: int = LENGTH) -> Tensor:
    """Document ids: documents of one and two tokens, and starts at the first two tokens of the second tile."""
    starts = torch.zeros(BATCH, length, dtype=torch.int32)
    for row, places in enumerate(((1, 3, 20, 64), (2, 65, 66))):
        starts[row, [place for place in places if place < length]] = 1
    return starts.cumsum(1, dtype=torch.int32)


def flat(projection: Tensor, weight: Tensor, bias: Tensor, **options) -> list[Tensor]:
    """The outputs; each reader of the convolved part has a gradient of its own."""
    found = projected_conv(projection, weight, bias, **options)
    readers = [x.square() * (reader + 1) for reader, x in enumerate(found.inputs)]
    return [found.output, tensor_of(found.other).square(), *readers]


@pytest.mark.parametrize(("part", "readers"), [(0, 2), (1, 0), (1, 1)])
@pytest.mark.parametrize("packed", [False, True], ids=["whole", "packed"])
def test_the_reference_convolves_one_part(part: int, readers: int, packed: bool):
    documents = make_documents() if packed else None

    def by_token(projection: Tensor, weight: Tensor, bias: Tensor) -> list[Tensor]:
        parts = projection.chunk(2, dim=-1)
        x, other = parts[part], parts[1 - part]
        conv = short_conv_recurrent(x, weight, bias, document_ids=documents).output
        return [conv, other.square(), *(x.square() * (reader + 1) for reader in range(readers))]

    actual = outputs_and_gradients(partial(flat, part=part, readers=readers, document_ids=documents), make_inputs())
    assert_close(actual, outputs_and_gradients(by_token, make_inputs()), 1e-13)


@pytest.mark.parametrize(("dtype", "part", "readers", "packed"), KERNEL_CASES)
@pytest.mark.parametrize("length", [2, LENGTH])
def test_the_kernel_is_as_good_as_the_reference(part, readers, packed, dtype, length):
    options = {"part": part, "readers": readers, "document_ids": make_documents(length) if packed else None}
    assert_as_good_as_the_reference(
        partial(flat, **options, backend="triton"),
        partial(flat, **options, backend="reference"),
        make_inputs(dtype, length=length),
    )


def gated(x: Tensor, matrix: Tensor, weight: Tensor, bias: Tensor, backend: str) -> list[Tensor]:
    """A mixer's use: a projection, its convolution with other readers, and the gate at the end."""
    conv = projected_conv(functional.linear(x, matrix), weight, bias, part=0, readers=2, backend=backend)
    scan = conv.output * torch.sigmoid(conv.inputs[0]) + conv.inputs[1]
    return list(skip_gated_squares(scan, conv.output, bias, conv.other, bias, backend=backend))


def mixer_inputs(dtype: torch.dtype = torch.float32) -> Tensors:
    inputs = make_inputs(dtype)
    inputs["matrix"], inputs["x"] = torch.randn(2 * WIDTH, 6).to(dtype), torch.randn(BATCH, LENGTH, 6).to(dtype)
    del inputs["projection"]
    return inputs


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gate_reads_the_other_part(dtype):
    assert_as_good_as_the_reference(
        partial(gated, backend="triton"), partial(gated, backend="reference"), mixer_inputs(dtype)
    )


@pytest.mark.parametrize("compiler", ["none", "aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_the_gradients_are_joined_without_a_copy(compiler, monkeypatch):
    """Compiled or not, the convolution's backward writes to the memory that the gate's backward has written."""
    storages: dict[str, int] = {}

    def spy(kernels, name: str, operand: Callable[..., Tensor]) -> None:
        launch = kernels.backward

        def recorded(*arguments, **options):
            storages[name] = operand(*arguments, **options).untyped_storage().data_ptr()
            return launch(*arguments, **options)

        monkeypatch.setattr(kernels, "backward", recorded)

    spy(skip_gated_squares_kernels, "gate", lambda *arguments: arguments[-1])
    spy(short_conv_gradient, "convolved", lambda *_, into, **__: into)
    run = partial(gated, backend="triton")
    compiled = run if compiler == "none" else torch.compile(run, fullgraph=True, dynamic=False, backend=compiler)
    inputs = mixer_inputs()
    actual = outputs_and_gradients(compiled, inputs)
    if compiler != "aot_eager":  # which copies what a custom op writes
        assert storages["gate"] == storages["convolved"]
    exact = {name: x.double() for name, x in inputs.items()}
    assert_close(actual, outputs_and_gradients(partial(gated, backend="reference"), exact), 1e-6)


def test_equal_calls_give_the_same_bits():
    def run(**x: Tensor) -> list[Tensor]:
        return flat(**x, part=1, readers=2, document_ids=make_documents(), backend="triton")

    inputs = make_inputs(torch.bfloat16)
    assert_close(outputs_and_gradients(run, inputs), outputs_and_gradients(run, inputs), 0.0)


def test_the_op_declares_what_it_writes():
    inputs = make_inputs(torch.float32)
    parts = inputs["projection"].unflatten(-1, (2, -1)).contiguous()
    arguments = (torch.zeros_like(parts), parts[:, :, 0].clone(), [parts[:, :, 1].clone()], parts)
    arguments = (*arguments, inputs["weight"], inputs["bias"], None, 1)
    torch.library.opcheck(module._backward, arguments, test_utils=("test_schema", "test_faketensor"))


def test_unsupported_inputs_are_refused():
    with pytest.raises(KernelError, match=r"does not take dtype torch\.float64"):
        projected_conv(**make_inputs(), part=0, backend="triton")
    inputs = make_inputs(torch.float32)
    with pytest.raises(KernelError, match="9 taps, outside 2 to 8"):
        projected_conv(**inputs | {"weight": torch.zeros(WIDTH, 9)}, part=0, backend="triton")
    with pytest.raises(OperandError, match="projected_conv: weight has shape"):
        projected_conv(**inputs | {"weight": inputs["weight"][1:]}, part=0)
