"""`megalin inspect` on a trained run."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest

from megalin.__main__ import main
from megalin.launch import Launch
from megalin.layers.decay import decay_slopes
from tests.model_runs import write_config

GLU = {"type": "glu", "intermediate_size": 48}
BLOCKS = [
    {"sublayers": [{"type": "hgrn2", "num_heads": 4, "chunk_size": 16}, GLU], "repeat": 2},
    {"sublayers": [{"type": kind, "num_heads": 4, "chunk_size": 16} for kind in ("tnl", "cosformer2")]},
    {"sublayers": [{"type": "rodimus", "state_size": 6}, {"type": "softmax", "num_heads": 4}]},
]
TYPES = [*["hgrn2", "glu"] * 2, "tnl", "cosformer2", "rodimus", "softmax"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one step."""
    folder = tmp_path_factory.mktemp("inspected")
    config = write_config(folder, model={"layers": BLOCKS}, train={"steps": 1}, schedule={"warmup_steps": 1})
    assert main(["train", str(config), "--folder", str(folder / "run")]) == 0
    return folder / "run"


@pytest.fixture
def without_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves out the figures, which take most of the time."""
    monkeypatch.setattr("megalin.commands.inspect.write_figures", lambda *_: [])


@pytest.mark.usefixtures("without_figures")
def test_decays_and_gates_of_a_run(run, capsys):
    assert main(["inspect", str(run), "--samples", "3", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    identity = result.pop("identity")
    assert identity["config"]["train.seed"] == 0
    assert "mesh" in identity["inputs"]
    assert json.loads((run / "inspections" / "step-1.json").read_text()) == result
    assert (result["step"], result["num_samples"], result["num_tokens"]) == (1, 3, 108)
    assert len(result["first_tokens"]) == 36
    tpe, *layers = result["layers"]
    assert (tpe["path"], tpe["type"]) == ("input_layers.cosformer2", "cosformer2")
    logits = [-4.0 + 8.0 * number / 7 for number in range(8)]  # TPE's initial ones
    half_lives = [math.log(2) / math.log1p(math.exp(-logit)) for logit in logits]
    assert tpe["half_life_tokens"][0] == pytest.approx(half_lives, rel=0.05)
    assert [layer["type"] for layer in layers] == TYPES
    hgrn2, _, upper, _, tnl, cosformer2, rodimus, softmax = layers
    assert softmax["decay"] is None
    assert {value for row in hgrn2["lower_bounds"] for value in row} == {0.0}
    assert [value for row in upper["lower_bounds"] for value in row] == pytest.approx([1 / 4] * 32, rel=0.05)
    assert upper["decays"]["mean"] > hgrn2["decays"]["mean"] > 0.3  # sigmoid of about 0, then raised by the bound
    for layer, heads, channels in ((hgrn2, 4, 8), (upper, 4, 8), (rodimus, 1, 6)):
        assert (layer["decay"], layer["num_heads"], layer["decays_per_head"]) == ("selected", heads, channels)
        assert sum(map(sum, layer["decays"]["histogram"])) == 108 * heads * channels
        assert len(layer["decays"]["curve"]) == 36
    assert set(rodimus["gates"]) == {"selection", "temperature", "tempered_selection", "input"}
    assert 0 < tnl["gates"]["output"]["mean"] < 1
    slopes = decay_slopes("alibi", layer=2, num_layers=4, num_heads=4)
    assert [half for (half,) in tnl["half_life_tokens"]] == pytest.approx((math.log(2) / slopes).tolist(), rel=1e-5)
    assert cosformer2["half_life_quantiles"] == {"min": None, "median": None, "max": None}


def test_figures_of_a_run(run, tmp_path):
    assert main(["inspect", str(run), "--samples", "1", "--png", str(tmp_path / "png")]) == 0
    images = {path.name: path.read_bytes() for path in (tmp_path / "png").iterdir()}
    by_token = {f"tokens-blocks.{place}.png" for place in ("0.sublayers.0", "1.sublayers.0", "3.sublayers.0")}
    by_layer = {f"{name}.png" for name in ("mean-decay", "half-life", "lower-bounds", "decays", "curves")}
    assert images.keys() == by_token | by_layer
    assert all(image.startswith(b"\x89PNG") for image in images.values())


@pytest.mark.usefixtures("without_figures")
def test_table_for_people(run, capsys):
    assert main(["inspect", str(run), "--samples", "1"]) == 0
    text = capsys.readouterr().out
    assert "step 1, 1 samples of validation, 36 tokens" in text
    (bounds,) = (line for line in text.splitlines() if "blocks.1.sublayers.0" in line)
    assert re.search(r"0\.2[345]\d / 0\.2[567]\d", bounds)
    assert "4 x 8" in bounds
    assert "∞ / ∞ / ∞" in text


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--samples", "0"], 2, "samples = 0 leaves no token; use at least 1"),
        (["parallel.tp=2"], 2, "override 'parallel.tp=2': one process inspects a run, without [parallel]; remove it"),
        (["--split", "test"], 2, "the run has no test split (data.test is empty"),
        (["--step", "3"], 4, "no checkpoint"),
    ],
)
def test_arguments_that_fit_no_inspection_are_refused(fails, run, arguments, code, message):
    assert message in fails(code, "inspect", run, *arguments)


def test_several_ranks_are_refused(fails, run, monkeypatch):
    monkeypatch.setattr("megalin.inspection.inspect_run.launched", lambda: Launch(0, 2, 0))
    assert "one process inspects a run, but 2 were started" in fails(2, "inspect", run)
