"""The coordinate check: exponents of outputs and of their changes over widths, for models of every mixer."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from megalin.__main__ import main
from megalin.errors import ConfigError, NumericError
from megalin.model.config import ModelConfig, parse_model
from megalin.model.presets import load_preset
from megalin.scaling_laws.coordinates import Coordinate, coordinate_check, coordinate_figure, growths
from tests.model_runs import model_table

FAMILIES = (
    *("tnl-70m", "hgrn2-70m", "cosformer2-70m", "llama-70m", "mamba2-410m", "rodimus-125m", "rodimus_plus-125m"),
    "transnormerllm-385m",
)


def test_growth_is_the_exponent():
    points = [Coordinate("a", width, 3.0 * width**-0.5, 2.0 * width) for width in (32, 64, 128)]
    ((name, size, change),) = growths(points)
    assert (name, size, change) == ("a", pytest.approx(-0.5), pytest.approx(1.0))
    assert np.isnan(growths([point._replace(change=0.0) for point in points])[0].change)


def test_outputs_are_those_of_the_trained_model():
    """Logits of an untied head with weights N(0, std^2): their size grows with the root of the width, as the
    norm before the head has entries of size 1. A rate of almost zero changes almost nothing."""
    model = parse_model({**model_table(), "tie_embeddings": False, "init_std": 0.02}, "test")
    assert isinstance(model, ModelConfig)
    found = coordinate_check(model, widths=(32, 128), steps=2, learning_rate=1e-12)
    names = ["0.0 transnormer", "0.1 glu", "1.0 tnl", "1.1 glu", "logits"]
    assert [each.name for each in found] == names * 2
    for each in found[4::5]:
        assert each.size == pytest.approx(0.02 * each.width**0.5, rel=0.05)
    assert max(each.change / each.size for each in found) < 1e-5
    moved = coordinate_check(model, widths=(32, 128), steps=2, learning_rate=1e-2)
    assert min(each.change / each.size for each in moved) > 1e-2


def test_result_does_not_depend_on_the_random_state():
    model = parse_model(model_table(), "test")
    assert isinstance(model, ModelConfig)
    torch.manual_seed(1)
    first = coordinate_check(model, widths=(32, 64), steps=1)
    torch.manual_seed(2)
    assert coordinate_check(model, widths=(32, 64), steps=1) == first


@pytest.mark.slow
@pytest.mark.parametrize("preset", FAMILIES)
def test_every_mixer_is_checked(preset):
    model = load_preset(preset).model
    assert isinstance(model, ModelConfig)
    slopes = growths(coordinate_check(model, widths=(32, 64, 128), steps=2))
    assert slopes[-1].name == "logits"
    assert all(np.isfinite([slope.size, slope.change]).all() for slope in slopes), slopes


def test_diverged_training_is_refused():
    model = parse_model(model_table(), "test")
    assert isinstance(model, ModelConfig)
    with pytest.raises(NumericError, match=r"is not finite at width 32 after 2 steps; lower --lr"):
        coordinate_check(model, widths=(32, 64), steps=2, learning_rate=1e38)


@pytest.mark.parametrize("widths", [(32,), (32, 32), (32, 40), (0, 32)])
def test_other_widths_are_refused(widths):
    with pytest.raises(ConfigError, match="give at least two different multiples of 32"):
        coordinate_check(parse_model(model_table(), "test"), widths=widths)  # type: ignore[arg-type]


def test_command_prints_the_exponents(tmp_path, capsys):
    picture = tmp_path / "widths.png"
    options = ["--widths", "32", "64", "--steps", "1"]
    assert main(["coordinate-check", "tnl-70m", "model.init_std=0.01", *options]) == 0
    assert "0.0 tnl" in capsys.readouterr().out
    assert main(["coordinate-check", "tnl-70m", *options, "--json", "--png", str(picture)]) == 0
    values = json.loads(capsys.readouterr().out)
    assert [each["name"] for each in values["growth"]][-1] == "logits"
    assert {each["width"] for each in values["coordinates"]} == {32, 64}
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["tnl-70m", "--steps", "0"], "--steps 0: use at least 1"),
        (["tnl-70m", "--lr", "nan"], "--lr nan: use a positive number"),
        (["danet-small"], 'model.kind = "encoder", but only decoders'),
    ],
)
def test_other_input_is_refused(arguments, expected, capsys):
    assert main(["coordinate-check", *arguments]) == 2
    assert expected in capsys.readouterr().err


def test_unwritable_picture_is_refused(tmp_path, capsys):
    (tmp_path / "file").touch()
    picture = tmp_path / "file" / "widths.png"
    options = ["--widths", "32", "64", "--steps", "1", "--png", str(picture)]
    assert main(["coordinate-check", "tnl-70m", *options]) == 5
    assert f"--png {picture}: {tmp_path}/file is not a folder" in capsys.readouterr().err


def test_figure_has_a_line_for_each_output():
    points = [Coordinate(name, width, 1.0, 2.0) for name in "ab" for width in (32, 64)]
    axes = coordinate_figure(points).axes
    assert [[line.get_ydata()[0] for line in panel.lines] for panel in axes] == [[1.0, 1.0], [2.0, 2.0]]
