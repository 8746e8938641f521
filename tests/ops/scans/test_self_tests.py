"""Self-tests of the scans, in the interpreter: they pass, and find a tile that is wrong at the call's own widths."""

from __future__ import annotations

from contextlib import ExitStack

import pytest
import torch

from megalin.ops.scans.context_parallel import SingleProcessExchange
from tests.ops.self_tests import CASES, self_test, wrong_tile

slow = pytest.mark.slow

SPLIT = [op for op in CASES if op.startswith("split_")]
QUICK = ("decay_state", "decay_step", "vector_decay_step")

WRONG = [
    ("vector_decay_scan", "output 0", ("forward_kernel", "output_ptr", 64)),
    ("vector_decay_scan", "output 1", ("forward_kernel", "final_ptr", 64)),
    ("vector_decay_scan", "output 0", ("scores_kernel", "q_start_ptr", 64)),
    ("vector_decay_scan", "gradient 0", ("gradients_kernel", "dq_ptr", 64)),
    ("vector_decay_scan", "gradient 1", ("gradients_kernel", "dk_ptr", 64)),
    ("vector_decay_scan", "gradient 2", ("reverse_kernel", "dv_ptr", 64)),
    ("vector_decay_scan", "gradient 3", ("gradients_kernel", "dg_ptr", 64)),
    ("vector_decay_scan", "gradient 4", ("reverse_kernel", "dinitial_ptr", 64)),
    ("forget_gate_scan", "gradient 1", ("gradients_kernel", "dk_ptr", 64, -1, {"GATES": True})),
    ("forget_gate_scan", "gradient 3", ("mild_gate_gradients_kernel", "dbound_ptr", 64)),
    ("scalar_decay_scan", "output 0", ("scan_kernel", "o_tiles", 32)),
    ("scalar_decay_scan", "output 1", ("scan_kernel", "leaving_ptr", 32)),
    ("scalar_decay_scan", "gradient 0", ("carried_kernel", "out_tiles", 64)),
    ("scalar_decay_scan", "gradient 1", ("carried_kernel", "out_tiles", 64, -1, {"REVERSE": True})),
    ("scalar_decay_scan", "gradient 2", ("scan_kernel", "o_tiles", 32, -1, {"REVERSE": True})),
    ("scalar_decay_scan", "gradient 3", ("carried_kernel", "carried_ptr", 128, -1, {"KEY": 128})),
    ("scalar_decay_scan", "gradient 4", ("scan_kernel", "leaving_ptr", 32, -1, {"REVERSE": True})),
    ("scalar_decay_scan", "output 0", ("fold_kernel", "states_ptr", 32)),
    ("decay_scan", "output 0", ("scan_kernel", "o_tiles", 64)),
    ("decay_scan", "output 1", ("scan_kernel", "leaving_ptr", 64)),
    ("decay_scan", "gradient 0", ("scan_kernel", "o_tiles", 64, -1, {"TRANSPOSED": True, "REVERSE": False})),
    ("decay_scan", "gradient 1", ("scan_kernel", "o_tiles", 64, -1, {"TRANSPOSED": True, "REVERSE": True})),
    ("decay_scan", "gradient 2", ("scan_kernel", "o_tiles", 64, -1, {"TRANSPOSED": False, "REVERSE": True})),
    ("decay_scan", "gradient 3", ("scan_kernel", "leaving_ptr", 64, -1, {"REVERSE": True})),
    ("decay_scan", "output 0", ("fold_kernel", "states_ptr", 64)),
    ("decay_state", "output 0", ("block_state_kernel", "added_ptr", 64, -2)),
    ("decay_state", "gradient 0", ("gradient_kernel", "dk_tiles", 64)),
    ("decay_state", "gradient 1", ("gradient_kernel", "dv_tiles", 64)),
    ("selective_scan", "output 0", ("forward_kernel", "o_ptr", 16)),
    ("selective_scan", "output 1", ("forward_kernel", "state_ptr", 16, 1, {"KIND": "scan"})),
    ("selective_scan", "gradient 0", ("gradient_kernel", "dq_ptr", 1, 1)),
    ("selective_scan", "gradient 1", ("gradient_kernel", "dk_ptr", 1, 1)),
    ("selective_scan", "gradient 2", ("gradient_kernel", "dv_ptr", 16)),
    ("selective_scan", "gradient 3", ("gradient_kernel", "dstep_ptr", 16)),
    ("selective_scan", "gradient 4", ("gradient_kernel", "drates_ptr", 16, -2)),
    ("selective_scan", "gradient 5", ("gradient_kernel", "dentering_ptr", 16, 1)),
    ("short_conv", "output 0", ("forward_kernel", "y_ptr", 128)),
    ("short_conv", "output 1", ("forward_kernel", "next_ptr", 128)),
    ("short_conv", "gradient 0", ("backward_kernel", "dx_ptr", 128)),
    ("short_conv", "gradient 1", ("sum_kernel", "dweight_ptr", 128, 0)),
    ("short_conv", "gradient 2", ("sum_kernel", "dbias_ptr", 128)),
    ("short_conv", "gradient 3", ("backward_kernel", "dstate_ptr", 128)),
    ("projected_conv", "gradient 0", ("backward_kernel", "dx_ptr", 128)),
    ("tpe", "output 0", ("states_kernel", "state_ptr", 64, -1, {"REVERSE": False})),
    ("tpe", "output 1", ("scan_kernel", "leaving_ptr", 64)),
    ("tpe", "gradient 0", ("states_kernel", "state_ptr", 64, -1, {"REVERSE": True})),
    ("tpe", "gradient 1", ("gradient_kernel", "dcoefficients_ptr", 64)),
    ("tpe", "gradient 2", ("gradient_kernel", "dslope_ptr", 64)),
    ("decay_step", "output 0", ("step_kernel", "o_ptr", 64)),
    ("decay_step", "output 1", ("step_kernel", "next_ptr", 64)),
    ("vector_decay_step", "output 0", ("step_kernel", "output_ptr", 64)),
    ("vector_decay_step", "output 1", ("step_kernel", "next_ptr", 64, -2)),
]
"""The op, the first tensor that is wrong, and the tile: kernel, result, index, dimension and constants."""

