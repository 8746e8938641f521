"""Kernels of norms on a GPU against fp64: every backend, dtype and kind of width, and strided rows."""

import functools

import pytest
import torch

from megalin.ops.dispatch import backend as backends
from megalin.ops.norms.gated_layer_norm import gated_layer_norm, gated_layer_norm_reference
from megalin.ops.norms.gated_squares import gated_squares, gated_squares_reference
from megalin.ops.norms.layer_norm import (
    MAX_WIDTH,
    add_layer_norm,
    add_layer_norm_reference,
    layer_norm,
    layer_norm_reference,
)
from megalin.ops.norms.max_norm import encoded_max_norm, encoded_max_norm_reference, max_norm, max_norm_reference
from megalin.ops.norms.rms_norm import rms_norm, rms_norm_reference
from megalin.ops.norms.srmsnorm import srmsnorm, srmsnorm_reference
from tests.numerics import outputs_and_gradients
from tests.ops.kernels import assert_as_good_as_the_reference

WIDTHS = {
    torch.bfloat16: [3, 33, 64, 257, 1024, 2056, 4096, 5120, 8192, 9001, 12288, 16384],
    torch.float32: [3, 200, 1024, 4100, 12288, 16384],
    torch.float16: [3, 1000, 2048, 16384],
}
ROWS = 300


def _rows(width, dtype):
    """Random rows with a single largest magnitude each: backends choose differently among equal ones."""
    x = torch.randn(ROWS, width, device="cuda")
    x[torch.arange(ROWS), torch.arange(ROWS) * 7919 % width] = -10.0
    return x.to(dtype)


def _encoded(function, x, *, packed, **options):
    """The norm of 20 sequences of 15 tokens at equal positions; packed: each at its own positions."""
    positions = torch.arange(15, device=x.device) * 200
    if packed:
        positions = positions + torch.arange(20, device=x.device)[:, None]
    factor = torch.linspace(0.0, 1.0, 20, device=x.device, dtype=torch.promote_types(x.dtype, torch.float32))
    heads = 4 if x.shape[-1] % 4 == 0 else 1
    return function(x.view(20, 15, -1), factor[:, None], positions, num_heads=heads, **options)


def _scaled(function, x, **options):
    return function(x, eps=1e-2, scale=torch.tensor(0.03, device=x.device), **options)


