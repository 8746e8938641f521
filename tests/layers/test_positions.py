"""Initial frequencies of LRPE, which span the whole model width."""

import pytest
import torch

from tests.cases import CASES, HIDDEN_SIZE, NUM_HEADS, build


@pytest.mark.parametrize(
    ("name", "width", "step"),
    [
        ("transnormer-cosine", HIDDEN_SIZE // NUM_HEADS, 2.0 / HIDDEN_SIZE),
        ("transnormer-rotation", HIDDEN_SIZE // NUM_HEADS // 2, 2.0 / HIDDEN_SIZE),
    ],
)
def test_initial_frequencies_fall_head_by_head(name, width, step):
    model = build(next(case for case in CASES if case.name == name).model)
    for mixer in model.mixers()[::2]:
        theta = mixer.full_precision.theta
        assert theta.shape == (NUM_HEADS, width)
        expected = [10000.0 ** (-step * j) for j in range(NUM_HEADS * width)]
        torch.testing.assert_close(theta.detach().flatten(), torch.tensor(expected).double(), rtol=1e-6, atol=0)


def test_mixers_receive_a_copy_of_the_frequencies():
    """The memory of a sharded parameter is freed after use, so the mixer must not read the parameter itself."""
    mixer = build(CASES[2].model).mixers()[0]
    (theta,) = mixer.full_precision()
    assert theta.data_ptr() != mixer.full_precision.theta.data_ptr()
    theta.sum().backward()
    assert mixer.full_precision.theta.grad.eq(1).all()
