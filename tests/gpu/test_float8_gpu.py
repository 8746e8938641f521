"""FP8 matmuls on a GPU: codes with the bits of the CPU, values and gradients against fp64, and compiled runs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megalin.ops.gates.gated_product import gated_product_reference
from megalin.ops.quantized_gated_product import (
    LARGEST_WIDTH,
    quantized_gated_product,
    quantized_gated_product_backward,
)
from megalin.ops.scaled_linear import (
    LOWEST_CAPABILITY,
    quantize_rows,
    quantize_rows_reference,
    row_magnitudes,
    scaled_matmul,
)
from megalin.parallel.float8_layers import Float8Settings, enable_float8, update_weight_magnitudes
from megalin.parallel.float8_matmuls import Operands
from megalin.parallel.linear import RowParallelLinear
from megalin.parallel.process_group import process_group
from megalin.parallel.tensor_parallel import TensorParallel
from megalin.train.config import load_run_config
from megalin.train.loop import train
from tests.model_runs import losses, write_config
from tests.numerics import relative_error

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() < LOWEST_CAPABILITY, reason="no FP8 matmuls"
)
FAST_ACCUMULATION = 4e-3
"""Largest relative error of a matmul with fast accumulation, rounded to bf16: 2.3e-3 at K = 5,632 on an H100."""


def bits(codes: Tensor) -> Tensor:
    return codes.view(torch.uint8).cpu()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(1, 16), (4097, 333), (8192, 2048)])
def test_codes_have_the_bits_of_the_cpu(shape, dtype):
    x = torch.randn(shape) * torch.randn(shape[0], 1).mul(20).exp2()
    x[0] = 0.0
    for rows in (x.to(dtype), x.to(dtype).t()):
        expected = quantize_rows_reference(rows, row_magnitudes(rows))
        on_gpu = rows.cuda() if rows.is_contiguous() else rows.t().contiguous().cuda().t()
        compiled = torch.compile(quantize_rows, fullgraph=True)
        for cast in (quantize_rows, compiled):
            found = cast(on_gpu)
            assert torch.equal(bits(found.codes), bits(expected.codes))
            assert torch.equal(found.scales.cpu(), expected.scales)


@pytest.mark.parametrize("activation", ["none", "silu"])
@pytest.mark.parametrize("width", [37, 5632, LARGEST_WIDTH])
def test_a_gated_product_and_its_gradient_have_the_codes_of_a_cast(width, activation):
    x, dy = (torch.randn(1003, size, device="cuda", dtype=torch.bfloat16) for size in (2 * width, width))
    leaf = x.double().requires_grad_()
    truth = gated_product_reference(leaf, activation=activation)
    (gradient,) = torch.autograd.grad(truth, leaf, dy.double())
    product = quantized_gated_product(x, activation=activation, backend="triton")
    dx = quantized_gated_product_backward(dy, x, activation=activation, backend="triton")
    for found, exact in ((product, truth.detach()), (dx, gradient)):
        assert relative_error(found.tensor, exact) < 2e-3
        expected = quantize_rows_reference(found.tensor.cpu(), row_magnitudes(found.tensor.cpu()))
        assert torch.equal(bits(found.rows.codes), bits(expected.codes))
        assert torch.equal(found.rows.scales.cpu(), expected.scales)
    x[5, 3] = torch.nan
    for found in (
        quantized_gated_product(x, activation=activation, backend="triton"),
        quantized_gated_product_backward(dy, x, activation=activation, backend="triton"),
    ):
        assert found.rows.codes.float().isnan().all(1).nonzero().flatten().tolist() == [5]
        assert found.rows.scales.isnan().nonzero().flatten().tolist() == [5]


def layer(outputs: int, width: int, *, weight_gradient: bool) -> RowParallelLinear:
    linear = RowParallelLinear(width, outputs, tp=TensorParallel(), std=width**-0.5, name="width")
    enable_float8(linear, [linear], Float8Settings(16, weight_gradient))
    linear.to_empty(device="cuda")
    torch.nn.init.normal_(linear.weight, std=width**-0.5)
    update_weight_magnitudes(linear)
    linear.weight.data = linear.weight.data.bfloat16()
    return linear


@pytest.mark.parametrize("weight_gradient", [False, True])
@pytest.mark.parametrize(("tokens", "outputs", "width"), [(16, 16, 32), (1000, 272, 48), (8192, 2048, 5632)])
def test_values_and_gradients_are_those_of_the_quantised_operands_in_fp64(tokens, outputs, width, weight_gradient):
    tokens += -tokens % 16 if weight_gradient else 0
    linear, recorded = layer(outputs, width, weight_gradient=weight_gradient), list[Operands]()
    assert linear.float8 is not None
    linear.float8.record = recorded.append
    x = torch.randn(tokens, width, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    dy = torch.randn(tokens, outputs, device="cuda", dtype=torch.bfloat16)
    y = linear(x)
    y.backward(dy)
    (operands,) = recorded
    assert relative_error(y, scaled_matmul(operands.x, operands.weight, torch.float64)) < FAST_ACCUMULATION
    dx = scaled_matmul(operands.dy, operands.transposed_weight, torch.float64)
    assert relative_error(x.grad, dx) < FAST_ACCUMULATION
    if weight_gradient:
        dw = scaled_matmul(quantize_rows(dy.t()), quantize_rows(x.detach().t()), torch.float64)
    else:
        dw = dy.double().t() @ x.detach().double()
    assert relative_error(linear.weight.grad, dw) < FAST_ACCUMULATION


def test_a_row_with_nan_is_nan_and_others_are_not():
    linear = layer(64, 64, weight_gradient=False)
    x = torch.randn(32, 64, device="cuda", dtype=torch.bfloat16)
    x[3, 5] = float("nan")
    assert linear(x).isnan().all(1).nonzero().flatten().tolist() == [3]


@pytest.mark.parametrize(
    "overrides", [[], ["train.compile=true"], ["train.compile=true", "train.cuda_graphs=true"]], ids=str
)
def test_a_run_learns_as_in_bf16(tmp_path, overrides):
    sublayers = [{"type": "tnl", "num_heads": 8, "chunk_size": 16}, {"type": "glu", "intermediate_size": 272}]
    model = {"hidden_size": 256, "init_std": 0.05, "layers": [{"sublayers": sublayers, "repeat": 2}]}
    config = write_config(tmp_path, model=model, optimizer={"lr": 2e-3}, checkpoint={"every_steps": 50})
    device = torch.device("cuda", torch.cuda.current_device())
    found = {}
    with process_group(device):
        for name, more in (("bf16", []), ("float8", ["train.matmul_dtype=float8"])):
            torch.compiler.reset()
            settings = [*overrides, *more, "train.dtype=bfloat16"]
            train(load_run_config(config, settings), device, tmp_path / name)
            found[name] = losses(tmp_path / name)
    assert found["float8"] != found["bf16"]
    assert found["float8"][-1] == pytest.approx(found["bf16"][-1], abs=0.05)
