"""Triton kernels of the scalar-decay scan in the interpreter: default blocks, extreme decays, refused arguments."""

import pytest
import torch

from megalin.errors import KernelError
from megalin.ops.scans.scalar_decay import scalar_decay_scan
from tests.numerics import outputs_and_gradients
from tests.ops.scans.scans import SHARED_KEYS, Case, compare, initial_state, make_inputs
from tests.ops.scans.test_fixed_decay import documents_of


def test_states_pass_between_blocks():
    from megalin._triton.scans import scalar_decay as kernels

    case = Case(520, key=16, value=16, decay=0.01, dtype=torch.bfloat16)
    inputs, _ = make_inputs(SHARED_KEYS, case)
    assert kernels.saved_shape(inputs["k"], inputs["v"])[2] > 1
    compare(SHARED_KEYS, case, documents_of(((100,),), 520))


def test_extreme_decay_stays_finite():
    case = Case(100, key=24, value=40, dtype=torch.bfloat16)
    inputs = make_inputs(SHARED_KEYS, case)[0] | initial_state(case)
    inputs["log_decay"] = torch.full_like(inputs["log_decay"], -500.0)
    found = outputs_and_gradients(lambda **x: scalar_decay_scan(backend="triton", **x), inputs)
    assert all(x.isfinite().all() for x in found.values())


def test_unsupported_arguments_are_refused():
    x, _ = make_inputs("scalar_decay_scan", Case(3, key=24, value=40))
    with pytest.raises(KernelError, match="the triton kernel does not take 1 heads of q but 2 of k"):
        scalar_decay_scan(**x | {"q": x["q"][:, :, :1]}, backend="triton")
    with pytest.raises(KernelError, match="does not take heads of 136 values, above 128"):
        scalar_decay_scan(**make_inputs("scalar_decay_scan", Case(3, key=24, value=136))[0], backend="triton")