OPS = {
    "srmsnorm": (functools.partial(srmsnorm, eps=1e-6), functools.partial(srmsnorm_reference, eps=1e-6)),
    "max_norm": (functools.partial(max_norm, eps=1e-3), functools.partial(max_norm_reference, eps=1e-3)),
    "max_norm, scaled": (functools.partial(_scaled, max_norm), functools.partial(_scaled, max_norm_reference)),
} | {
    name: (
        functools.partial(_encoded, encoded_max_norm, packed=packed, num_positions=3000, eps=1e-3),
        functools.partial(_encoded, encoded_max_norm_reference, packed=packed, eps=1e-3),
    )
    for name, packed in (("encoded_max_norm", False), ("encoded_max_norm, packed", True))
}


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(("dtype", "width"), [(dtype, width) for dtype in WIDTHS for width in WIDTHS[dtype]])
@pytest.mark.parametrize("backend", ["triton", "cuda"])
def test_every_width_is_as_good_as_the_reference(op, dtype, width, backend):
    function, reference = OPS[op]
    x = {"x": _rows(width, dtype)}
    kernel = lambda x: [function(x, backend=backend)]  # noqa: E731
    assert_as_good_as_the_reference(kernel, lambda x: [reference(x)], x)
    first, second = outputs_and_gradients(kernel, x), outputs_and_gradients(kernel, x)
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("op", ["srmsnorm", "max_norm"])
@pytest.mark.parametrize("backend", ["triton", "cuda"])
def test_strided_and_unaligned_rows_are_taken(op, backend):
    function, reference = OPS[op]
    x = {"x": torch.randn(6 * 5 * 128 + 1, device="cuda", dtype=torch.bfloat16)}
    x["x"][1::32] = 10.0 + torch.rand(120, device="cuda").argsort() / 4
    views = {
        "transposed": lambda x: x[1:].view(6, 5, 128).transpose(0, 1),
        "every second": lambda x: x[1:].view(6, 5, 128)[..., ::2],
        "odd start": lambda x: x[1:].view(6, 5, 128),
    }
    for view in views.values():
        assert_as_good_as_the_reference(
            lambda x, v=view: [function(v(x), backend=backend)], lambda x, v=view: [reference(v(x))], x
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("backend", ["triton", "cuda"])
def test_angles_are_exact_far_from_the_start(dtype, backend):
    """Only the cosine and the result are rounded, where fp32 angles would be off by 1e-3."""
    positions = torch.tensor([0, 1, 4095, 4096, 65537, 99991, 131071], device="cuda")
    x, factor = torch.randn(3, 7, 768, device="cuda").to(dtype), torch.rand(3, 7, device="cuda")
    found = encoded_max_norm(x, factor, positions, num_positions=131072, num_heads=1, eps=1e-3, backend=backend)
    truth = encoded_max_norm_reference(x.double(), factor.double(), positions, num_heads=1, eps=1e-3)
    error = ((found.double() - truth).norm(dim=-1) / truth.norm(dim=-1)).max()
    assert error <= {torch.float32: 2e-7, torch.bfloat16: 2.5e-3}[dtype]


@pytest.mark.parametrize("dtype", WIDTHS)
def test_weighted_and_gated_rows_are_as_good_as_the_reference(dtype):
    for width in (33, 200, 1024, 2056, 5120, 16384):
        inputs = {
            "x": torch.randn(3000, width, device="cuda").to(dtype),
            "gate": torch.randn(3000, width, device="cuda").to(dtype),
            "weight": torch.randn(width, device="cuda").to(dtype),
        }
        for first in (False, True):
            assert_as_good_as_the_reference(
                lambda first=first, **x: gated_squares(**x, gate_first=first, backend="triton"),
                lambda first=first, **x: gated_squares_reference(**x, gate_first=first),
                inputs,
            )
        del inputs["gate"]
        assert_as_good_as_the_reference(
            lambda x, weight: [rms_norm(x, weight, eps=1e-6, backend="triton")],
            lambda x, weight: [rms_norm_reference(x, weight, eps=1e-6)],
            inputs,
        )


@pytest.mark.parametrize(
    ("dtype", "width"), [(dtype, width) for dtype in WIDTHS for width in WIDTHS[dtype] if 3 < width <= MAX_WIDTH]
)
@pytest.mark.parametrize("rows", [1, ROWS, 1000])
def test_layer_norms_of_every_width_are_as_good_as_the_reference(dtype, width, rows):
    """But of three numbers: there rounding decides, and the reference in bf16 is off by 2 %."""
    sizes = {"x": (rows, width), "addend": (rows, width), "weight": (width,), "bias": (width,)}
    inputs = {name: torch.randn(*size, device="cuda").to(dtype) for name, size in sizes.items()}
    kernel = lambda **x: add_layer_norm(**x, eps=1e-6, backend="triton")  # noqa: E731
    assert_as_good_as_the_reference(kernel, lambda **x: add_layer_norm_reference(**x, eps=1e-6), inputs)
    first, second = outputs_and_gradients(kernel, inputs), outputs_and_gradients(kernel, inputs)
    assert all(torch.equal(first[name], second[name]) for name in first)
    for activation in ("none", "sigmoid"):
        options = {"eps": 1e-6, "gate_activation": activation}
        assert_as_good_as_the_reference(
            lambda addend, o=options, **x: [gated_layer_norm(gate=addend, **x, **o, backend="triton")],
            lambda addend, o=options, **x: [gated_layer_norm_reference(gate=addend, **x, **o)],
            inputs,
        )
    del inputs["addend"]
    assert_as_good_as_the_reference(
        lambda **x: add_layer_norm(addend=None, **x, eps=1e-6, backend="triton"),
        lambda **x: add_layer_norm_reference(addend=None, **x, eps=1e-6),
        inputs,
    )
    assert_as_good_as_the_reference(
        lambda **x: [layer_norm(**x, eps=1e-6, backend="triton")],
        lambda **x: [layer_norm_reference(**x, eps=1e-6)],
        inputs,
    )


def test_layer_norms_of_a_compiled_block_take_the_kernel():
    sizes = {"x": (2, 96, 256), "y": (2, 96, 256), "weight": (256,), "bias": (256,)}
    inputs = {name: torch.randn(*size, device="cuda") for name, size in sizes.items()}

    def block(x, y, weight, bias, backend="auto"):
        first = add_layer_norm(x, None, weight, bias, eps=1e-6, backend=backend)
        second = add_layer_norm(first.total, first.normed.tanh() * y, weight, bias, eps=1e-6, backend=backend)
        return [second.total + layer_norm(second.normed, weight, bias, eps=1e-6, backend=backend)]

    found = outputs_and_gradients(torch.compile(block, fullgraph=True), inputs)
    assert backends.used()["add_layer_norm"].backend == "triton"
    expected = outputs_and_gradients(functools.partial(block, backend="reference"), inputs)
    for name, truth in expected.items():
        assert (found[name] - truth).norm() <= 1e-5 * truth.norm(), name


def test_blocks_compile_whole_with_the_kernels_and_without():
    x, gate = (torch.randn(2, 96, 256, device="cuda", requires_grad=True) for _ in range(2))
    weight = torch.rand(256, device="cuda", requires_grad=True)

    def block(x, gate, weight, backend):
        x = max_norm(srmsnorm(x, eps=1e-6, backend=backend), eps=1e-3, backend=backend)
        parts = gated_squares(rms_norm(x, weight, eps=1e-6, backend=backend), gate, backend=backend)
        return parts.product * parts.squares[..., None]

    for backend in ("auto", "triton"):
        compiled = torch.compile(block, fullgraph=True)
        found = torch.autograd.grad(compiled(x, gate, weight, backend).square().sum(), (x, gate, weight))
        expected = torch.autograd.grad(block(x, gate, weight, "reference").square().sum(), (x, gate, weight))
        for actual, truth in zip(found, expected, strict=True):
            assert (actual - truth).norm() <= 1e-5 * truth.norm()
