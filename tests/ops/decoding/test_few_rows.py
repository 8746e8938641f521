"""Linear maps of decoding: kernels in the interpreter against fp64, by numbers of rows on both sides of the limit."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from megalin.errors import KernelError, OperandError
from megalin.ops.decoding.few_rows import MAX_ROWS, add_linear, few_row_linear, normed_glu
from megalin.ops.norms.srmsnorm import srmsnorm_reference

DTYPES = {torch.float32: 1e-5, torch.bfloat16: 6e-3}
ROWS = (1, 3, MAX_ROWS + 2)
EPS = 1e-2


def operands(rows: int, dtype: torch.dtype, *shapes: tuple[int, int]) -> list[torch.Tensor]:
    return [torch.randn(rows if size == 0 else size, width).to(dtype) for size, width in shapes]


def error(found: torch.Tensor, truth: torch.Tensor) -> float:
    return ((found.double() - truth).norm() / truth.norm()).item()


@pytest.fixture(autouse=True)
def _no_gradients():
    with torch.no_grad():
        yield


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [40, 2100])
def test_a_linear_map_is_the_matmul(rows, dtype, width):
    x, weight = operands(rows, dtype, (0, width), (13, width))
    found = few_row_linear(x[:, None], weight, backend="triton")
    assert found.shape == (rows, 1, 13)
    assert error(found[:, 0], functional.linear(x.double(), weight.double())) < DTYPES[dtype]


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ["none", "silu"])
def test_the_gated_unit_is_that_of_the_normed_input(rows, dtype, activation):
    x, weight = operands(rows, dtype, (0, 40), (26, 40))
    found = normed_glu(x, weight, eps=EPS, activation=activation, backend="triton")
    gate, value = functional.linear(srmsnorm_reference(x.double(), eps=EPS), weight.double()).chunk(2, -1)
    assert error(found, (functional.silu(gate) if activation == "silu" else gate) * value) < DTYPES[dtype]
    assert found.dtype == dtype


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("normed", [False, True])
def test_the_addition_follows_the_scale_of_the_squares(rows, dtype, normed):
    x, weight, residual = operands(rows, dtype, (0, 40), (13, 40), (0, 13))
    squares = torch.rand(rows, 5) if normed else None
    found = add_linear(residual, x, weight, squares, width=7, eps=EPS, backend="triton")
    scale = (squares.double().sum(-1, keepdim=True) / 7 + EPS).rsqrt() if normed else 1.0
    assert error(found, residual.double() + scale * functional.linear(x.double(), weight.double())) < DTYPES[dtype]


def test_gradients_biases_and_many_rows_take_the_matmul(monkeypatch):
    x, weight, bias = torch.randn(1, 8), torch.randn(6, 8), torch.randn(6)
    monkeypatch.setattr("megalin.ops.decoding.few_rows._linear", lambda *_: pytest.fail("the kernel ran"))
    assert torch.equal(few_row_linear(x, weight, bias, backend="triton"), functional.linear(x, weight, bias))
    many = x.expand(MAX_ROWS + 1, 8)
    assert torch.equal(few_row_linear(many, weight, backend="triton"), functional.linear(many, weight))
    with torch.enable_grad():
        y = few_row_linear(x.requires_grad_(), weight, backend="triton")
        torch.testing.assert_close(torch.autograd.grad(y.sum(), x)[0], weight.sum(0, keepdim=True))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.ones(1, 8).double()}, "decode_linear: the triton kernel does not take dtypes torch.float64"),
        ({"weight": torch.ones(8, 6).T}, "decode_linear: the triton kernel does not take a weight that is not contig"),
        ({"x": torch.ones(1, 16392), "weight": torch.ones(6, 16392)}, "a width of 16392, above 16384"),
    ],
)
def test_what_the_kernel_does_not_take_is_refused(change, message):
    arguments = {"x": torch.ones(1, 8), "weight": torch.ones(6, 8), **change}
    with pytest.raises(KernelError, match=message):
        few_row_linear(arguments["x"], arguments["weight"], backend="triton")


def test_shapes_that_do_not_agree_are_refused():
    with pytest.raises(OperandError, match="normed_glu: weight has shape"):
        normed_glu(torch.ones(1, 8), torch.ones(6, 9), eps=EPS, activation="none")
    with pytest.raises(OperandError, match="add_linear: weight has shape"):
        add_linear(torch.ones(1, 5), torch.ones(1, 8), torch.ones(6, 8))