FAST = {
    ("vector_decay_scan", "gradient 3"),
    ("scalar_decay_scan", "gradient 1"),
    ("decay_scan", "gradient 2"),
    ("decay_state", "gradient 1"),
    ("decay_step", "output 1"),
    ("vector_decay_step", "output 1"),
}


def plant(stack, op, tile):
    """Plants a wrong tile, of an op whose wide case has more than one."""
    kernel, argument, first, dim, constants = (*tile, *(-1, {})[len(tile) - 3 :])
    stack.enter_context(wrong_tile(kernel, argument, first, dim, **constants))


@pytest.mark.parametrize(
    ("op", "wrong", "tile"),
    [
        pytest.param(
            *row, marks=[slow] * ((row[:2] not in FAST) or row[2][0] == "fold_kernel"), id=f"{row[0]} {row[2]}"
        )
        for row in WRONG
    ],
)
def test_a_wrong_tile_is_found(op, wrong, tile):
    with ExitStack() as stack:
        plant(stack, op, tile)
        assert self_test(op, CASES[op][0]).startswith(f"self-test: {wrong} is off by ")


@pytest.mark.parametrize("op", [pytest.param(op, marks=[slow] * (op not in QUICK)) for op in CASES])
def test_the_right_tiles_pass(op):
    assert self_test(op, CASES[op][0]) == ""


@pytest.mark.parametrize(
    "op", [pytest.param(op, marks=[slow] * (op not in QUICK)) for op in dict.fromkeys(row[0] for row in WRONG)]
)
def test_a_narrow_case_does_not_find_the_wrong_tiles(op):
    """As with the fixed cases of one tile that self-tests had before they took the widths of the call."""
    with ExitStack() as stack:
        for name, _, tile in WRONG:
            if name == op:
                plant(stack, op, tile)
        assert self_test(op, CASES[op][1]) == ""


@pytest.mark.parametrize("method", ["entering", "leaving_gradient"])
@pytest.mark.parametrize("op", [pytest.param(op, marks=[slow] * (op != "split_decay_scan")) for op in SPLIT])
def test_a_lost_state_exchange_is_found(op, method, monkeypatch):
    monkeypatch.setattr(SingleProcessExchange, method, lambda self, x, transition, documents: torch.zeros_like(x))
    assert "is off by" in self_test(op, CASES[op][1])
