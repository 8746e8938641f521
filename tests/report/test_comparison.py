"""The comparison of runs: curves by tokens and FLOPs, evaluations and decoding states, harmless for any content."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from megalin.errors import ConfigError, StorageError
from megalin.report import comparison
from megalin.report.comparison import run_names, state_text, write_comparison
from megalin.report.reading import read_run
from megalin.train.curves import Curve, draw
from tests.report.test_page import Page, assert_harmless, hostile_run, write_results, write_run

MIXER = '[model]\nvocab_size = 40\nhidden_size = 8\nnorm = "srmsnorm"\nlayers = [{{repeat = 2, sublayers = [{}]}}]\n'


def lines(steps: int, *, tokens: int, flops: int, start: float) -> list[dict[str, float]]:
    """Metrics of a run whose loss falls by 0.01 a step."""
    return [
        {"step": step, "loss": start - step / 100, "tokens": tokens * step, "flops": flops * step}
        for step in range(1, steps + 1)
    ]


@pytest.fixture
def runs(tmp_path: Path) -> list[Path]:
    """Two runs of one name, of different rates; the second has evaluations."""
    first = write_run(tmp_path / "a" / "run", lines=lines(1500, tokens=100, flops=7_000, start=20.0))
    second = lines(10, tokens=300, flops=9_000, start=4.0)
    second[4] |= {"evaluation_loss": 3.75, "evaluation_accuracy": 0.5}
    second[9] |= {"evaluation_loss": 3.5}
    return [first, write_run(tmp_path / "b" / "run", lines=second)]


def test_page_and_pictures_hold_every_run(runs, tmp_path):
    page, *pictures = write_comparison(runs, tmp_path / "compare.html")
    assert [picture.name for picture in pictures] == ["compare-loss-by-tokens.png", "compare-loss-by-flops.png"]
    assert all(picture.read_bytes().startswith(b"\x89PNG") for picture in pictures)
    parsed = Page(page.read_bytes())
    assert_harmless(parsed)
    assert len(parsed.sources()) == 2
    mean = 20.0 - sum(range(501, 1501)) / 1000 / 100
    for expected in (
        "a/run",
        "b/run",
        "150,000",
        "1.050e+07",
        f"{mean:.4f}",
        f"{math.exp(mean):.4f}",
        f"{mean / math.log(2):.4f}",
        "3.5000 (step 10)",
        "50.00% (step 5)",
    ):
        assert expected in parsed.text, expected


def test_stored_results_stand_next_to_each_other(runs, tmp_path):
    for run, step, value in ((runs[0], 5, 0.25), (runs[0], 20, 0.5), (runs[1], 10, 0.75)):
        write_results(run, step, {"recall": {"mqar/64x4": {"metrics": {"accuracy": {"value": value}}}}})
    text = Page(write_comparison(runs, tmp_path / "compare.html")[0].read_bytes()).text
    assert "Results of the suite recall" in text
    assert "mqar/64x4accuracy50.00% (step 20)75.00% (step 10)" in text


def test_newest_held_out_numbers(runs):
    """Bits per byte come from the loop or from `megalin eval`; the latter's loss counts at the same step."""
    cells = comparison._summary(read_run(runs[1]))
    assert (cells["held-out loss"], cells["held-out bits per byte"]) == ("3.5000", "")
    validation = {"loss": 3.25, "bits_per_byte": 1.125, "tokens": 5000}
    write_results(runs[1], 10, {"loss": {"validation": validation, "test": {"loss": 9.0}}})
    cells = comparison._summary(read_run(runs[1]))
    assert [cells[f"held-out {name}"] for name in ("loss", "loss over", "bits per byte")] == [
        *("3.2500", "5,000 tokens", "1.1250"),
    ]
    mean = 4.0 - 0.055
    assert cells["in bits a token"] == f"{mean / math.log(2):.4f}"
    assert cells["perplexity, e^nats = 2^bits"] == f"{math.exp(mean):.4f}" == f"{2 ** (mean / math.log(2)):.4f}"


