"""Self-tests of all ops but the scans, in the interpreter: they pass, and find a wrong tile."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from megalin._triton.norms import layer_norm as kernels
from megalin.ops.dispatch import backend as backends
from tests.ops import self_tests
from tests.ops.self_tests import self_test, wrong_tile

BF16, FP32 = torch.bfloat16, torch.float32

ROWS = {"D": 300, "x": BF16, "weight": BF16, "gate": BF16}
STEP = {"P": 4, "H": 1, "K": 32, "V": 32, "parts": BF16, "state": FP32, "slopes": FP32, "gate": None}
STEP |= {"positions": torch.int64, "form": "rotation", "unnormed": 40}
LINEAR = {"rows": 2, "N": 40, "K": 300, "sums": 0, "width": 1, "x": BF16}
CASES = {
    "adamw_update": {"compute": BF16},
    "add_layer_norm": ROWS | {"addend": BF16, "bias": BF16, "sum_gradient": True},
    "layer_norm": ROWS | {"bias": BF16},
    "rms_norm": ROWS,
    "srmsnorm": ROWS,
    "gated_squares": ROWS | {"gate_first": True},
    "skip_gated_squares": ROWS | {"skip": BF16, "factor": FP32},
    "max_norm": ROWS | {"scaled": False, "heads": 2},
    "gated_layer_norm": ROWS | {"bias": BF16, "gate_activation": "sigmoid"},
    "gated_product": {"W": 600, "gate_value": BF16, "activation": "silu"},
    "low_rank_gate": {"D": 40, "L": 12, "x": BF16, "code": BF16, "weight": BF16, "bias": BF16},
    "forget_gates": {"D": 40, "logit": BF16},
    "scaled_heads": {"P": 40, "x": BF16},
    "rope": {"H": 2, "K": 24, "x": BF16, "positions": torch.int64},
    "silu_lrpe": {"P": 3, "H": 2, "K": 24, "projection": BF16, "positions": torch.int64, "form": "cosine"},
    "enter_segments": {"H": 2, "K": 8, "V": 24, "initial": FP32, "form": "rotation"},
    "linear_cross_entropy": {"V": 3000, "x": BF16},
    "quantized_gated_product": {"F": 200, "x": BF16},
    "quantize_rows": {"contiguous": 200, "by_rows": False, "x": FP32},
    "draw_tokens": {"V": 3000, "logits": BF16},
    "decode_linear": LINEAR | {"form": "silu"},
    "gated_decay_step": STEP,
    "gated_vector_step": STEP | {"bound": FP32, "query_activation": "silu", "silu_value": True},
}
MORE = {
    "adamw_update": {"compute": FP32},
    "add_layer_norm": ROWS | {"addend": None, "bias": BF16, "sum_gradient": True},
    "max_norm": ROWS | {"scaled": True, "heads": 0},
    "gated_layer_norm": ROWS | {"bias": BF16, "gate": None, "gate_activation": "none"},
    "gated_squares": {"D": 300, "x": FP32, "weight": None, "gate": None, "gate_first": False},
    "silu_lrpe": CASES["silu_lrpe"] | {"form": None},
    "decode_linear": LINEAR | {"form": "add", "rows": 5, "sums": 3, "width": 120},
    "quantize_rows": CASES["quantize_rows"] | {"by_rows": True, "x": BF16},
    "gated_decay_step": STEP | {"P": 3, "gate": BF16, "form": None, "unnormed": 0},
}
"""Other forms of some."""


@pytest.mark.parametrize(("op", "items"), [*CASES.items(), *MORE.items()])
def test_the_right_tiles_pass(op, items):
    assert self_test(op, items) == ""


@pytest.mark.parametrize("sum_gradient", [True, False])
def test_the_self_test_of_a_sum_runs_the_backward_of_its_case(sum_gradient):
    """As a training step does: a kernel reads the gradient of the sum only where the case has one."""
    read = []
    backward = kernels.backward

    def recorded(dy, dtotal, *others, **options):
        read.append(dtotal is not None)
        return backward(dy, dtotal, *others, **options)

    with mock.patch.object(kernels, "backward", recorded):
        assert self_test("add_layer_norm", CASES["add_layer_norm"] | {"sum_gradient": sum_gradient}) == ""
    assert read == [sum_gradient] * 2


def test_every_op_with_a_triton_kernel_has_a_case():
    backends._register_all()
    assert {op for op, kernel in backends._kernels.items() if "triton" in kernel.order} == {*CASES, *self_tests.CASES}


@pytest.mark.parametrize(
    ("op", "wrong", "tile"),
    [
        ("rms_norm", "output 0", ("forward_kernel", "y_ptr", 256)),
        ("rms_norm", "gradient 0", ("backward_kernel", "dx_ptr", 256)),
        ("add_layer_norm", "output 1", ("forward_kernel", "total_ptr", 256)),
        ("layer_norm", "gradient 0", ("backward_kernel", "dx_ptr", 256)),
        ("srmsnorm", "gradient 0", ("backward_kernel", "dx_ptr", 256)),
        ("gated_product", "output 0", ("forward_kernel", "product_ptr", 256)),
        ("linear_cross_entropy", "gradient 0", ("gradient_kernel", "logits_ptr", 2048)),
    ],
    ids=str,
)
def test_a_wrong_tile_is_found(op, wrong, tile):
    with wrong_tile(*tile):
        assert self_test(op, CASES[op]).startswith(f"self-test: {wrong} is off by ")
