"""Kernels of the selective scan on a GPU against fp64: lengths, decays, dtypes, widths, shards, equal bits."""

import pytest
import torch

from megalin.ops.scans.context_parallel import SingleProcessExchange
from megalin.ops.scans.selective_scan import selective_scan, selective_scan_reference
from tests.numerics import outputs_and_gradients, relative_error
from tests.ops.kernels import assert_as_good_as_the_reference
from tests.ops.scans.test_selective_scan import make_inputs


def documents_of(length):
    starts = torch.zeros(2, length, dtype=torch.int32)
    for row, places in enumerate(((15, 63, 64, 500), (20, 70, 71, 100, 128, 900))):
        starts[row, [place for place in places if place < length]] = 1
    return starts.cumsum(1, dtype=torch.int32).cuda()


def check(length, decay, dtype, *, width=72, states=16, documents=None):
    inputs = make_inputs(length, decay, dtype, width=width, states=states)
    inputs = {name: x.cuda() for name, x in inputs.items()}

    def kernel(**x):
        return selective_scan(**x, document_ids=documents, backend="triton")

    assert_as_good_as_the_reference(kernel, lambda **x: selective_scan_reference(**x, document_ids=documents), inputs)
    first, second = (outputs_and_gradients(kernel, inputs) for _ in range(2))
    assert not [name for name in first if not torch.equal(first[name], second[name])]


@pytest.mark.parametrize("length", [1, 63, 64, 65, 1000, 4096])
@pytest.mark.parametrize("packed", [False, True])
def test_lengths_and_documents(length, packed):
    check(length, 0.1, torch.bfloat16, documents=documents_of(length) if packed else None)


@pytest.mark.parametrize("decay", [0.0, 1e-3, 1.0, 20.0])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_decays(decay, dtype):
    check(700, decay, dtype)


@pytest.mark.parametrize(("width", "states"), [(3, 1), (17, 5), (1536, 16), (40, 64), (10, 128)])
def test_widths(width, states):
    check(300, 0.1, torch.bfloat16, width=width, states=states, documents=documents_of(300))


def test_three_shards_equal_the_sequence():
    inputs = make_inputs(2100, 0.003, torch.bfloat16, width=72, states=16, batch=1)
    inputs = {name: x.cuda() for name, x in inputs.items() if name != "initial_state"}
    ids = (torch.arange(2100, device="cuda") >= 1600).int()
    shard = SingleProcessExchange().sequence_shard(ids.view(3, 700))
    cut = {name: x if name == "rates" else x.view(3, 700, -1) for name, x in inputs.items()}
    found = selective_scan(**cut, shard=shard, document_ids=ids.view(3, 700), backend="triton").output
    exact = selective_scan_reference(**{name: x.double() for name, x in inputs.items()}, document_ids=ids[None])
    assert relative_error(found.flatten(0, 1)[None], exact.output) <= 7.8e-3