def test_keys_that_differ_are_listed(runs, tmp_path):
    (runs[0] / "config.toml").write_text('[train]\nsteps = 3\n[model]\nlayers = [{repeat = 2, type = "tnl"}]\n')
    (runs[1] / "config.toml").write_text('[train]\nsteps = 4\n[model]\nlayers = [{repeat = 2, type = "glu"}]\n')
    text = Page(write_comparison(runs, tmp_path / "compare.html")[0].read_bytes()).text
    assert "train.steps34model.layers.0.typetnlglu" in text
    assert "model.layers.0.repeat" not in text


def test_inputs_that_differ_are_listed(runs, tmp_path):
    for run, torch in zip(runs, ("2.13.0", "2.11.0"), strict=True):
        inputs = {"version of torch": torch, "mesh": "tp 1"}
        (run / "identity.json").write_text(json.dumps({"config": {}, "inputs": inputs, "segments": []}))
    text = Page(write_comparison(runs, tmp_path / "compare.html")[0].read_bytes()).text
    assert "version of torch2.13.02.11.0" in text
    assert "tp 1" not in text


def test_curves_are_over_tokens_and_flops(runs):
    run = read_run(runs[1])
    for axis, factor in (("tokens", 300), ("flops", 9_000)):
        training, held_out = comparison._loss_curves("b", run, axis)
        assert list(training.points) == [(factor * step, 4.0 - step / 100) for step in range(1, 11)]
        assert list(held_out.points) == [(factor * 5, 3.75), (factor * 10, 3.5)]


def test_a_run_has_one_colour_and_its_marks_no_line_in_the_legend():
    points = [(0.0, 2.0), (1.0, 1.0)]
    curves = [Curve(f"{run}{end}", points, sparse=end != "", run=run) for run in "ab" for end in ("", ", held out")]
    axes = draw("loss", curves, top=1.5).axes[0]
    first, held_out, second, _ = (line.get_color() for line in axes.lines)
    assert first == held_out != second
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["a", "b"]
    assert axes.get_ylim()[1] == 1.5


def test_run_without_flops_is_named(runs, tmp_path):
    older = write_run(tmp_path / "older", 4)
    parsed = Page(write_comparison([*runs, older], tmp_path / "compare.html")[0].read_bytes())
    assert "No loss by flops: older." in parsed.text.replace(f"{tmp_path.name}/older", "older")


def test_hostile_texts_are_text(runs, tmp_path):
    hostile = hostile_run(tmp_path)
    assert_harmless(Page(write_comparison([runs[0], hostile], tmp_path / "compare.html")[0].read_bytes()))


@pytest.mark.parametrize(
    ("sublayer", "expected"),
    [
        ('{type = "transnormer", num_heads = 2}', "256 bytes"),  # 2 blocks x 2 heads x 4 x 4 x 4 bytes
        ('{type = "softmax", num_heads = 2}', "a cache that grows with the sequence"),
    ],
)
def test_state_in_decoding(tmp_path, sublayer, expected):
    run = write_run(tmp_path / "run")
    (run / "config.toml").write_text(MIXER.format(sublayer))
    assert state_text(read_run(run).config) == expected


@pytest.mark.parametrize("config", [{}, {"model": 3}, {"model": {"hidden_size": 8}}])
def test_state_of_an_unreadable_config_is_left_out(config):
    assert state_text(config) == ""


def test_names_are_the_shortest_that_differ():
    assert run_names([Path("/x/a/run"), Path("/x/b/run")]) == ["a/run", "b/run"]
    assert run_names([Path("/x/one"), Path("/x/two")]) == ["one", "two"]


def test_one_run_or_the_same_twice_is_refused(runs, tmp_path):
    for folders in (runs[:1], [runs[0], runs[0]], [*runs, runs[0] / ".." / "run"]):
        with pytest.raises(ConfigError, match="needs at least two different runs; give each folder once"):
            write_comparison(folders, tmp_path / "compare.html")
    assert not (tmp_path / "compare.html").exists()


def test_output_that_cannot_be_written_is_refused(runs, tmp_path):
    with pytest.raises(StorageError, match=r"none/compare.html: cannot be written \(No such file.*another --output"):
        write_comparison(runs, tmp_path / "none" / "compare.html")
