"""Numbers of quality from run folders: the rows that they belong to, and the values that are read."""

from __future__ import annotations

import json
import math
import tomllib
from pathlib import Path

import pytest
import tomli_w

from megalin.config import apply_overrides, dumps
from megalin.errors import ConfigError
from megalin.model.config import parse_model
from megalin.model.presets import preset_table
from megalin.reproduce.papers import Column, Row, Table, load_table
from megalin.reproduce.runs import command
from megalin.reproduce.tables import ReproducedCell, reproduce


def write_run(folder: Path, preset: str, *overrides: str, length: int = 8192) -> Path:
    """Writes a run of a preset, with a resolved config as `megalin train` has it, and 2,000 steps, whose second
    half has losses of 2 and 4 in turn."""
    folder.mkdir()
    table = apply_overrides({"model": preset_table(preset)}, [f"model.{override}" for override in overrides])
    model = tomllib.loads(dumps(parse_model(table["model"], preset)))
    (folder / "config.toml").write_text(tomli_w.dumps({"model": model, "data": {"sequence_length": length}}))
    losses = [9.0] * 1000 + [2.0, 4.0] * 500
    lines = [json.dumps({"step": step, "loss": loss}) for step, loss in enumerate(losses, 1)]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def add_results(run: Path, suites: dict[str, dict[str, dict[str, float]]], step: int = 2000) -> None:
    (run / "evaluations").mkdir(exist_ok=True)
    values = {
        suite: {
            task: {"metrics": {name: {"value": value} for name, value in metrics.items()}}
            for task, metrics in own.items()
        }
        for suite, own in suites.items()
    }
    (run / "evaluations" / f"step-{step}.json").write_text(json.dumps({"step": step, "suites": values}))


def cells(table: Table, *arguments: str, row: str) -> dict[str, ReproducedCell]:
    found = [each for each in reproduce(table, arguments) if each.name == row]
    assert len(found) == 1
    return {cell.column: cell for cell in found[0].cells}


def test_run_goes_to_the_row_with_its_model_and_length(tmp_path):
    run = write_run(tmp_path / "run", "tnl-1b", "vocab_size=1000", length=4096)
    add_results(
        run,
        {
            "choices": {"hellaswag/rc_0shot": {"acc": 0.4, "acc_norm": 0.5}, "boolq/rc_0shot": {"acc": 0.625}},
            "needle": {"needle/easy": {"weighted_average": 0.25}, "needle/standard": {"weighted_average": 0.125}},
            "lm-eval": {"wikitext": {"word_perplexity,none": 25.5}},
        },
    )
    table = load_table("scaling-laws", "6")
    own = cells(table, str(run), row="TNL 4K")
    assert (own["HS"].published, own["HS"].ours) == (49.88, 50.0)
    assert [own[name].ours for name in ("BoolQ", "WIKI", "NIAH")] == [62.5, 25.5, 25.0]
    assert own["PIQA"].reason == "not measured yet: megalin eval RUN --suite choices --tasks piqa/rc_0shot"
    assert own["CSR"].reason == "the mean of BoolQ, PIQA, HS, WG, ARC-E, ARC-C, OBQA"
    assert own["SCROLLS"].reason == "SCROLLS is not among the suites"
    assert cells(table, str(run), row="TNL 8K")["HS"].ours is None


def test_two_runs_of_one_row_stand_below_each_other(tmp_path):
    runs = [str(write_run(tmp_path / name, "tnl-1b", length=4096)) for name in "ab"]
    rows = [row for row in reproduce(load_table("scaling-laws", "6"), runs) if row.name == "TNL 4K"]
    assert [row.run for row in rows] == runs


def test_losses_in_nats_bits_and_perplexity(tmp_path):
    run = write_run(tmp_path / "run", "tnl-70m")
    columns = [
        Column(name=measure, unit="", measure=measure)
        for measure in ("train_loss", "train_bits", "train_perplexity", "loss", "perplexity")
    ]
    columns.append(Column(name="two", unit="", measure="mean", columns=["train_loss", "loss"]))
    table = Table(title="", columns=columns, rows=[Row(name="r", preset="tnl-70m", published=["-"] * 6)])
    own = cells(table, str(run), row="r")
    expected = [3.0, 3.0 / math.log(2), math.exp(3.0)]
    assert [own[column.name].ours for column in columns[:3]] == pytest.approx(expected, rel=1e-12)
    assert own["loss"].reason == "not measured yet: megalin eval RUN"
    add_results(run, {"loss": {"validation": {"loss": 2.5}, "test": {"loss": 2.0}}}, step=1000)
    own = cells(table, str(run), row="r")
    assert [own[name].ours for name in ("loss", "perplexity", "two")] == pytest.approx([2.0, math.exp(2.0), 2.5])


def test_named_row_takes_any_model(tmp_path):
    run = write_run(tmp_path / "run", "hgrn2-70m")
    add_results(run, {"choices": {"boolq/rc_0shot": {"acc": 0.75}}})
    table = load_table("scaling-laws", "8")
    assert cells(table, f"Mamba1 3B={run}", row="Mamba1 3B")["BoolQ"].ours == 75.0
    assert cells(table, f"mamba2-1b={run}", row="Mamba2 1B")["BoolQ"].ours == 75.0


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("{run}", r"no row of this table has its model and length .*; name the row it belongs to, as in 'TNL 2K="),
        ("TNL 2k={run}", "the table has no row 'TNL 2k'; did you mean 'TNL 2K'"),
        ("{run}/missing", "no run in this folder"),
        ("{run}/empty", r"no \[model\] in its config.toml"),
    ],
)
def test_runs_without_a_row_are_refused(argument: str, message: str, tmp_path):
    run = write_run(tmp_path / "run", "tnl-1b", "init_std=0.5", length=4096)
    (run / "empty").mkdir()
    (run / "empty" / "config.toml").write_text("")
    with pytest.raises(ConfigError, match=message):
        reproduce(load_table("scaling-laws", "6"), [argument.format(run=run)])


@pytest.mark.parametrize(
    ("measure", "expected"),
    [
        ("train_bits", "megalin train"),
        ("mlm_loss", "megalin eval RUN"),
        ("loss test perplexity", "megalin eval RUN --suite loss --split test"),
        ("lm-eval wikitext word_perplexity,none", "megalin lm-eval RUN --tasks wikitext"),
        ("needle needle/easy accuracy", "megalin eval RUN --suite needle"),
        ("recall mqar/64x4 accuracy", "megalin eval RUN --suite recall"),
    ],
)
def test_commands_that_fill_a_cell(measure: str, expected: str):
    assert command(measure) == expected
