"""Statistics of gates against numpy, over batches, padding, and more heads than rows."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from megalin.inspection import statistics
from megalin.inspection.statistics import NUM_BINS, GateStatistics
from megalin.layers.gates import MixerGates


@pytest.mark.parametrize(("heads", "channels", "rows"), [(4, 3, 4), (1, 5, 5), (130, 2, 64), (1, 200, 64), (3, 1, 3)])
def test_selected_decays_of_two_batches_with_padding(monkeypatch, heads, channels, rows):
    monkeypatch.setattr(statistics, "_PIECE_ELEMENTS", 3 * heads * channels)  # several pieces a batch
    generator = torch.Generator().manual_seed(0)
    found, kept, gates = GateStatistics(), [], []
    for batch in range(2):
        decay = torch.rand(2, 7, heads, channels, generator=generator, dtype=torch.float64).sqrt()
        gate = torch.rand(2, 7, heads, 2, generator=generator) * 1.5
        valid = torch.arange(7).expand(2, 7) < torch.tensor([[4 + batch], [7]])
        found.add(MixerGates(decay.log(), gates={"input": gate}), valid)
        kept.append(decay[valid].numpy())
        gates.append(gate[valid].double().numpy())
    decays, result = np.concatenate(kept), found.result()
    assert (result.decay, result.num_heads, result.decays_per_head) == ("selected", heads, channels)
    np.testing.assert_allclose(result.half_life, math.log(2) / -np.log(decays).mean(0), rtol=1e-12)
    np.testing.assert_allclose(result.effective_length, 1 / (1 - decays.mean(0)), rtol=1e-12)
    assert result.summary.mean == pytest.approx(decays.mean())
    assert result.summary.standard_deviation == pytest.approx(decays.std())
    units = decays[:, 0] if heads == 1 else decays.mean(2)  # [N, units]
    places = np.arange(units.shape[1]) * rows // units.shape[1]
    assert result.first_units == [int(np.flatnonzero(places == row)[0]) for row in range(rows)]
    expected = [units[:, places == row].mean() for row in range(rows)]
    np.testing.assert_allclose(result.summary.row_means, expected, rtol=1e-12)
    of_row = decays[:, 0, places == 1] if heads == 1 else decays[:, places == 1]
    counts, _ = np.histogram(of_row, NUM_BINS, (0.0, 1.0))
    np.testing.assert_array_equal(result.summary.histogram[1], counts)
    assert result.summary.histogram.sum() == decays.size
    first = kept[0][:4, 0] if heads == 1 else kept[0][:4].mean(2)
    np.testing.assert_allclose(result.summary.tokens[1], first[:, places == 1].mean(1))
    values = np.concatenate(gates)
    assert result.gates["input"].mean == pytest.approx(values.mean())
    assert result.gates["input"].histogram[:, -1].sum() == (values >= 1 - 1 / NUM_BINS).sum()  # with those above 1


def test_fixed_decays_are_those_of_the_table():
    found, slopes = GateStatistics(), torch.tensor([[0.5], [1e-9], [0.0]])
    for _ in range(3):
        found.add(MixerGates(-slopes), None)
    result = found.result()
    assert result.decay == "fixed"
    assert result.half_life[:, 0] == pytest.approx([math.log(2) / 0.5, math.log(2) * 1e9, math.inf])
    assert result.effective_length[:, 0] == pytest.approx([1 / (1 - math.exp(-0.5)), 1e9, math.inf])
    assert result.summary.tokens.shape == (3, 1)
    assert result.values()["half_life_tokens"][2] == [None]
    assert result.values()["half_life_quantiles"] == {"min": 1.38629, "median": 6.93147e8, "max": None}


def test_a_mixer_without_gates_has_no_statistics():
    assert GateStatistics().result() is None
