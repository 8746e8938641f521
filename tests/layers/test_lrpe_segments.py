"""LRPE in segments: accurate gradients of its frequencies, which positions over a long sequence lose in rounding."""

import pytest
import torch

from tests.layers.lrpe import frequency_gradient
from tests.numerics import relative_error


@pytest.mark.parametrize("form", ["cosine", "rotation"])
@pytest.mark.parametrize("length", [1024, 1000])
def test_the_rounding_of_the_gradient_does_not_grow_with_the_length(form, length):
    """The first head has the highest frequencies and the strongest decay."""
    exact = frequency_gradient(form, length, torch.float64)
    assert relative_error(frequency_gradient(form, length, torch.float64, whole_sequence=True), exact) < 1e-11
    for dtype, bound in ((torch.float32, 2e-5), (torch.bfloat16, 0.2)):
        found, whole = (frequency_gradient(form, length, dtype, whole_sequence=flag)[0] for flag in (False, True))
        error = relative_error(found, exact[0])
        assert error < bound
        assert error < relative_error(whole, exact[0]) / 5
