"""Decay tables against the published numbers."""

import math

import pytest
import torch

from megalin.layers.decay import alibi_slopes, decay_slopes


def factors(kind: str, **place: int) -> list[float]:
    return torch.exp(-decay_slopes(kind, **place)).tolist()


@pytest.mark.parametrize(
    ("kind", "expected"), [("paper", [0.384, 0.0216, 0.00047]), ("alibi", [0.6065, 0.9394, 0.9961])]
)
def test_first_layer_of_eight_heads_and_24_layers(kind, expected):
    table = factors(kind, layer=0, num_layers=24, num_heads=8)
    assert [table[h - 1] for h in (1, 4, 8)] == pytest.approx(expected, rel=2e-2 if kind == "paper" else 1e-4)
    assert [table[h - 1] for h in (1, 4, 8)] == pytest.approx(
        [math.exp(-h * 23 / 24) if kind == "paper" else math.exp(-(2.0**-h) * (1 + 1e-5)) for h in (1, 4, 8)], rel=1e-14
    )


@pytest.mark.parametrize("num_heads", [1, 2, 8, 64])
def test_slopes_of_a_power_of_two_are_geometric(num_heads):
    assert alibi_slopes(num_heads) == [2.0 ** (-8.0 * h / num_heads) for h in range(1, num_heads + 1)]


def test_slopes_of_twelve_heads_interleave():
    slopes = alibi_slopes(12)
    assert slopes[:8] == [2.0**-h for h in range(1, 9)]
    assert slopes[8:] == pytest.approx([0.7071, 0.3536, 0.1768, 0.0884], rel=1e-3)


def test_slopes_of_twenty_heads_interleave():
    slopes = alibi_slopes(20)
    assert slopes[:16] == pytest.approx([2.0 ** (-i / 2) for i in range(1, 17)], rel=1e-15)
    assert slopes[16:] == pytest.approx([0.8409, 0.5946, 0.4204, 0.2973], rel=1e-3)


@pytest.mark.parametrize("num_heads", [3, 5, 12, 20, 40, 96])
def test_every_head_has_a_slope_of_its_own(num_heads):
    slopes = alibi_slopes(num_heads)
    assert len(set(slopes)) == len(slopes) == num_heads
    assert all(0 < slope < 1 for slope in slopes)


def test_last_layer():
    """The paper's last layer has no decay, that of the released checkpoints almost none."""
    assert decay_slopes("paper", layer=23, num_layers=24, num_heads=8).eq(0).all()
    alibi = decay_slopes("alibi", layer=23, num_layers=24, num_heads=8)
    assert alibi.tolist() == pytest.approx([1e-5 * 2.0**-h for h in range(1, 9)], rel=1e-9)


def test_a_single_layer_divides_by_nothing():
    assert decay_slopes("alibi", layer=0, num_layers=1, num_heads=2).tolist() == pytest.approx(
        [(1 + 1e-5) / 16, (1 + 1e-5) / 256], rel=1e-14
    )
    assert decay_slopes("paper", layer=0, num_layers=1, num_heads=2).eq(0).all()
