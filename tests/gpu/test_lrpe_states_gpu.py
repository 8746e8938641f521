"""States that rotate with LRPE on a GPU against fp64: forms, widths, documents, many segments, equal bits.

Also their purpose: accurate gradients of the frequencies over long sequences in bf16.
"""

import pytest
import torch

from megalin.ops.positions.lrpe_states import enter_segments
from tests.layers.lrpe import frequency_gradient
from tests.numerics import outputs_and_gradients, relative_error
from tests.ops.kernels import assert_as_good_as_the_reference

every_form = pytest.mark.parametrize("form", ["cosine", "rotation"])


@every_form
@pytest.mark.parametrize("packed", [False, True], ids=["one document", "packed"])
@pytest.mark.parametrize("entered", [False, True], ids=["from zero", "from a state"])
@pytest.mark.parametrize(
    ("batch", "segments", "key", "value"), [(2, 1, 128, 128), (2, 64, 128, 128), (1, 33, 256, 128), (2, 5, 24, 200)]
)
def test_the_kernels_are_as_good_as_the_reference(form, packed, entered, batch, segments, key, value):
    heads, length = 3, 64
    inputs = {
        "added": torch.randn(batch, segments, heads, key, value).cuda(),
        "theta": torch.rand(heads, key // 2).cuda(),
    }
    if entered:
        inputs["initial"] = torch.randn(batch, heads, key, value).cuda()
    ids = (torch.arange(segments * length) * 7 // (segments * length)).repeat(batch, 1).cuda() if packed else None
    slopes = torch.tensor([0.0, 0.01, 1.0]).cuda()

    def run(added, theta, backend, initial=None):
        options = {"form": form, "length": length, "document_ids": ids, "backend": backend}
        return enter_segments(added, theta, slopes.to(added.dtype), initial=initial, **options)

    def kernel(**x):
        return run(**x, backend="triton")

    assert_as_good_as_the_reference(kernel, lambda **x: run(**x, backend="reference"), inputs)
    first, second = (outputs_and_gradients(kernel, inputs) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


@every_form
@pytest.mark.parametrize("length", [512, 8192, 8191])
def test_frequencies_learn_from_gradients_not_from_rounding(form, length):
    exact = frequency_gradient(form, length, torch.float64, device="cuda")
    found = frequency_gradient(form, length, torch.bfloat16, device="cuda")
    assert relative_error(found[0], exact[0]) < 0.2  # of the first head, with the strongest decay
