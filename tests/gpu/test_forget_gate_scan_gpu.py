"""Scan of tied forget gates on a GPU against fp64: decays, dtypes, widths, documents, shards, equal bits."""

import importlib.util

import pytest
import torch

from megalin.ops.gates.forget_gate_scan import forget_gate_scan, forget_gate_scan_reference
from megalin.ops.scans.context_parallel import SingleProcessExchange
from megalin.ops.scans.fixed_decay_cuda import is_hopper
from tests.gpu.test_vector_decay_gpu import documents_of
from tests.numerics import outputs_and_gradients
from tests.ops.gates.test_forget_gate_scan import ALL, SCALE, make_inputs
from tests.ops.kernels import assert_as_good_as_the_reference
from tests.ops.scans.scans import Case, initial_state

COMPILED = pytest.mark.skipif(importlib.util.find_spec("megalin._C") is None, reason="the CUDA extension is not built")
BACKENDS = ["triton", pytest.param("cuda", marks=COMPILED)]
"""The one in CUDA C++ needs compute capability 9.0."""


@pytest.fixture(params=BACKENDS)
def backend(request):
    if request.param == "cuda" and not is_hopper():
        pytest.skip("needs compute capability 9.0")
    return request.param


def check(case, *shifts, packed=False, backend="triton"):
    documents = documents_of(case.length) if packed else None
    options = {"document_ids": documents, "scale": SCALE}
    inputs = {name: x.cuda() for name, x in (make_inputs(case, *shifts) | initial_state(case)).items()}

    def kernel(**x):
        return forget_gate_scan(**x, **options, backend=backend)

    assert_as_good_as_the_reference(kernel, lambda **x: forget_gate_scan_reference(**x, **options), inputs)
    first, second = (outputs_and_gradients(kernel, inputs) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("shifts", [("weak",), ("mild",), ALL], ids=str)
@pytest.mark.parametrize("length", [1, 65, 1000])
def test_values_and_gradients_are_as_good_as_the_reference(length, shifts, packed, backend):
    check(Case(length, 128, 128, dtype=torch.bfloat16, batch=2), *shifts, packed=packed, backend=backend)


def test_heads_of_64(backend):
    check(Case(1500, 64, 64, dtype=torch.bfloat16, batch=2), *ALL, packed=True, backend=backend)


def test_slices_of_a_projection_without_a_state(backend):
    """Tokens of the slices are not a multiple of 16 bytes apart."""
    inputs = {name: x.cuda() for name, x in make_inputs(Case(200, 128, 128, dtype=torch.bfloat16), "mild").items()}

    def kernel(logit, v, **x):
        wide = torch.cat([logit.flatten(2), v.flatten(2), v.flatten(2)[..., :1]], dim=-1)
        logit, v = (y.unflatten(2, v.shape[2:]) for y in wide[..., :-1].chunk(2, dim=-1))
        return [forget_gate_scan(logit=logit, v=v, **x, scale=SCALE, state_gradient=False, backend=backend).output]

    def reference(**x):
        return [forget_gate_scan_reference(**x, scale=SCALE).output]

    assert_as_good_as_the_reference(kernel, reference, inputs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("shifts", [("weak",), ALL], ids=str)
def test_values_and_gradients_in_other_dtypes(shifts, dtype):
    check(Case(300, 64, 64, dtype=dtype, batch=2), *shifts, packed=True)


@pytest.mark.parametrize(("key", "value"), [(20, 24), (72, 40), (256, 96)])
def test_any_width(key, value):
    check(Case(500, key, value, dtype=torch.bfloat16, batch=2), *ALL, packed=key == 72)


def test_shards_are_as_good_as_the_full_sequence(backend):
    case = Case(1100, 128, 128, dtype=torch.bfloat16, ranks=3)
    shard_ids = (torch.arange(3300) >= 1400).int().view(3, 1100).cuda()
    shard = SingleProcessExchange().sequence_shard(shard_ids)
    inputs = {name: x.cuda() for name, x in make_inputs(case, "weak").items()}

    def kernel(bound, **x):
        x = {name: y.unflatten(1, (3, 1100))[0] for name, y in x.items()}
        options = {"scale": SCALE, "shard": shard, "document_ids": shard_ids, "backend": backend}
        return [forget_gate_scan(**x, bound=bound, **options).output.flatten(0, 1)[None]]

    def reference(**x):
        return [forget_gate_scan_reference(**x, scale=SCALE, document_ids=shard_ids.view(1, -1)).output]

    assert_as_good_as_the_reference(kernel, reference, inputs)
