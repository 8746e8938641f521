"""LRPE in segments: the gradient of its frequencies over a long row, which the row's own positions lose in rounding."""

import pytest
import torch

from tests.layers.lrpe import frequency_gradient
from tests.numerics import relative_error


@pytest.mark.parametrize("form", ["cosine", "rotation"])
@pytest.mark.parametrize("length", [1024, 1000])
def test_the_rounding_of_the_gradient_does_not_grow_with_the_row(form, length):
    """Of the first head, which has the highest frequencies and forgets most."""
    exact = frequency_gradient(form, length, torch.float64)
    assert relative_error(frequency_gradient(form, length, torch.float64, whole_row=True), exact) < 1e-11
    for dtype, bound in ((torch.float32, 2e-5), (torch.bfloat16, 0.2)):
        found, whole = (frequency_gradient(form, length, dtype, whole_row=row)[0] for row in (False, True))
        error = relative_error(found, exact[0])
        assert error < bound
        assert error < relative_error(whole, exact[0]) / 5
