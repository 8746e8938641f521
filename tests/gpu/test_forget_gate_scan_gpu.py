"""Scan of tied forget gates on a GPU against fp64: decays, dtypes, widths, documents, shards, equal bits."""

import pytest
import torch

from megalin.ops.gates.forget_gate_scan import forget_gate_scan, forget_gate_scan_reference
from megalin.ops.scans.context_parallel import SingleProcessExchange
from tests.gpu.test_vector_decay_gpu import documents_of
from tests.numerics import outputs_and_gradients
from tests.ops.gates.test_forget_gate_scan import ALL, SCALE, make_inputs
from tests.ops.kernels import assert_as_good_as_the_reference
from tests.ops.scans.scans import Case, initial_state


def check(case, *shifts, packed=False):
    documents = documents_of(case.length) if packed else None
    options = {"document_ids": documents, "scale": SCALE}
    inputs = {name: x.cuda() for name, x in (make_inputs(case, *shifts) | initial_state(case)).items()}

    def kernel(**x):
        return forget_gate_scan(**x, **options, backend="triton")

    assert_as_good_as_the_reference(kernel, lambda **x: forget_gate_scan_reference(**x, **options), inputs)
    first, second = (outputs_and_gradients(kernel, inputs) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("shifts", [("weak",), ("mild",), ALL], ids=str)
@pytest.mark.parametrize("length", [65, 1000])
def test_values_and_gradients_are_as_good_as_the_reference(length, shifts, packed):
    check(Case(length, 128, 128, dtype=torch.bfloat16, batch=2), *shifts, packed=packed)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("shifts", [("weak",), ALL], ids=str)
def test_values_and_gradients_in_other_dtypes(shifts, dtype):
    check(Case(300, 64, 64, dtype=dtype, batch=2), *shifts, packed=True)


@pytest.mark.parametrize(("key", "value"), [(20, 24), (72, 40), (256, 96)])
def test_any_width(key, value):
    check(Case(500, key, value, dtype=torch.bfloat16, batch=2), *ALL, packed=key == 72)


def test_shards_are_as_good_as_the_full_sequence():
    case = Case(1100, 128, 128, dtype=torch.bfloat16, ranks=3)
    shard_ids = (torch.arange(3300) >= 1400).int().view(3, 1100).cuda()
    shard = SingleProcessExchange().sequence_shard(shard_ids)
    inputs = {name: x.cuda() for name, x in make_inputs(case, "weak").items()}

    def kernel(bound, **x):
        x = {name: y.unflatten(1, (3, 1100))[0] for name, y in x.items()}
        options = {"scale": SCALE, "shard": shard, "document_ids": shard_ids, "backend": "triton"}
        return [forget_gate_scan(**x, bound=bound, **options).output.flatten(0, 1)[None]]

    def reference(**x):
        return [forget_gate_scan_reference(**x, scale=SCALE, document_ids=shard_ids.view(1, -1)).output]

    assert_as_good_as_the_reference(kernel, reference, inputs)
