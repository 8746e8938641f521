"""The ladders of examples/scaling_laws: their shapes, and the price of the one for a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from megalin.ladder.config import parse_ladder
from megalin.ladder.plan import make_rungs, price
from megalin.planner.hardware import HARDWARE

EXAMPLES = Path(__file__).parents[2] / "examples" / "scaling_laws"


@pytest.mark.parametrize("name", ["ladder", "tiny"])
def test_ladder_and_its_config_are_read(name):
    ladder = parse_ladder(EXAMPLES / f"{name}.toml")
    assert {mixer: ladder.values(mixer)["data"]["sequence_length"] > 0 for mixer in ladder.config.mixers}


@pytest.mark.slow
def test_mixers_of_a_size_have_one_shape():
    """The ladder for a GPU compares mixers, not widths; the one for a CPU has rungs of 20k to 200k parameters."""
    rungs = [rung for rung in make_rungs(parse_ladder(EXAMPLES / "ladder.toml")) if not rung.is_search]
    shapes = {mixer: [] for mixer in ("TNL", "HGRN2", "LLaMA")}
    for rung in rungs:
        shapes[rung.mixer].append((rung.shape.model.hidden_size, rung.shape.model.num_layers))
        assert abs(rung.difference) < 0.05
    assert shapes["TNL"] == shapes["HGRN2"] == shapes["LLaMA"] == [(128, 5), (256, 4), (384, 5), (512, 9)]
    tiny = [rung.shape.counts.non_embedding_parameters for rung in make_rungs(parse_ladder(EXAMPLES / "tiny.toml"))]
    assert 17e3 < min(tiny) < max(tiny) < 230e3


@pytest.mark.slow
def test_one_mixer_fits_half_an_hour_of_a_gpu():
    ladder = parse_ladder(EXAMPLES / "ladder.toml")
    hours = dict.fromkeys(ladder.config.mixers, 0.0)
    for rung in make_rungs(ladder):
        hours[rung.mixer] += price(ladder, rung, HARDWARE["h100"]).hours
    assert max(hours.values()) < 0.4
