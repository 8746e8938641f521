"""Kernels of the state on a GPU against fp64: lengths, decays, widths, documents, equal bits."""

import pytest
import torch

from megalin.ops.scans.states import decay_state, decay_state_reference
from tests.gpu.test_fixed_decay_gpu import SLOPES, documents_of
from tests.numerics import outputs_and_gradients
from tests.ops.kernels import assert_as_good_as_the_reference


@pytest.mark.parametrize("decay", SLOPES)
@pytest.mark.parametrize("packed", [False, True], ids=["one document", "packed"])
@pytest.mark.parametrize(
    ("length", "key", "value"),
    [
        (1, 128, 128),
        (63, 128, 128),
        (64, 128, 128),
        (65, 256, 128),
        (300, 256, 256),
        (1000, 80, 24),
        (4096, 128, 128),
        (131072, 128, 64),
    ],
)
def test_the_kernel_is_as_good_as_the_reference(length, key, value, packed, decay):
    inputs = {
        name: torch.randn(2, length, 3, width).bfloat16().cuda() for name, width in {"k": key, "v": value}.items()
    }
    slopes = None if SLOPES[decay] is None else torch.tensor(SLOPES[decay]).cuda()
    ids = documents_of(length) if packed else None

    def kernel(**x):
        return [decay_state(slopes=slopes, document_ids=ids, backend="triton", **x)]

    def reference(**x):
        return [decay_state_reference(slopes=slopes, document_ids=ids, **x)]

    assert_as_good_as_the_reference(kernel, reference, inputs)
    first, second = (outputs_and_gradients(kernel, inputs) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)
