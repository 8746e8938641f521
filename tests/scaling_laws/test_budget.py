"""Predictions for a budget of FLOPs or GPU-hours."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from matplotlib.figure import Figure

from megalin.__main__ import main
from megalin.errors import ConfigError, StorageError
from megalin.model.config import parse_model
from megalin.model.language_model import LanguageModel
from megalin.planner.hardware import HARDWARE
from megalin.planner.search import Plan
from megalin.scaling_laws.budget import (
    Budget,
    Candidate,
    Utilisation,
    answer,
    answer_lines,
    nearest,
    parse_budget,
    planned_utilisation,
)
from megalin.scaling_laws.figures import laws_figure, residual_figure
from megalin.scaling_laws.fit import Fit, fit_points
from megalin.scaling_laws.optimum import TokenCost, optimum
from megalin.scaling_laws.page import write_page, write_pictures
from tests.model_runs import model_table
from tests.scaling_laws.designs import CHINCHILLA, WIDE, losses_of

TINY = Candidate("tiny", parse_model(model_table(), "test"), 64)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def fit() -> Fit:
    return fit_points(losses_of(WIDE, noise=1e-4), 20)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1e21", Budget(1e21)),
        ("2.5e20 FLOPs", Budget(2.5e20)),
        ("1000 h100-hours", Budget(None, 1000.0, HARDWARE["h100"])),
        ("1000 H200 hours", Budget(None, 1000.0, HARDWARE["h200"])),
    ],
)
def test_budget_is_read(text, expected):
    assert parse_budget(text) == expected


@pytest.mark.parametrize("text", ["", "much", "0", "-1e20", "1e999", "1000 v100-hours", "1.2.3", "1e21 tokens"])
def test_other_budgets_are_refused(text):
    with pytest.raises(ConfigError, match=r"not a budget; write it as 1e21, or as 1000 h100-hours"):
        parse_budget(text)


def test_flops_give_the_surfaces_optimum(fit):
    found = answer(fit, Budget(1e22), mixer="")
    exact = optimum(CHINCHILLA, TokenCost(6.0, 1.0), 1e22)
    assert found.best.parameters == pytest.approx(exact.parameters, rel=0.1)
    assert found.best.loss == pytest.approx(exact.loss, abs=0.005)
    assert found.band.low < found.best.loss < found.band.high
    assert found.extrapolation == pytest.approx(1e22 / fit.points.flops.max())
    assert found.utilisation is None


def test_hours_are_flops_at_the_utilisation(fit):
    budget, given = Budget(None, 1000.0, HARDWARE["h100"]), Utilisation(0.5, "given")
    found = answer(fit, budget, mixer="", utilisation=given)
    assert found.flops == pytest.approx(1000 * 3600 * 989e12 * 0.5)
    assert found.as_json()["mfu"] == 0.5
    text = "\n".join(answer_lines("1000 h100-hours", {"": found}))
    assert "1.78e+21 FLOPs" in text
    assert "MFU 50.0% (given)" in text


def test_budget_below_the_smallest_loss_is_refused(fit):
    with pytest.raises(ConfigError, match=r"1e\+10 FLOPs are fewer than the 1.2e\+16 of the smallest measured loss"):
        answer(fit, Budget(1e10), mixer="")


def test_planned_model_is_the_nearest_of_the_mixer(monkeypatch):
    names = ["danet-small", "hgrn2-150m", "llama-70m", "llama-160m", "tnl-70m", "tnl-160m"]
    monkeypatch.setattr("megalin.scaling_laws.budget.preset_names", lambda: names)
    assert nearest("tnl", 3e7, ()).name == "preset tnl-70m"
    assert nearest("tnl", 7e7, ()).name == "preset tnl-160m"
    assert nearest("tnl", 4e3, [TINY]) == TINY
    assert nearest("LLaMA", 3e9, ()).name == "preset llama-160m"
    assert nearest("unknown", float("nan"), ()).name == "preset llama-160m"


@pytest.mark.slow
def test_planned_model_among_all_presets():
    assert nearest("tnl", 1e9, ()).name == "preset tnl-1b"
    assert nearest("LLaMA", 3e9, ()).name == "preset llama-3b"


def test_utilisation_is_that_of_a_layout_that_fits(monkeypatch):
    """One GPU has no layout, 8 have one: its tokens a second by the model's FLOPs over the rate of 8 GPUs."""
    estimate = SimpleNamespace(tokens_per_second=8e9, layout=SimpleNamespace(name=lambda: "dp 8"))
    plans = {1: Plan([], [], 1), 8: Plan([estimate], [], 1)}
    monkeypatch.setattr("megalin.scaling_laws.budget.search", lambda _, limits, *, count: plans[limits.gpus])
    found = planned_utilisation(TINY, HARDWARE["h100"])
    assert found.fraction == pytest.approx(1e9 * LanguageModel(TINY.model).training_flops(64) / 989e12)
    assert found.source == "planner: tiny, dp 8 on 8 x h100"
    plans[8] = plans[1]
    with pytest.raises(ConfigError, match=r"tiny fits no layout of 8 x h100; give the utilisation.*--mfu"):
        planned_utilisation(TINY, HARDWARE["h100"])


@pytest.mark.slow
def test_planner_gives_the_utilisation():
    found = planned_utilisation(TINY, HARDWARE["h100"])
    assert 0 < found.fraction < 0.05  # a model that the host cannot launch fast enough
    assert found.source.startswith("planner: tiny, dp 1")


def test_utilisation_above_one_is_refused(capsys):
    assert main(["fit", "--points", "points.csv", "--ask", "1 h100-hours", "--mfu", "2"]) == 2
    assert "--mfu 2.0: a fraction" in capsys.readouterr().err


def test_pictures_are_written(tmp_path):
    figures = {"residuals": ("Residuals", Figure(figsize=(1, 1)))}
    (path,) = write_pictures(figures, tmp_path / "new")
    assert path.name == "residuals.png"
    assert path.read_bytes().startswith(b"\x89PNG")
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match=r"cannot be written.*choose another --png"):
        write_pictures(figures, tmp_path / "file")
    with pytest.raises(StorageError, match=r"cannot be written.*choose another --html"):
        write_page(figures, [], tmp_path / "file" / "page.html")


def test_figures_show_every_mixer(fit):
    figure = laws_figure({"a": fit, "b": fit})
    assert len(figure.axes) == 9
    master = figure.axes[0]
    assert [line.get_label().partition(":")[0] for line in master.lines if not line.get_label().startswith("_")] == [
        "a",
        "b",
    ]
    assert len(laws_figure({"": fit}).axes) == 3
    residuals = residual_figure(fit).axes[0].lines[1].get_ydata()
    np.testing.assert_allclose(residuals, 0.0, atol=0.1)  # per cent
    assert np.ptp(residuals) > 0.01
